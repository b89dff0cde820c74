"""Figures of score tables."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from cellica.drawing import COLORS, GREY, MARKERS, axes_of, ink, legend, plain, shortened
from cellica.schema import SCORE_COLUMNS, InputError, require_columns
from cellica.scores import BASELINE, GAIN, OVER_BATCHES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOT_APPLICABLE = "not applicable"


def scores(scores: pd.DataFrame, *, metric: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """Bars of one metric, one a representation, each with its 95 % interval and its chance level.

    Parameters
    ----------
    scores
        Score table (``schema.SCORE_COLUMNS``).
    metric
        Which metric, by default the first that has a value. Groups of a metric (``CORUM``, ...) have bars of their own.

    Returns
    -------
    Axes, first row of the table on top. Baselines (``baseline:...``) come last, apart and hatched; a value that is
    missing is written as "not applicable".

    Raises
    ------
    InputError
        The table has no such metric, or lacks columns.
    """
    require_columns(scores, SCORE_COLUMNS, "the score table")
    known = list(dict.fromkeys(scores["metric"]))
    valued = list(dict.fromkeys(scores.loc[scores["value"].notna(), "metric"]))
    metric = metric or next(iter([*valued, *known]), "")
    if metric not in known:
        raise InputError(f"metric {metric!r} is not in the score table; it has {', '.join(map(str, known)) or 'none'}")
    rows = scores[(scores["metric"] == metric) & (scores["group"] != OVER_BATCHES)]
    baseline = rows["rep"].str.startswith(BASELINE).to_numpy()
    rows = pd.concat([rows[~baseline], rows[baseline]])
    at = np.arange(len(rows)) + 0.6 * np.sort(baseline)
    names = [rep if group == "all" else f"{rep}, {group}" for rep, group in zip(rows["rep"], rows["group"])]
    value, chance = (rows[column].to_numpy(dtype=float) for column in ("value", "chance"))

    ax = axes_of(ax, (5.2, 0.9 + 0.26 * len(rows)))
    colors = np.where(np.sort(baseline), GREY, COLORS[0])
    bars = ax.barh(at, np.nan_to_num(value), height=0.7, color=colors)
    for bar, apart in zip(bars, np.sort(baseline)):
        bar.set_hatch("///" if apart else "")
    if {"low", "high"} <= set(rows):
        low, high = (rows[column].to_numpy(dtype=float) for column in ("low", "high"))
        ax.hlines(at, low, high, color=ink(), linewidth=1)
    ax.vlines(chance, at - 0.45, at + 0.45, color=COLORS[1], linewidth=2, label="chance")
    ends = np.fmax(np.fmax(value, chance), 0)
    if "high" in rows:
        ends = np.fmax(ends, rows["high"].to_numpy(dtype=float))
    for y, v, beside in zip(at, value, ends):
        text = NOT_APPLICABLE if np.isnan(v) else f"{v:.3g}"
        ax.annotate(text, (beside, y), (5, 0), textcoords="offset points", va="center", fontsize="small")
    ax.set_yticks(at, [plain(shortened(name, 32)) for name in names])
    ax.axvline(0, color=ink(), linewidth=0.8)
    ax.margins(x=0.2)
    ax.invert_yaxis()
    ax.set(title=plain(metric), xlabel="value (upright mark: chance)")
    return ax


def tradeoff(scores: pd.DataFrame, *, metric: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """Batch effect left against what is found: up is better, left alone is not.

    Parameters
    ----------
    scores
        Score table of `retrieval.compare` or `evaluate`.
    metric
        What is found, by default the first of class and replicate retrieval that has a value, by wells that no fit has
        seen where there are such scores.

    Returns
    -------
    Axes: a point a representation, ``batch_share`` across and the metric up, with its 95 % interval; a line at chance.

    Raises
    ------
    InputError
        The table lacks the metric, ``batch_share`` or columns, or no representation has both.
    """
    require_columns(scores, [*SCORE_COLUMNS, "low", "high"], "the score table")
    known = scores[scores["value"].notna() & (scores["group"] == "all")]
    metric = metric or _main_metric(known)
    share = known[known["metric"] == "batch_share"].set_index("rep")["value"]
    found = known[(known["metric"] == metric) & known["rep"].isin(share.index)]
    if found.empty:
        raise InputError(
            f"no representation has both {metric!r} and 'batch_share': the table has values of "
            f"{', '.join(dict.fromkeys(known['metric'])) or 'nothing'}"
        )
    ax = axes_of(ax, (6.4, 4.2))
    handles = []
    values = found[["value", "low", "high"]].to_numpy(dtype=float)
    for i, (rep, (value, low, high)) in enumerate(zip(found["rep"], values)):
        style: dict[str, Any] = {"color": COLORS[i % len(COLORS)], "marker": (*MARKERS, "s", "D")[i // len(COLORS) % 4]}
        if rep.startswith(BASELINE):
            style = {"color": GREY, "marker": "x"}
        reach = np.nan_to_num([[value - low], [high - value]]).clip(0)
        handles.append(ax.errorbar(share[rep], value, yerr=reach, linestyle="", capsize=2, **style))
    legend(ax, handles, found["rep"].str.removeprefix("X_").tolist())
    ax.axhline(found["chance"].mean(), color=ink(), linewidth=0.8, linestyle=":")
    ax.annotate(
        "chance",
        (1, found["chance"].mean()),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize="small",
    )
    absent = [rep.removeprefix("X_") for rep in share.index if rep not in set(found["rep"])]
    if absent:
        ax.set_title(plain(f"without {metric}: {', '.join(absent)}"), fontsize="small", loc="left", wrap=True)
    ax.set(xlabel="batch effect left (batch_share)", ylabel=plain(f"{metric} (higher is better)"))
    return ax


def gains(scores: pd.DataFrame, *, metric: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """Gains over uncorrected profiles with their paired 95 % intervals; those whose interval holds zero are open.

    Parameters
    ----------
    scores
        Score table of `retrieval.compare`.
    metric
        By default the one that `tradeoff` shows.

    Raises
    ------
    InputError
        The table has no gains in the metric.
    """
    require_columns(scores, [*SCORE_COLUMNS, *GAIN], "the table of a comparison")
    known = scores[scores["gain"].notna() & (scores["group"] == "all")]
    metric = metric or _main_metric(known)
    rows = known[known["metric"] == metric]
    if rows.empty:
        has = ", ".join(dict.fromkeys(known["metric"])) or "none"
        raise InputError(f"the table has no gains in {metric!r} over 'none': it has gains in {has}")
    ax = axes_of(ax, (5.2, 0.9 + 0.26 * len(rows)))
    gain, low, high = rows[list(GAIN)].to_numpy(dtype=float).T
    at, sure = np.arange(len(rows)), (low > 0) | (high < 0)
    ax.hlines(at, low, high, color=COLORS[0])
    ax.scatter(gain, at, color=np.where(sure, COLORS[0], "none"), edgecolors=COLORS[0], zorder=3)
    ax.axvline(0, color=ink(), linewidth=0.8)
    ax.set_yticks(at, [plain(shortened(name.removeprefix("X_"), 32)) for name in rows["rep"]])
    ax.invert_yaxis()
    ax.set(title=plain(metric), xlabel="gain over none (95 % interval, paired)")
    return ax


def activity(detail: pd.DataFrame, *, threshold: float = 0.05, ax: "Axes | None" = None) -> "Axes":
    """Mean average precision of each perturbation or class against its adjusted p; who passes is filled.

    Parameters
    ----------
    detail
        Table of `retrieval.activity` or `retrieval.consistency`.
    threshold
        Where the line is drawn.
    """
    require_columns(detail, ["mean_average_precision", "p_adjusted", "chance"], "the table of activity")
    ax = axes_of(ax, (5.2, 3.8))
    evidence = -np.log10(detail["p_adjusted"].to_numpy(dtype=float))
    passed = detail["p_adjusted"].to_numpy() < threshold
    for rows, face, name in ((passed, COLORS[0], "below"), (~passed, "none", "not below")):
        at = detail["mean_average_precision"].to_numpy(dtype=float)[rows]
        ax.scatter(
            at, evidence[rows], s=18, color=face, edgecolors=COLORS[0], label=f"{rows.sum()} {name} {threshold:g}"
        )
    ax.axhline(-np.log10(threshold), color=ink(), linewidth=0.8, linestyle=":")
    ax.axvline(detail["chance"].mean(), color=COLORS[1], linewidth=1.5, label="mean chance")
    ax.legend(frameon=False, fontsize="small")
    ax.set(xlabel="mean average precision", ylabel="-log10 of adjusted p")
    return ax


def concentrations(scores: pd.DataFrame, *, metric: str = "compound_gene_ap", ax: "Axes | None" = None) -> "Axes":
    """How well compounds find the genes of their targets at each concentration, a line a representation.

    Parameters
    ----------
    scores
        Score table with rows of `retrieval.compound_gene`; the dotted line is chance.

    Raises
    ------
    InputError
        The table has no values of the metric by concentration.
    """
    require_columns(scores, [*SCORE_COLUMNS, "low", "high"], "the score table")
    rows = scores[(scores["metric"] == metric) & scores["value"].notna()]
    dose = pd.to_numeric(rows["group"], errors="coerce")
    rows = rows.assign(dose=dose)[dose.notna()].sort_values("dose", kind="stable")
    if rows.empty:
        raise InputError(f"the score table has no values of {metric!r} by concentration")
    ax = axes_of(ax, (5.6, 3.8))
    handles = []
    for i, (_, line) in enumerate(rows.groupby("rep", sort=False)):
        value, low, high, at = line[["value", "low", "high", "dose"]].to_numpy(dtype=float).T
        color, marker = COLORS[i % len(COLORS)], (*MARKERS, "s", "D")[i // len(COLORS) % 4]
        reach = np.nan_to_num([value - low, high - value]).clip(0)
        handles.append(ax.errorbar(at, value, yerr=reach, color=color, marker=marker, capsize=2))
    legend(ax, handles, [name.removeprefix("X_") for name in rows["rep"].unique()])
    chance = rows.groupby("dose")["chance"].mean()
    ax.plot(chance.index, chance.to_numpy(), color=ink(), linewidth=0.8, linestyle=":")
    ax.set_xscale("log")
    ax.set(xlabel="concentration", ylabel=plain(metric))
    return ax


def probes(detail: pd.DataFrame, *, ax: "Axes | None" = None) -> "Axes":
    """AUROC of every perturbation in each batch that its probe had not seen, with the mean of the batch.

    Parameters
    ----------
    detail
        Table of `retrieval.holdout_probes`.
    """
    require_columns(detail, ["held_out", "auroc"], "the table of probes")
    names = sorted(detail["held_out"].astype(str).unique())
    ax = axes_of(ax, (5.2, 0.9 + 0.26 * len(names)))
    rng = np.random.default_rng(0)
    for y, name in enumerate(names):
        value = detail.loc[detail["held_out"].astype(str) == name, "auroc"].to_numpy(dtype=float)
        ax.scatter(value, y + rng.uniform(-0.25, 0.25, len(value)), s=8, color=COLORS[0], alpha=0.5, linewidths=0)
        ax.plot([np.nanmean(value)] * 2, [y - 0.4, y + 0.4], color=ink(), linewidth=1.5)
    ax.axvline(0.5, color=COLORS[1], linewidth=1.5)
    ax.set_yticks(np.arange(len(names)), [plain(shortened(name, 32)) for name in names])
    ax.invert_yaxis()
    ax.set(xlabel="AUROC in the batch left out (red: chance)")
    return ax


def clusters(detail: pd.DataFrame, *, ax: "Axes | None" = None) -> "Axes":
    """Mean cosine within each known cluster against that to the rest of the map; similar ones are filled.

    Parameters
    ----------
    detail
        Table of `retrieval.cluster_test`.
    """
    require_columns(detail, ["within", "between", "similar"], "the table of clusters")
    ax = axes_of(ax, (4.4, 4.0))
    within, between = detail[["within", "between"]].to_numpy(dtype=float).T
    similar = detail["similar"].to_numpy(dtype=bool)
    for rows, face, name in ((similar, COLORS[0], "similar"), (~similar, "none", "not")):
        ax.scatter(between[rows], within[rows], s=18, color=face, edgecolors=COLORS[0], label=f"{rows.sum()} {name}")
    ends = [min(within.min(), between.min()), max(within.max(), between.max())]
    ax.plot(ends, ends, color=ink(), linewidth=0.8, linestyle=":")
    ax.legend(frameon=False, fontsize="small")
    ax.set(xlabel="mean cosine to the rest", ylabel="mean cosine within")
    return ax


def _main_metric(known: pd.DataFrame) -> str:
    wanted = [f"{kind}_map{how}" for kind in ("class", "replicate") for how in ("_held_out", "")]
    return next((name for name in wanted if name in set(known["metric"])), wanted[-1])
