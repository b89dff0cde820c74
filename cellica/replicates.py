"""Replicates of a perturbation: how alike they are, and how far from controls (Celik et al., PLoS Comput Biol 2024)."""

from collections.abc import Sequence
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control

from cellica import maps, metrics
from cellica.metrics import label_codes
from cellica.schema import EXPERIMENT, PERTURBATION, InputError, control_mask, first_few, labels, treated_mask
from cellica.scores import DETAILS, Detail, absent_row, scorable, score_row, score_table

MIN_WELLS = 5  # fewest wells of a perturbation whose distance from controls is measured
MAX_WELLS = 1000  # most wells of a perturbation, and most controls, that it is measured on


def replicate_consistency(
    adata: ad.AnnData,
    *,
    null: Sequence[str] | None = None,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    null_size: int = 1000,
    threshold: float = 0.05,
    random_state: int = 0,
) -> pd.DataFrame:
    """Which perturbations are consistent: are their wells more alike than those of perturbations that do nothing?

    Parameters
    ----------
    null
        Perturbations that do nothing, such as genes that are not expressed. Without them controls stand in for perturbations:
        as many controls as the perturbation has wells in each batch are drawn, ``null_size`` times.
    batch_key, label_key, controls, use_rep
        As in `replicate_retrieval`; the batch matters only where controls are the null.
    threshold
        Adjusted p below which a perturbation is consistent.
    random_state
        Seed of the draws.

    Returns
    -------
    One row a perturbation of at least 2 wells, index its name: ``mean_cosine`` between its wells (-1 to 1, higher is better),
    ``chance``, the mean of the null, ``n_wells``, ``is_null``, and, except for those that are the null, ``p`` = (1 + #{null >= value}) /
    (1 + size of the null), ``p_adjusted`` (Benjamini and Hochberg) and ``consistent``. ``attrs["notes"]`` says what was left out, and
    the smallest p that can be reached where none is consistent.

    Raises
    ------
    InputError
        A name of the null is not there or has no 2 wells, there are neither null nor controls, or nothing has 2 wells.

    Notes
    -----
    The mean cosine of all pairs of a perturbation's wells. Higher is better. Chance: the mean of the null. Source:
    Celik et al., 2024 (EFAAR).
    """
    treated, control = treated_mask(adata.obs, controls, label_key), control_mask(adata.obs, controls, label_key)
    needed = [label_key] if null is not None else [label_key, batch_key]
    x, kept, dropped, notes = scorable(adata, treated | control, needed, use_rep)
    rows, label = np.flatnonzero(kept & treated), labels(adata.obs, label_key)
    names, code, n_wells = np.unique(label[rows].astype(str), return_inverse=True, return_counts=True)
    enough = n_wells > 1
    if not enough.any():
        raise InputError(f"not applicable: none of {len(names)} perturbations has 2 wells that can be scored")
    value = maps.mean_cosine(x[rows], code)
    is_null = np.zeros(len(names), dtype=bool)
    if null is not None:
        is_null = _null_perturbations(names, n_wells, null)
        of_null = value[is_null]
        nulls = [of_null] * len(names)
        notes.append(f"null: {len(of_null)} perturbations that were named")
    else:
        if not (kept & control).any():
            raise InputError(
                "replicate_consistency compares with perturbations that do nothing (null=) or with negative controls, and there "
                "are neither: name them"
            )
        nulls, said = _control_nulls(adata, x, kept & control, rows, code, enough, batch_key, null_size, random_state)
        notes += [f"null: {null_size} draws of controls, as many in each batch as the perturbation has wells", *said]
    p = np.array([(1 + np.count_nonzero(null >= v - metrics.TIE)) / (1 + len(null)) for null, v in zip(nulls, value)])
    chance = [null.mean() if len(null) else np.nan for null in nulls]
    columns = {
        "mean_cosine": value,
        "chance": chance,
        "n_wells": n_wells,
        "is_null": is_null,
        "p": np.where(is_null, np.nan, p),
    }
    table = pd.DataFrame(columns, index=pd.Index(names, name=label_key, dtype=object))[enough]
    if not enough.all():
        notes.append(f"{np.count_nonzero(~enough)} perturbations left out: a single well ({first_few(names[~enough])})")
    return _judged(table, "consistent", threshold, max(map(len, nulls)), dropped, notes)


