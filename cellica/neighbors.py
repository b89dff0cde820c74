"""What lies near what: average precision of wells and perturbations, and nearest neighbours."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control

from cellica import metrics
from cellica.metrics import Pairs, label_codes
from cellica.schema import (
    EXPERIMENT,
    PERTURBATION,
    InputError,
    control_mask,
    labels,
    require_columns,
    strata_labels,
    treated_mask,
)
from cellica.scores import (
    DETAILS,
    PER_QUERY,
    Detail,
    PerQuery,
    attempt,
    column_pairs,
    embedding_of,
    joint_codes,
    mean_of,
    scorable,
    score_row,
    score_table,
    unscored,
)


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
    device: str = "cpu",
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
    device
        ``"cpu"``, ``"cuda"``, or ``"auto"``: the GPU where there is one.

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
    for name, mask in (("queries", queries), ("candidates", candidates)):
        if mask is not None and (np.asarray(mask).dtype != bool or np.shape(mask) != rows.shape):
            raise InputError(
                f"{name} must be a boolean mask of the {adata.n_obs} wells, and is {np.shape(mask)} of {np.asarray(mask).dtype}"
            )
    at = rows if queries is None else np.flatnonzero(queries)
    result = metrics.average_precision(
        embedding_of(adata, use_rep),
        column_pairs(adata.obs, pos_sameby, pos_diffby),
        column_pairs(adata.obs, neg_sameby, neg_diffby),
        queries=at,
        candidates=None if candidates is None else np.flatnonzero(candidates),
        counter=_counter(device),
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
    device: str = "cpu",
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
    max_queries, random_state
        Score a random sample of this many queries against all candidates.
    device
        As in `average_precision`.

    Returns
    -------
    Score table of one row, metric ``replicate_map``, or ``replicate_map_other_{column}`` for further columns: the mean
    average precision of the queries that have a positive and a negative, and the mean over random rankings.

    Notes
    -----
    Average precision of a query is the mean over its positives of the share of positives among the candidates down to
    each, expected over ties (`metrics.average_precision`). Higher is better. Chance: the mean over random rankings,
    exact. Source: Kalinin et al., 2025 (copairs).
    """
    metric = "_".join(["replicate_map", *(["other", *pos_diffby] if pos_diffby else [])])
    return _mean_average_precision(
        adata,
        metric,
        *replicate_pairs(adata.obs, batch_key, label_key, strata_key, pos_diffby),
        treated=treated_mask(adata.obs, controls, label_key),
        needed=[label_key, batch_key, *pos_diffby],
        unit=label_key,
        use_rep=use_rep,
        max_queries=max_queries,
        random_state=random_state,
        device=device,
    )


def replicate_pairs(
    obs: pd.DataFrame, batch_key: str, label_key: str, strata_key: str | None, pos_diffby: Sequence[str] = ()
) -> tuple[Pairs, Pairs]:
    """Positives and negatives of `replicate_retrieval`."""
    require_columns(obs, [label_key, batch_key, *pos_diffby], "obs")
    stratum = label_codes(strata_labels(obs, strata_key))
    within = (stratum,) if stratum.any() else ()
    positive = column_pairs(obs, [label_key], [batch_key, *pos_diffby], within)
    return positive, column_pairs(obs, [], [label_key, batch_key], within)


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
    device: str = "cpu",
) -> pd.DataFrame:
    """Do wells find other compounds of their class (a mechanism, a target) in other batches?

    Queries are treated wells that have a class; candidates are treated wells that have one, of another group and another
    batch; positives share the class.

    Parameters
    ----------
    class_key, group_key
        Columns of obs: the class, and what must differ (the compound, so that its doses do not find each other).
    batch_key, label_key, controls, use_rep, max_queries, random_state, device
        As in `replicate_retrieval`.

    Returns
    -------
    Score table of one row, metric ``class_map``: the mean average precision of the queries that have a positive and a
    negative, and the mean over random rankings.

    Notes
    -----
    Average precision of a query is the mean over its positives of the share of positives among the candidates down to
    each, expected over ties (`metrics.average_precision`). Higher is better. Chance: the mean over random rankings,
    exact. Source: cellica, after Kalinin et al., 2025.
    """
    return _mean_average_precision(
        adata,
        "class_map",
        *class_pairs(adata.obs, class_key, group_key, batch_key),
        treated=treated_mask(adata.obs, controls, label_key),
        needed=[class_key, group_key, batch_key],
        unit=group_key,
        use_rep=use_rep,
        max_queries=max_queries,
        random_state=random_state,
        device=device,
    )


