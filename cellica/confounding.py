"""Can batch, strata and position be told from perturbation at all? Asked of the design, before any correction."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from cellica.metrics import label_codes
from cellica.roles import Roles, only
from cellica.schema import InputError, first_few

N_PERMUTATIONS = 5
NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Confounding:
    """What a design can and cannot tell apart.

    Attributes
    ----------
    verdict
        ``"proceed"``; ``"warn"``, where what some perturbations do cannot be told from batch or position; ``"refuse"``, where
        each batch holds one perturbation of its own and no control that others share, so that a method that does not look
        at controls (combat, harmony, leace on all wells) would remove all there is.
    table
        One row a factor of several levels (batch, plate, strata, well, row, column, edge): ``n_levels``; ``share``, the information that factor
        and perturbation share, over the smaller entropy of the two, less its mean over permutations (0: no more than by
        chance, 1: one determines the other); ``n_perturbations`` with two treated wells or more, and ``n_fixed``, those that occur at one
        level only; ``linked``, whether perturbations, controls included, join all levels of the factor (within a stratum).
    sentences
        The same in words, for the notes of a correction.
    single_batch, fixed_well, unlinked_batches
        Names of treated perturbations that lie in one batch only; that have several wells, all in one position; and of
        batches that share no treated perturbation with another.
    """

    verdict: str
    table: pd.DataFrame
    sentences: tuple[str, ...]
    single_batch: tuple[str, ...]
    fixed_well: tuple[str, ...]
    unlinked_batches: tuple[str, ...]


def check(roles: Roles) -> Confounding:
    """Look at a design for what it cannot tell apart; features are not looked at."""
    treated = roles.treated
    label = label_codes(only(roles.label, treated))
    names = np.unique(roles.label[treated].astype(str))
    factors: dict[str, np.ndarray] = {"batch": roles.batch, "plate": roles.plate, "strata": roles.strata}
    positions = roles.positions if roles.well is not None else {}
    if roles.well is not None and positions:
        factors |= {"well": roles.well, **positions}
    batch = label_codes(roles.batch)
    batches = np.unique(roles.batch.astype(str))
    coded = {name: label_codes(values) for name, values in factors.items()}
    cells = label_codes(only(roles.cells, roles.labelled | roles.control))
    several = {name: code for name, code in coded.items() if code.max(initial=-1) > 0}
    table = pd.DataFrame([_row(name, code, label, cells, roles) for name, code in several.items()])

    single = names[_n_levels(label, batch) == 1] if len(names) else names
    n_wells = np.bincount(label[label >= 0], minlength=len(names))
    fixed = np.array([], dtype=names.dtype)
    if roles.well is not None and positions and len(names):
        fixed = names[(_n_levels(label, label_codes(roles.well)) == 1) & (n_wells > 1)]
    alone = _alone(label, batch, batches)
    sentences = [
        *_on_batches(single, names, alone, batches, roles),
        *_on_positions(fixed, int(np.sum(n_wells > 1)), len(np.unique(roles.plate.astype(str))), roles),
        *(_on_layout(roles, label) if not len(fixed) else []),
    ]
    verdict = "refuse" if _inseparable(roles) else "warn" if sentences else "proceed"
    if verdict == "refuse":
        sentences.insert(
            0, "each batch holds one perturbation of its own and shares nothing with another: they cannot be told apart"
        )
    if verdict == "proceed" and len(batches) > 1:
        sentences.append(f"{len(names)} perturbations in {len(batches)} batches, each in several")
    if len(batches) > 1 and len({*zip(roles.strata.astype(str), roles.batch.astype(str))}) == len(
        np.unique(roles.strata.astype(str))
    ):
        sentences.append(
            "each stratum holds one batch: nothing tells one from the other, so no batch effect can be removed"
        )
    return Confounding(
        verdict,
        table,
        tuple(f"confounding: {sentence}" for sentence in sentences),
        tuple(map(str, single)),
        tuple(map(str, fixed)),
        tuple(map(str, alone)),
    )


def require_separable(roles: Roles, method: str) -> None:
    """Raise an InputError where a method that looks at no controls would remove all there is."""
    if _inseparable(roles):
        raise InputError(
            f"{method} cannot tell batch from perturbation: each of the {len(np.unique(roles.batch.astype(str)))} batches of "
            f"obs[{roles.batch_key!r}] holds one perturbation of its own and shares nothing with another, so all differences "
            "would be removed; name another batch key, or use 'sphere' or 'none'"
        )


def _row(name: str, factor: np.ndarray, label: np.ndarray, cells: np.ndarray, roles: Roles) -> dict[str, object]:
    known = (factor >= 0) & (label >= 0)
    repeated = np.bincount(label[known], minlength=label.max(initial=-1) + 1) > 1
    both = (factor >= 0) & (cells >= 0)
    n_sets = _n_connected(factor[both], cells[both])
    n_strata = len(np.unique(roles.strata[both].astype(str))) if name != "strata" else n_sets
    return {
        "factor": name,
        "n_levels": len(np.unique(factor[factor >= 0])),
        "share": shared_information(factor[known], label[known]),
        "n_perturbations": int(repeated.sum()),
        "n_fixed": int(np.sum((_n_levels(label, factor) == 1) & repeated)) if len(repeated) else 0,
        "linked": bool(n_sets <= max(n_strata, 1)),
    }


def shared_information(a: np.ndarray, b: np.ndarray, random_state: int = 0) -> float:
    """Mutual information of two codings (n,) over the smaller entropy, less what permutations give (0 at least); NaN for one level.

    >>> shared_information(np.repeat([0, 1, 2], 20), np.repeat([5, 4, 3], 20))
    1.0
    """
    entropies = [_entropy(a), _entropy(b)]
    if not len(a) or min(entropies) == 0:
        return float("nan")
    rng = np.random.default_rng(random_state)

    def share(codes: np.ndarray) -> float:
        joint = _entropy(codes.astype(np.int64) * (int(b.max()) + 1) + b)
        return (sum(entropies) - joint) / min(entropies)

    chance = float(np.mean([share(rng.permutation(a)) for _ in range(N_PERMUTATIONS)]))
    return max(0.0, (share(a) - chance) / (1 - chance)) if chance < 1 - 1e-9 else float("nan")


def _entropy(codes: np.ndarray) -> float:
    counts = np.unique(codes, return_counts=True)[1]
    p = counts / max(counts.sum(), 1)
    return float(-(p * np.log(p)).sum())


def _n_levels(label: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Levels of a factor at which each label occurs; rows where either is missing (-1) are left out."""
    known = (label >= 0) & (factor >= 0)
    n_levels = int(factor.max(initial=-1)) + 1
    pairs = np.unique(label[known] * n_levels + factor[known])
    return np.bincount(pairs // max(n_levels, 1), minlength=label.max(initial=-1) + 1)


def _graph(a: np.ndarray, b: np.ndarray) -> tuple[coo_array, int]:
    n_a, n_b = a.max(initial=-1) + 1, b.max(initial=-1) + 1
    return coo_array((np.ones(len(a)), (a, b + n_a)), shape=(n_a + n_b, n_a + n_b)), n_a


def _n_connected(a: np.ndarray, b: np.ndarray) -> int:
    """Sets of levels of two factors that no well joins."""
    a, b = np.unique(a, return_inverse=True)[1], np.unique(b, return_inverse=True)[1]
    return int(connected_components(_graph(a, b)[0], directed=False)[0]) if len(a) else 0


def _alone(label: np.ndarray, batch: np.ndarray, batches: np.ndarray) -> np.ndarray:
    """Batches that share no treated perturbation with another."""
    known = label >= 0
    if not known.any() or len(batches) < 2:
        return batches[:0]
    pairs = np.unique(np.column_stack([label[known], batch[known]]), axis=0)
    shared = np.bincount(pairs[:, 0])[pairs[:, 0]] > 1
    return batches[~np.isin(np.arange(len(batches)), pairs[shared, 1])]


def _inseparable(roles: Roles) -> bool:
    """Each batch holds one label, and none that another holds."""
    known = roles.labelled | roles.control
    if len(np.unique(roles.batch.astype(str))) < 2 or not known.all():
        return False
    label = label_codes(np.where(roles.labelled, roles.label, "a control"))
    batch = label_codes(roles.batch)
    return bool((_n_levels(batch, label) == 1).all() and (_n_levels(label, batch) == 1).all())


def _on_batches(
    single: np.ndarray, names: np.ndarray, alone: np.ndarray, batches: np.ndarray, roles: Roles
) -> list[str]:
    if len(batches) < 2:
        return []
    found = []
    if len(single):
        found.append(
            f"{len(single)} of {len(names)} perturbations lie in one batch only ({first_few(single, 3)}): what they do can be "
            "told from what the batch does only by controls and anchors, and a method that does not look at these (combat, "
            "harmony) removes both"
        )
    if len(alone):
        anchor, n_strata = roles.anchor, len(np.unique(roles.strata.astype(str)))
        everywhere = len(np.unique(roles.batch[anchor].astype(str))) == len(batches)
        joined = _n_connected(label_codes(roles.cells[anchor]), label_codes(roles.batch[anchor])) <= n_strata
        how = (
            "controls and anchors join them" if everywhere and joined else "nor do controls or anchors join all of them"
        )
        found.append(
            f"{len(alone)} of {len(batches)} batches share no treated perturbation with another ({first_few(alone, 3)}), {how}"
        )
    return found


def _on_layout(roles: Roles, label: np.ndarray) -> list[str]:
    """Where every plate has one layout, perturbations of several positions are tied to these too."""
    if roles.well is None:
        return []
    wells = pd.DataFrame({"well": roles.well, "label": label})[label >= 0].dropna()
    held = wells.groupby("well")["label"].agg(["size", "nunique"])
    held = held[held["size"] > 1]
    if not len(held) or (held["nunique"] == 1).mean() < NEARLY_ALL:
        return []
    return [
        f"{int((held['nunique'] == 1).sum())} of {len(held)} well positions hold one perturbation on all plates: score replicates "
        "in other positions (replicate_map_other_well), as those in the same position share what it does"
    ]


def _on_positions(fixed: np.ndarray, n_repeated: int, n_plates: int, roles: Roles) -> list[str]:
    if not len(fixed) or n_plates < 2:
        return []
    text = f"{len(fixed)} of {n_repeated} perturbations with replicates have one well position ({first_few(fixed, 3)})"
    if len(fixed) >= NEARLY_ALL * n_repeated:
        return [f"{text}: what they do cannot be told from what the position does, and replicate scores hold both"]
    return [f"{text}: score replicates in other positions (replicate_map_other_well)"]