def magnitude(
    adata: ad.AnnData,
    *,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    min_wells: int = MIN_WELLS,
    max_wells: int = MAX_WELLS,
    n_permutations: int = 1000,
    threshold: float = 0.05,
    random_state: int = 0,
) -> pd.DataFrame:
    """How far is each perturbation from controls, by energy distance?

    Parameters
    ----------
    label_key, controls, use_rep
        As in `replicate_retrieval`.
    min_wells, max_wells
        Perturbations with fewer wells are left out. Of more controls, or more wells of a perturbation, a random sample of
        ``max_wells`` is taken.
    n_permutations, random_state
        Permuted labels, well against control, behind a p-value, and the seed of these and of the samples.
    threshold
        Adjusted p below which a perturbation is distinct.

    Returns
    -------
    One row a perturbation, index its name: ``energy_distance``, the V-statistic of the public implementation, which grows as wells
    get fewer; ``energy_distance_unbiased``, the U-statistic, 0 by chance (``maps.energy_distance``; higher is further from
    controls); ``n_wells``, ``p`` (of the latter), ``p_adjusted`` (Benjamini and Hochberg) and ``distinct``. ``attrs["notes"]`` says what was
    left out. In profiles with a batch effect, perturbations of few batches differ from controls of all of them by that.

    Raises
    ------
    InputError
        There are fewer than 2 controls, or no perturbation has enough wells.

    Notes
    -----
    Energy distance 2 E|x - y| - E|x - x'| - E|y - y'| of wells x and controls y: the V-statistic takes all pairs, the unbiased one those of two
    wells. Higher is further, in units of the representation. Chance: 0 for the unbiased one. Source: Szekely and Rizzo, 2013; Celik et al., 2024 (EFAAR).
    """
    treated, control = treated_mask(adata.obs, controls, label_key), control_mask(adata.obs, controls, label_key)
    x, kept, dropped, notes = scorable(adata, treated | control, [label_key], use_rep)
    by_name = np.argsort(adata.obs_names.to_numpy(dtype=str), kind="stable")  # the order of rows decides no draw
    compared = by_name[(kept & control)[by_name]]
    if len(compared) < 2:
        raise InputError(
            f"magnitude needs 2 negative controls and found {len(compared)}: mark them, or name them (controls=)"
        )
    rng = np.random.default_rng(random_state)
    if len(compared) > max_wells:
        notes.append(f"{max_wells} of {len(compared)} controls sampled (random_state {random_state})")
        compared = rng.choice(compared, max_wells, replace=False)
    rows = by_name[(kept & treated)[by_name]]
    names, code, n_wells = np.unique(
        labels(adata.obs, label_key)[rows].astype(str), return_inverse=True, return_counts=True
    )
    groups = np.split(rows[np.argsort(code, kind="stable")], np.cumsum(n_wells)[:-1])
    enough = n_wells >= max(min_wells, 2)
    if not enough.any():
        raise InputError(
            f"not applicable: none of {len(names)} perturbations has {min_wells} wells that can be scored: lower min_wells"
        )
    if not enough.all():
        notes.append(
            f"{np.count_nonzero(~enough)} perturbations left out: under {min_wells} wells ({first_few(names[~enough])})"
        )
    if (n_wells > max_wells).any():
        notes.append(f"{max_wells} wells sampled of each of {first_few(names[n_wells > max_wells])}")
    taken = [rng.choice(one, max_wells, replace=False) if len(one) > max_wells else one for one in groups]
    found = maps.energy_distance(
        x,
        [one for one, some in zip(taken, enough) if some],
        compared,
        n_permutations=n_permutations,
        random_state=random_state,
    )
    columns = {
        "energy_distance": found.biased,
        "energy_distance_unbiased": found.unbiased,
        "n_wells": n_wells[enough],
        "p": found.p,
    }
    table = pd.DataFrame(columns, index=pd.Index(names[enough], name=label_key, dtype=object))
    return _judged(table, "distinct", threshold, n_permutations, dropped, notes)