def class_pairs(obs: pd.DataFrame, class_key: str, group_key: str, batch_key: str) -> tuple[Pairs, Pairs]:
    """Positives and negatives of `class_retrieval`."""
    return (
        column_pairs(obs, [class_key], [group_key, batch_key]),
        column_pairs(obs, [], [class_key, group_key, batch_key]),
    )


def activity(
    adata: ad.AnnData,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    pos_sameby: Sequence[str] = (),
    pos_diffby: Sequence[str] | None = None,
    neg_sameby: Sequence[str] | None = None,
    neg_diffby: Sequence[str] = (),
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    null_size: int = 10_000,
    threshold: float = 0.05,
    max_queries: int | None = None,
    random_state: int = 0,
    device: str = "cpu",
) -> pd.DataFrame:
    """Which perturbations are active: do their wells find each other rather than controls (Kalinin et al., 2025)?

    Queries are treated wells; positives share the perturbation, negatives are negative controls.

    Parameters
    ----------
    pos_sameby, pos_diffby
        Columns that positives must share besides the perturbation, and columns that they must differ in: by default the batch,
        where perturbations lie in several; ``["well"]`` asks for another position.
    neg_sameby, neg_diffby
        Columns that negatives must share, by default the batch, and columns that they must differ in.
    batch_key, label_key, controls, use_rep, device
        As in `replicate_retrieval`.
    null_size, random_state
        Random rankings behind a p-value (`metrics.mean_average_precision_p`), and their seed.
    threshold
        Adjusted p below which a perturbation is active.
    max_queries
        Judge a random sample of the perturbations, with at most about this many wells.

    Returns
    -------
    One row a perturbation, index its name: ``mean_average_precision``, ``chance``, ``n_queries``, ``p``, ``least_p`` (the smallest that
    its numbers of positives and negatives can reach), ``p_adjusted`` (Benjamini and Hochberg) and ``active``. ``attrs["notes"]`` says what was
    left out, and where no p-value can reach the threshold.

    Raises
    ------
    InputError
        There are no controls, or no perturbation has a positive and a negative.

    Notes
    -----
    Average precision of a query is the mean over its positives of the share of positives among the candidates down to
    each, expected over ties; a perturbation's is the mean over its wells. p = (1 + #{null >= value}) / (1 +
    null_size), the null random rankings of as many positives and negatives. Higher is better. Chance: the mean over
    random rankings, exact. Source: Kalinin et al., 2025 (copairs).
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
    needed = list(dict.fromkeys([label_key, *pos_sameby, *pos_diffby, *neg_sameby, *neg_diffby]))
    x, kept, _, notes = scorable(adata, treated | control, needed, use_rep)
    if max_queries is not None and max_queries < np.count_nonzero(kept & treated):
        names, counts = np.unique(labels(adata.obs, label_key)[kept & treated].astype(str), return_counts=True)
        order = np.random.default_rng(random_state).permutation(len(names))
        sample = names[order[: max(1, np.searchsorted(np.cumsum(counts[order]), max_queries, side="right"))]]
        treated &= np.isin(labels(adata.obs, label_key), sample)
        notes.append(f"{len(sample)} of {len(names)} perturbations sampled (random_state {random_state})")
    same, diff = column_pairs(adata.obs, neg_sameby, neg_diffby)
    negative = Pairs(same, [*diff, control.astype(np.int64)])
    table = _retrieved(
        adata,
        x,
        label_key,
        column_pairs(adata.obs, [label_key, *pos_sameby], pos_diffby),
        negative,
        kept & treated,
        kept,
        null_size,
        random_state,
        device,
    )
    return _judged(table, "active", threshold, notes)


def consistency(
    adata: ad.AnnData,
    *,
    class_key: str,
    group_key: str = PERTURBATION,
    label_key: str = PERTURBATION,
    pos_sameby: Sequence[str] = (),
    pos_diffby: Sequence[str] = (),
    neg_sameby: Sequence[str] = (),
    neg_diffby: Sequence[str] = (),
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
    pos_sameby, pos_diffby, neg_sameby, neg_diffby
        Further columns that positives and negatives must share or differ in; profiles are then means within their values too.
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

    Notes
    -----
    Formula, p, direction (higher is better) and chance as in `activity`. Source: Kalinin et al., 2025 (copairs).
    """
    treated = treated_mask(adata.obs, controls, label_key)
    columns = [*pos_sameby, *pos_diffby, *neg_sameby, *neg_diffby]
    needed = list(dict.fromkeys([label_key, class_key, group_key, *columns]))
    require_columns(adata.obs, needed, "obs")
    x, kept, _, notes = scorable(adata, treated, needed, use_rep)
    if active is None:
        notes.append("all perturbations, active or not")
    else:
        kept &= np.isin(labels(adata.obs, label_key), active.index[active["active"]])
        notes.append(f"{int(active['active'].sum())} of {len(active)} perturbations are active")
    profile = joint_codes(adata.obs[kept], needed) if kept.any() else np.zeros(0, dtype=np.int64)
    first = np.unique(profile, return_index=True)[1]
    means = ad.AnnData(metrics.group_means(x[kept], profile) if len(first) else x[:0], obs=adata.obs[kept].iloc[first])
    positive, negative = (
        column_pairs(means.obs, [class_key, *pos_sameby], [group_key, *pos_diffby]),
        column_pairs(means.obs, neg_sameby, [class_key, group_key, *neg_diffby]),
    )
    every = np.ones(len(first), dtype=bool)
    table = _retrieved(means, np.asarray(means.X), class_key, positive, negative, every, every, null_size, random_state)
    return _judged(table, "consistent", threshold, notes)


