"""Score tables: one row a score, with chance, interval and what was left out; and what a reader of the values must mind.

Columns are ``schema.SCORE_COLUMNS`` (the representation, the metric, the group of queries, value and chance level, the
number of queries, the wells left out, and a note that gives the reasons) and ``schema.INTERVAL_COLUMNS``: the 95 % interval by
bootstrap over ``n_units`` independent units (perturbations, compounds, genes, batches), never over wells. What does not
apply is a row without a value whose note says why.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import anndata as ad
import numpy as np
import pandas as pd

from cellica import metrics
from cellica.glossary import metric_of
from cellica.metrics import Pairs, label_codes
from cellica.schema import INTERVAL_COLUMNS, SCORE_COLUMNS, InputError, first_few, labels

CIRCULAR, CONFOUNDING, ONE_CLASS = "circular:", "confounding:", "one class:"  # begin notes that a reader must mind
DOSES = "groups:"  # begins the note that perturbations were taken for groups
BASELINE, POSITION = "baseline:", "baseline:position"
LEAST_FALL = 0.02  # of the share of batch, to speak of over-correction
AGAINST = "reference"  # in a table's attrs: the representation over which gains are
PER_QUERY = "per_query"  # in a table's attrs: what `compare` pairs
DETAILS = "details"  # in a table's attrs: the tables that its rows sum up
GAIN = ("gain", "gain_low", "gain_high")
OVER_BATCHES = "over batches"  # group of rows that repeat a score with its interval over batches
REFERENCE = "none"  # the method over which `compare` gives gains


@dataclass(frozen=True, eq=False)
class Detail:
    """A table that scores sum up. Two are never equal: pandas compares attrs."""

    table: pd.DataFrame


@dataclass(frozen=True, eq=False)
class PerQuery:
    """Score, independent unit and class of each query, index their obs names. Two are never equal: pandas compares attrs."""

    value: pd.Series
    unit: np.ndarray
    group: np.ndarray | None = None


def embedding_of(adata: ad.AnnData, use_rep: str | None) -> np.ndarray:
    """Representation ``use_rep`` (a key of obsm, None or ``"X"`` for X) as a dense array (wells x features).

    Raises
    ------
    InputError
        It is not there, or has no features.
    """
    if use_rep not in (None, "X") and use_rep not in adata.obsm:
        raise InputError(f"representation {use_rep!r} is not in obsm: use X{''.join(f', {key}' for key in adata.obsm)}")
    x = adata.X if use_rep in (None, "X") else adata.obsm[use_rep]
    if x is None:
        raise InputError("adata has no X: name a key of obsm")
    x = np.asarray(x.todense() if hasattr(x, "todense") else x)
    if not x.shape[1]:
        raise InputError(f"representation {use_rep or 'X'!r} has no features")
    return x


def column_pairs(
    obs: pd.DataFrame, same: Sequence[str], diff: Sequence[str], within: Iterable[np.ndarray] = ()
) -> Pairs:
    """Pairs that share the columns ``same`` (and codes ``within``) and differ in the columns ``diff``."""
    codes = {key: label_codes(labels(obs, key)) for key in dict.fromkeys([*same, *diff])}
    return Pairs([*(codes[key] for key in same), *within], [codes[key] for key in dict.fromkeys(diff)])


def joint_codes(obs: pd.DataFrame, keys: Sequence[str]) -> np.ndarray:
    """One integer code for each combination of the columns' values."""
    codes = np.column_stack([label_codes(labels(obs, key)) for key in keys])
    return np.unique(codes, axis=0, return_inverse=True)[1].ravel()


