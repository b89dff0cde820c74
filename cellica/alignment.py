"""How far two representations of the same inputs agree: errors after the best map of each class, from half to half."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.linalg import orthogonal_procrustes
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import pdist
from sklearn.base import clone
from sklearn.utils import check_random_state

from cellica.ica import ICA
from cellica.whitening import Whitening, principal_directions, rank

GROUPS = ("permutation", "rigid", "linear", "ica")
DIAMETER = 99.9  # percentile of the pairwise distances
DIAMETER_PAIRS = 2**19
PAIRS_AT_ONCE = 2**15


class MapError(NamedTuple):
    """Errors of the best map of a class, each over the diameter of the target: lower is better, 0 is equal.

    Attributes
    ----------
    held_out
        Mean of ||h(a) - b|| over the rows that the map was not fitted on.
    fit
        The same over the rows it was fitted on.
    fit_rms
        Root of the mean square instead of the mean: what the fit makes smallest, so here no class can lose to one it holds.
    chance
        ``held_out`` of the same fit with the rows of b shuffled: what a map reaches that knows the distribution of b only.
    """

    held_out: float
    fit: float
    fit_rms: float
    chance: float


@dataclass(frozen=True)
class Alignment:
    """Errors of all classes of maps from a to b: see `align`.

    Attributes
    ----------
    raw, whitened
        `MapError` by class, in the space of b and in that of b whitened.
    efficiency
        Share of the way from the best signed permutation to the best rigid map that ICA goes unsupervised, in the whitened
        space: (permutation - ica) / (permutation - rigid), 1 at best, 0 or less where ICA is of no use; NaN where a
        signed permutation is as good as a rigid map.
    diameter
        Of b (``"raw"``) and of b whitened (``"whitened"``): the 99.9th percentile of the distances between its rows.
    n_components
        Directions of the whitened space.
    n_fit, n_held_out
        Rows of the two halves.
    n_converged
        Components of the ICA of a, and of b, that are non-Gaussian and stopped moving.
    """

    raw: dict[str, MapError]
    whitened: dict[str, MapError]
    efficiency: float
    diameter: dict[str, float]
    n_components: int
    n_fit: int
    n_held_out: int
    n_converged: tuple[int, int]


class _Half(NamedTuple):
    """Paired rows, centred by the means of the half that maps are fitted on."""

    a: np.ndarray
    b: np.ndarray


class _Halves(NamedTuple):
    fit: _Half
    held_out: _Half


def alignment_error(
    a: np.ndarray,
    b: np.ndarray,
    group: str = "permutation",
    *,
    whiten: bool | None = None,
    n_components: int | None = None,
    ica: ICA | None = None,
    random_state: int = 0,
) -> float:
    """Held-out error of the best map of one class from a to b, over the diameter of b: lower is better, 0 is equal.

    Parameters
    ----------
    a, b
        Representations (n, d) and (n, e) of the same n inputs, row by row.
    group
        ``"permutation"`` (signed), ``"rigid"``, ``"linear"`` or ``"ica"``; all with a translation. See `align` for formulas.
    whiten
        Whether both sides are whitened first. None: for ``"ica"`` alone, which is defined on whitened data; with False its
        matched sources are put back into the space of b by b's mixing matrix.
    n_components, ica, random_state
        As in `align`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> a = rng.laplace(size=(4000, 2))
    >>> turned = a @ np.array([[0.8, 0.6], [-0.6, 0.8]])
    >>> round(alignment_error(a, turned, "rigid"), 6), alignment_error(a, turned, "permutation") > 0.05
    (0.0, True)
    >>> alignment_error(a, turned, "ica") < 0.02
    True
    """
    if group not in GROUPS:
        raise ValueError(f"group={group!r} is not known: use one of {', '.join(map(repr, GROUPS))}")
    halves = _split(a, b, random_state)
    if whiten is None:
        whiten = group == "ica"
    if group == "ica":
        k = _common_rank(halves, n_components)
        sides = _separated(halves, k, ica, random_state)
        error = _ica_errors(halves, sides, random_state)[int(whiten)]
    else:
        space = _whitened(halves, _common_rank(halves, n_components)) if whiten else _padded(halves)
        error = _map_error(space, group, _diameter(space, random_state), random_state)
    return error.held_out


def align(
    a: np.ndarray,
    b: np.ndarray,
    *,
    n_components: int | None = None,
    ica: ICA | None = None,
    random_state: int = 0,
) -> Alignment:
    """Errors of the best signed permutation, rigid, linear and ICA map from a to b, raw and whitened, and ICA's efficiency.

    The rows are split at random into two halves; a map h is fitted on one and measured on the other:
    error = mean ||h(a_i) - b_i|| / diameter(b). That normalisation, the classes and the efficiency are those of arXiv
    2603.11970, table 1; the split into halves, the diameter as a percentile, the translation in every class, the padding and the
    whitened space are cellica's.

    Classes, on rows centred by the means of the fitting half, so that each holds a translation:

    - *permutation*: h(a) = a P, P a permutation with signs, by Hungarian assignment on |a^T b|, which is the best one in the
      mean square.
    - *rigid*: h(a) = a R, R orthogonal, by Procrustes (Schonemann, 1966).
    - *linear*: h(a) = a M, M of least squares.
    - *ica*: each side is whitened and separated alone, without the pairing; then the sources of a are matched to those of b
      by a signed permutation. Measured between sources (``whitened``), which are a rotation of whitened b, so their
      diameters are equal; and with the sources put back into the space of b by its mixing matrix (``raw``).

    Each class holds the one before in its space (ICA aside), so on the fitted half their errors fall in the mean square.
    The direction matters: the error is that of reaching b. Every error comes with the chance level of shuffled pairs; for
    white noise of d dimensions it is near sqrt(2 d) / diameter, and for the linear map near sqrt(d) / diameter.

    Sides of different widths: raw, the narrower is padded with zeros, so that what only the wider side holds is
    an error (where b is the narrower, the linear map has none from it); whitened, both are cut to as many leading principal
    directions as the side of smaller rank has.

    Parameters
    ----------
    a, b
        Representations (n, d) and (n, e) of the same n inputs, row by row; each half needs more rows than the wider has columns.
    n_components
        Directions of the whitened space and number of sources, by default the smaller rank. Of wide representations take
        fewer: whitening puts directions of noise on a par with all others, and ICA needs about 5 k^2 rows.
    ica
        Settings of the ICA, as an unfitted estimator; its number of components and seed are set here. The two
        sides get different seeds, so that no agreement comes from a shared start.
    random_state
        Seed of the halves, the ICAs, the shuffled pairs and the pairs that give the diameter.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> sources = rng.laplace(size=(4000, 3))
    >>> found = align(sources @ rng.normal(size=(3, 3)), sources @ rng.normal(size=(3, 3)))
    >>> found.raw["linear"].held_out < 1e-9, found.raw["rigid"].held_out > 0.02
    (True, True)
    >>> found.whitened["ica"].held_out < 0.02 < found.whitened["permutation"].held_out
    True
    >>> found.efficiency > 0.9
    True
    """
    halves = _split(a, b, random_state)
    k = _common_rank(halves, n_components)
    sides = _separated(halves, k, ica, random_state)
    errors, sizes = {}, {}
    for name, space in (("raw", _padded(halves)), ("whitened", _whitened(halves, k))):
        sizes[name] = _diameter(space, random_state)
        errors[name] = {group: _map_error(space, group, sizes[name], random_state) for group in GROUPS[:3]}
    errors["raw"]["ica"], errors["whitened"]["ica"] = _ica_errors(halves, sides, random_state)
    return Alignment(
        raw=errors["raw"],
        whitened=errors["whitened"],
        efficiency=efficiency(*(errors["whitened"][group].held_out for group in ("permutation", "ica", "rigid"))),
        diameter=sizes,
        n_components=k,
        n_fit=len(halves.fit.a),
        n_held_out=len(halves.held_out.a),
        n_converged=(int(sides[0].converged_.sum()), int(sides[1].converged_.sum())),
    )


def efficiency(permutation: float, ica: float, rigid: float) -> float:
    """(permutation - ica) / (permutation - rigid) of errors in one space (arXiv 2603.11970); NaN where there is no gap.

    >>> round(efficiency(permutation=0.197, ica=0.145, rigid=0.109), 2)
    0.59
    """
    gap = permutation - rigid
    return (permutation - ica) / gap if gap > 1e-6 else float("nan")


def diameter(rows: np.ndarray, random_state: int = 0) -> float:
    """99.9th percentile of the pairwise distances of rows: all pairs, of more than 1,024 rows 524,288 pairs drawn at random.

    The largest distance, the diameter proper, hangs on the two farthest rows and grows with their number. With n rows, 2 / n of
    the pairs hold the farthest one, so below some thousands of rows the percentile leans on few too.

    >>> diameter(np.array([[0.0, 0.0], [3.0, 4.0]]))
    5.0
    """
    n = len(rows)
    if n * (n - 1) // 2 <= DIAMETER_PAIRS:
        return float(np.percentile(pdist(rows), DIAMETER))
    rng = check_random_state(random_state)
    first, gap = rng.randint(n, size=DIAMETER_PAIRS), rng.randint(1, n, size=DIAMETER_PAIRS)
    distances = np.empty(DIAMETER_PAIRS)
    for start in range(0, DIAMETER_PAIRS, PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        distances[part] = np.linalg.norm(rows[first[part]] - rows[(first[part] + gap[part]) % n], axis=1)
    return float(np.percentile(distances, DIAMETER))


def matrix(name: str, x: np.ndarray, rows: int = 2) -> np.ndarray:
    """``x`` as float64 (n, d); a ValueError says what is wrong with it."""
    x = np.asarray(x)
    if x.ndim != 2 or x.shape[0] < rows or x.shape[1] < 1:
        raise ValueError(f"{name} has the shape {x.shape}: use rows by columns, {rows} of rows and 1 column at least")
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool) or np.iscomplexobj(x):
        raise ValueError(f"{name} holds {x.dtype}: use real numbers")
    x = x.astype(np.float64)
    if not np.isfinite(x).all():
        row = int(np.argmin(np.isfinite(x).all(axis=1)))
        raise ValueError(f"row {row} of {name} holds NaN or infinity: leave such rows out of both sides, or fill them")
    return x


def paired(names: tuple[str, str], a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two matrices with a row each for the same inputs."""
    a, b = matrix(names[0], a), matrix(names[1], b)
    if len(a) != len(b):
        raise ValueError(
            f"{names[0]} has {len(a)} rows and {names[1]} has {len(b)}: give both for the same inputs, row by row"
        )
    return a, b


