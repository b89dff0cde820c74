"""How much batch is left in a representation: its share of the variance, and whether a probe can read it."""

from collections.abc import Sequence
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from cellica import metrics, probes
from cellica.metrics import label_codes
from cellica.schema import EXPERIMENT, PERTURBATION, anchor_mask, control_mask, labels, strata_labels
from cellica.scores import mean_of, method_of, scorable, score_row, score_table
from cellica.shares import batch_share_intervals

N_FOLDS = 5
N_PERMUTED = 5
CENTERING = (
    "center",
    "center_scale",
    "combat",
    "harmony",
    "harmony_full",
    "leace",
)  # methods that take batch means from the wells themselves


def batch_effect(
    adata: ad.AnnData,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    controls: Sequence[str] | None = None,
    anchors: Sequence[str] | None = None,
    use_rep: str | None = None,
    random_state: int = 0,
) -> pd.DataFrame:
    """Share of the variance of anchors that lies between batches, anchor means removed, within strata.

    Parameters
    ----------
    anchors
        Perturbations to measure on, by default those present in more than half of the batches, controls included
        (``schema.anchor_mask``).
    batch_key, label_key, strata_key, controls, use_rep
        As in `replicate_retrieval`.
    random_state
        Seed of the bootstrap.

    Returns
    -------
    Score table of two rows, lower is better: ``batch_share``, the mean over features of adjusted eta squared
    (``metrics.adjusted_eta2``), and ``batch_share_weighted``, weighted by the features' variance. Chance is 0, and
    noise has none either: a low share alone is no success. Queries are anchor wells. Intervals are of batches drawn again
    (`shares.batch_share_intervals`), for three or more.

    Notes
    -----
    Adjusted eta squared: 1 - (1 - eta^2)(n - 1) / (n - k) for n wells in k batches, on residuals from anchor means. Lower is less batch.
    Chance: 0. Source: `metrics.adjusted_eta2`.
    """
    roles: dict[str, Any] = {"batch_key": batch_key, "label_key": label_key, "controls": controls}
    anchor = anchor_mask(adata.obs, anchors, **roles)
    x, kept, dropped, notes = scorable(adata, anchor, list(dict.fromkeys([batch_key, label_key])), use_rep)
    obs = adata.obs[kept]
    batch, cell = labels(obs, batch_key), label_codes(strata_labels(obs, strata_key))
    cell = np.unique(np.column_stack([cell, label_codes(labels(obs, label_key))]), axis=0, return_inverse=True)[
        1
    ].ravel()
    values = x[kept]
    share = metrics.adjusted_eta2(values, batch, cell)
    known = ~np.isnan(share)
    notes.insert(0, f"wells of {len(set(labels(obs, label_key)))} anchors in {len(set(batch))} batches")
    if not known.any():
        notes.insert(0, "not applicable: anchors do not repeat within and across batches")
    notes += _centred(adata, use_rep, ", on which the share is low for that")
    variance = (values - metrics.group_means(values, cell)[cell]).var(axis=0) if known.any() else share
    weighted = np.average(share[known], weights=variance[known]) if known.any() else np.nan
    values_of = {"batch_share": mean_of(share), "batch_share_weighted": float(weighted)}
    n_batches, intervals = 0, [(np.nan, np.nan)] * 2
    if known.any():
        code = np.unique(label_codes(batch), return_inverse=True)[1]
        n_batches = int(code.max()) + 1
        intervals = batch_share_intervals(values, code, cell, list(values_of.values()), random_state=random_state)
        notes.append("interval over batches" if n_batches > 2 else "no interval: over batches, of which there are two")
    return score_table(
        [
            score_row(
                use_rep, metric, value, 0.0, int(np.count_nonzero(kept)), dropped, notes, interval=(*ends, n_batches)
            )
            for (metric, value), ends in zip(values_of.items(), intervals)
        ]
    )


