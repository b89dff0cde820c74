"""All scores that apply to a representation, in one table."""

import warnings
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
from cellica.guides import guide_agreement, read_positions, recall_without_arms
from cellica.integration import integration
from cellica.neighbors import activity_scores, class_retrieval, nearest_neighbor, replicate_retrieval
from cellica.progress import track
from cellica.relationships import cluster_scores, read_clusters, read_sources, relationship_recall
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
    DOSES,
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
AS_GROUPS = DOSES + " no group_key was named, so each {} is a group of its own: doses of one compound find each other"
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
    design: bool = True,
    before: str = "X",
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
    design
        Say in the first note what the design cannot tell apart (``correct.confounding``).
    before
        Representation before correction, with which scIB's PCR comparison compares.
    key_added
        Also write the table to ``uns["cellica"][key_added]``; None: do not.

    Returns
    -------
    Score table. What does not apply is a row without a value whose note says why. ``attrs["details"]`` holds the tables of
    single perturbations and classes that rows sum up (each as ``.table``), by representation and name.

    Raises
    ------
    InputError
        A column, a control, an anchor, a representation or a kind of scores that was named is not there.
    """
    kinds = list(DEFAULT if scores is None else scores)
    if unknown := [name for name in kinds if name not in KINDS]:
        raise InputError(f"scores {first_few(unknown)} are not known: use some of {', '.join(KINDS)}")
    if group_key and not class_key:
        raise InputError(
            f"group_key={group_key!r} says what must differ within a class: name the class too (class_key=)"
        )
    doses = class_key is not None and group_key is None
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
    files = {"truth": truth, "clusters": clusters, "compound_gene": compound_gene, "gene_positions": gene_positions}
    given = [name for name, value in {**files, "guide_key": guide_key}.items() if value is not None]
    if given and "relationships" not in kinds:
        raise InputError(f"{first_few(given)} is for 'relationships', which is not among scores={kinds}: add it there")
    if gene_positions is not None and truth is None:
        raise InputError("gene_positions corrects genes before their relationships are scored: name these too (truth=)")
    if truth is not None:
        read_sources(truth)
    if gene_positions is not None:
        read_positions(gene_positions)
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
                yield attempt(
                    rep, "recall", lambda: recall_without_arms(data, truth, gene_positions, **keys, **seed, **of)
                )
            elif truth is not None:
                yield attempt(rep, "recall", lambda: relationship_recall(data, truth, **keys, **seed, **of))
            if guide_key is not None:
                yield attempt(
                    rep, "guide_map", lambda: guide_agreement(data, guide_key=guide_key, controls=controls, **of)
                )
            if clusters is not None:
                yield attempt(rep, "cluster_share", lambda: cluster_scores(data, clusters, **keys, **seed, **of))
            if compound_gene is not None:
                found = attempt(rep, "compound_gene_ap", lambda: gene_scores(data, compound_gene, **keys, **seed, **of))
                yield found
        if "integration" in kinds:
            first = before if before in data.obsm or (before == "X" and data.X is not None) else rep
            own: dict[str, Any] = {"strata_key": strata_key, "reference": first}
            yield attempt(rep, "integration", lambda: integration(data, **own, **roles, **seed, **of))

    def marked(data: ad.AnnData, rep: str, kinds: Sequence[str]) -> Iterator[pd.DataFrame]:
        circular = _circular(data.obs, method_of(data, rep), anchors=anchors, **roles)
        for table in score(data, rep, kinds):
            said = table["metric"].str.startswith(("class_map", "nsc", "consistency")) & doses
            table["note"] = [
                join_notes([note, circular, AS_GROUPS.format(label_key) if one else ""])
                for note, one in zip(table["note"], said)
            ]
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
    if names and not len(scored):
        raise InputError(
            f"there is nothing to score: {', '.join(kinds) or 'no kind of scores'} needs a file or column that was not named (truth, "
            "clusters, compound_gene, guide_key)"
        )
    if design and len(scored):
        from cellica import correct

        sentences = correct.confounding(adata, anchors=anchors, strata_key=strata_key, **roles).sentences
        scored.loc[0, "note"] = join_notes([str(scored.loc[0, "note"]), *sentences])
    if key_added is not None:
        with warnings.catch_warnings():  # a view becomes a table of its own
            warnings.simplefilter("ignore", ad.ImplicitModificationWarning)
            adata.uns[UNS] = {**adata.uns.get(UNS, {}), key_added: scored.copy()}
    for key in (PER_QUERY, DETAILS):
        parts = (
            (table["rep"].iloc[0], name, one) for table in tables for name, one in table.attrs.get(key, {}).items()
        )
        scored.attrs[key] = {(rep, name): one for rep, name, one in parts}
    return scored