def signed_permutation(cross: np.ndarray) -> np.ndarray:
    """Signed permutation P (d, e) that makes the sum of P * cross largest (Hungarian); all zeros where none is matched.

    >>> signed_permutation(np.array([[0.1, -2.0], [1.0, 0.5]]))
    array([[ 0., -1.],
           [ 1.,  0.]])
    """
    rows, columns = linear_sum_assignment(-np.abs(cross))
    found = np.zeros_like(cross)
    found[rows, columns] = np.where(cross[rows, columns] < 0, -1.0, 1.0)
    return found


def _split(a: np.ndarray, b: np.ndarray, random_state: int) -> _Halves:
    """Random halves of the rows, centred by the means of the first."""
    a, b = paired(("a", "b"), a, b)
    wider = max(a.shape[1], b.shape[1])
    half = (len(a) + 1) // 2
    if half < wider + 2 or len(a) - half < 2:
        raise ValueError(
            f"{len(a)} rows give {half} to fit {wider} columns on, and a map of as many columns fits any pairs: "
            f"give {2 * wider + 3} rows at least, or fewer columns (such as the leading principal components)"
        )
    order = check_random_state(random_state).permutation(len(a))
    fit, held_out = order[:half], order[half:]
    for name, side in (("a", a), ("b", b)):
        if not np.ptp(side[fit], axis=0).any():
            raise ValueError(
                f"all {half} rows of {name} to fit on are identical: leave out inputs that are the same, or the side"
            )
    a, b = a - a[fit].mean(axis=0), b - b[fit].mean(axis=0)
    return _Halves(_Half(a[fit], b[fit]), _Half(a[held_out], b[held_out]))


