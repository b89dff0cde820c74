"""Scores of what is learned in some experiments and asked for in others: probes, neighbours, RxRx1's task.

Batches are left out one at a time, or in ten groups where there are more than twelve; everything is trained within
strata. Each score comes with a 95 % interval over perturbations (group ``all`` and strata) and another over batches
(group ``over batches``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from cellica import correct, metrics, probes
from cellica.methods import FITS, JOINT, options_of, parse
from cellica.metrics import label_codes
from cellica.schema import (
    EXPERIMENT,
    PERTURBATION,
    PLATE,
    SITE,
    WELL,
    InputError,
    control_mask,
    first_few,
    labels,
    require_columns,
    strata_labels,
    treated_mask,
)
from cellica.scores import (
    DETAILS,
    OVER_BATCHES,
    PER_QUERY,
    Detail,
    PerQuery,
    embedding_of,
    joint_codes,
    mean_of,
    method_of,
    scorable,
    score_row,
    score_table,
)

PLATE_GROUP = "among the plate's siRNAs"
FIRST_TEST = {"HEPG2": 8, "HUVEC": 17, "RPE": 8, "U2OS": 4}  # RxRx1: the first test experiment of each cell type
PROBE_COLUMNS = [
    "perturbation",
    "held_out",
    "auroc",
    "n_perturbed",
    "n_controls",
    "C",
    "hoyer",
    "top_quarter",
    "permuted_hoyer",
    "permuted_top_quarter",
]  # of `holdout_probes`, in the order of `probes.HeldOut`
PROBE_SCORES = {
    "holdout_auroc": ("auroc", None),
    "probe_hoyer": ("hoyer", "permuted_hoyer"),
    "probe_top_quarter": ("top_quarter", "permuted_top_quarter"),
}  # metric: columns of the value and of chance
CLASSIFIERS: dict[str, Callable[..., probes.Scores]] = {
    "knn": probes.neighbor_votes,
    "lda": probes.discriminants,
    "class_mean": probes.class_mean_cosines,
}


# ---------------------------------------------------------------------------------------------- held-out-batch probes


def holdout_probes(
    adata: ad.AnnData,
    *,
    method: str | None = None,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    Cs: Sequence[float] = probes.CS,
    max_batches: int = 12,
    random_state: int = 0,
    **options: Any,
) -> pd.DataFrame:
    """Probes of each perturbation against negative controls, on batches that were left out of everything.

    Logistic regressions with an L2 penalty, trained within strata on all batches but one (but one of ten groups of them,
    where there are more than ``max_batches``) and scored by AUROC in the batch left out.

    Parameters
    ----------
    method
        Correction to fit on the training batches only and to apply to those left out, a name or chain of
        ``correct.METHODS``; by default the representation is probed as it is.
    batch_key, label_key, strata_key, controls, use_rep
        As in `replicate_retrieval`; ``use_rep`` is what is probed, or corrected by ``method``.
    Cs
        Inverse strengths of the penalty; each probe's is chosen by cross-validation over its training batches
        (`probes.held_out_probes`).
    max_batches, random_state
        Leave out single batches up to this many; seed of groups, folds, permuted labels and of the correction.
    **options
        Options of the method.

    Returns
    -------
    One row a perturbation and batch left out: ``stratum``, ``held_out`` (the batch), ``perturbation``, ``auroc`` (higher is better, chance is
    0.5), ``n_perturbed``, ``n_controls``, the probe's ``C``, ``hoyer`` and ``top_quarter`` (`probes.hoyer_sparsity` and `probes.top_share` of
    its weights on standardised features), and ``permuted_hoyer`` and ``permuted_top_quarter``, those of a probe of labels permuted within
    batches. ``attrs["notes"]`` says what was left out, ``attrs["n_dropped"]`` how many wells, ``attrs["rep"]`` what was probed.

    Raises
    ------
    InputError
        There are no controls, no perturbation lies in two batches that have some, or the method cannot be fitted or
        applied to new batches.
    """
    control, treated = control_mask(adata.obs, controls, label_key), treated_mask(adata.obs, controls, label_key)
    roles: dict[str, Any] = {"batch_key": batch_key, "label_key": label_key, "strata_key": strata_key}
    wells = _wells(adata, control | treated, use_rep, max_batches, random_state, **roles)
    negative = wells.kept & control
    scored = _repeated(wells, wells.kept & treated, negative)
    if not scored.any():
        raise InputError(
            f"no perturbation of obs[{label_key!r}] lies in two batches of obs[{batch_key!r}] that have negative controls, "
            "within a stratum: mark controls, give replicates, or name another batch key or strata key"
        )
    roles |= {"controls": controls, "random_state": random_state, **options}
    found = []
    for held in np.unique(wells.group[scored]):
        x = wells.x if method is None else _corrected(adata, wells, held, method, roles)
        for stratum in np.unique(wells.stratum[scored & (wells.group == held)]):
            at = wells.rows((scored | negative) & (wells.stratum == stratum))
            names, code = np.unique(np.where(scored[at], wells.label[at], ""), return_inverse=True)
            code -= names[0] == ""
            probed = probes.held_out_probes(
                x[at], code, wells.batch_code[at], wells.group[at], held, Cs=Cs, random_state=random_state
            )
            table = pd.DataFrame(dict(zip(PROBE_COLUMNS, probed)))
            table["perturbation"] = names[names != ""][probed.label]
            table["held_out"] = wells.batch_names[probed.batch]
            found.append(table.assign(stratum=stratum))
    table = pd.concat(found, ignore_index=True)[["stratum", *PROBE_COLUMNS]]
    said = _as_it_is(adata, use_rep) if method is None else f"{method} fitted on the training batches only"
    n_dropped = int(np.count_nonzero((control | treated) & ~(scored | negative)))
    rep = use_rep or "X" if method is None else f"X_{method}"
    table.attrs.update(notes=[said, *wells.notes], n_dropped=n_dropped, rep=rep)
    return table


def holdout_auroc(adata: ad.AnnData, *, detail: pd.DataFrame | None = None, **keywords: Any) -> pd.DataFrame:
    """Can perturbed wells be told from controls in batches that the probe, and the correction, did not see?

    Parameters
    ----------
    detail
        The table of `holdout_probes`, where it is at hand.
    **keywords
        Those of `holdout_probes`: ``method`` to fit a correction on the training batches only.

    Returns
    -------
    Score table of two rows a metric. Of group ``all``: the mean over perturbations, each the mean over its held-out
    batches, with the interval over perturbations. Of group ``over batches``: the mean over held-out batches, each the mean over
    its perturbations, with the interval over batches. Metrics: ``holdout_auroc`` (higher is better, chance 0.5);
    ``probe_hoyer`` and ``probe_top_quarter``, sparsity of the probe's weights and the share of their sum of squares that the
    first quarter holds (higher: fewer features carry it), chance the values of probes of permuted labels. Without a value,
    and with the reason, where there are no controls or replicates, or the method cannot be applied to new batches.

    Notes
    -----
    AUROC of logistic regressions; Hoyer's sparsity (sqrt(n) - |w|_1 / |w|_2) / (sqrt(n) - 1); share of the sum of w^2
    held by the largest quarter. AUROC: higher is better, chance .5; the others have no better end, and chance by
    permuted labels. Source: arXiv:2603.11970; Hoyer, 2004.
    """
    if detail is None:
        _check(adata, **keywords)
        try:
            detail = holdout_probes(adata, **keywords)
        except InputError as error:
            method, use_rep = keywords.get("method"), keywords.get("use_rep")
            rep = use_rep or "X" if method is None else f"X_{method}"
            return score_table([_not_applicable(rep, metric, str(error)) for metric in PROBE_SCORES])
    rep, dropped, notes = (detail.attrs[key] for key in ("rep", "n_dropped", "notes"))
    rows, per_query = [], {}
    for metric, (column, chance) in PROBE_SCORES.items():
        for unit, group in (("perturbation", "all"), ("held_out", OVER_BATCHES)):
            means = detail.groupby(["stratum", unit])[[column, *([chance] if chance else [])]].mean().dropna()
            units = means.index.get_level_values(unit).to_numpy()
            expected = float(means[chance].mean()) if chance else 0.5
            value = means[column].to_numpy()
            said = [
                f"interval over {unit.replace('held_out', 'batches left out').replace('perturbation', 'perturbations')}",
                *notes,
            ]
            rows.append(
                score_row(
                    rep, metric, mean_of(value), expected, len(value), dropped, said, group=group, of=(value, units)
                )
            )
            if group == "all":
                names = ["/".join(index) for index in means.index]
                per_query[metric] = PerQuery(pd.Series(value, names), units)
    table = score_table(rows)
    table.attrs[PER_QUERY] = per_query
    table.attrs[DETAILS] = {"holdout_probes": Detail(detail)}
    return table


# ---------------------------------------------------------------------------------------------- naming perturbations


def knn_accuracy(adata: ad.AnnData, *, k: int = 5, **keywords: Any) -> pd.DataFrame:
    """How often do the k nearest wells of other batches, by cosine, name the perturbation of a well?

    Parameters
    ----------
    k
        Number of neighbours, each one vote; fewer where there are fewer training wells, which the note says. Ties, of votes and
        for the last place, are worth their expected value.
    **keywords
        Those of `probe_accuracy`.

    Returns
    -------
    Score table as that of `probe_accuracy`, metric ``knn_accuracy``.

    Notes
    -----
    The expected share of wells whose perturbation has most votes among their neighbours. Higher is better. Chance:
    the best constant guess, or a uniform one where that is higher. Source: RxRx1's task, Sypetkowski et al., 2023.
    """
    _check_k(k)
    return _accuracy(adata, {"knn_accuracy": k}, **keywords)


def probe_accuracy(adata: ad.AnnData, **keywords: Any) -> pd.DataFrame:
    """How often does a linear probe name the perturbation of a well of a batch that it has not seen?

    The probe is a linear discriminant with a shrunk covariance within classes (`probes.discriminants`): it takes a
    thousand perturbations at the cost of one covariance, which logistic regression does not. It is trained on the treated wells
    of the other batches of the stratum.

    Parameters
    ----------
    method, max_batches, **options
        As in `holdout_probes`.
    max_queries
        Ask for a random sample of this many wells.
    batch_key, label_key, strata_key, controls, use_rep, random_state
        As in `replicate_retrieval`.

    Returns
    -------
    Score table, metric ``probe_accuracy`` (higher is better). Group ``all``: the share of wells that are named right, with
    the interval over perturbations; ``over batches``: the same value, with the interval over batches; then a row a stratum, where there
    are several. Queries are treated wells whose perturbation lies in the training batches. Chance is the accuracy of
    the best constant guess, or of a uniform one where that is higher.

    Notes
    -----
    The share of wells that a linear discriminant names right. Higher is better. Chance: as said. Source: RxRx1's
    task, Sypetkowski et al., 2023; Ledoit and Wolf, 2004.
    """
    return _accuracy(adata, {"probe_accuracy": None}, **keywords)


def accuracies(adata: ad.AnnData, *, k: int = 5, **keywords: Any) -> pd.DataFrame:
    """`knn_accuracy` and `probe_accuracy` of the same fits of a method. Keywords are theirs."""
    return _accuracy(adata, {"knn_accuracy": k, "probe_accuracy": None}, **keywords)


def _accuracy(
    adata: ad.AnnData,
    asked: Mapping[str, int | None],
    *,
    method: str | None = None,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    max_batches: int = 12,
    max_queries: int | None = None,
    random_state: int = 0,
    **options: Any,
) -> pd.DataFrame:
    """Metrics with their numbers of neighbours (None: the discriminant)."""
    roles: dict[str, Any] = {"batch_key": batch_key, "label_key": label_key, "strata_key": strata_key}
    _check(adata, method=method, controls=controls, use_rep=use_rep, **roles)
    if options and method is None:
        raise InputError(f"{first_few(options)} is for a method, and none was named (method=)")
    treated = treated_mask(adata.obs, controls, label_key)
    wells = _wells(adata, treated, use_rep, max_batches, random_state, **roles)
    roles |= {"controls": controls, "random_state": random_state, **options}
    rep = use_rep or "X" if method is None else f"X_{method}"
    classifiers = {
        metric: CLASSIFIERS["lda"] if k is None else partial(probes.neighbor_votes, k=k, random_state=random_state)
        for metric, k in asked.items()
    }
    named: dict[str, list[pd.DataFrame]] = {metric: [] for metric in asked}
    queries = wells.kept
    if max_queries is not None and max_queries < np.count_nonzero(queries):
        every = wells.rows(queries)
        queries = np.zeros(len(queries), dtype=bool)
        queries[np.random.default_rng(random_state).choice(every, max_queries, replace=False)] = True
        wells.notes.append(f"{max_queries} of {len(every)} queries sampled (random_state {random_state})")
    crossing = wells.kept & (_n_groups(wells, wells.kept) > 1)
    for held in np.unique(wells.group[queries & (crossing if method else wells.kept)]):
        try:
            x = wells.x if method is None else _corrected(adata, wells, held, method, roles)
        except InputError as error:
            return score_table([_not_applicable(rep, metric, str(error)) for metric in asked])
        aside = wells.group == held
        for metric, classifier in classifiers.items() if (queries & aside).any() else ():
            named[metric].append(_named(wells, x, wells.kept & ~aside, queries & aside, classifier))
    said = [
        _as_it_is(adata, use_rep) if method is None else f"{method} fitted on the training batches only",
        *wells.notes,
    ]
    tables = []
    for metric, k in asked.items():
        one = pd.concat(named[metric]) if named[metric] else pd.DataFrame({"hit": []})
        tables.append(_accuracy_table(rep, metric, one, wells.dropped, [*said, *_fewer_neighbors(one, k)]))
    table = pd.concat(tables, ignore_index=True)
    table.attrs[PER_QUERY] = {name: one for part in tables for name, one in part.attrs.get(PER_QUERY, {}).items()}
    return table


def _check_k(k: int) -> None:
    if not isinstance(k, int | np.integer) or k < 1:
        raise InputError(f"k is {k!r}: ask for a whole number of neighbours, at least 1")


def _n_groups(wells: "_Wells", rows: np.ndarray) -> np.ndarray:
    """In how many groups of batches the perturbation of each well lies, within its stratum, by some of the wells."""
    lies = pd.DataFrame({"stratum": wells.stratum, "label": wells.label, "group": np.where(rows, wells.group, np.nan)})
    return lies.groupby(["stratum", "label"])["group"].transform("nunique").to_numpy()


# ---------------------------------------------------------------------------------------------- RxRx1's task


def sirna_accuracy(
    adata: ad.AnnData,
    *,
    classifiers: Sequence[str] = ("knn", "lda", "class_mean"),
    k: int = 5,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    random_state: int = 0,
) -> pd.DataFrame:
    """RxRx1's task: name the siRNA of treated wells of the 18 test experiments, having seen the 33 of training.

    Trained within cell types, on embeddings as they are (Sypetkowski et al., 2023, arXiv:2301.05768, train a network on the
    images instead). Test experiments are those whose ``obs["dataset"]`` is ``test``, else HEPG2-08, HUVEC-17, RPE-08, U2OS-04 and later
    ones.

    Parameters
    ----------
    classifiers
        Of ``"knn"`` (k nearest neighbours by cosine), ``"lda"`` (`probes.discriminants`) and ``"class_mean"`` (nearest mean
        profile by cosine).
    k
        As in `knn_accuracy`.
    batch_key, label_key, strata_key, controls, use_rep, random_state
        As in `replicate_retrieval`.

    Returns
    -------
    Score table, metrics ``sirna_accuracy_{classifier}`` (higher is better) on wells, the means of their sites, and
    ``sirna_accuracy_{classifier}_sites`` where obs has sites. Groups ``all``, ``over batches`` and cell types as in `probe_accuracy`; chance
    is 1 over the number of siRNAs (1,108). Each plate holds one of four fixed sets of 277 siRNAs: the rows of group ``among the plate's siRNAs``
    choose among the siRNAs that share plates with the query's, with chance 1/277, the level that knowing the plate alone
    gives. Where the test wells have no siRNA, as in Kaggle's tables, these are rows without a value, and metrics that end
    in ``_left_out`` leave out each training experiment in turn.

    Raises
    ------
    InputError
        A classifier is unknown, or a column or representation is not there.

    Notes
    -----
    The share of wells that are named right. Higher is better. Chance and source: as said.
    """
    _check_k(k)
    odd = [name for name in classifiers if name not in CLASSIFIERS] or ([] if len(classifiers) else ["none"])
    if odd:
        raise InputError(f"classifier {first_few(odd)} is not known: use {first_few(CLASSIFIERS)}")
    roles: dict[str, Any] = {"batch_key": batch_key, "label_key": label_key, "strata_key": strata_key}
    _check(adata, controls=controls, use_rep=use_rep, **roles)
    asked = treated_mask(adata.obs, controls, label_key) & rxrx1_test(adata.obs, batch_key)
    absent = "there are no wells of test experiments"
    if asked.any():
        absent = f"the {asked.sum()} wells of the test experiments have no {label_key} or no usable row: Kaggle's tables name none"
    levels = {"": _well_means(adata, use_rep, batch_key), "_sites": adata} if SITE in adata.obs else {"": adata}
    tables = []
    for level, data in levels.items():
        rep = use_rep if data is adata else None
        wells = _wells(data, treated_mask(data.obs, controls, label_key), rep, len(data), random_state, **roles)
        test = rxrx1_test(data.obs, batch_key)
        sets = _plate_sets(wells, data.obs)
        for name in classifiers:
            classify = (
                partial(CLASSIFIERS[name], k=k, random_state=random_state) if name == "knn" else CLASSIFIERS[name]
            )
            metric, said = f"sirna_accuracy_{name}{level}", [_as_it_is(adata, use_rep), *wells.notes]
            train, queries = wells.kept & ~test, wells.kept & test
            if queries.any():
                named = _named(wells, wells.x, train, queries, classify, sets)
            else:
                tables.append(score_table([_not_applicable(use_rep or "X", metric, absent)]))
                metric += "_left_out"
                parts = [wells.kept & (wells.group == one) for one in np.unique(wells.group[train])]
                named = pd.concat([_named(wells, wells.x, train & ~part, part, classify, sets) for part in parts])
            said += _fewer_neighbors(named, k if name == "knn" else None)
            tables.append(_accuracy_table(use_rep or "X", metric, named, wells.dropped, said))
    return pd.concat(tables, ignore_index=True)


# ---------------------------------------------------------------------------------------------- wells and what is left out


@dataclass
class _Wells:
    """Wells of a role: their representation, labels, codes of batches and groups of them, and an order of their own."""

    x: np.ndarray
    kept: np.ndarray
    label: np.ndarray
    stratum: np.ndarray
    batch_code: np.ndarray
    batch_names: np.ndarray
    group: np.ndarray
    order: np.ndarray
    dropped: int
    notes: list[str] = field(default_factory=list)

    def rows(self, mask: np.ndarray) -> np.ndarray:
        """Indices of the wells of a mask, in the order of their names: that of the table must not matter."""
        return self.order[mask[self.order]]


def _wells(
    adata: ad.AnnData,
    role: np.ndarray,
    use_rep: str | None,
    max_batches: int,
    random_state: int,
    *,
    batch_key: str,
    label_key: str,
    strata_key: str | None,
) -> _Wells:
    x, kept, dropped, notes = scorable(adata, role, [label_key, batch_key], use_rep)
    batch, strata = labels(adata.obs, batch_key), strata_labels(adata.obs, strata_key).astype(str)
    code, group = label_codes(batch), np.full(len(x), -1)
    known = np.isfinite(x).all(axis=1) & (code >= 0)
    if known.any():
        present = np.unique(code[known], return_inverse=True)[1]
        group[known] = probes.batch_groups(
            present, label_codes(strata)[known], most=max_batches, random_state=random_state
        )
        if group.max() < present.max():
            notes.append(f"{present.max() + 1} batches in {group.max() + 1} groups, left out in turn")
    names = np.unique(batch[code >= 0].astype(str))
    label = labels(adata.obs, label_key).astype(str)
    order = np.argsort(adata.obs_names.to_numpy(dtype=str), kind="stable")
    return _Wells(x, kept, label, strata, code, names, group, order, dropped, notes)


def _repeated(wells: _Wells, treated: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Treated wells of batches that have controls, and of perturbations that lie in several groups of such batches."""
    lies = pd.DataFrame(
        {"stratum": wells.stratum, "batch": wells.batch_code, "group": wells.group, "label": wells.label}
    )
    place = pd.MultiIndex.from_frame(lies[["stratum", "batch"]])
    alone = treated & ~place.isin(place[negative])
    single = treated & ~alone
    single &= _n_groups(wells, single) < 2
    for left_out, keys, reason in (
        (alone, ["stratum", "batch"], "batches without negative controls"),
        (single, ["stratum", "label"], "perturbations that lie in one batch, or group of batches, only"),
    ):
        if left_out.any():
            n = len(lies[left_out].drop_duplicates(keys))
            wells.notes.append(f"{np.count_nonzero(left_out)} wells left out: {n} {reason}")
    return treated & ~alone & ~single


