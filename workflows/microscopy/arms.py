"""The arms of the experiment: features of all wells, fitted to the training wells alone.

Every arm but ``base`` starts from features that are z-scored on the training wells. ``ica_drop``, ``pca_drop`` and ``random_drop`` take
batch components away in their basis, as many as ``ica_drop`` takes, and then are whitened and rotated by ICA, all alike:
they differ only in what was taken.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cellica.ica import ICA
from cellica.methods import chain_of, fit_chain
from cellica.roles import Roles
from cellica.schema import InputError
from cellica.whitening import Whitening

ROTATED = ("pca", "pca+ica", "pca+random")
DROPPED = {"ica_drop": {"check_stability": False}, "pca_drop": {"match": "number"}, "random_drop": {"match": "number"}}
MAX_ITER = 1000  # of ICA: converged, as the paper asks


@dataclass
class Arm:
    """Features (wells x components) of every well in one arm, and what its fit found."""

    name: str
    x: np.ndarray
    rotation: int = 0
    n_dropped: int = 0
    n_converged: int = 0


def rotations(z: np.ndarray, ica: ICA, n: int, random_state: int) -> Iterator[np.ndarray]:
    """Whitened rows in random orthonormal bases, each uniform over rotations and reflections."""
    white = z @ ica.whitening_.T
    rng = np.random.default_rng(random_state)
    for _ in range(n):
        q, r = np.linalg.qr(rng.standard_normal((white.shape[1], white.shape[1])))
        yield white @ (q * np.sign(np.diag(r)))


def independent(x: np.ndarray, training: np.ndarray, n_components: int | str | None, random_state: int) -> ICA:
    """ICA of the training rows. What it warns of, few rows and components that never settle, the tables tell in numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ICA(n_components, max_iter=MAX_ITER, random_state=random_state).fit(x[training])


def corrected(
    x: np.ndarray, wells: Roles, training: np.ndarray, method: str, **options: Any
) -> tuple[np.ndarray, dict[str, Any]]:
    """Rows of all wells after a method of cellica (none: z-scores) that was fitted to the training rows, and its account."""
    chain, accounts, _ = fit_chain(x[training], wells.take(training), chain_of([method]), options)
    return np.asarray(chain.apply(x, wells), dtype=np.float64), accounts[-1][1]


def fold_arms(
    x: np.ndarray,
    wells: Roles,
    training: np.ndarray,
    *,
    n_components: int | str | None = "auto",
    n_rotations: int = 2,
    random_state: int = 0,
) -> Iterator[Arm]:
    """Each arm of one fold, one at a time: rows of ``x`` (n x d), of which those in the mask ``training`` are fitted to."""
    z, _ = corrected(x, wells, training, "none")
    yield Arm("base", x)
    ica = independent(z, training, n_components, random_state)
    k = len(ica.components_)
    if k < 2:
        raise InputError(
            f"{k} component stands above the noise of {training.sum()} training wells: there is no rotation"
        )
    yield Arm("pca", Whitening(k).fit(z[training]).transform(z))
    yield Arm("pca+ica", ica.transform(z), n_converged=int(ica.converged_.sum()))
    for i, turned in enumerate(rotations(z - ica.mean_, ica, n_rotations, random_state)):
        yield Arm("pca+random", turned, rotation=i)
    for method, options in DROPPED.items():
        left, account = corrected(x, wells, training, method, n_components=k, random_state=random_state, **options)
        n_dropped = int(account["n_removed"])
        if k - n_dropped < 2:
            raise InputError(f"{method} removes {n_dropped} of {k} components: too few are left to probe")
        found = independent(left, training, k - n_dropped, random_state)
        yield Arm(method, found.transform(left), n_dropped=n_dropped, n_converged=int(found.converged_.sum()))