def scorable(
    adata: ad.AnnData, role: np.ndarray, needed: Sequence[str], use_rep: str | None
) -> tuple[np.ndarray, np.ndarray, int, list[str]]:
    """Representation, the wells of a role that can be scored, how many cannot, and why."""
    x = embedding_of(adata, use_rep)
    kept, notes = role.copy(), []
    missing = {f"without {key}": label_codes(labels(adata.obs, key)) < 0 for key in dict.fromkeys(needed)}
    for reason, bad in {**missing, "all-zero, constant or not finite": ~metrics.usable_rows(x)}.items():
        if (bad & kept).any():
            notes.append(f"{np.count_nonzero(bad & kept)} wells left out: {reason}")
        kept &= ~bad
    return x, kept, int(np.count_nonzero(role & ~kept)), notes


def mean_profiles(
    adata: ad.AnnData, wells: np.ndarray, keys: Sequence[str], use_rep: str | None
) -> tuple[np.ndarray, pd.DataFrame, int, list[str]]:
    """Mean profile of each combination of the columns' values among a role's wells: a map, in order of the values.

    Returns
    -------
    Profiles (n x d, float64, all usable), one row of ``keys`` and ``n_wells`` for each, the wells left out, and why.
    """
    x, kept, dropped, notes = scorable(adata, wells, keys, use_rep)
    values = pd.DataFrame({key: labels(adata.obs[kept], key) for key in keys})
    codes = np.column_stack([label_codes(values[key].to_numpy()) for key in keys])
    _, first, code = np.unique(codes, axis=0, return_index=True, return_inverse=True)
    table = values.iloc[first].reset_index(drop=True)
    profiles = metrics.group_means(x[kept], code.ravel()) if len(table) else x[:0].astype(np.float64)
    usable = metrics.usable_rows(profiles) if len(table) else np.zeros(0, dtype=bool)
    if not usable.all():
        lost = [" ".join(name) for name in table[~usable].to_numpy()]
        notes.append(f"{len(lost)} mean profiles left out as they are all-zero or constant: {first_few(lost)}")
    table["n_wells"] = np.bincount(code.ravel(), minlength=len(table))
    return profiles[usable], table[usable].reset_index(drop=True), dropped, notes