def activity_scores(
    adata: ad.AnnData,
    *,
    class_key: str | None = None,
    group_key: str | None = None,
    label_key: str = PERTURBATION,
    batch_key: str = EXPERIMENT,
    pairs: Mapping[str, Any] | None = None,
    max_queries: int | None = None,
    use_rep: str | None = None,
    device: str = "cpu",
    **keywords: Any,
) -> pd.DataFrame:
    """`activity`, and where ``class_key`` is given `consistency` of the active perturbations, as scores.

    Keywords are theirs, ``pairs`` holds those of `activity` that name columns. Higher is better.

    Returns
    -------
    Score table: ``activity_map``, the mean over perturbations of their mean average precision, chance that of random rankings;
    ``active_share``, the share of perturbations with an adjusted p below the threshold, chance 0; ``consistency_map`` and
    ``class_consistent_share``, likewise of classes. Queries and units are perturbations or classes. The tables themselves are in
    ``attrs["details"]``.
    """
    keywords |= {"label_key": label_key, "use_rep": use_rep}
    every = np.ones(adata.n_obs, dtype=bool)
    dropped = scorable(adata, every, [label_key, batch_key], use_rep)[2]
    found: dict[str, pd.DataFrame] = {}
    tables = []

    def of_perturbations() -> pd.DataFrame:
        own: dict[str, Any] = {
            "batch_key": batch_key,
            "max_queries": max_queries,
            "device": device,
        }
        found["activity"] = activity(adata, **own, **(pairs or {}), **keywords)
        return _summed(use_rep, found["activity"], "active", "activity_map", "active_share", dropped)

    def of_classes() -> pd.DataFrame:
        own: dict[str, Any] = {
            "class_key": class_key,
            "group_key": group_key or label_key,
            "active": found.get("activity"),
        }
        found["consistency"] = consistency(adata, **own, **keywords)
        return _summed(
            use_rep, found["consistency"], "consistent", "consistency_map", "class_consistent_share", dropped
        )

    tables.append(attempt(use_rep or "X", "activity_map", of_perturbations, dropped))
    if class_key:
        tables.append(attempt(use_rep or "X", "consistency_map", of_classes, dropped))
    table = pd.concat(tables, ignore_index=True)
    table.attrs[DETAILS] = {name: Detail(one) for name, one in found.items()}
    return table


