"""The scores that single-cell benchmarks give for integration (Luecken et al., Nature Methods 2022), where they apply.

BRAS, iLISI, kBET and the PCR comparison are those of the package scib-metrics (the extra ``scib``); graph connectivity
and the agreement of clusters with perturbations need scikit-learn alone.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import anndata as ad
import numpy as np
import pandas as pd
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_mutual_info_score, adjusted_rand_score, normalized_mutual_info_score
from sklearn.neighbors import NearestNeighbors

from cellica.metrics import label_codes
from cellica.schema import EXPERIMENT, PERTURBATION, InputError, first_few, labels, strata_labels, treated_mask
from cellica.scores import embedding_of, scorable, score_row, score_table

LEAST_WELLS = 10  # of a stratum
NEIGHBORS = {"ilisi": 90, "kbet": 50, "graph_connectivity": 15}  # those of scIB; a well counts among its own
ON_BATCHES = ("bras", "ilisi", "kbet", "pcr_comparison")
CLUSTERS = {
    "kmeans_nmi": normalized_mutual_info_score,
    "kmeans_ami": adjusted_mutual_info_score,
    "kmeans_ari": adjusted_rand_score,
}
N_PERMUTED = 3
ALPHA = 0.05  # of kBET


@dataclass
class _Stratum:
    """Wells of a stratum: representation and the one before correction, label and batch codes."""

    x: np.ndarray
    reference: np.ndarray | None
    label: np.ndarray
    batch: np.ndarray
    random_state: int

    @cached_property
    def neighbors(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the nearest wells, itself among them, and their distances."""
        k = min(max(NEIGHBORS.values()), len(self.x) - 1)
        distances, indices = NearestNeighbors(n_neighbors=k).fit(self.x).kneighbors(self.x)
        return indices, distances

    @cached_property
    def clusters(self) -> np.ndarray:
        """K-means clusters, as many as labels."""
        n_clusters = len(np.unique(self.label))
        return KMeans(n_clusters, n_init=10, random_state=self.random_state).fit(self.x).labels_

    def nearest(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """As many neighbours as a metric takes."""
        indices, distances = self.neighbors
        return indices[:, : NEIGHBORS[metric]], distances[:, : NEIGHBORS[metric]]


def integration(
    adata: ad.AnnData,
    *,
    metrics: Sequence[str] | None = None,
    reference: str = "X",
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    random_state: int = 0,
) -> pd.DataFrame:
    """Scores of scIB on treated wells, within strata.

    Parameters
    ----------
    metrics
        Some of the metrics below, by default all.
    reference
        The representation before correction, with which the PCR comparison compares: X, or a key of obsm.
    batch_key, label_key, strata_key, controls, use_rep
        As in `replicate_retrieval`.
    random_state
        Seed of the clusters and of the permuted labels.

    Returns
    -------
    Score table, one row a metric, all from 0 to 1 unless said. What does not apply has no value and says why.

    Of batches, higher is better mixed; chance is the value with batches permuted among the wells of each perturbation, that of
    a representation without batch effect:
    ``bras`` (Rautenstrauch and Ohler, 2025), 1 - |silhouette of batch| by cosine within each perturbation, where one of its batches
    has two wells; ``ilisi``, median number of batches among 90 neighbours, scaled; ``kbet``, share of wells whose 50 neighbours have the
    batches of all wells (chi squared, p >= 0.05); ``pcr_comparison``, how much of the batch's share of the variance of principal
    components a correction removes.

    Of perturbations, higher is more found; chance is the value with perturbations permuted within batches:
    ``graph_connectivity``, largest connected part of the wells of a perturbation in the graph of 15 neighbours, for perturbations
    with two wells; ``kmeans_nmi``, ``kmeans_ami``, ``kmeans_ari`` (the last two up to 1, about 0 by chance), agreement of perturbations
    with as many k-means clusters; NMI grows with their number even on noise.

    Neighbours are Euclidean; where a stratum has fewer wells than neighbours, all but one are taken, which the note says. Strata of fewer
    than ten wells are left out. Values are means over strata, weighted by their wells, or over perturbations, which then carry the
    interval (``bras``, ``kbet``, ``graph_connectivity``); the others are one number of all wells, and have none.

    Raises
    ------
    InputError
        A metric is unknown, or a column or representation is not there.

    Notes
    -----
    Formulas are those of scib-metrics and scikit-learn, higher is better, chance as said. Source: Luecken et al.,
    2022 (scIB).
    """
    asked = list(SCORES if metrics is None else metrics)
    if odd := [name for name in asked if name not in SCORES]:
        raise InputError(f"metric {first_few(odd)} is not known: use {first_few(SCORES, len(SCORES))}")
    treated = treated_mask(adata.obs, controls, label_key)
    x, kept, dropped, notes = scorable(adata, treated, [label_key, batch_key], use_rep)
    rep = use_rep or "X"
    before = None if reference == rep else embedding_of(adata, reference)
    if before is not None and kept.any():
        lost = kept & ~np.isfinite(before).all(axis=1)
        notes += [f"{lost.sum()} wells left out: not finite in {reference}"] if lost.any() else []
        kept, dropped = kept & ~lost, dropped + int(lost.sum())
    label, batch = label_codes(labels(adata.obs, label_key)), label_codes(labels(adata.obs, batch_key))
    stratum = strata_labels(adata.obs, strata_key).astype(str)
    order = np.argsort(adata.obs_names.to_numpy(dtype=str), kind="stable")
    order = order[kept[order]]
    parts = []
    for name in np.unique(stratum[order]):
        at = order[stratum[order] == name]
        if len(at) < LEAST_WELLS:
            notes.append(f"{len(at)} wells of {name!r} left out: fewer than {LEAST_WELLS}")
            dropped += len(at)
            continue
        parts.append(
            _Stratum(
                x[at].astype(np.float32),
                None if before is None else before[at].astype(np.float32),
                label[at],
                np.unique(batch[at], return_inverse=True)[1],
                random_state,
            )
        )
    rows = []
    scib = _scib() if set(asked) & set(ON_BATCHES) else None
    for metric in asked:
        reasons = [_inapplicable(part, metric, scib, rep, batch_key, label_key) for part in parts]
        scored = [part for part, reason in zip(parts, reasons) if not reason]
        why = list(dict.fromkeys(filter(None, reasons))) or [
            "" if parts else f"no stratum has {LEAST_WELLS} treated wells"
        ]
        rows.append(_row(rep, metric, scored, why, dropped, notes, random_state))
    return score_table(rows)


def _scib() -> ModuleType | None:
    """scib-metrics, None where it is not installed. Its import takes seconds, and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import scib_metrics
        except ImportError:
            return None
    return scib_metrics


def _inapplicable(
    part: _Stratum, metric: str, scib: ModuleType | None, rep: str, batch_key: str, label_key: str
) -> str:
    """Why a metric says nothing of a stratum; empty where it does."""
    n_wells, n_labels = len(part.x), len(np.unique(part.label))
    if metric in ON_BATCHES and part.batch.max() < 1:
        return f"one batch (obs[{batch_key!r}])"
    if metric in ON_BATCHES and scib is None:
        return "install scib-metrics (pip install cellica[scib])"
    if metric == "pcr_comparison" and part.reference is None:
        return f"{rep} is itself the representation before correction"
    if metric == "bras" and not len(_replicated(part.label, part.batch)):
        return f"no {label_key} lies in two batches with two wells in one of them"
    if metric == "graph_connectivity" and n_labels == n_wells:
        return f"no {label_key} has two wells (obs[{label_key!r}])"
    if metric in CLUSTERS and not 1 < n_labels < n_wells:
        return f"obs[{label_key!r}] has {n_labels} values in {n_wells} wells"
    return ""


def _row(
    rep: str,
    metric: str,
    parts: Sequence[_Stratum],
    why: Sequence[str],
    dropped: int,
    notes: Sequence[str],
    random_state: int,
) -> tuple:
    if not parts:
        return score_row(rep, metric, np.nan, np.nan, 0, dropped, [f"not applicable: {'; '.join(why)}", *notes])
    rng = np.random.default_rng(random_state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of jax, and of a PCR comparison below 0
        value, of = _scored(metric, parts, [(part.label, part.batch) for part in parts])
        permuted = [[_permuted(part, metric, rng) for part in parts] for _ in range(N_PERMUTED)]
        chance = np.mean([_scored(metric, parts, codes)[0] for codes in permuted])
    n_wells = sum(len(part.x) for part in parts)
    k = min([NEIGHBORS.get(metric, 0), *(len(part.x) - 1 for part in parts)])
    said = [
        f"{k} neighbours, of the {NEIGHBORS[metric]} of scIB" if k < NEIGHBORS.get(metric, 0) else "",
        f"of {len(of[0])} perturbations" if metric in ("bras", "graph_connectivity") else "",
        f"not of all strata: {'; '.join(why)}" if any(why) else "",
    ]
    return score_row(
        rep, metric, value, float(chance), n_wells, dropped, [*said, *notes], of=of if len(of[0]) else None
    )


def _permuted(part: _Stratum, metric: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Labels and batches of wells: batches permuted within labels, or labels within batches."""
    code, within = (part.batch, part.label) if metric in ON_BATCHES else (part.label, part.batch)
    code = code.copy()
    for one in np.unique(within):
        code[within == one] = rng.permutation(code[within == one])
    return (part.label, code) if metric in ON_BATCHES else (code, part.batch)


def _scored(
    metric: str, parts: Sequence[_Stratum], codes: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[float, tuple[np.ndarray, np.ndarray]]:
    """A metric over strata, and its values by perturbation, none where it is one number for all wells."""
    found = [SCORES[metric](part, label, batch) for part, (label, batch) in zip(parts, codes)]
    values = np.concatenate([value for value, _ in found])
    units = np.concatenate([unit for _, unit in found])
    if len(units):
        return float(values.mean()), (values, units)
    return float(np.average(values, weights=[len(part.x) for part in parts])), (units, units)


def _replicated(label: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Labels that lie in several batches, with several wells in one of them."""
    names, code = np.unique(label, return_inverse=True)
    n_batches = np.bincount(np.unique(np.column_stack([code, batch]), axis=0)[:, 0])
    return names[(n_batches > 1) & (np.bincount(code) > n_batches)]


Found = tuple[np.ndarray, np.ndarray]  # values, and the label of each; without labels one value for all
ALL = np.zeros(0, dtype=np.int64)


def _bras(part: _Stratum, label: np.ndarray, batch: np.ndarray) -> Found:
    from scib_metrics import bras

    names = _replicated(label, batch)
    each = [bras(part.x[label == name], label[label == name], batch[label == name]) for name in names]
    return np.array(each, dtype=float), names


def _neighbor_results(part: _Stratum, metric: str):
    from scib_metrics.nearest_neighbors import NeighborsResults

    return NeighborsResults(*part.nearest(metric))


def _ilisi(part: _Stratum, label: np.ndarray, batch: np.ndarray) -> Found:
    from scib_metrics import ilisi_knn

    return np.array([float(ilisi_knn(_neighbor_results(part, "ilisi"), batch))]), ALL


def _kbet(part: _Stratum, label: np.ndarray, batch: np.ndarray) -> Found:
    from scib_metrics import kbet

    _, _, p = kbet(_neighbor_results(part, "kbet"), batch, alpha=ALPHA)
    return (p >= ALPHA).astype(float), label


def _pcr_comparison(part: _Stratum, label: np.ndarray, batch: np.ndarray) -> Found:
    from scib_metrics import pcr_comparison

    return np.array([float(pcr_comparison(part.reference, part.x, batch, categorical=True))]), ALL


def _graph_connectivity(part: _Stratum, label: np.ndarray, batch: np.ndarray) -> Found:
    indices, _ = part.nearest("graph_connectivity")
    n, k = indices.shape
    graph = csr_array((np.ones(n * k), indices.ravel(), np.arange(0, n * k + 1, k)), shape=(n, n))
    names, counts = np.unique(label, return_counts=True)
    names = names[counts > 1]
    each = []
    for name in names:
        at = np.flatnonzero(label == name)
        part_of = connected_components(graph[at][:, at], connection="strong")[1]
        each.append(np.bincount(part_of).max() / len(at))
    return np.array(each), names


def _clusters(agreement: Callable[..., float]) -> Callable[[_Stratum, np.ndarray, np.ndarray], Found]:
    return lambda part, label, batch: (np.array([agreement(label, part.clusters)]), ALL)


SCORES: dict[str, Callable[[_Stratum, np.ndarray, np.ndarray], Found]] = {
    "bras": _bras,
    "ilisi": _ilisi,
    "kbet": _kbet,
    "pcr_comparison": _pcr_comparison,
    "graph_connectivity": _graph_connectivity,
    **{name: _clusters(agreement) for name, agreement in CLUSTERS.items()},
}
