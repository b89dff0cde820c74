"""How much batch is left in a representation."""

from collections.abc import Sequence
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from cellica import metrics
from cellica.metrics import label_codes
from cellica.schema import EXPERIMENT, PERTURBATION, anchor_mask, labels, strata_labels
from cellica.scores import mean_of, method_of, scorable, score_row, score_table

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
) -> pd.DataFrame:
    """Share of the variance of anchors that lies between batches, anchor means removed, within strata.

    Parameters
    ----------
    anchors
        Perturbations to measure on, by default those present in more than half of the batches, controls included
        (``schema.anchor_mask``).
    batch_key, label_key, strata_key, controls, use_rep
        As in `replicate_retrieval`.

    Returns
    -------
    Score table of two rows: ``batch_share``, the mean over features of adjusted eta squared
    (``metrics.adjusted_eta2``), and ``batch_share_weighted``, weighted by the features' variance. Chance is 0, and
    noise has none either: a low share alone is no success. Queries are anchor wells.
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
    centred = [name for name in method_of(adata, use_rep).split("+") if name in CENTERING]
    if centred:
        notes.append(
            f"{' and '.join(centred)} took batch means from these very wells, on which the share is low for that"
        )
    variance = (values - metrics.group_means(values, cell)[cell]).var(axis=0) if known.any() else share
    weighted = np.average(share[known], weights=variance[known]) if known.any() else np.nan
    return score_table(
        [
            score_row(use_rep, metric, value, 0.0, int(np.count_nonzero(kept)), dropped, notes)
            for metric, value in (("batch_share", mean_of(share)), ("batch_share_weighted", weighted))
        ]
    )
