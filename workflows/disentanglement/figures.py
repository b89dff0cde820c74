"""Draw the figures from the tables alone.

python workflows/disentanglement/figures.py FOLDER_OF_TABLES OUT_FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cellica.drawing import COLORS, GREY

sys.path.insert(0, str(Path(__file__).parents[1]))
import validation

ARMS = {"raw": COLORS[0], "whitened": COLORS[4], "rotated": COLORS[3], "ica": COLORS[1]}
PANELS = {"infom": "InfoM", "infoe": "InfoE (100 iterations)", "infoe_converged": "InfoE (converged)", "infoc": "InfoC"}
PUBLISHED = {"ae": {"raw": "AE", "ica": "AE + ICA"}, "beta-vae": {"raw": "beta-VAE"}}
PUBLISHED |= {"beta-tcvae": {"raw": "beta-TCVAE"}, "bio-ae": {"raw": "BioAE"}}


def infomec(scores: pd.DataFrame, paper: pd.DataFrame) -> Figure:
    """Bars by model and arm with intervals; black ticks: shuffled codes; stars: the paper's means over other sets."""
    sets = list(dict.fromkeys(scores["data"]))
    figure = Figure(figsize=(13, 3.2 * len(sets)), layout="constrained")
    means = paper[paper["data"] == "mean"].set_index("model")
    for row, data in zip(figure.subplots(len(sets), len(PANELS), squeeze=False, sharey=True), sets):
        part = scores[scores["data"] == data]
        models = list(dict.fromkeys(part["model"]))
        for axes, (score, title) in zip(row, PANELS.items()):
            for i, (arm, color) in enumerate(ARMS.items()):
                rows = part[(part["arm"] == arm) & (part["score"] == score)].set_index("model").reindex(models)
                place = np.arange(len(models)) + (i - 1.5) / 5
                error = np.abs(rows[["low", "high"]].sub(rows["mean"], axis=0)).to_numpy().T
                axes.bar(place, rows["mean"], 0.19, color=color, label=arm, yerr=error, ecolor="black", capsize=2)
                chance = part[(part["arm"] == arm) & (part["score"] == f"chance_{score}")].set_index("model")
                if len(chance):
                    axes.scatter(place, chance["mean"].reindex(models), marker="_", color="black", zorder=3)
                named = [PUBLISHED.get(model, {}).get(arm) for model in models]
                for x, name in zip(place, named):
                    if name and score in means:
                        axes.scatter(x, means.loc[name, score], marker="*", color="white", edgecolor="black", zorder=4)
            axes.set(title=f"{title}, {data}", xticks=range(len(models)), xticklabels=models, ylim=(0, 1.02))
            axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    title = "star: the paper's mean\ndash: shuffled rows"
    figure.legend(handles, names, loc="outside right center", frameon=False, title=title)
    return figure


def conditions(table: pd.DataFrame) -> Figure:
    """The same code, stretched and turned: what a linear classifier can read does not change, what a short fit finds does."""
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.semilogx(table["condition"], table["infoe"], "o-", color=COLORS[1], label="100 iterations, as published")
    axes.semilogx(table["condition"], table["infoe_converged"], "s-", color=COLORS[0], label="converged")
    axes.set(xlabel="condition number of the code", ylabel="InfoE")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def gains(claims: pd.DataFrame) -> Figure:
    """Paired differences with intervals, one row a claim."""
    figure = Figure(figsize=(8, 0.8 + 0.32 * len(claims)), layout="constrained")
    axes = figure.subplots()
    colors = {"holds": COLORS[2], "refuted": COLORS[1], "open": GREY}
    for i, row in enumerate(claims.itertuples()):
        bounds = [[row.mean - row.low], [row.high - row.mean]]
        axes.errorbar(row.mean, i, xerr=np.nan_to_num(bounds), fmt="o", color=colors[row.verdict], capsize=2)
    axes.axvline(0, color="black", lw=0.8)
    axes.set(yticks=range(len(claims)), yticklabels=[f"{row.claim} ({row.data})" for row in claims.itertuples()])
    axes.invert_yaxis()
    axes.set_xlabel("difference of scores, mean over seeds with 95 % interval (green: holds, red: refuted, grey: open)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure


def draw(tables: Path, out: Path) -> None:
    found = {name: pd.read_csv(tables / f"{name}.csv") for name in ("scores", "paper", "conditions", "claims")}
    validation.save(infomec(found["scores"], found["paper"]), out / "infomec.png")
    validation.save(conditions(found["conditions"]), out / "conditions.png")
    validation.save(gains(found["claims"]), out / "gains.png")


if __name__ == "__main__":
    validation.main_of_figures(__doc__, draw)
