"""The table as a figure: how much faster than each peer, and how near to what the machine can do."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cellica.drawing import COLORS, GREY
from speed import machine as machines
from speed.cases import Row
from speed.groups import GROUPS, PEERS, group_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOR = dict(zip((*GROUPS, "other"), (*COLORS[:5], GREY)))


def draw(rows: Sequence[Row], machine: dict[str, str]) -> "Figure":
    """Left: a bar a row, on a logarithmic axis with a line at 1. Right: the fractions of limits, where there are any."""
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: list(COLOR).index(group_of(row.row)))
    limits = [(row, name, value) for row in rows for name, value in row.limit.items()]
    height = 1.6 + 0.36 * max(len(rows), len(limits), 3)
    figure = Figure(figsize=(13, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_ratios(left, rows)
    draw_limits(right, limits, of=len(rows))
    figure.supxlabel(caption(machine), fontsize="small", color="#444444")
    return figure


def draw_ratios(ax: "Axes", rows: Sequence[Row]) -> None:
    from matplotlib.patches import Patch

    labels = [f"{row.row}: {short(row.size)}\nagainst {PEERS.get(row.row, 'peer')}" for row in rows]
    values = np.array([row.speedup for row in rows])
    bars = ax.barh(range(len(rows)), values - 1, left=1, color=[COLOR[group_of(row.row)] for row in rows], height=0.7)
    ax.set_xscale("log")
    least, most = min([0.5, *values]), max([2.0, *values])
    ax.set_xlim(least / 2.2, most * 2.2)
    for bar, value in zip(bars, values):
        beside = {"ha": "left", "xytext": (4, 0)} if value >= 1 else {"ha": "right", "xytext": (-4, 0)}
        middle = bar.get_y() + bar.get_height() / 2
        ax.annotate(number(value), (value, middle), textcoords="offset points", va="center", fontsize="small", **beside)
    ax.axvline(1, color="black", linewidth=1)
    ax.set_xticks([x for x in (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if least / 2.2 < x < most * 2.2])
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.minorticks_off()
    finish(ax, labels, "times as fast as the peer (seconds of the peer / seconds of cellica)", len(rows))
    present = dict.fromkeys(group_of(row.row) for row in rows)
    ax.legend([Patch(color=COLOR[group]) for group in present], present, loc="lower right", fontsize="small")


def draw_limits(ax: "Axes", limits: Sequence[tuple[Row, str, float]], of: int) -> None:
    """Bars as high as those of the ``of`` rows beside them."""
    labels = [f"{row.row}: {short(row.size)}\nof {name}" for row, name, _ in limits]
    values = [value for *_, value in limits]
    colors = [COLOR[group_of(row.row)] for row, *_ in limits]
    bars = ax.barh(range(len(limits)), values, color=colors, height=0.7)
    for bar, value in zip(bars, values):
        middle = bar.get_y() + bar.get_height() / 2
        ax.annotate(
            number(value), (value, middle), xytext=(4, 0), textcoords="offset points", va="center", fontsize="small"
        )
    ax.axvline(1, color="black", linewidth=1)
    ax.set_xlim(0, 1.15 * max([1.0, *values]))
    finish(ax, labels, "fraction of the physical limit", max(of, len(limits)))


def finish(ax: "Axes", labels: Sequence[str], title: str, n_places: int) -> None:
    ax.set_yticks(range(len(labels)), labels, fontsize="x-small")
    ax.set_ylim(n_places - 0.4, -0.6)
    ax.set_xlabel(title, fontsize="small")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def caption(machine: dict[str, str]) -> str:
    parts = [machine.get(name, "") for name in ("cpu", "flags", "cores", "memory", "system")]
    parts[2] += " cores" * bool(parts[2])
    text = ", ".join(part for part in parts if part) or machine.get("machine", "unknown machine")
    what = f"cellica {machine['cellica']}, {machine.get('date', '')}; " if "cellica" in machine else ""
    note = "\nBusy machine: times and ratios are disturbed" if machines.is_busy(machine) else ""
    return f"{what}{text}; medians of interleaved rounds in one run{note}"


def short(size: str) -> str:
    """Without what does not fit.

    >>> short("5000 x 128, 5 sources, 150562 pairs")
    '5000 x 128, 5 sources'
    """
    return re.sub(r", a third Gaussian|, \d+ pairs", "", size)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}" if value >= 10 or value < 1 else f"{value:.1f}"


def save(rows: Sequence[Row], machine: dict[str, str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, machine).savefig(path, dpi=130)