def _corrected(adata: ad.AnnData, wells: _Wells, held: int, method: str, keywords: dict[str, Any]) -> np.ndarray:
    """Representation (n x d) corrected as fitted on the wells outside a group of batches, NaN where a well has none."""
    if joint := JOINT & set(parse(method)):
        raise InputError(f"not applicable: {' and '.join(sorted(joint))} corrects only the wells it was fitted on")
    at = wells.rows(wells.group >= 0)
    work = ad.AnnData(wells.x[at], obs=adata.obs.iloc[at].copy())
    if any("check_stability" in options_of(FITS[step]) for step in parse(method)):
        keywords = {"check_stability": False, **keywords}  # says much of a fit, and changes nothing
    corrector = correct.fit(work[wells.group[at] != held].copy(), method, **keywords)
    corrector.transform(work, key_added="held_out")
    if held == wells.group[at].min():
        said = work.uns["cellica"]["held_out"]["notes"]
        wells.notes += [str(note) for note in said if not str(note).startswith("confounding:")]
    corrected = np.full(wells.x.shape, np.nan)
    corrected[at] = work.obsm["X_held_out"]
    return corrected


def _named(
    wells: _Wells,
    x: np.ndarray,
    train: np.ndarray,
    queries: np.ndarray,
    classify: Callable[..., probes.Scores],
    sets: np.ndarray | None = None,
) -> pd.DataFrame:
    """Whether each query is named right by a classifier of the training wells of its stratum; one row a query.

    ``hit`` is NaN where the query's label is in no training well. ``uniform`` and ``constant``: what a guess at random and the most
    frequent label in training hit. With ``sets``, one a well, ``set_hit`` is the hit among labels of the query's set, and
    ``set_uniform`` its chance.
    """
    tables = []
    for stratum in np.unique(wells.stratum[queries]):
        inside = wells.stratum == stratum
        fit, asked = wells.rows(train & inside), wells.rows(queries & inside)
        names, code = np.unique(wells.label[fit], return_inverse=True)
        right = np.searchsorted(names, wells.label[asked]) if len(names) else np.zeros(len(asked), dtype=np.int64)
        right = np.minimum(right, max(len(names) - 1, 0))
        seen = names[right] == wells.label[asked] if len(names) else np.zeros(len(asked), dtype=bool)
        table = pd.DataFrame(
            {
                "hit": np.nan,
                "label": wells.label[asked],
                "batch": wells.batch_names[wells.batch_code[asked]],
                "stratum": stratum,
                "n_train": len(fit),
            },
            index=pd.Index(asked),
        )
        if seen.any():
            known, right = asked[seen], right[seen]
            among = None
            if sets is not None:
                set_of = np.zeros(len(names), dtype=sets.dtype)
                set_of[code] = sets[fit]
                among = set_of == sets[known][:, None]
            choices = [None] if among is None else [None, among]
            hits = probes.expected_hits(classify(x[fit], code, len(names), x[known]), right, choices)
            table.loc[known, "hit"] = hits[0]
            table.loc[known, "uniform"] = 1 / len(names)
            table.loc[known, "constant"] = (right == np.argmax(np.bincount(code))).astype(float)
            if among is not None:
                table.loc[known, "set_hit"] = hits[1]
                table.loc[known, "set_uniform"] = 1 / among.sum(axis=1)
        tables.append(table)
    return pd.concat(tables)


