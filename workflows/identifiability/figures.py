"""Draw the figures from the tables alone.

python workflows/identifiability/figures.py FOLDER_OF_TABLES OUT_FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cellica.drawing import COLORS

sys.path.insert(0, str(Path(__file__).parents[1]))
import validation

GROUPS = {"permutation": COLORS[0], "ica": COLORS[1], "rigid": COLORS[2], "linear": COLORS[3]}


def bound(decoders: pd.DataFrame) -> Figure:
    """The error of the rigid map against sqrt(2 L + L^2), a point a pair; the line goes through the origin, by least squares."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, kind, title in zip(
        figure.subplots(1, 2, sharey=True), ("L", "L_90"), ("L of all directions", "L of the central 90 % of them")
    ):
        x, y = decoders[f"bound_{kind}"].to_numpy(), decoders["rigid_raw"].to_numpy()
        drawn = axes.scatter(x, y, c=decoders["leak"], cmap="viridis", s=18)
        slope = float(x @ y / (x @ x)) if (x > 0).any() else 0.0
        ends = np.array([0, x.max()])
        axes.plot(ends, slope * ends, color="black", lw=1, label=f"{slope:.3f} sqrt(2 L + L$^2$)")
        axes.set(xlabel=f"sqrt(2 L + L$^2$), {title}", ylim=(0, None), xlim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        axes.set_ylabel("error of the best rigid map / diameter")
    figure.colorbar(drawn, ax=axes, label="leak of the decoder")
    return figure


def classes(scores: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Errors by class of maps, raw and whitened, with the range over pairs; dashes: shuffled pairs. Last: the paper's pairs."""
    sets = list(dict.fromkeys(scores["data"]))
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    upper, middle, lower = figure.subplots(3, 1)
    for axes, space in ((upper, "raw"), (middle, "whitened")):
        for i, (group, color) in enumerate(GROUPS.items()):
            rows = scores[(scores["space"] == space) & (scores["group"] == group)].set_index("data").reindex(sets)
            place = np.arange(len(sets)) + (i - 1.5) / 5
            error = np.stack([rows["mean"] - rows["min"], rows["max"] - rows["mean"]])
            axes.bar(place, rows["mean"], 0.19, color=color, label=group, yerr=error, ecolor="black", capsize=2)
            axes.scatter(place, rows["chance"], marker="_", color="black", zorder=3)
        axes.set(xticks=range(len(sets)), xticklabels=sets, ylabel=f"error / diameter, {space}")
    for i, (group, color) in enumerate(GROUPS.items()):
        lower.bar(np.arange(len(paper)) + (i - 1.5) / 5, paper[group], 0.19, color=color)
    lower.set(xticks=range(len(paper)), xticklabels=paper["pair"], ylabel="error / diameter, the paper's")
    for axes in (upper, middle, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    upper.legend(
        frameon=False, ncols=4, title="best map of a class; dash: shuffled pairs", fontsize=8, title_fontsize=8
    )
    return figure


def draw(tables: Path, out: Path) -> None:
    found = {name: pd.read_csv(tables / f"{name}.csv") for name in ("decoders", "scores", "paper")}
    validation.save(bound(found["decoders"]), out / "bound.png")
    validation.save(classes(found["scores"], found["paper"]), out / "classes.png")


if __name__ == "__main__":
    validation.main_of_figures(__doc__, draw)
