"""Figures of score tables."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from cellica.drawing import COLORS, GREY, MARKERS, axes_of, ink, legend, plain, shortened
from cellica.schema import SCORE_COLUMNS, InputError, require_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE = "baseline:"
NOT_APPLICABLE = "not applicable"


def scores(scores: pd.DataFrame, *, metric: str | None = None, ax: "Axes | None" = None) -> "Axes":
    """Bars of one metric, one a representation, each with its 95 % interval and its chance level.

    Parameters
    ----------
    scores
        Score table (``schema.SCORE_COLUMNS``).
    metric
        Which metric, by default the first of the table. Groups of a metric (``CORUM``, ...) have bars of their own.

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
    metric = metric or (known[0] if known else "")
    if metric not in known:
        raise InputError(f"metric {metric!r} is not in the score table; it has {', '.join(map(str, known)) or 'none'}")
    rows = scores[scores["metric"] == metric]
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
    for y, v, beside in zip(at, value, np.fmax(np.fmax(value, chance), 0)):
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
    if metric is None:
        wanted = [f"{kind}_map{how}" for kind in ("class", "replicate") for how in ("_held_out", "")]
        metric = next((name for name in wanted if name in set(known["metric"])), wanted[-1])
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
    ax.set(xlabel="batch effect left (batch_share)", ylabel=plain(metric))
    return ax