def _accuracy_table(rep: str, metric: str, named: pd.DataFrame, dropped: int, notes: Sequence[str]) -> pd.DataFrame:
    known = named[named["hit"].notna()]
    unseen = named[named["hit"].isna()]
    said = [note for note in notes if note]
    if len(unseen):
        n = len(unseen.drop_duplicates(["stratum", "label"]))
        said.append(
            f"{len(unseen)} wells of {n} perturbations that are in no training batch of their stratum are not scored"
        )
        dropped += len(unseen)
    if not len(known):
        reason = "no treated well shares its perturbation and stratum with one in another batch"
        return score_table([_not_applicable(rep, metric, reason, said, dropped)])

    def row(
        rows: pd.DataFrame, group: str, unit: str = "label", hit: str = "hit", chance: float | None = None
    ) -> tuple:
        if chance is None:
            chance = max(rows["uniform"].mean(), rows["constant"].mean())
        of = rows[hit].to_numpy(), rows[unit].to_numpy(dtype=str)
        over = "interval over batches" if unit == "batch" else "interval over perturbations"
        return score_row(rep, metric, of[0].mean(), chance, len(rows), dropped, [over, *said], group=group, of=of)

    rows = [row(known, "all"), row(known, OVER_BATCHES, "batch")]
    if len(set(known["stratum"])) > 1:
        rows += [row(part, str(stratum)) for stratum, part in known.groupby("stratum")]
    if "set_hit" in known:
        rows.append(row(known, PLATE_GROUP, hit="set_hit", chance=known["set_uniform"].mean()))
    table = score_table(rows)
    table.attrs[PER_QUERY] = {metric: PerQuery(known["hit"], known["label"].to_numpy(dtype=str))}
    return table


