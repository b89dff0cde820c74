"""Score tables of an AnnData: does a representation find what belongs together, and how much batch is left in it?

Every table has one row a score (``schema.SCORE_COLUMNS``): the representation, the metric, the group of queries, its
value and chance level, the number of queries, the wells left out, and a note that gives the reasons. ``low`` and ``high``
are the 95 % interval of the retrievals and of ``nsc``, by bootstrap over ``n_units`` perturbations or compounds, never over
wells (``metrics.cluster_interval``). What does not apply is a row without a value whose note says why.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control

from cellica import metrics
from cellica.artifacts import PathLike, require_file
from cellica.metrics import THRESHOLDS, Pairs, label_codes
from cellica.progress import track
from cellica.schema import (
    EXPERIMENT,
    INTERVAL_COLUMNS,
    PERTURBATION,
    SCORE_COLUMNS,
    WELL,
    InputError,
    anchor_mask,
    control_mask,
    labels,
    numbers,
    parse_well,
    quality_columns,
    require_columns,
    strata_labels,
    treated_mask,
)

MIN_ENTITIES = 20  # fewest perturbations of a map on which known relationships are scored
CENTERING = (
    "center",
    "center_scale",
    "combat",
    "harmony",
    "harmony_full",
    "leace",
)  # methods that take batch means from the wells themselves
ON_ANCHORS = {"wccn", "ica_shrink", "ruv", "leace"}  # methods fitted on the labels of anchors
CIRCULAR = "circular:"
PER_QUERY = "per_query"  # in a table's attrs: what `compare` pairs
GAIN = ("gain", "gain_low", "gain_high")
REFERENCE = "none"  # the method over which `compare` gives gains


@dataclass(frozen=True, eq=False)
class _PerQuery:
    """Score and independent unit of each query, index their obs names. Two are never equal: pandas compares attrs."""

    value: pd.Series
    unit: np.ndarray


# ---------------------------------------------------------------------------------------------- retrieval


def average_precision(
    adata: ad.AnnData,
    *,
    pos_sameby: Sequence[str],
    pos_diffby: Sequence[str] = (),
    neg_sameby: Sequence[str] = (),
    neg_diffby: Sequence[str] = (),
    use_rep: str | None = None,
    queries: np.ndarray | None = None,
    candidates: np.ndarray | None = None,
) -> pd.DataFrame:
    """Average precision of each well's ranking of the others by cosine similarity.

    Parameters
    ----------
    pos_sameby, pos_diffby, neg_sameby, neg_diffby
        Columns of obs that a positive or a negative pair must share or differ in. A well where one is missing forms no
        such pair.
    use_rep
        Key of obsm, by default X.
    queries, candidates
        Boolean masks of wells, by default all.

    Returns
    -------
    One row a query, index its obs name: ``average_precision`` (NaN where the well has no positive or no usable row),
    ``n_pos``, ``n_neg`` and ``chance``, the mean over random rankings.

    Raises
    ------
    InputError
        A column is not in obs, or no query has a positive or a negative.
    """
    if not pos_sameby or not (neg_sameby or neg_diffby):
        raise InputError("name at least one column in pos_sameby, and one in neg_sameby or neg_diffby")
    rows = np.arange(adata.n_obs)
    at = rows if queries is None else np.flatnonzero(queries)
    result = metrics.average_precision(
        _embedding(adata, use_rep),
        _pairs(adata.obs, pos_sameby, pos_diffby),
        _pairs(adata.obs, neg_sameby, neg_diffby),
        queries=at,
        candidates=None if candidates is None else np.flatnonzero(candidates),
    )
    for name, n, same, diff in (
        ("positive", result.n_pos, pos_sameby, pos_diffby),
        ("negative", result.n_neg, neg_sameby, neg_diffby),
    ):
        if not n.any():
            raise InputError(
                f"no query has a {name}: no two usable wells share {list(same)} and differ in {list(diff)}; name other "
                "columns, or give replicates"
            )
    table = pd.DataFrame(result._asdict(), index=adata.obs_names[at]).rename(columns={"value": "average_precision"})
    table["chance"] = metrics.chance_average_precision(result.n_pos, result.n_neg)
    return table


def replicate_retrieval(
    adata: ad.AnnData,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    pos_diffby: Sequence[str] = (),
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    max_queries: int | None = None,
    random_state: int = 0,
) -> pd.DataFrame:
    """Do wells find their replicates in other batches?

    Queries are treated wells, candidates are treated wells of other batches and of the same stratum, and positives share
    the perturbation. Controls, negative or positive, are neither. With ``pos_diffby=["well"]`` positives must also sit in another position;
    wells of the same perturbation that do not are no candidates.

    Parameters
    ----------
    batch_key, label_key, strata_key
        Columns of obs; see ``schema.strata_labels`` for the default of strata.
    pos_diffby
        Further columns that a positive must differ in.
    controls
        Perturbations that are controls, by default where ``obs["control"] == "negative"``.
    use_rep
        Key of obsm, by default X.
    max_queries
        Score a random sample of this many queries against all candidates.

    Returns
    -------
    Score table of one row, metric ``replicate_map``, or ``replicate_map_other_{column}`` for further columns: the mean
    average precision of the queries that have a positive and a negative, and the mean over random rankings.
    """
    metric = "_".join(["replicate_map", *(["other", *pos_diffby] if pos_diffby else [])])
    require_columns(adata.obs, [label_key, batch_key, *pos_diffby], "obs")
    stratum = label_codes(strata_labels(adata.obs, strata_key))
    within = (stratum,) if stratum.any() else ()
    positive = _pairs(adata.obs, [label_key], [batch_key, *pos_diffby], within)
    negative = _pairs(adata.obs, [], [label_key, batch_key], within)
    return _mean_average_precision(
        adata,
        metric,
        positive,
        negative,
        treated=treated_mask(adata.obs, controls, label_key),
        needed=[label_key, batch_key, *pos_diffby],
        unit=label_key,
        use_rep=use_rep,
        max_queries=max_queries,
        random_state=random_state,
    )


def class_retrieval(
    adata: ad.AnnData,
    *,
    class_key: str,
    group_key: str,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    max_queries: int | None = None,
    random_state: int = 0,
) -> pd.DataFrame:
    """Do wells find other compounds of their class (a mechanism, a target) in other batches?

    Queries are treated wells that have a class; candidates are treated wells that have one, of another group and another
    batch; positives share the class.

    Parameters
    ----------
    class_key, group_key
        Columns of obs: the class, and what must differ (the compound, so that its doses do not find each other).
    batch_key, label_key, controls, use_rep, max_queries
        As in `replicate_retrieval`.

    Returns
    -------
    Score table of one row, metric ``class_map``: the mean average precision of the queries that have a positive and a
    negative, and the mean over random rankings.
    """
    return _mean_average_precision(
        adata,
        "class_map",
        _pairs(adata.obs, [class_key], [group_key, batch_key]),
        _pairs(adata.obs, [], [class_key, group_key, batch_key]),
        treated=treated_mask(adata.obs, controls, label_key),
        needed=[class_key, group_key, batch_key],
        unit=group_key,
        use_rep=use_rep,
        max_queries=max_queries,
        random_state=random_state,
    )


def activity(
    adata: ad.AnnData,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    pos_diffby: Sequence[str] | None = None,
    neg_sameby: Sequence[str] | None = None,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    null_size: int = 10_000,
    threshold: float = 0.05,
    random_state: int = 0,
) -> pd.DataFrame:
    """Which perturbations are active: do their wells find each other rather than controls (Kalinin et al., 2025)?

    Queries are treated wells; positives share the perturbation, negatives are negative controls.

    Parameters
    ----------
    pos_diffby
        Columns that positives must differ in: by default the batch, where perturbations lie in several; ``["well"]`` asks for
        another position.
    neg_sameby
        Columns that negatives must share: by default the batch.
    batch_key, label_key, controls, use_rep
        As in `replicate_retrieval`.
    null_size, random_state
        Random rankings behind a p-value (`metrics.mean_average_precision_p`), and their seed.
    threshold
        Adjusted p below which a perturbation is active.

    Returns
    -------
    One row a perturbation, index its name: ``mean_average_precision``, ``chance``, ``n_queries``, ``p``, ``p_adjusted`` (Benjamini and
    Hochberg) and ``active``. ``attrs["notes"]`` says what was left out, and where no p-value can reach the threshold.

    Raises
    ------
    InputError
        There are no controls, or no perturbation has a positive and a negative.
    """
    treated, control = treated_mask(adata.obs, controls, label_key), control_mask(adata.obs, controls, label_key)
    if not control.any():
        raise InputError(
            "activity compares with negative controls, and there are none: mark them, or name them (controls=)"
        )
    if pos_diffby is None:
        lies = pd.DataFrame({"label": labels(adata.obs, label_key), "batch": labels(adata.obs, batch_key)})[treated]
        several = (lies.dropna().drop_duplicates().groupby("label").size() > 1).mean() > 0.5
        pos_diffby = [batch_key] if several else []
    neg_sameby = [batch_key] if neg_sameby is None else list(neg_sameby)
    needed = list(dict.fromkeys([label_key, *pos_diffby, *neg_sameby]))
    x, kept, _, notes = _kept(adata, treated | control, needed, use_rep)
    role = control.astype(np.int64)
    negative = Pairs(_pairs(adata.obs, neg_sameby, []).same, [role])
    table = _retrieved(
        adata,
        x,
        label_key,
        _pairs(adata.obs, [label_key], pos_diffby),
        negative,
        kept & treated,
        kept,
        null_size,
        random_state,
    )
    return _judged(table, "active", threshold, null_size, notes)


def consistency(
    adata: ad.AnnData,
    *,
    class_key: str,
    group_key: str = PERTURBATION,
    label_key: str = PERTURBATION,
    active: pd.DataFrame | None = None,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    null_size: int = 10_000,
    threshold: float = 0.05,
    random_state: int = 0,
) -> pd.DataFrame:
    """Which classes are consistent: do the profiles of their active perturbations find each other (Kalinin et al., 2025)?

    Profiles are the means of each perturbation's treated wells; positives share the class and differ in ``group_key``,
    negatives differ in both.

    Parameters
    ----------
    class_key, group_key
        As in `class_retrieval`.
    active
        Table of `activity`; only its active perturbations are looked at. Without it all are, and the notes say so.
    label_key, controls, use_rep, null_size, threshold, random_state
        As in `activity`.

    Returns
    -------
    One row a class, columns and notes as those of `activity`, ``consistent`` in place of ``active``.

    Raises
    ------
    InputError
        No class has two such perturbations, or a column is not there.
    """
    treated = treated_mask(adata.obs, controls, label_key)
    needed = list(dict.fromkeys([label_key, class_key, group_key]))
    require_columns(adata.obs, needed, "obs")
    x, kept, _, notes = _kept(adata, treated, needed, use_rep)
    if active is None:
        notes.append("all perturbations, active or not")
    else:
        kept &= np.isin(labels(adata.obs, label_key), active.index[active["active"]])
        notes.append(f"{int(active['active'].sum())} of {len(active)} perturbations are active")
    profile = _joint_codes(adata.obs[kept], needed) if kept.any() else np.zeros(0, dtype=np.int64)
    first = np.unique(profile, return_index=True)[1]
    means = ad.AnnData(metrics.group_means(x[kept], profile) if len(first) else x[:0], obs=adata.obs[kept].iloc[first])
    positive, negative = _pairs(means.obs, [class_key], [group_key]), _pairs(means.obs, [], [class_key, group_key])
    every = np.ones(len(first), dtype=bool)
    table = _retrieved(means, np.asarray(means.X), class_key, positive, negative, every, every, null_size, random_state)
    return _judged(table, "consistent", threshold, null_size, notes)


def _retrieved(
    adata: ad.AnnData,
    x: np.ndarray,
    by: str,
    positive: Pairs,
    negative: Pairs,
    queries: np.ndarray,
    candidates: np.ndarray,
    null_size: int,
    random_state: int,
) -> pd.DataFrame:
    """Mean average precision, chance and p of each label of a column."""
    at = np.flatnonzero(queries)
    found = metrics.average_precision(x, positive, negative, queries=at, candidates=np.flatnonzero(candidates))
    scored = (found.n_pos > 0) & (found.n_neg > 0)
    if not scored.any():
        raise InputError(
            f"no query has a positive and a negative: {len(at)} wells or profiles were looked at; name other columns"
        )
    names, group = np.unique(labels(adata.obs, by)[at][scored].astype(str), return_inverse=True)
    value, n_pos, n_neg = found.value[scored], found.n_pos[scored], found.n_neg[scored]
    mean, p = metrics.mean_average_precision_p(
        value, n_pos, n_neg, group, null_size=null_size, random_state=random_state
    )
    counts = np.bincount(group)
    chance = np.bincount(group, weights=metrics.chance_average_precision(n_pos, n_neg)) / counts
    columns = {"mean_average_precision": mean, "chance": chance, "n_queries": counts, "p": p}
    table = pd.DataFrame(columns, index=pd.Index(names, name=by, dtype=object))
    table.attrs["notes"] = [_without(np.count_nonzero(~scored), "queries")] if not scored.all() else []
    return table


def _judged(table: pd.DataFrame, verdict: str, threshold: float, null_size: int, notes: Sequence[str]) -> pd.DataFrame:
    table["p_adjusted"] = false_discovery_control(table["p"])
    table[verdict] = table["p_adjusted"] < threshold
    least = 1 / (1 + null_size)
    said = [*notes, *table.attrs["notes"]]
    if not table[verdict].any():
        said.append(
            f"none is {verdict}; the smallest p among {len(table)} is {table['p'].min():.4g} ({least:.2g} can be reached)"
        )
    table.attrs["notes"] = said
    return table


def nearest_neighbor(
    adata: ad.AnnData,
    *,
    class_key: str,
    group_key: str,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
) -> pd.DataFrame:
    """Is a treatment's nearest neighbour, not of the same compound (NSC) nor batch (NSCB), of its class?

    Queries and candidates are mean profiles of treated wells that have a class: for NSC one a perturbation, for NSCB
    one a perturbation and batch (Ljosa et al., J Biomol Screen 2013; Ando, McLean and Berndl, 2017). Keywords are those
    of `class_retrieval`.

    Returns
    -------
    Score table of two rows, metrics ``nsc`` and ``nscb``: share of right neighbours among the profiles that have a
    positive, and the mean share of positives among their candidates.
    """
    needed = list(dict.fromkeys([label_key, class_key, group_key, batch_key]))
    treated = treated_mask(adata.obs, controls, label_key)
    x, kept, dropped, notes = _kept(adata, treated, needed, use_rep)
    rows = []
    for metric, apart in (("nsc", [group_key]), ("nscb", [group_key, batch_key])):
        unit = list(dict.fromkeys([label_key, class_key, *apart]))
        profile = _joint_codes(adata.obs[kept], unit)
        first = np.unique(profile, return_index=True)[1]
        obs = adata.obs[kept].iloc[first]
        means = metrics.group_means(x[kept], profile) if len(first) else x[:0]
        value, chance = metrics.nearest_neighbor(
            means, _pairs(obs, [class_key], apart), _pairs(obs, [], [class_key, *apart])
        )
        scored = ~np.isnan(value)
        said = ["queries are mean profiles", *notes, _without(np.count_nonzero(~scored), "profiles")]
        if not scored.any():
            said = [
                f"not applicable: no profile shares its {class_key} with one of another {' and '.join(apart)}",
                *said,
            ]
        unit = labels(obs, group_key)[scored].astype(str)
        rows.append(
            _row(use_rep, metric, _mean(value), _mean(chance), scored.sum(), dropped, said, of=(value[scored], unit))
        )
    return _table(rows)


def _mean_average_precision(
    adata: ad.AnnData,
    metric: str,
    positive: Pairs,
    negative: Pairs,
    *,
    treated: np.ndarray,
    needed: Sequence[str],
    unit: str,
    use_rep: str | None,
    max_queries: int | None,
    random_state: int,
) -> pd.DataFrame:
    x, kept, dropped, notes = _kept(adata, treated, needed, use_rep)
    candidates = queries = np.flatnonzero(kept)
    if max_queries is not None and max_queries < len(queries):
        sample = np.random.default_rng(random_state).choice(len(queries), max_queries, replace=False)
        queries = queries[np.sort(sample)]
        notes.append(f"{max_queries} of {len(candidates)} queries sampled (random_state {random_state})")
    result = metrics.average_precision(x, positive, negative, queries=queries, candidates=candidates)
    scored = (result.n_pos > 0) & (result.n_neg > 0)
    if scored.any():
        notes.append(_without(np.count_nonzero(~scored), "queries"))
    elif result.n_pos.any():
        notes.insert(0, "not applicable: every candidate is a positive")
    else:
        notes.insert(0, f"not applicable: no two treated wells share {needed[0]} and differ in {', '.join(needed[1:])}")
    chance = metrics.chance_average_precision(result.n_pos, result.n_neg)
    values, names = result.value[scored], labels(adata.obs, unit)[queries][scored].astype(str)
    row = _row(use_rep, metric, _mean(values), _mean(chance[scored]), scored.sum(), dropped, notes, of=(values, names))
    table = _table([row])
    table.attrs[PER_QUERY] = {metric: _PerQuery(pd.Series(values, adata.obs_names[queries][scored]), names)}
    return table


# ---------------------------------------------------------------------------------------------- known relationships


def relationship_recall(
    adata: ad.AnnData,
    truth: PathLike,
    *,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    thresholds: Sequence[tuple[float, float]] = THRESHOLDS,
) -> pd.DataFrame:
    """Recall of known relationships between perturbations among the extremes of all pairs' cosines.

    Parameters
    ----------
    truth
        Folder of ``{source}.txt`` files: comma-separated, columns ``entity1`` and ``entity2`` that hold perturbations.
    label_key, controls, use_rep
        As in `replicate_retrieval`. The map holds the mean profile of each perturbation's treated wells.
    thresholds
        Lower and upper ranks; see ``metrics.relationship_recall``.

    Returns
    -------
    Score table, a row for each source and pair of thresholds: metric ``recall_{low}_{high}``, group the source; queries
    are annotated pairs. Not applicable to maps of fewer than 20 perturbations.

    Raises
    ------
    MissingFileError, InputError
        The folder is not there, holds no ``.txt``, or one lacks the columns.
    """
    files = sorted(require_file(truth, "folder of known relationships").glob("*.txt"))
    if not files:
        raise InputError(f"{truth} holds no .txt file: give a folder of files such as CORUM.txt (entity1,entity2)")
    treated = treated_mask(adata.obs, controls, label_key)
    x, kept, dropped, notes = _kept(adata, treated, [label_key], use_rep)
    names, code = np.unique(labels(adata.obs[kept], label_key).astype(str), return_inverse=True)
    profiles = metrics.group_means(x[kept], code) if len(names) else x[:0]
    usable = metrics.usable_rows(profiles) if len(names) else np.zeros(0, dtype=bool)
    names, profiles = names[usable], profiles[usable]
    rows = []
    for file in files:
        pairs = _read_pairs(file)
        enough = len(names) >= MIN_ENTITIES
        recall = metrics.relationship_recall(profiles, names, pairs if enough else pairs[:0], thresholds=thresholds)
        said = [f"queries are annotated pairs of {len(names)} perturbations", *notes]
        if not enough:
            said = [f"not applicable: {len(names)} perturbations, and at least {MIN_ENTITIES} are needed", *notes]
        elif not recall.n_pairs:
            said = [f"not applicable: no pair of {file.name} is among the {len(names)} perturbations", *notes]
        for (low, high), value in zip(thresholds, recall.value):
            chance = low + 1 - high
            metric = f"recall_{low}_{high}"
            rows.append(_row(use_rep, metric, value, chance, recall.n_pairs, dropped, said, group=file.stem))
    return _table(rows)


def _read_pairs(file: Path) -> np.ndarray:
    pairs = pd.read_csv(file, dtype=str)
    require_columns(pairs, ["entity1", "entity2"], str(file))
    return pairs[["entity1", "entity2"]].dropna().to_numpy(dtype=object)


# ---------------------------------------------------------------------------------------------- batch effect


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
    x, kept, dropped, notes = _kept(adata, anchor, list(dict.fromkeys([batch_key, label_key])), use_rep)
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
    centred = [name for name in _method(adata, use_rep).split("+") if name in CENTERING]
    if centred:
        notes.append(
            f"{' and '.join(centred)} took batch means from these very wells, on which the share is low for that"
        )
    variance = (values - metrics.group_means(values, cell)[cell]).var(axis=0) if known.any() else share
    weighted = np.average(share[known], weights=variance[known]) if known.any() else np.nan
    return _table(
        [
            _row(use_rep, metric, value, 0.0, int(np.count_nonzero(kept)), dropped, notes)
            for metric, value in (("batch_share", _mean(share)), ("batch_share_weighted", weighted))
        ]
    )


def _method(adata: ad.AnnData, use_rep: str | None) -> str:
    """Name of the method or chain that wrote a representation, as recorded or by its key."""
    key = str(use_rep or "").removeprefix("X_")
    record = adata.uns.get("cellica", {}).get(key, {})
    return str(record.get("method", key)) if isinstance(record, Mapping) else key


# ---------------------------------------------------------------------------------------------- all scores


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
            _attempt(
                rep, "replicate_map_other_well", lambda: replicate_retrieval(data, pos_diffby=[WELL], **replicates)
            ),
            batch_effect(data, strata_key=strata_key, anchors=anchors, use_rep=rep, **roles),
        ]
        if class_key:
            tables.append(class_retrieval(data, use_rep=rep, **of_class, **sampled))
            tables.append(nearest_neighbor(data, use_rep=rep, **of_class))
        if truth is not None:
            tables.append(relationship_recall(data, truth, label_key=label_key, controls=controls, use_rep=rep))
        circular = _circular(data.obs, _method(data, rep), anchors=anchors, **roles)
        for table in tables if circular else ():
            table["note"] = [_joined([note, circular]) for note in table["note"]]
        return tables

    keys = ["X", *(key for key in adata.obsm if key.startswith("X_"))] if reps is None else list(reps)
    for key in keys:
        _embedding(adata, key)
    tables = [table for key in track(keys, "score") for table in scores(adata, key)]
    for key, build in _BASELINES.items() if baselines else ():
        try:
            baseline = build(adata.obs)
        except InputError as error:
            tables.append(_table([_absent(key, "all", error)]))
            continue
        if baseline is not None:
            tables += scores(ad.AnnData(obs=adata.obs.copy(), obsm={key: baseline}), key)
    scored = pd.concat(tables, ignore_index=True) if tables else _table([])
    scored.attrs[PER_QUERY] = {
        (table["rep"].iloc[0], metric): one
        for table in tables
        for metric, one in table.attrs.get(PER_QUERY, {}).items()
    }
    return scored


def compare(
    adata: ad.AnnData,
    methods: Sequence[str] | None = None,
    *,
    use_rep: str | None = None,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    controls: Sequence[str] | None = None,
    anchors: Sequence[str] | None = None,
    random_state: int = 0,
    baselines: bool = True,
    **scoring: Any,
) -> pd.DataFrame:
    """Correct by each method and score the result. Changes nothing in ``adata``.

    Parameters
    ----------
    methods
        Names of methods or chains (``"center+sphere"``), by default ``correct.DEFAULT_COMPARISON``.
    use_rep
        What to correct: a key of obsm, by default X.
    batch_key, label_key, strata_key, controls, anchors, random_state
        Given to each method and to `evaluate`.
    **scoring
        Further keywords of `evaluate`: ``class_key``, ``group_key``, ``truth``, ``max_queries``.

    Returns
    -------
    Score table; ``rep`` is ``X_{method}``. Notes hold what the method said of its fit, and that it saw the scored wells.
    A method that cannot run is a row without a value whose note says why. Where ``none`` is among the methods, the columns
    ``gain``, ``gain_low`` and ``gain_high`` hold the difference from it in the retrievals, paired over queries, with its 95 %
    interval over perturbations (of classes, over groups).

    Raises
    ------
    InputError
        An unknown method, or a column that is not there.
    """
    from cellica import correct

    names = list(dict.fromkeys(correct.DEFAULT_COMPARISON if methods is None else methods))
    for name in names:
        correct.parse(name)
    roles: dict[str, Any] = {
        "batch_key": batch_key,
        "label_key": label_key,
        "strata_key": strata_key,
        "controls": controls,
        "anchors": anchors,
        "random_state": random_state,
    }
    tables = [evaluate(adata, [], baselines=baselines, **roles, **scoring)]
    per_query = dict(tables[0].attrs[PER_QUERY])
    for name in track(names, "compare methods"):
        work = ad.AnnData(obs=adata.obs.copy(), var=adata.var.copy(), X=None if adata.X is None else adata.X.copy())
        if use_rep not in (None, "X"):
            work.obsm[use_rep] = _embedding(adata, use_rep)
        try:
            correct.run(work, name, use_rep=use_rep, **roles)
        except (ValueError, ArithmeticError, np.linalg.LinAlgError) as error:  # one method must not end the comparison
            tables.append(_table([_absent(f"X_{name}", "all", error)]))
            continue
        table = evaluate(work, [f"X_{name}"], baselines=False, **roles, **scoring)
        said = [
            *(note for note in work.uns["cellica"][name]["notes"] if not note.startswith("confounding:")),
            "" if name == "none" else "fitted on the scored wells (transductive)",
        ]
        table["note"] = [_joined([note, *said]) for note in table["note"]]
        per_query |= table.attrs[PER_QUERY]
        tables.append(table)
    scores = pd.concat([*tables[1:], tables[0]], ignore_index=True)
    return scores.assign(**_gains(scores, per_query, f"X_{REFERENCE}"))


def _gains(
    scores: pd.DataFrame, per_query: Mapping[tuple[str, str], _PerQuery], reference: str
) -> dict[str, list[float]]:
    """Columns ``GAIN`` of a score table: paired over queries, intervals over their units."""
    rows = []
    for rep, metric in zip(scores["rep"], scores["metric"]):
        mine, theirs = per_query.get((rep, metric)), per_query.get((reference, metric))
        row = (np.nan, np.nan, np.nan)
        if mine and theirs and rep != reference:
            unit = pd.Series(mine.unit, mine.value.index)
            gain = (mine.value - theirs.value).dropna()
            if len(gain):
                row = (float(gain.mean()), *metrics.cluster_interval(gain.to_numpy(), unit[gain.index].to_numpy()))
        rows.append(row)
    return dict(zip(GAIN, map(list, zip(*rows)))) if rows else {name: [] for name in GAIN}


def gains(scores: pd.DataFrame) -> pd.DataFrame:
    """Gains over uncorrected profiles of a table of `compare`, as text: a row a representation, a column a metric."""
    known = scores[scores["gain"].notna()]
    text = [f"{gain:+.3f} ({low:+.3f} to {high:+.3f})" for gain, low, high in known[list(GAIN)].itertuples(index=False)]
    wide = known.assign(gain=text).pivot_table("gain", "rep", "metric", aggfunc="first", sort=False)
    return wide.reindex(known["rep"].unique())


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


def cautions(scores: pd.DataFrame) -> list[str]:
    """What a reader of the bare values must know: circular scores, over-correction, and why a score is not there.

    One text a cause, with the representations it holds for where that is not all of them.
    """
    causes: dict[str, list[str]] = {}
    for rep, metric, value, note in scores[["rep", "metric", "value", "note"]].itertuples(index=False):
        parts = str(note).split("; ")
        if np.isnan(value):
            causes.setdefault(parts[0] if metric == "all" else f"{metric} {parts[0]}", []).append(rep)
        for part in parts:
            if part.startswith(CIRCULAR):
                causes.setdefault(part, []).append(rep)
    n_reps = scores.loc[scores["metric"] != "all", "rep"].nunique()
    unique = {cause: list(dict.fromkeys(reps)) for cause, reps in causes.items()}
    found = [cause if len(reps) == n_reps else f"{', '.join(reps)}: {cause}" for cause, reps in unique.items()]
    return [*found, *_over_corrected(scores)]


def _over_corrected(scores: pd.DataFrame) -> list[str]:
    """Methods by which there is less batch effect and less is found than without correction, beyond the interval."""
    if GAIN[-1] not in scores:
        return []
    share = scores[scores["metric"] == "batch_share"].set_index("rep")["value"]
    before = share.get(f"X_{REFERENCE}", np.nan)
    worse = scores[scores[GAIN[-1]] < 0]
    return [
        f"{rep}: over-corrected: the share of batch falls from {before:.3f} to {share[rep]:.3f}, and so does "
        + " and ".join(
            f"{row.metric} ({row.gain:+.3f}, {row.gain_low:+.3f} to {row.gain_high:+.3f})" for row in rows.itertuples()
        )
        for rep, rows in worse.groupby("rep", sort=False)
        if str(rep).startswith("X_") and share.get(rep, np.nan) < before
    ]


def summary(scores: pd.DataFrame, *, chance: bool = False) -> pd.DataFrame:
    """Values of a score table for printing: a row a representation, a column a metric (and group).

    With ``chance`` a last row holds the mean chance of each column.

    >>> summary(_table([_row("X", "nsc", 0.5, 0.1, 9, 0, []), _row("X", "recall", 0.2, 0.1, 9, 0, [], group="CORUM")]))
    metric  nsc  recall CORUM
    rep
    X       0.5           0.2
    """
    metric = scores["metric"].where(scores["group"] == "all", scores["metric"] + " " + scores["group"])
    wide = scores.assign(metric=metric).pivot_table("value", "rep", "metric", dropna=False, sort=False)
    columns = [name for name in dict.fromkeys(metric) if name != "all"]
    wide = wide.reindex(index=list(dict.fromkeys(scores["rep"])), columns=pd.Index(columns, name="metric"))
    if chance:
        wide.loc["chance"] = summary(scores.assign(value=scores["chance"])).mean()
    return wide


# ---------------------------------------------------------------------------------------------- baselines


def _position(obs: pd.DataFrame) -> np.ndarray:
    """Row and column of the well, one-hot (n x rows + columns); zeros where the well is missing."""
    well = labels(obs, WELL)
    known = np.array([name is not None for name in well], dtype=bool)
    if not known.any():
        raise InputError(f"not applicable: obs[{WELL!r}] is missing in all wells")
    places = np.array([parse_well(name) for name in well[known]])
    baseline = np.zeros((len(obs), places.max(axis=0).sum() + 2), dtype=np.float32)
    at = np.flatnonzero(known)
    baseline[at, places[:, 0]] = 1
    baseline[at, places[:, 0].max() + 1 + places[:, 1]] = 1
    return baseline


def _measured(obs: pd.DataFrame, *kinds: str) -> np.ndarray | None:
    """Columns of what was measured of the fields, z-scored; None where there are none that vary."""
    values = numbers(obs, quality_columns(obs, kinds))
    values = values.loc[:, values.std() > 0]
    if values.shape[1] == 1:
        return _directions(values.iloc[:, 0])
    return ((values - values.mean()) / values.std()).to_numpy() if values.shape[1] else None


def _directions(values: pd.Series) -> np.ndarray:
    """Ranks of numbers as directions on a half circle (n x 2): their cosines fall with the difference, as one column's
    own, which are 1 or -1, do not."""
    angle = np.pi * (0.25 + (values.rank() - 0.5) / values.count())  # no row has two equal features
    return np.column_stack([np.cos(angle), np.sin(angle)])


_BASELINES: dict[str, Callable[[pd.DataFrame], np.ndarray | None]] = {
    "baseline:position": _position,
    "baseline:intensity": lambda obs: _measured(obs, "intensity_"),
    "baseline:cell_count": lambda obs: _measured(obs, "cell_count"),
    "baseline:quality": lambda obs: _measured(obs, "focus_", "saturation_", "empty"),
}


# ---------------------------------------------------------------------------------------------- wells and rows


def _embedding(adata: ad.AnnData, use_rep: str | None) -> np.ndarray:
    if use_rep not in (None, "X") and use_rep not in adata.obsm:
        raise InputError(f"representation {use_rep!r} is not in obsm: use X{''.join(f', {key}' for key in adata.obsm)}")
    x = adata.X if use_rep in (None, "X") else adata.obsm[use_rep]
    if x is None:
        raise InputError("adata has no X: name a key of obsm")
    x = np.asarray(x.todense() if hasattr(x, "todense") else x)
    if not x.shape[1]:
        raise InputError(f"representation {use_rep or 'X'!r} has no features")
    return x


def _pairs(obs: pd.DataFrame, same: Sequence[str], diff: Sequence[str], within: Iterable[np.ndarray] = ()) -> Pairs:
    codes = {key: label_codes(labels(obs, key)) for key in dict.fromkeys([*same, *diff])}
    return Pairs([*(codes[key] for key in same), *within], [codes[key] for key in dict.fromkeys(diff)])


def _joint_codes(obs: pd.DataFrame, keys: Sequence[str]) -> np.ndarray:
    codes = np.column_stack([label_codes(labels(obs, key)) for key in keys])
    return np.unique(codes, axis=0, return_inverse=True)[1].ravel()


def _kept(
    adata: ad.AnnData, role: np.ndarray, needed: Sequence[str], use_rep: str | None
) -> tuple[np.ndarray, np.ndarray, int, list[str]]:
    """Representation, the wells of a role that can be scored, how many cannot, and why."""
    x = _embedding(adata, use_rep)
    kept, notes = role.copy(), []
    missing = {f"without {key}": label_codes(labels(adata.obs, key)) < 0 for key in dict.fromkeys(needed)}
    for reason, bad in {**missing, "all-zero, constant or not finite": ~metrics.usable_rows(x)}.items():
        if (bad & kept).any():
            notes.append(f"{np.count_nonzero(bad & kept)} wells left out: {reason}")
        kept &= ~bad
    return x, kept, int(np.count_nonzero(role & ~kept)), notes


def _without(n: int | np.integer, what: str) -> str:
    return f"{n} {what} without a positive or negative are not scored" if n else ""


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if not np.isnan(values).all() else np.nan


def _joined(notes: Iterable[str]) -> str:
    return "; ".join(note for note in notes if note)


def _row(
    rep: str | None,
    metric: str,
    value: float,
    chance: float,
    n_queries: int | np.integer,
    n_dropped: int,
    notes: Iterable[str],
    group: str = "all",
    of: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple:
    """A row of a score table; ``of``: value and independent unit of each query, for the interval."""
    low, high = metrics.cluster_interval(*of) if of and len(of[0]) else (np.nan, np.nan)
    n_units = len(set(of[1])) if of else 0
    known = rep or "X", metric, group, float(value), float(chance), int(n_queries), int(n_dropped), _joined(notes)
    return (*known, low, high, n_units)


def _absent(rep: str, metric: str, reason: Exception) -> tuple:
    return _row(rep, metric, np.nan, np.nan, 0, 0, [str(reason)])


def _attempt(rep: str, metric: str, score: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    try:
        return score()
    except InputError as error:
        return _table([_absent(rep, metric, error)])


def _table(rows: Sequence[tuple]) -> pd.DataFrame:
    types = {"value": float, "chance": float, "n_queries": int, "n_dropped": int, "low": float, "high": float}
    return pd.DataFrame(rows, columns=[*SCORE_COLUMNS, *INTERVAL_COLUMNS]).astype({**types, "n_units": int})
