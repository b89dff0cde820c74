"""What two runs of a model, or a model and the true factors, agree on: alignment errors, MCC, InfoMEC, DCI, MIG, stability."""

import numpy as np
from sklearn.base import clone

from cellica.alignment import GROUPS, Alignment, MapError, align, alignment_error, efficiency, matrix
from cellica.disentangling import dci, infomec, mcc, mig
from cellica.ica import ICA, Stability, stability
from cellica.isometry import BiLipschitz, bi_lipschitz, rigid_bound

__all__ = [
    "GROUPS",
    "Alignment",
    "BiLipschitz",
    "MapError",
    "Stability",
    "align",
    "alignment_error",
    "bi_lipschitz",
    "dci",
    "efficiency",
    "ica_stability",
    "infomec",
    "mcc",
    "mig",
    "rigid_bound",
]


def ica_stability(
    x: np.ndarray,
    n_components: int | str | None = None,
    *,
    n_runs: int = 4,
    kind: str = "seed",
    ica: ICA | None = None,
    random_state: int = 0,
) -> Stability:
    """Fit an ICA to x, run it again, and say how well each component is found again: see `ica.stability`.

    |correlation| of matched sources and |cosine| of matched unmixing rows, means over the runs, at most 1; ``chance`` is that
    of a random rotation. Both are given because equal rows do not imply equal sources.

    Parameters
    ----------
    x
        (n, d), with more rows than columns.
    n_components
        Number of sources, as in `ICA`.
    n_runs
        Runs beside the first.
    kind
        ``"seed"``: the same rows from another start. ``"bootstrap"``: as many rows drawn with replacement, and whitened anew.
    ica
        Settings, as an unfitted estimator; number of components and seed are set here.
    random_state
        Seed of all runs.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> found = ica_stability(rng.laplace(size=(3000, 3)) @ rng.normal(size=(3, 3)))
    >>> bool(found.correlation.min() > 0.99)
    True
    >>> bool(ica_stability(rng.normal(size=(3000, 3))).correlation.mean() < 0.95)
    True
    """
    x = matrix("x", x)
    if len(x) <= x.shape[1]:
        raise ValueError(
            f"{len(x)} rows are too few for {x.shape[1]} columns: give more rows, or fewer columns (such as the leading "
            f"principal components)"
        )
    model = clone(ICA() if ica is None else ica).set_params(n_components=n_components, random_state=random_state).fit(x)
    return stability(model, x, n_runs=n_runs, kind=kind, random_state=random_state + 1)
