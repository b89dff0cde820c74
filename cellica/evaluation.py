"""All scores that apply to a representation, in one table."""

from collections.abc import Sequence
from typing import Any

import anndata as ad
import pandas as pd

from cellica.artifacts import PathLike
from cellica.baselines import BASELINES
from cellica.batch_effects import batch_effect
from cellica.neighbors import class_retrieval, nearest_neighbor, replicate_retrieval
from cellica.progress import track
from cellica.relationships import relationship_recall
from cellica.schema import (
    EXPERIMENT,
    PERTURBATION,
    WELL,
    InputError,
    anchor_mask,
    labels,
    require_columns,
    strata_labels,
    treated_mask,
)
from cellica.scores import CIRCULAR, PER_QUERY, absent_row, attempt, embedding_of, join_notes, method_of, score_table

ON_ANCHORS = {"wccn", "ica_shrink", "ruv", "leace"}  # methods fitted on the labels of anchors


def _circular(
    obs: pd.DataFrame,
    method: str,
    *,
    batch_key: str,
    label_key: str,
    controls: Sequence[str] | None,
    anchors: Sequence[str] | None,
) -> str:
    """A warning where a method was fitted on the labels of the perturbations that are scored."""
    from cellica import correct

    try:
        if not ON_ANCHORS & set(correct.parse(method)):
            return ""
    except InputError:  # a representation that no correction wrote
        return ""
    label, treated = labels(obs, label_key), treated_mask(obs, controls, label_key)
    fitted = treated & anchor_mask(obs, anchors, batch_key=batch_key, label_key=label_key, controls=controls)
    scored = {value for value in label[treated] if value is not None}
    shared = {value for value in label[fitted] if value is not None}
    if not shared:
        return ""
    return f"{CIRCULAR} {len(shared)} of {len(scored)} scored perturbations are anchors, on whose labels {method} was fitted"


def evaluate(
    adata: ad.AnnData,
    reps: Sequence[str] | None = None,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    class_key: str | None = None,
    group_key: str | None = None,
    controls: Sequence[str] | None = None,
    anchors: Sequence[str] | None = None,
    truth: PathLike | None = None,
    max_queries: int | None = None,
    random_state: int = 0,
    baselines: bool = True,
) -> pd.DataFrame:
    """All scores that apply, for each representation.

    Parameters
    ----------
    reps
        ``"X"`` and keys of obsm, by default X and all keys that start with ``X_``.
    batch_key, label_key, strata_key, controls, anchors
        Roles of wells; see `replicate_retrieval` and `batch_effect`.
    class_key, group_key
        Columns for `class_retrieval` and `nearest_neighbor`, which are left out without ``class_key``; ``group_key``
        is by default ``label_key``.
    truth
        Folder for `relationship_recall`, which is left out without it.
    max_queries, random_state
        Score a random sample of queries in the retrievals.
    baselines
        Also score what needs no encoder: the row and column of the well (``baseline:position``) and, where obs has
        such columns and they vary, mean pixels (``intensity_*``: ``baseline:intensity``), the number of cells
        (``cell_count``: ``baseline:cell_count``), and focus, saturation and the share of empty fields (``focus_*``,
        ``saturation_*``, ``empty``: ``baseline:quality``).

    Returns
    -------
    Score table. What does not apply is a row without a value whose note says why.

    Raises
    ------
    InputError
        A column, a control, an anchor or a representation that was named is not there.
    """
    group_key = group_key or label_key
    named = [batch_key, label_key, *([class_key, group_key] if class_key else [])]
    require_columns(adata.obs, list(dict.fromkeys(named)), "obs")
    roles: dict[str, Any] = {"batch_key": batch_key, "label_key": label_key, "controls": controls}
    anchor_mask(adata.obs, anchors, **roles)
    strata_labels(adata.obs, strata_key)
    sampled: dict[str, Any] = {"max_queries": max_queries, "random_state": random_state}
    of_class: dict[str, Any] = {"class_key": class_key, "group_key": group_key, **roles}

    def scores(data: ad.AnnData, rep: str) -> list[pd.DataFrame]:
        replicates: dict[str, Any] = {"strata_key": strata_key, "use_rep": rep, **roles, **sampled}
        tables = [
            replicate_retrieval(data, **replicates),
            attempt(
                rep, "replicate_map_other_well", lambda: replicate_retrieval(data, pos_diffby=[WELL], **replicates)
            ),
            batch_effect(data, strata_key=strata_key, anchors=anchors, use_rep=rep, **roles),
        ]
        if class_key:
            tables.append(class_retrieval(data, use_rep=rep, **of_class, **sampled))
            tables.append(nearest_neighbor(data, use_rep=rep, **of_class))
        if truth is not None:
            tables.append(relationship_recall(data, truth, label_key=label_key, controls=controls, use_rep=rep))
        circular = _circular(data.obs, method_of(data, rep), anchors=anchors, **roles)
        for table in tables if circular else ():
            table["note"] = [join_notes([note, circular]) for note in table["note"]]
        return tables

    keys = ["X", *(key for key in adata.obsm if key.startswith("X_"))] if reps is None else list(reps)
    for key in keys:
        embedding_of(adata, key)
    tables = [table for key in track(keys, "score") for table in scores(adata, key)]
    for key, build in BASELINES.items() if baselines else ():
        try:
            baseline = build(adata.obs)
        except InputError as error:
            tables.append(score_table([absent_row(key, "all", error)]))
            continue
        if baseline is not None:
            tables += scores(ad.AnnData(obs=adata.obs.copy(), obsm={key: baseline}), key)
    scored = pd.concat(tables, ignore_index=True) if tables else score_table([])
    scored.attrs[PER_QUERY] = {
        (table["rep"].iloc[0], metric): one
        for table in tables
        for metric, one in table.attrs.get(PER_QUERY, {}).items()
    }
    return scored
