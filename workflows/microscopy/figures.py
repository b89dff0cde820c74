"""Draw the figures from the tables alone.

python workflows/microscopy/figures.py FOLDER_OF_TABLES OUT_FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cellica.drawing import COLORS, GREY

sys.path.insert(0, str(Path(__file__).parents[1]))
import validation

ARMS = ("base", "pca", "pca+ica", "pca+random", "ica_drop", "pca_drop", "random_drop")
LOOK = {"l1": ("s", COLORS[1], "L1"), "l2": ("o", COLORS[0], "L2")}
VERDICTS = {
    "holds": COLORS[2],
    "holds weakly": COLORS[3],
    "refuted": COLORS[1],
    "no difference": COLORS[0],
    "open": GREY,
    "nothing dropped": "#E0E0E0",
}


def panel(axes, part: pd.DataFrame, marker: str, color: str, label: str, shift: float = 0.0) -> None:  # type: ignore[no-untyped-def]
    """Means and intervals of the arms."""
    rows = part.set_index("arm").reindex(ARMS)
    error = np.nan_to_num(np.abs(rows[["low", "high"]].sub(rows["mean"], axis=0)).to_numpy().T)
    place = np.arange(len(ARMS)) + shift
    axes.errorbar(place, rows["mean"], yerr=error, fmt=marker, color=color, capsize=2, label=label)
    axes.set(xticks=range(len(ARMS)))
    axes.set_xticklabels(ARMS, rotation=60, ha="right")
    axes.axvline(3.5, color=GREY, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def by_arm(summary: pd.DataFrame, scores: dict[str, str], paper: pd.DataFrame, published: dict[str, str]) -> Figure:
    """One row a score, one column a data set; stars are the paper's numbers, of other wells."""
    sets = list(dict.fromkeys(summary["data"]))
    figure = Figure(figsize=(2.2 + 2.7 * len(sets), 1 + 2.5 * len(scores)), layout="constrained")
    for row, (score, title) in zip(
        figure.subplots(len(scores), len(sets), squeeze=False, sharey="row"), scores.items()
    ):
        for axes, data in zip(row, sets):
            part = summary[(summary["data"] == data) & (summary["score"] == score)]
            for i, (penalty, look) in enumerate(LOOK.items()):
                panel(axes, part[part["penalty"] == penalty], *look, shift=0.2 * i - 0.1)
            if score in published:
                place = [ARMS.index(arm) for arm in paper["arm"]]
                axes.scatter(place, paper[published[score]], marker="*", color="black", label="the paper's")
            axes.set_title(f"{title}, {data}", fontsize=9)
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def batches(summary: pd.DataFrame) -> Figure:
    """How often the batch of a control is named, and by chance."""
    sets = list(dict.fromkeys(summary["data"]))
    figure = Figure(figsize=(2.2 + 2.7 * len(sets), 3.2), layout="constrained")
    for axes, data in zip(figure.subplots(1, len(sets), squeeze=False, sharey=True)[0], sets):
        part = summary[summary["data"] == data]
        for score, look in {
            "batch_probe": ("o", COLORS[5], "batch named"),
            "batch_chance": ("_", "black", "chance"),
        }.items():
            panel(axes, part[part["score"] == score], *look)
        axes.set_title(data, fontsize=9)
        axes.set_ylim(0, 1)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    return figure


def claims(table: pd.DataFrame) -> Figure:
    """Paired differences with intervals, one column a data set."""
    sets = list(dict.fromkeys(table["data"]))
    names = list(dict.fromkeys(zip(table["claim"], table["penalty"].fillna(""))))
    figure = Figure(figsize=(4.2 + 2.3 * len(sets), 1 + 0.24 * len(names)), layout="constrained")
    for axes, data in zip(figure.subplots(1, len(sets), squeeze=False, sharey=True)[0], sets):
        for row in table[table["data"] == data].fillna({"penalty": ""}).itertuples():
            bounds = np.nan_to_num([[row.mean - row.low], [row.high - row.mean]])
            place = names.index((row.claim, row.penalty))
            axes.errorbar(row.mean, place, xerr=bounds, fmt="o", ms=4, color=VERDICTS[row.verdict], capsize=2)
        axes.axvline(0, color="black", lw=0.8)
        axes.set_title(data, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set(yticks=range(len(names)), yticklabels=[f"{said} {penalty.upper()}".strip() for said, penalty in names])
    axes.invert_yaxis()
    figure.supxlabel(
        "paired difference, 95 % interval (green: holds, yellow: weakly, red: refuted, blue: no difference, grey: open)",
        fontsize=9,
    )
    return figure


def draw(tables: Path, out: Path) -> None:
    found = {name: pd.read_csv(tables / f"{name}.csv") for name in ("summary", "claims", "paper")}
    summary, paper = found["summary"], found["paper"]
    validation.save(by_arm(summary, {"auroc": "AUROC"}, paper, {"auroc": "auroc_eif3h"}), out / "auroc.png")
    shares = {"hoyer": "Hoyer sparsity", "top_quarter": "top quarter"}
    validation.save(by_arm(summary, shares, paper, {"top_quarter": "top_quarter"}), out / "sparsity.png")
    validation.save(batches(summary), out / "batches.png")
    validation.save(claims(found["claims"]), out / "claims.png")


if __name__ == "__main__":
    validation.main_of_figures(__doc__, draw)