def _not_applicable(rep: str, metric: str, reason: str, notes: Sequence[str] = (), dropped: int = 0) -> tuple:
    return score_row(
        rep, metric, np.nan, np.nan, 0, dropped, [f"not applicable: {reason.removeprefix('not applicable: ')}", *notes]
    )


def _fewer_neighbors(named: pd.DataFrame, k: int | None) -> list[str]:
    """A note where training wells are fewer than the neighbours asked for."""
    least = named["n_train"].min() if len(named) else None
    return (
        [f"{least} neighbours where there are no more training wells"] if k and least is not None and least < k else []
    )


def _as_it_is(adata: ad.AnnData, use_rep: str | None) -> str:
    """What must be said of a representation that was not fitted here."""
    method = method_of(adata, use_rep)
    try:
        steps = set(parse(method)) - {"none"}
    except InputError:  # no correction wrote it, or none that is known here
        return ""
    if not steps:
        return ""
    return (
        f"{method} was fitted before, on the wells that are left out too unless it was applied to them (transductive)"
    )


def _check(adata: ad.AnnData, **keywords: Any) -> None:
    """Raise an InputError where a name is wrong, which is no reason for a row without a value."""
    label_key, batch_key = keywords.get("label_key", PERTURBATION), keywords.get("batch_key", EXPERIMENT)
    require_columns(adata.obs, [label_key, batch_key], "obs")
    control_mask(adata.obs, keywords.get("controls"), label_key)
    strata_labels(adata.obs, keywords.get("strata_key", "auto"))
    embedding_of(adata, keywords.get("use_rep"))
    if keywords.get("method") is not None:
        correct.parse(keywords["method"])