def replicate_scores(
    adata: ad.AnnData,
    *,
    null: Sequence[str] | None = None,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    null_size: int = 1000,
    n_permutations: int = 1000,
    threshold: float = 0.05,
    random_state: int = 0,
) -> pd.DataFrame:
    """`replicate_consistency` and `magnitude` as scores. Keywords are theirs.

    Returns
    -------
    Score table, higher is better, queries and units are perturbations: ``replicate_cosine``, the mean of ``mean_cosine``, chance the
    mean of the null; ``consistent_share``, the share with p, unadjusted, of at most the threshold, chance the share of p-values
    there without any effect; ``magnitude``, the mean unbiased energy distance, chance 0; ``distinct_share``, likewise. Notes say
    how many pass after Benjamini and Hochberg.
    """
    keys: dict[str, Any] = {"label_key": label_key, "controls": controls, "use_rep": use_rep, "threshold": threshold}
    keys["random_state"] = random_state
    lost = scorable(adata, np.ones(adata.n_obs, dtype=bool), [label_key], use_rep)[2]
    rows, details = [], {}
    for metric, share, column, verdict, measure in (
        ("replicate_cosine", "consistent_share", "mean_cosine", "consistent",
         lambda: replicate_consistency(adata, null=null, batch_key=batch_key, null_size=null_size, **keys)),
        ("magnitude", "distinct_share", "energy_distance_unbiased", "distinct",
         lambda: magnitude(adata, n_permutations=n_permutations, **keys)),
    ):  # fmt: skip
        try:
            table = measure()
        except InputError as error:
            rows += [absent_row(use_rep or "X", name, error, lost) for name in (metric, share)]
            continue
        details["replicate_consistency" if metric == "replicate_cosine" else metric] = Detail(table)
        dropped, size, notes = table.attrs["n_dropped"], table.attrs["null_size"], table.attrs["notes"]
        table = table[table["p"].notna()]
        unit = table.index.to_numpy(dtype=str)
        passed = (table["p"] <= threshold).to_numpy(dtype=float)
        said = [
            "queries are perturbations",
            "in units of this representation: not to be compared with others" if metric == "magnitude" else "",
            f"{table[verdict].sum()} of {len(table)} are {verdict} after Benjamini and Hochberg",
            *notes,
        ]
        by_chance = float(table["chance"].mean()) if "chance" in table else 0.0
        value = table[column].to_numpy()
        rows.append(score_row(use_rep, metric, value.mean(), by_chance, len(table), dropped, said, of=(value, unit)))
        by_chance = np.floor(threshold * (1 + size)) / (1 + size)
        rows.append(score_row(use_rep, share, passed.mean(), by_chance, len(table), dropped, said, of=(passed, unit)))
    scores = score_table(rows)
    scores.attrs[DETAILS] = details
    return scores


def _null_perturbations(names: np.ndarray, n_wells: np.ndarray, null: Sequence[str]) -> np.ndarray:
    """Which perturbations are the null, all of them there and with replicates."""
    usable = set(names[n_wells > 1].tolist())
    absent = sorted({str(name) for name in null} - usable)
    if absent or not len(null):
        raise InputError(
            f"null perturbations {first_few(absent)} are not there with 2 wells each; there are {first_few(sorted(usable), 10)}"
        )
    return np.isin(names, [str(name) for name in null])


def _control_nulls(
    adata: ad.AnnData,
    x: np.ndarray,
    control: np.ndarray,
    rows: np.ndarray,
    code: np.ndarray,
    enough: np.ndarray,
    batch_key: str,
    null_size: int,
    random_state: int,
) -> tuple[list[np.ndarray], list[str]]:
    """Mean cosines among drawn controls for each perturbation, by its numbers of wells in each batch; and what was said."""
    by_name = np.argsort(adata.obs_names.to_numpy(dtype=str), kind="stable")  # the order of rows decides no draw
    at = by_name[control[by_name]]
    units, batch = metrics.unit_rows(x[at]), label_codes(labels(adata.obs, batch_key))
    pools = {int(b): np.flatnonzero(batch[at] == b) for b in np.unique(batch[at])}
    nulls, drawn, lacking = [], {}, 0
    for i in range(len(enough)):
        if not enough[i]:
            nulls.append(np.empty(0))
            continue
        batches, counts = np.unique(batch[rows[code == i]], return_counts=True)
        key = tuple(zip(batches.tolist(), counts.tolist()))
        if any(len(pools.get(b, ())) < n for b, n in key):  # controls of all batches, so that none is drawn twice
            lacking += 1
            key = ((-1, min(int(counts.sum()), len(at))),)
        if key not in drawn:
            rng = np.random.default_rng([random_state, *(number + 1 for pair in key for number in pair)])
            from_pools = [pools[b] if b >= 0 else np.arange(len(at)) for b, _ in key]
            drawn[key] = maps.drawn_mean_cosine(units, from_pools, [n for _, n in key], null_size, rng)
        nulls.append(drawn[key])
    note = f"{lacking} perturbations have more wells in a batch than it has controls: drawn from all controls"
    return nulls, [note] if lacking else []


def _judged(
    table: pd.DataFrame, verdict: str, threshold: float, null_size: int, n_dropped: int, notes: Sequence[str]
) -> pd.DataFrame:
    tested = table["p"].notna().to_numpy()
    table["p_adjusted"] = np.nan
    if tested.any():
        table.loc[tested, "p_adjusted"] = false_discovery_control(table.loc[tested, "p"])
    table[verdict] = table["p_adjusted"] < threshold
    said = list(notes)
    if tested.any() and not table[verdict].any():
        said.append(
            f"none is {verdict}; the smallest p among {tested.sum()} is {table['p'].min():.4g} ({1 / (1 + null_size):.2g} can be reached)"
        )
    table.attrs.update(notes=said, n_dropped=n_dropped, null_size=null_size)
    return table