def _padded(halves: _Halves) -> _Halves:
    """The narrower side with columns of zeros."""
    wider = max(halves.fit.a.shape[1], halves.fit.b.shape[1])
    return _Halves(*(_Half(*(np.pad(x, ((0, 0), (0, wider - x.shape[1]))) for x in half)) for half in halves))


def _common_rank(halves: _Halves, n_components: int | None) -> int:
    """Directions that both sides have, or as many as asked for."""
    ranks = [rank(principal_directions(side)[1]) for side in halves.fit]
    if n_components is None:
        return min(ranks)
    if not isinstance(n_components, int | np.integer) or not 1 <= n_components <= min(ranks):
        raise ValueError(
            f"n_components={n_components!r} is not allowed: a varies in {ranks[0]} directions and b in {ranks[1]}, "
            f"use 1 to {min(ranks)}, or None for {min(ranks)}"
        )
    return int(n_components)


def _whitened(halves: _Halves, k: int) -> _Halves:
    """Both sides in their k leading principal directions, with unit variance on the fitted half."""
    sides = [Whitening(k).fit(side) for side in halves.fit]
    return _Halves(*(_Half(*(side.transform(x) for side, x in zip(sides, half))) for half in halves))


def _separated(halves: _Halves, k: int, ica: ICA | None, random_state: int) -> tuple[ICA, ICA]:
    """An ICA of each side, fitted without the pairing and from another seed."""
    first, second = check_random_state(random_state).randint(2**31 - 1, size=2).tolist()
    model = clone(ICA() if ica is None else ica)
    return (
        clone(model).set_params(n_components=k, random_state=first).fit(halves.fit.a),
        clone(model).set_params(n_components=k, random_state=second).fit(halves.fit.b),
    )