def rxrx1_test(obs: pd.DataFrame, batch_key: str = EXPERIMENT) -> np.ndarray:
    """Wells of RxRx1's test experiments."""
    if "dataset" in obs:
        return labels(obs, "dataset") == "test"
    name = pd.Series(labels(obs, batch_key).astype(str)).str.extract(r"^([A-Z0-9]+)-([0-9]+)$")
    first = name[0].map(FIRST_TEST)
    return (pd.to_numeric(name[1]) >= first).to_numpy()


def _plate_sets(wells: _Wells, obs: pd.DataFrame) -> np.ndarray | None:
    """Set of labels that share plates, of each well; None where all do."""
    if PLATE not in obs:
        return None
    names, code = np.unique(wells.label[wells.kept], return_inverse=True)
    pairs = np.column_stack([wells.batch_code, label_codes(labels(obs, PLATE))])[wells.kept]
    plate = np.unique(pairs, axis=0, return_inverse=True)[1].ravel() if len(pairs) else code
    n = len(names) + plate.max(initial=-1) + 1
    graph = coo_array((np.ones(len(code)), (code, len(names) + plate)), shape=(n, n))
    n_sets, component = connected_components(graph, directed=False)
    if n_sets < 2:
        return None
    sets = np.full(len(wells.kept), -1)
    sets[wells.kept] = component[code]
    return sets


def _well_means(adata: ad.AnnData, use_rep: str | None, batch_key: str) -> ad.AnnData:
    """Mean of the sites of each well, as X."""
    well = joint_codes(
        adata.obs, [key for key in dict.fromkeys((batch_key, EXPERIMENT, PLATE, WELL)) if key in adata.obs]
    )
    first = np.unique(well, return_index=True)[1]
    return ad.AnnData(metrics.group_means(embedding_of(adata, use_rep), well), obs=adata.obs.iloc[first].copy())
