"""All scores that apply to a representation, in one table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import anndata as ad
import pandas as pd

from cellica.artifacts import PathLike
from cellica.baselines import BASELINES
from cellica.batch_effects import batch_effect, batch_probe
from cellica.compounds import compound_gene as gene_scores
from cellica.compounds import read_truth
from cellica.generalization import accuracies, holdout_auroc
from cellica.guides import guide_agreement, recall_without_arms
from cellica.integration import integration
from cellica.neighbors import activity_scores, class_retrieval, nearest_neighbor, replicate_retrieval
from cellica.progress import track
from cellica.relationships import cluster_scores, read_clusters, relationship_recall
from cellica.replicates import replicate_scores
from cellica.schema import (
    EXPERIMENT,
    PERTURBATION,
    UNS,
    WELL,
    InputError,
    anchor_mask,
    first_few,
    labels,
    require_columns,
    strata_labels,
    treated_mask,
)
from cellica.scores import (
    CIRCULAR,
    DETAILS,
    PER_QUERY,
    absent_row,
    attempt,
    embedding_of,
    join_notes,
    method_of,
    score_table,
)

DEFAULT = ("retrieval", "batch", "activity", "accuracy", "relationships")
KINDS = (*DEFAULT, "probes", "integration")
OF_BASELINES = DEFAULT
LEARNED: Mapping[str, Mapping[str, Callable[..., pd.DataFrame]]] = {
    "accuracy": {"knn_accuracy": accuracies},
    "probes": {"holdout_auroc": holdout_auroc},
}  # scores of what is learned in other batches than those that are scored, which can take a ``method`` to fit there too
PAIRS = ("pos_sameby", "pos_diffby", "neg_sameby", "neg_diffby")
MAX_QUERIES = 20_000
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
    scores: Sequence[str] | None = None,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    class_key: str | None = None,
    group_key: str | None = None,
    controls: Sequence[str] | None = None,
    anchors: Sequence[str] | None = None,
    truth: PathLike | None = None,
    clusters: PathLike | None = None,
    compound_gene: PathLike | None = None,
    gene_positions: PathLike | None = None,
    guide_key: str | None = None,
    activity_pairs: Mapping[str, Sequence[str]] | None = None,
    max_queries: int | None = MAX_QUERIES,
    random_state: int = 0,
    device: str = "cpu",
    baselines: bool = True,
    key_added: str | None = "scores",
) -> pd.DataFrame:
    """All scores that apply, for each representation.

    Parameters
    ----------
    reps
        ``"X"`` and keys of obsm, by default X and all keys that start with ``X_``.
    scores
        Kinds of scores. By default ``retrieval`` (`replicate_retrieval`, `class_retrieval`, `nearest_neighbor`), ``batch`` (`batch_effect`,
        `batch_probe`), ``activity`` (`activity`, `consistency`, `replicate_scores`), ``accuracy`` (`knn_accuracy`, `probe_accuracy`) and
        ``relationships`` (`relationship_recall`, `cluster_scores`, `compound_gene`, where their files are given). On request,
        as they take long: ``probes`` (`holdout_auroc`) and ``integration`` (scIB's).
    batch_key, label_key, strata_key, controls, anchors
        Roles of wells; see `replicate_retrieval` and `batch_effect`.
    class_key, group_key
        Columns for scores of classes, which are left out without ``class_key``; ``group_key`` is by default ``label_key``.
    truth, clusters, compound_gene
        Folder for `relationship_recall`, files for `cluster_scores` and `compound_gene`, which are left out without them.
    gene_positions
        Table for `correct_arms`, before relationships are scored.
    guide_key
        Column of guides such as ``GENE_guide_1``, for `guide_agreement`.
    activity_pairs
        Columns for `activity` by keyword: ``pos_sameby``, ``pos_diffby``, ``neg_sameby``, ``neg_diffby``, as ``{"pos_diffby": ["well"]}``.
    max_queries, random_state
        Score a random sample of about this many queries in ``retrieval``, ``activity`` and ``accuracy``, and say so; None: all.
    device
        Where rankings are counted: ``"cpu"``, ``"cuda"``, or ``"auto"``, the GPU where there is one.
    baselines
        Also score what needs no encoder: the row and column of the well (``baseline:position``) and, where obs has
        such columns and they vary, mean pixels (``intensity_*``: ``baseline:intensity``), the number of cells
        (``cell_count``: ``baseline:cell_count``), and focus, saturation and the share of empty fields (``focus_*``,
        ``saturation_*``, ``empty``: ``baseline:quality``).
    key_added
        Also write the table to ``uns["cellica"][key_added]``; None: do not.

    Returns
    -------
    Score table. What does not apply is a row without a value whose note says why. ``attrs["details"]`` holds the tables of
    single perturbations and classes that rows sum up, by representation and name.

    Raises
    ------
    InputError
        A column, a control, an anchor, a representation or a kind of scores that was named is not there.
    """
    kinds = list(DEFAULT if scores is None else scores)
    if unknown := [name for name in kinds if name not in KINDS]:
        raise InputError(f"scores {first_few(unknown)} are not known: use some of {', '.join(KINDS)}")
    group_key = group_key or label_key
    pairs = dict(activity_pairs or {})
    if odd := sorted(set(pairs) - set(PAIRS)):
        raise InputError(f"activity_pairs has no {first_few(odd)}: it takes {', '.join(PAIRS)}")
    named = [batch_key, label_key, *([class_key, group_key] if class_key else [])]
    named += [*(column for columns in pairs.values() for column in columns), *([guide_key] if guide_key else [])]
    require_columns(adata.obs, list(dict.fromkeys(named)), "obs")
    keys: dict[str, Any] = {"label_key": label_key, "controls": controls}
    roles: dict[str, Any] = {"batch_key": batch_key, **keys}
    anchor_mask(adata.obs, anchors, **roles)
    strata_labels(adata.obs, strata_key)
    if clusters is not None:
        read_clusters(clusters)
    if compound_gene is not None:
        read_truth(compound_gene)
    seed: dict[str, Any] = {"random_state": random_state}
    sampled: dict[str, Any] = {"max_queries": max_queries, "device": device, **seed}
    classes: dict[str, Any] = {"class_key": class_key, "group_key": group_key}

    def score(data: ad.AnnData, rep: str, kinds: Sequence[str]) -> Iterator[pd.DataFrame]:
        of: dict[str, Any] = {"use_rep": rep}
        if "retrieval" in kinds:
            replicates: dict[str, Any] = {"strata_key": strata_key, **roles, **sampled, **of}
            yield replicate_retrieval(data, **replicates)
            other = "replicate_map_other_well"
            yield attempt(rep, other, lambda: replicate_retrieval(data, pos_diffby=[WELL], **replicates))
            if class_key:
                yield class_retrieval(data, **classes, **roles, **sampled, **of)
                yield nearest_neighbor(data, **classes, **roles, **of)
        if "batch" in kinds:
            yield batch_effect(data, strata_key=strata_key, anchors=anchors, **roles, **of)
            yield attempt(rep, "batch_probe", lambda: batch_probe(data, strata_key=strata_key, **roles, **seed, **of))
        if "activity" in kinds:
            yield activity_scores(data, pairs=pairs, **classes, **roles, **sampled, **of)
            yield attempt(rep, "replicate_cosine", lambda: replicate_scores(data, **roles, **seed, **of))
        for kind in LEARNED:
            for metric, learn in LEARNED[kind].items() if kind in kinds else ():
                some = {"max_queries": max_queries} if kind == "accuracy" else {}
                yield attempt(rep, metric, partial(learn, data, strata_key=strata_key, **some, **roles, **seed, **of))
        if "relationships" in kinds:
            if truth is not None and gene_positions is not None:
                yield recall_without_arms(data, truth, gene_positions, **keys, **seed, **of)
            elif truth is not None:
                yield relationship_recall(data, truth, **keys, **seed, **of)
            if guide_key is not None:
                yield guide_agreement(data, guide_key=guide_key, controls=controls, **of)
            if clusters is not None:
                yield attempt(rep, "cluster_share", lambda: cluster_scores(data, clusters, **keys, **seed, **of))
            if compound_gene is not None:
                found = attempt(rep, "compound_gene_ap", lambda: gene_scores(data, compound_gene, **keys, **seed, **of))
                yield found
        if "integration" in kinds:
            yield attempt(rep, "integration", lambda: integration(data, **roles, **seed, **of))

    def marked(data: ad.AnnData, rep: str, kinds: Sequence[str]) -> Iterator[pd.DataFrame]:
        circular = _circular(data.obs, method_of(data, rep), anchors=anchors, **roles)
        for table in score(data, rep, kinds):
            if circular:
                table["note"] = [join_notes([note, circular]) for note in table["note"]]
            yield table

    names = ["X", *(key for key in adata.obsm if key.startswith("X_"))] if reps is None else list(reps)
    for name in names:
        embedding_of(adata, name)
    tables = [table for name in track(names, "score") for table in marked(adata, name, kinds)]
    for name, build in BASELINES.items() if baselines else ():
        try:
            baseline = build(adata.obs)
        except InputError as error:
            tables.append(score_table([absent_row(name, "all", error)]))
            continue
        if baseline is not None:
            data = ad.AnnData(obs=adata.obs.copy(), obsm={name: baseline})
            tables += marked(data, name, [kind for kind in kinds if kind in OF_BASELINES])
    scored = pd.concat(tables, ignore_index=True) if tables else score_table([])
    if key_added is not None:
        adata.uns.setdefault(UNS, {})[key_added] = scored.copy()
    for key in (PER_QUERY, DETAILS):
        parts = (
            (table["rep"].iloc[0], name, one) for table in tables for name, one in table.attrs.get(key, {}).items()
        )
        scored.attrs[key] = {(rep, name): one for rep, name, one in parts}
    return scored
