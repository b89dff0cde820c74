"""Parameters chosen honestly: by replicates in batches that were left out, never by controls alone, never by the reported score.

Tuning on controls is minimised by dropping everything; so where no perturbation lies in several batches, nothing is tuned.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from cellica.heldout import OWN, Task, left_out
from cellica.methods import FITS, ON_LABELS, options_of, parse
from cellica.metrics import Pairs, label_codes
from cellica.roles import Roles
from cellica.schema import InputError, first_few

RIDGES = (0.001, 0.01, 0.1, 1.0)
MAX_BATCHES, MAX_QUERIES = 6, 1000  # batches left out in turn, and queries in each
N_BOOTSTRAPS = 2000
FEWEST = 8  # perturbations below which no interval is believed
PLAIN = ("center+sphere", "sphere", "wccn")


def leave_one_batch_out(
    x: np.ndarray, roles: Roles, method: str, ridges: Sequence[float], options: Mapping[str, Any], random_state: int
) -> pd.DataFrame:
    """Average precision of replicates in batches left out of the fit.

    Each of at most 6 batches is left out in turn, the chain is fitted to the others, and the treated wells of the batch
    left out are ranked against those of the others in their stratum. Where a method sees labels of anchors, those of the
    perturbations that are scored are hidden from it: half of them at a time. Where perturbations change their well,
    replicates in the same well do not count.

    Returns
    -------
    One row for each ridge, batch and perturbation: ``ridge`` (NaN where the chain has none), ``batch``,
    ``perturbation``, ``value`` (mean over its queries).

    Raises
    ------
    InputError
        No perturbation has treated wells in several batches, or the chain cannot be fitted without any of the batches.
    """
    diff = [label_codes(roles.well)] if roles.well is not None and _moves(roles, roles.well) else []
    label, stratum, batch = label_codes(roles.label), label_codes(roles.strata), label_codes(roles.batch)
    task = Task(Pairs([label, stratum], [batch, *diff]), Pairs([stratum], [label, batch]), roles.treated)
    names = crossing_batches(roles)
    if len(names) > MAX_BATCHES:
        names = sorted(np.random.default_rng(random_state).choice(names, MAX_BATCHES, replace=False))
    found = left_out(
        x,
        roles,
        method,
        {"replicates": task},
        [[name] for name in names],
        ridges=ridges,
        options=options,
        max_queries=MAX_QUERIES,
        random_state=random_state,
    )
    found["perturbation"] = roles.label[found["row"]].astype(str)
    by = ["ridge", "batch", "perturbation"]
    return found.groupby(by, dropna=False, sort=False)["value"].mean().reset_index()


def crossing_batches(roles: Roles) -> list[str]:
    """Batches with treated wells of perturbations that other batches of their stratum hold.

    Raises
    ------
    InputError
        There are none.
    """
    wells = pd.DataFrame({"cell": roles.cells, "batch": roles.batch.astype(str)})[roles.treated].drop_duplicates()
    shared = wells[wells.groupby("cell")["batch"].transform("size") > 1]
    if not len(shared):
        raise InputError("no perturbation has treated wells in several batches of its stratum")
    return sorted(shared["batch"].unique())


def _moves(roles: Roles, well: np.ndarray) -> bool:
    """Most perturbations with several treated wells have them in several positions."""
    wells = pd.DataFrame({"label": roles.label, "well": well})[roles.treated].dropna()
    counts = wells.groupby("label")["well"].agg(["size", "nunique"])
    counts = counts[counts["size"] > 1]
    return bool(len(counts) and (counts["nunique"] > 1).mean() > 0.5)


def paired_interval(difference: np.ndarray, random_state: int = 0, level: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the mean of paired differences (n,), one an independent unit such as a perturbation."""
    rng = np.random.default_rng(random_state)
    means = [difference[rng.integers(0, len(difference), len(difference))].mean() for _ in range(N_BOOTSTRAPS)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


# ----------------------------------------------------------------------------------------------------- one method


@dataclass(frozen=True)
class Choice:
    """A ridge chosen, or the default kept (``ridge`` is None), why, and the trials: one row a ridge."""

    ridge: float | None
    sentence: str
    trials: pd.DataFrame


def choose_ridge(x: np.ndarray, roles: Roles, method: str, options: Mapping[str, Any], random_state: int) -> Choice:
    """Ridge of a chain by `leave_one_batch_out`; the default where no other one is better beyond its paired interval.

    The interval is wider than one of 95 %, as the best of several ridges is looked at (Bonferroni), and with fewer than 8
    perturbations the default is kept.

    Raises
    ------
    InputError
        The chain has no ridge, or one that is given.
    """
    defaults = [
        inspect.signature(FITS[name]).parameters["ridge"].default
        for name in parse(method)
        if "ridge" in options_of(FITS[name])
    ]
    if not defaults or "ridge" in options:
        raise InputError(
            f"there is nothing to tune: {method} has no ridge"
            if not defaults
            else "tune chooses the ridge: leave ridge out"
        )
    default = defaults[-1] if len(set(defaults)) == 1 else OWN
    ridges = sorted({*RIDGES, default})
    try:
        trials = leave_one_batch_out(x, roles, method, ridges, {**options, "check_stability": False}, random_state)
    except InputError as error:
        return Choice(None, f"tune: {_default(default)} is kept: {error}", pd.DataFrame())
    table = per_ridge(trials)
    values = trials.pivot_table("value", "perturbation", "ridge")
    best = _best(trials)
    level = 1 - 0.05 / (len(ridges) - 1)
    low, high = paired_interval((values[best] - values[default]).to_numpy(), random_state, level)
    chosen = best if low > 0 and len(values) >= FEWEST else default
    table["low"], table["high"] = (
        np.where(table["ridge"] == best, low, np.nan),
        np.where(table["ridge"] == best, high, np.nan),
    )
    table["chosen"] = table["ridge"] == chosen
    gain = f"{values[best].mean():.3f} against {values[default].mean():.3f}, difference {low:+.3f} to {high:+.3f}"
    extent = f"{len(values)} perturbations, {trials['batch'].nunique()} batches left out in turn"
    kept = _default(default)
    if chosen != default:
        text = f"tune: ridge {chosen:g} chosen in place of {kept} ({gain}; {extent})"
    elif best == default:
        text = f"tune: {kept} is the best of {len(table)} ({extent})"
    elif len(values) < FEWEST:
        text = f"tune: {kept} is kept; {len(values)} perturbations are too few to choose by, {FEWEST} are needed"
    else:
        text = f"tune: {kept} is kept; {best:g} is no better beyond its interval ({gain}; {extent})"
    table["ridge"] = table["ridge"].where(table["ridge"] != OWN)
    return Choice(None if chosen == default else chosen, text, table)


def _default(ridge: float) -> str:
    return "each method's own default ridge" if ridge == OWN else f"the default ridge of {ridge:g}"


def per_ridge(trials: pd.DataFrame) -> pd.DataFrame:
    """Mean average precision over perturbations, one row a ridge."""
    grouped = trials.groupby(["ridge", "perturbation"])["value"].mean().groupby("ridge")
    table = grouped.agg(["mean", "size"]).reset_index()
    table.columns = pd.Index(["ridge", "value", "n_perturbations"], dtype=object)
    return table


# --------------------------------------------------------------------------------------------------- which method


@dataclass(frozen=True)
class Recommendation:
    """Which chain to use, and why.

    Attributes
    ----------
    method, ridge
        The chain, and its ridge (None: the default).
    table
        One row a chain: ``method``, ``value`` (mean average precision of replicates in batches left out, over
        perturbations; the ridge of each batch is chosen on the others), ``ridge`` (best over all), ``n_perturbations``,
        ``n_batches``, and ``difference`` from the best plain chain with its paired 95 % interval ``low`` to ``high``;
        ``note`` where a chain could not be tried.
    sentences
        The same in words.
    """

    method: str
    ridge: float | None
    table: pd.DataFrame
    sentences: tuple[str, ...]


def recommend(
    x: np.ndarray, roles: Roles, methods: Sequence[str], options: Mapping[str, Any], random_state: int
) -> Recommendation:
    """Compare chains by `leave_one_batch_out`; a plain one is recommended where no advantage over it is established."""
    scores, ridges, rows = {}, {}, []
    for method in methods:
        row: dict[str, Any] = {"method": method, "note": ""}
        try:
            trials = leave_one_batch_out(x, roles, method, RIDGES, {**options, "check_stability": False}, random_state)
            scores[method] = _crossfitted(trials)
            ridges[method] = None if trials["ridge"].isna().all() else _best(trials)
            row |= {"ridge": ridges[method], "n_batches": trials["batch"].nunique()}
        except InputError as error:
            row["note"] = str(error)
        rows.append(row)
    table = pd.DataFrame(rows)
    plain = [method for method in scores if method in PLAIN or not _has_ica(method)]
    if not plain:
        chosen = "center+sphere" if roles.control.sum() > 1 else "wccn" if roles.anchor.sum() > 1 else "none"
        why = "; ".join(dict.fromkeys(table["note"])) or "no plain chain was among the methods"
        text = f"no comparison is possible ({why}): {chosen} is the plain choice, and an advantage of ICA is not established"
        return Recommendation(chosen, None, table, (text,))
    best = max(plain, key=lambda method: scores[method].mean())
    for i, method in enumerate(table["method"]):
        if method in scores:
            both = pd.concat([scores[method], scores[best]], axis=1, join="inner").dropna().to_numpy()
            low, high = paired_interval(both[:, 0] - both[:, 1], random_state)
            entry = {"value": scores[method].mean(), "n_perturbations": len(both)}
            entry |= {"difference": float(np.mean(both[:, 0] - both[:, 1])), "low": low, "high": high}
            table.loc[i, list(entry)] = list(entry.values())
    enough = table["n_perturbations"] >= FEWEST
    established = table[(table["low"] > 0) & enough & ~table["method"].isin(plain)]
    chosen = max(established["method"], key=lambda method: scores[method].mean(), default=best)
    return Recommendation(chosen, ridges[chosen], table, tuple(_reasons(table, best, chosen, plain)))


def _reasons(table: pd.DataFrame, best: str, chosen: str, plain: Sequence[str]) -> list[str]:
    values = ", ".join(f"{m} {v:.3f}" for m, v in zip(table["method"], table["value"]) if np.isfinite(v))
    found = [f"mean average precision of replicates in batches left out: {values}"]
    for row in table[~table["method"].isin(plain) & np.isfinite(table["value"])].itertuples():
        few = "" if row.n_perturbations >= FEWEST else f", {FEWEST} are needed"
        verdict = "is established" if row.low > 0 and not few else "is not established"
        found.append(
            f"{row.method}'s advantage over {best} {verdict}: {row.difference:+.3f}, 95 % interval {row.low:+.3f} to {row.high:+.3f} "
            f"over {int(row.n_perturbations)} perturbations{few}"
        )
    if ON_LABELS & {step for method in table["method"] for step in parse(method)}:
        found.append("labels of the perturbations that are scored were hidden from fits on anchors")
    untried = table[table["note"] != ""]
    if len(untried):
        found.append(f"not tried: {first_few([f'{m} ({n})' for m, n in zip(untried['method'], untried['note'])])}")
    return [*found, f"recommended: {chosen}"]


def _has_ica(method: str) -> bool:
    return any(step in ("ica_drop", "ica_shrink") for step in parse(method))


def _best(trials: pd.DataFrame) -> float:
    table = per_ridge(trials)
    return float(table["ridge"].to_numpy()[table["value"].to_numpy().argmax()])


def _crossfitted(trials: pd.DataFrame) -> pd.Series:
    """Score of each perturbation, the ridge of each batch chosen on the other batches."""
    if trials["ridge"].isna().all():
        return trials.groupby("perturbation")["value"].mean()
    parts = []
    for name, own in trials.groupby("batch"):
        others = trials[trials["batch"] != name]
        parts.append(own[own["ridge"] == _best(others if len(others) else own)])
    return pd.concat(parts).groupby("perturbation")["value"].mean()