def spelling_hint(mine: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """A note where names of two lists that did not match differ in case or spaces alone; empty where none do."""
    plain = {"".join(name.split()).casefold(): name for name in mine}
    alike = [(plain[key], name) for name in theirs if (key := "".join(name.split()).casefold()) in plain]
    examples = first_few((f"{a} and {b}" for a, b in alike), 3)
    return (
        [f"{len(alike)} names differ in case or spaces alone ({examples}): write them alike to match them"]
        if alike
        else []
    )


def unscored(n: int | np.integer, what: str) -> str:
    """A note that n queries could not be scored; empty where n is 0."""
    return f"{n} {what} without a positive or negative are not scored" if n else ""


def mean_of(values: np.ndarray) -> float:
    """Mean of the known values, NaN where there is none."""
    return float(np.nanmean(values)) if not np.isnan(values).all() else np.nan


def join_notes(notes: Iterable[str]) -> str:
    """Notes as one text; empty ones are left out."""
    return "; ".join(note for note in notes if note)


def score_row(
    rep: str | None,
    metric: str,
    value: float,
    chance: float,
    n_queries: int | np.integer,
    n_dropped: int,
    notes: Iterable[str],
    group: str = "all",
    of: tuple[np.ndarray, np.ndarray] | None = None,
    interval: tuple[float, float, int] | None = None,
) -> tuple:
    """A row of a score table; ``of``: value and independent unit of each query, for the interval, or ``interval`` itself."""
    low, high = metrics.cluster_interval(*of) if of and len(of[0]) else (np.nan, np.nan)
    low, high, n_units = interval or (low, high, len(set(of[1])) if of else 0)
    known = rep or "X", metric, group, float(value), float(chance), int(n_queries), int(n_dropped), join_notes(notes)
    return (*known, low, high, n_units)


def absent_row(rep: str, metric: str, reason: Exception, n_dropped: int = 0) -> tuple:
    """A row without a value that says why."""
    return score_row(rep, metric, np.nan, np.nan, 0, n_dropped, [str(reason)])


def attempt(rep: str, metric: str, score: Callable[[], pd.DataFrame], n_dropped: int = 0) -> pd.DataFrame:
    """A score, or where its input does not allow it a row that says why, and how many wells cannot be scored at all."""
    try:
        return score()
    except InputError as error:
        return score_table([absent_row(rep, metric, error, n_dropped)])


def score_table(rows: Sequence[tuple]) -> pd.DataFrame:
    """Rows of `score_row` as a table."""
    types = {"value": float, "chance": float, "n_queries": int, "n_dropped": int, "low": float, "high": float}
    return pd.DataFrame(rows, columns=[*SCORE_COLUMNS, *INTERVAL_COLUMNS]).astype({**types, "n_units": int})


def method_of(adata: ad.AnnData, use_rep: str | None) -> str:
    """Name of the method or chain that wrote a representation, as recorded or by its key."""
    key = str(use_rep or "").removeprefix("X_")
    record = adata.uns.get("cellica", {}).get(key, {})
    return str(record.get("method", key)) if isinstance(record, Mapping) else key


def gains(scores: pd.DataFrame) -> pd.DataFrame:
    """Gains over uncorrected profiles of a table of `compare`, as text: a row a representation, a column a metric."""
    known = scores[scores["gain"].notna() & (scores["group"] == "all")]
    text = [f"{gain:+.3f} ({low:+.3f} to {high:+.3f})" for gain, low, high in known[list(GAIN)].itertuples(index=False)]
    wide = known.assign(gain=text).pivot_table("gain", "rep", "metric", aggfunc="first", sort=False)
    return wide.reindex(known["rep"].unique())


def cautions(scores: pd.DataFrame) -> list[str]:
    """What a reader of the bare values must know: confounding, circular scores, gains that rest on one class, batch effects that one
    measure misses, over-correction, what well position alone reaches, and why a score is not there.

    One text a cause, with the representations it holds for where that is not all of them.
    """
    causes: dict[str, list[str]] = {}
    of_design: dict[str, None] = {}
    for rep, metric, value, note in scores[["rep", "metric", "value", "note"]].itertuples(index=False):
        parts = str(note).split("; ")
        if np.isnan(value):
            why = next((part for part in parts if part.startswith("not applicable")), parts[0])
            causes.setdefault(why if metric == "all" else f"{metric}: {why}", []).append(rep)
        for part in parts:
            if part.startswith((CIRCULAR, ONE_CLASS, DOSES)):
                causes.setdefault(part, []).append(rep)
            elif part.startswith(CONFOUNDING):
                of_design.setdefault(part)
    n_reps = scores.loc[scores["metric"] != "all", "rep"].nunique()
    unique = {cause: list(dict.fromkeys(reps)) for cause, reps in causes.items()}
    found = [cause if len(reps) == n_reps else f"{', '.join(reps)}: {cause}" for cause, reps in unique.items()]
    return [*of_design, *found, *_not_beaten(scores), *_still_there(scores), *_over_corrected(scores)]


def _not_beaten(scores: pd.DataFrame) -> list[str]:
    """Retrievals in which well position alone does as well as a representation."""
    whole = scores[scores["group"] == "all"]
    value, found = whole.pivot_table("value", "rep", "metric", sort=False), []
    for metric in ("replicate_map", "class_map", "activity_map"):
        values = value[metric].astype(float).to_dict() if metric in value else {}
        alone = values.get(POSITION, np.nan)
        at = [str(rep) for rep, one in values.items() if not str(rep).startswith(BASELINE) and one <= alone]
        if at:
            found.append(f"{metric}: well position alone gives {alone:.3f}, and no more is in {', '.join(at)}")
    return found


def _still_there(scores: pd.DataFrame) -> list[str]:
    """Representations without a share of batch from which a linear probe still names batches."""
    if "low" not in scores:
        return []
    whole = scores[scores["group"] == "all"].set_index("rep")
    share = whole.loc[whole["metric"] == "batch_share", "value"].astype(float).to_dict()
    probe = whole.loc[whole["metric"] == "batch_probe", ["value", "low", "chance"]].astype(float)
    return [
        f"{rep}: next to no share of batch ({share[rep]:.3f}), but a linear probe still names the batch of {value:.0%} of controls "
        f"(chance {chance:.0%})"
        for rep, (value, low, chance) in zip(map(str, probe.index), probe.to_numpy())
        if share.get(rep, np.nan) < 0.05 and low > chance + 0.2
    ]


def _over_corrected(scores: pd.DataFrame) -> list[str]:
    """Methods by which there is clearly less batch effect, and less is found than without correction beyond the interval.

    The share must fall by .02, weighted by variance too, and no score may rise beyond its interval.
    """
    if GAIN[-1] not in scores:
        return []
    whole = scores[scores["group"] == "all"]
    shares = {
        name: whole[whole["metric"] == name].set_index("rep")["value"].astype(float).to_dict()
        for name in ("batch_share", "batch_share_weighted")
    }
    found, against = [], str(scores.attrs.get(AGAINST, f"X_{REFERENCE}"))
    words = [metric_of(name) for name in whole["metric"]]
    better = np.array([one is not None and one.better == "higher" for one in words], dtype=bool)
    for rep, rows in whole[better & whole["rep"].str.startswith("X_").to_numpy()].groupby("rep", sort=False):
        before, after = ([of.get(name, np.nan) for of in shares.values()] for name in (against, str(rep)))
        worse = rows[rows[GAIN[-1]] < 0]
        if len(worse) and (np.subtract(before, after) >= LEAST_FALL).all() and not (rows[GAIN[1]] > 0).any():
            texts = [
                f"{m} ({g:+.3f}, {low:+.3f} to {high:+.3f})" for m, g, low, high in worse[["metric", *GAIN]].to_numpy()
            ]
            found.append(
                f"{rep}: over-corrected: the share of batch falls from {before[0]:.3f} to {after[0]:.3f}, and so does "
                + " and ".join(texts)
            )
    return found


def chances(scores: pd.DataFrame) -> dict[str, str]:
    """Chance of each column of `summary`, as text: a range where it differs between representations."""
    by_rep = summary(scores.assign(value=scores["chance"].where(scores["value"].notna())))
    ends = {str(name): (column.min(), column.max()) for name, column in by_rep.astype(float).items()}
    return {
        name: "-" if np.isnan(low) else f"{low:.3f}" if high - low < 0.01 else f"{low:.3f} to {high:.3f}"
        for name, (low, high) in ends.items()
    }


def summary(scores: pd.DataFrame, *, chance: bool = False) -> pd.DataFrame:
    """Values of a score table for printing: a row a representation, a column a metric (and group, but ``over batches``).

    With ``chance`` a last row holds the mean chance of each column; `chances` tells where it differs.

    >>> summary(score_table([score_row("X", "nsc", 0.5, 0.1, 9, 0, []), score_row("X", "recall", 0.2, 0.1, 9, 0, [], group="CORUM")]))
    metric  nsc  recall CORUM
    rep
    X       0.5           0.2
    """
    scores = scores[scores["group"] != OVER_BATCHES]
    metric = scores["metric"].where(scores["group"] == "all", scores["metric"] + " " + scores["group"])
    wide = scores.assign(metric=metric).pivot_table("value", "rep", "metric", dropna=False, sort=False)
    columns = [name for name in dict.fromkeys(metric) if name != "all"]
    wide = wide.reindex(index=list(dict.fromkeys(scores["rep"])), columns=pd.Index(columns, name="metric"))
    if chance:
        wide.loc["chance"] = summary(scores.assign(value=scores["chance"])).mean()
    return wide