def _summed(
    use_rep: str | None, detail: pd.DataFrame, verdict: str, metric: str, share: str, dropped: int
) -> pd.DataFrame:
    unit = detail.index.to_numpy(dtype=str)
    what = f"queries are {'perturbations' if verdict == 'active' else 'classes'}"
    said = [what, f"{detail[verdict].sum()} of {len(detail)} are {verdict}", *detail.attrs["notes"]]
    rows = []
    for name, column, chance in (
        (metric, "mean_average_precision", detail["chance"].mean()),
        (share, verdict, 0.0),
    ):
        value = detail[column].to_numpy(dtype=float)
        rows.append(score_row(use_rep, name, value.mean(), chance, len(value), dropped, said, of=(value, unit)))
    return score_table(rows)


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
    device: str = "cpu",
) -> pd.DataFrame:
    """Mean average precision, chance and p of each label of a column."""
    at = np.flatnonzero(queries)
    found = metrics.average_precision(
        x, positive, negative, queries=at, candidates=np.flatnonzero(candidates), counter=_counter(device)
    )
    scored = (found.n_pos > 0) & (found.n_neg > 0)
    if not scored.any():
        reason = "; name other columns" if len(at) else ": there is none that can be scored, or none that is active"
        raise InputError(f"not applicable: of {len(at)} wells or profiles none has a positive and a negative{reason}")
    names, group = np.unique(labels(adata.obs, by)[at][scored].astype(str), return_inverse=True)
    value, n_pos, n_neg = found.value[scored], found.n_pos[scored], found.n_neg[scored]
    mean, p = metrics.mean_average_precision_p(
        value, n_pos, n_neg, group, null_size=null_size, random_state=random_state
    )
    counts = np.bincount(group)
    chance = np.bincount(group, weights=metrics.chance_average_precision(n_pos, n_neg)) / counts
    least = metrics.least_p(n_pos, n_neg, group, null_size)
    p = np.maximum(p, least)  # a draw of the null may by luck hold fewer perfect rankings than there are
    columns = {"mean_average_precision": mean, "chance": chance, "n_queries": counts, "p": p, "least_p": least}
    table = pd.DataFrame(columns, index=pd.Index(names, name=by, dtype=object))
    table.attrs["notes"] = [unscored(np.count_nonzero(~scored), "queries")] if not scored.all() else []
    return table