def batch_probe(
    adata: ad.AnnData,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    random_state: int = 0,
) -> pd.DataFrame:
    """How often does a linear probe name the batch of a negative control that it has not seen?

    The probe is a linear discriminant (`probes.discriminants`), cross-validated within strata: the controls of each batch are
    dealt at random to five folds, and each fold is named by a probe of the others.

    Parameters
    ----------
    batch_key, label_key, strata_key, controls, use_rep
        As in `replicate_retrieval`.
    random_state
        Seed of the folds and of the permuted labels.

    Returns
    -------
    Score table of one row, metric ``batch_probe``, lower is better: the share of controls whose batch is named right. Chance is its
    mean over batches permuted within strata. Queries are controls of batches with two of them in a stratum with two
    such batches; the interval is over batches. Not applicable without.

    Notes
    -----
    The share of right names by linear discriminants with a shrunk covariance (Ledoit and Wolf, 2004). Lower is less batch. Chance: permuted
    batches. Source: cellica.
    """
    control = control_mask(adata.obs, controls, label_key)
    x, kept, dropped, notes = scorable(adata, control, [batch_key], use_rep)
    batch = labels(adata.obs, batch_key)
    place = pd.MultiIndex.from_arrays([strata_labels(adata.obs, strata_key).astype(str), batch.astype(str)])
    order = np.argsort(adata.obs_names.to_numpy(dtype=str), kind="stable")
    order = order[kept[order]]
    counts = place[order].value_counts()
    counts = counts[counts > 1]
    several = counts.groupby(level=0).transform("size") > 1
    at = order[place[order].isin(counts.index[several])]
    if len(at) < len(order):
        notes.append(
            f"{len(order) - len(at)} controls left out: of a batch with one, or the only such batch of a stratum"
        )
    dropped += len(order) - len(at)
    if not len(at):
        reason = f"not applicable: no stratum has two batches (obs[{batch_key!r}]) with two negative controls each"
        return score_table([score_row(use_rep, "batch_probe", np.nan, np.nan, 0, dropped, [reason, *notes])])
    stratum, code = (label_codes(np.asarray(place[at].get_level_values(level))) for level in (0, 1))
    rng = np.random.default_rng(random_state)
    hits = _named_batches(x[at], code, stratum, rng)
    permuted = []
    for _ in range(N_PERMUTED):
        mixed = code.copy()
        for one in np.unique(stratum):
            mixed[stratum == one] = rng.permutation(code[stratum == one])
        permuted.append(_named_batches(x[at], mixed, stratum, rng).mean())
    notes = ["lower is better; interval over batches", f"{len(counts[several])} batches", *notes]
    notes += _centred(adata, use_rep, ": the value says nothing of others")
    of = hits, np.array(["/".join(one) for one in place[at]])
    return score_table(
        [score_row(use_rep, "batch_probe", hits.mean(), float(np.mean(permuted)), len(at), dropped, notes, of=of)]
    )


def _centred(adata: ad.AnnData, use_rep: str | None, so: str) -> list[str]:
    """A note where a correction took batch means from the wells that are scored, and what comes of it."""
    centred = [name for name in method_of(adata, use_rep).split("+") if name in CENTERING]
    return [f"{' and '.join(centred)} took batch means from these very wells{so}"] if centred else []


def _named_batches(x: np.ndarray, batch: np.ndarray, stratum: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whether the batch of each row is named by a discriminant of the other folds of its stratum."""
    fold, hits = np.zeros(len(x), dtype=np.int64), np.zeros(len(x))
    for one in np.unique(batch):
        for part in np.unique(stratum[batch == one]):
            rows = np.flatnonzero((batch == one) & (stratum == part))
            fold[rows] = rng.permutation(len(rows)) % N_FOLDS
    for part in np.unique(stratum):
        for held in np.unique(fold[stratum == part]):
            train, asked = (np.flatnonzero((stratum == part) & ((fold == held) == out)) for out in (False, True))
            names, code = np.unique(batch[train], return_inverse=True)
            right = np.searchsorted(names, batch[asked])
            (hits[asked],) = probes.expected_hits(probes.discriminants(x[train], code, len(names), x[asked]), right)
    return hits