def _fitted_map(half: _Half, group: str) -> np.ndarray:
    """The matrix of a class that is nearest to taking a to b in the mean square."""
    if group == "permutation":
        return signed_permutation(half.a.T @ half.b)
    if group == "rigid":
        return orthogonal_procrustes(half.a, half.b)[0]
    return np.linalg.lstsq(half.a, half.b)[0]


def _map_error(space: _Halves, group: str, size: float, random_state: int) -> MapError:
    """Errors of a map fitted on one half and measured on both, and on shuffled pairs."""
    shuffled = _shuffled(space, random_state)
    found, by_chance = _fitted_map(space.fit, group), _fitted_map(shuffled.fit, group)
    return _errors(space, found, size, _distances(shuffled.held_out, by_chance).mean())


def _ica_errors(halves: _Halves, sides: tuple[ICA, ICA], random_state: int) -> tuple[MapError, MapError]:
    """Errors of matched sources put back into the space of b, and of the sources themselves."""
    sources = _Halves(*(_Half(*(side.transform(x) for side, x in zip(sides, half))) for half in halves))
    whitened = _map_error(sources, "permutation", _diameter(sources, random_state), random_state)

    def through(pairs: _Halves) -> np.ndarray:
        return sides[0].components_.T @ _fitted_map(pairs.fit, "permutation") @ sides[1].mixing_.T

    chance = _distances(_shuffled(halves, random_state).held_out, through(_shuffled(sources, random_state))).mean()
    return _errors(halves, through(sources), _diameter(halves, random_state), chance), whitened


def _errors(space: _Halves, found: np.ndarray, size: float, chance: float) -> MapError:
    fit = _distances(space.fit, found)
    held_out = _distances(space.held_out, found).mean()
    return MapError(*(float(x / size) for x in (held_out, fit.mean(), np.sqrt(np.mean(fit**2)), chance)))


def _diameter(space: _Halves, random_state: int) -> float:
    found = diameter(np.concatenate([space.fit.b, space.held_out.b]), random_state)
    if found <= 0:
        raise ValueError(
            "at least 99.9 % of the pairs of rows of b are equal, so it has no diameter: leave out repeats"
        )
    return found


def _distances(half: _Half, found: np.ndarray) -> np.ndarray:
    return np.linalg.norm(half.a @ found - half.b, axis=1)


def _shuffled(space: _Halves, random_state: int) -> _Halves:
    """The same rows, b's in another order."""
    rng = np.random.default_rng(random_state)
    return _Halves(*(_Half(half.a, half.b[rng.permutation(len(half.b))]) for half in space))