def _judged(table: pd.DataFrame, verdict: str, threshold: float, notes: Sequence[str]) -> pd.DataFrame:
    table["p_adjusted"] = false_discovery_control(table["p"])
    table[verdict] = table["p_adjusted"] < threshold
    said = [*notes, *table.attrs["notes"]]
    short = table["least_p"] >= threshold
    if short.any():
        said.append(
            f"{short.sum()} of {len(table)} have too few positives and negatives for any p below {threshold:g}: the smallest "
            f"that they can reach is {table.loc[short, 'least_p'].min():.2g}"
        )
    if not table[verdict].any():
        said.append(
            f"none is {verdict}; the smallest p among {len(table)} is {table['p'].min():.4g} ({table['least_p'].min():.2g} can be "
            "reached)"
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

    Notes
    -----
    The share of profiles whose nearest neighbour by cosine has their class; ties count by their share. Higher is
    better. Chance: the mean share of positives among candidates. Source: Ljosa et al., 2013; Ando et al., 2017.
    """
    needed = list(dict.fromkeys([label_key, class_key, group_key, batch_key]))
    treated = treated_mask(adata.obs, controls, label_key)
    x, kept, dropped, notes = scorable(adata, treated, needed, use_rep)
    rows = []
    for metric, apart in (("nsc", [group_key]), ("nscb", [group_key, batch_key])):
        unit = list(dict.fromkeys([label_key, class_key, *apart]))
        profile = joint_codes(adata.obs[kept], unit)
        first = np.unique(profile, return_index=True)[1]
        obs = adata.obs[kept].iloc[first]
        means = metrics.group_means(x[kept], profile) if len(first) else x[:0]
        value, chance = metrics.nearest_neighbor(
            means, column_pairs(obs, [class_key], apart), column_pairs(obs, [], [class_key, *apart])
        )
        scored = ~np.isnan(value)
        said = ["queries are mean profiles", *notes, unscored(np.count_nonzero(~scored), "profiles")]
        if not scored.any():
            said = [
                f"not applicable: no profile shares its {class_key} with one of another {' and '.join(apart)}",
                *said,
            ]
        unit = labels(obs, group_key)[scored].astype(str)
        rows.append(
            score_row(
                use_rep, metric, mean_of(value), mean_of(chance), scored.sum(), dropped, said, of=(value[scored], unit)
            )
        )
    return score_table(rows)


def _counter(device: str) -> Callable | None:
    """What counts on a device; None for this processor's own threads."""
    if device == "cpu":
        return None
    import torch

    from cellica import ranks

    if device == "auto":
        return partial(ranks.counter, device="cuda") if torch.cuda.is_available() else None
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' is not there: torch sees no GPU; use 'cpu', or 'auto'")
    if device != "cuda":
        raise InputError(f"device {device!r} is not known: use 'cpu', 'cuda' or 'auto'")
    return partial(ranks.counter, device=device)


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
    device: str,
) -> pd.DataFrame:
    x, kept, dropped, notes = scorable(adata, treated, needed, use_rep)
    candidates = queries = np.flatnonzero(kept)
    if max_queries is not None and max_queries < len(queries):
        by_name = np.argsort(adata.obs_names.to_numpy(dtype=str)[queries], kind="stable")
        sample = np.random.default_rng(random_state).choice(by_name, max_queries, replace=False)
        queries = queries[np.sort(sample)]
        notes.append(f"{max_queries} of {len(candidates)} queries sampled (random_state {random_state})")
    result = metrics.average_precision(
        x, positive, negative, queries=queries, candidates=candidates, counter=_counter(device)
    )
    scored = (result.n_pos > 0) & (result.n_neg > 0)
    if scored.any():
        notes.append(unscored(np.count_nonzero(~scored), "queries"))
    elif result.n_pos.any():
        notes.insert(0, "not applicable: every candidate is a positive")
    else:
        notes.insert(0, f"not applicable: no two treated wells share {needed[0]} and differ in {', '.join(needed[1:])}")
    chance = metrics.chance_average_precision(result.n_pos, result.n_neg)
    values, names = result.value[scored], labels(adata.obs, unit)[queries][scored].astype(str)
    row = score_row(
        use_rep, metric, mean_of(values), mean_of(chance[scored]), scored.sum(), dropped, notes, of=(values, names)
    )
    table = score_table([row])
    of = labels(adata.obs, needed[0])[queries][scored].astype(str)
    table.attrs[PER_QUERY] = {metric: PerQuery(pd.Series(values, adata.obs_names[queries][scored]), names, of)}
    return table
