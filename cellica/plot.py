"""Figures from AnnData, score tables and plates. Each function draws on ``ax`` (or a new figure) and returns the Axes.

Figures are made without pyplot, so that nothing global changes and no screen is needed. Colors are Paul Tol's bright
scheme and matplotlib's perceptual maps, which color-blind readers can tell apart; shape repeats what color says.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from cellica.drawing import (
    COLORS,
    GREY,
    MARKERS,
    axes_of,
    categories,
    colormap,
    figure_of,
    ink,
    legend,
    plain,
    values_of,
)
from cellica.plate_plots import (
    component_maps,
    component_table,
    composite,
    field,
    plate_map,
    plate_picture,
    plate_summary,
)
from cellica.schema import EXPERIMENT, UNS, InputError, labels
from cellica.score_plots import activity, clusters, concentrations, gains, probes, scores, tradeoff

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "activity",
    "clusters",
    "component_maps",
    "components",
    "composite",
    "concentrations",
    "embedding",
    "field",
    "gains",
    "plate_map",
    "plate_picture",
    "plate_summary",
    "probes",
    "removal_path",
    "scores",
    "tradeoff",
]

LABEL_COLORS = {"batch": COLORS[1], "biology": COLORS[2], "mixed": COLORS[3], "other": GREY}
PATH_NAMES = {
    "batch_share": "explained by batch",
    "biology_share": "explained by perturbation",
    "variance_share": "variance",
}
LABEL_MARKERS = {"batch": "s", "biology": "o", "mixed": "D", "other": "."}

# ---------------------------------------------------------------------------------------------- profiles


def embedding(
    adata: ad.AnnData,
    *,
    use_rep: str | None = None,
    color: str | Sequence[Any] = EXPERIMENT,
    ax: "Axes | None" = None,
) -> "Axes":
    """First two principal components (centred, not scaled) of a representation.

    Parameters
    ----------
    use_rep
        Key of obsm, by default X.
    color
        Column of obs, or one value a well. Numbers are drawn on a scale; of categories the 12 largest have a color and
        shape of their own, the rest is "other". Wells whose value is missing or "" are grey and lie below the others.
    ax
        Where to draw; by default a new figure.

    Returns
    -------
    Axes; their title says how many wells are not finite and therefore not drawn.

    Raises
    ------
    InputError
        A key or column is not there, or fewer than 3 wells are finite.
    """
    values, name = values_of(adata, color)
    points, share = principal_points(adata, use_rep)
    finite = np.isfinite(points).all(axis=1)
    points = points[finite]
    ax = axes_of(ax, (5.2, 3.6))
    if is_numeric_dtype(values) and not is_bool_dtype(values):
        _scatter_numbers(ax, points, values[finite].to_numpy(dtype=float), name)
    else:
        _scatter_categories(ax, points, labels(pd.DataFrame({name: values[finite]}), name), name)
    missing = f" ({np.sum(~finite)} wells not finite, not drawn)" if not finite.all() else ""
    names = [f"PC {i} ({100 * one:.0f} %)" for i, one in enumerate(share, 1)]
    ax.set(xlabel=names[0], ylabel=names[1], title=plain(f"{use_rep or 'X'}{missing}"))
    ax.set(xticks=[], yticks=[])
    return ax


def principal_points(adata: ad.AnnData, use_rep: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """First two principal components of a representation, NaN where a well is not finite, and their shares of the variance.

    Raises
    ------
    InputError
        The key is not there, or fewer than 3 wells are finite.
    """
    from sklearn.decomposition import PCA

    x = _rows(adata, use_rep)
    finite = np.isfinite(x).all(axis=1)
    if finite.sum() < 3 or x.shape[1] < 2:
        raise InputError(
            f"an embedding plot needs 3 finite wells and 2 features; {use_rep or 'X'} has {finite.sum()} x {x.shape[1]}"
        )
    pca = PCA(2, random_state=0)
    points = np.full((len(x), 2), np.nan, dtype=np.float32)
    points[finite] = pca.fit_transform(x[finite])
    return points, pca.explained_variance_ratio_


def _scatter_numbers(ax: "Axes", points: np.ndarray, values: np.ndarray, name: str) -> None:
    order = np.random.default_rng(0).permutation(len(points))
    order = order[np.argsort(~np.isnan(values[order]), kind="stable")]  # missing ones, grey, below
    x, y = points[order].T
    style: dict[str, Any] = {"cmap": colormap("viridis"), "plotnonfinite": True}
    drawn = ax.scatter(x, y, c=values[order], s=_size(points), linewidths=0, rasterized=True, **style)
    figure_of(ax).colorbar(drawn, ax=ax, label=plain(name))


def _scatter_categories(ax: "Axes", points: np.ndarray, values: np.ndarray, name: str) -> None:
    from matplotlib.lines import Line2D

    code, looks = categories(values)
    colors = np.array([look.color for look in looks])
    size = np.bincount(code, minlength=len(looks)).astype(float)
    size[colors == GREY] = np.inf
    shuffled = np.random.default_rng(0).random(len(points))
    order = np.argsort(shuffled / np.sqrt(size[code]))  # no batch hides another, and rare ones tend to the top
    for marker in MARKERS:
        rows = order[np.array([look.marker == marker for look in looks])[code[order]]]
        if len(rows):
            x, y = points[rows].T
            style: dict[str, Any] = {"alpha": 0.8, "linewidths": 0, "rasterized": True}
            ax.scatter(x, y, c=colors[code[rows]], s=_size(points), marker=marker, **style)
    handles = [Line2D([], [], color=look.color, marker=look.marker, linestyle="") for look in looks]
    legend(ax, handles, [look.name for look in looks], name)


def _size(points: np.ndarray) -> float:
    return float(np.clip(40000 / len(points), 4, 20))


def components(adata: ad.AnnData, key: str, *, ax: "Axes | None" = None) -> "Axes":
    """What batch and what perturbation explain of each component of a correction.

    Parameters
    ----------
    key
        Name of a correction that has components (``uns["cellica"][key]["components"]``).

    Returns
    -------
    Axes: one mark a component, by label; removed ones are crossed. Lines are the threshold and, where the guard was on,
    equal shares. A share that is unknown is drawn below 0, at "unknown".

    Raises
    ------
    InputError
        There is no such correction, or it has no components.
    """
    table = component_table(adata, key)
    record = adata.uns[UNS][key]
    unknown = -0.15
    shares = table[["perturbation_r2", "batch_r2"]].astype(float)
    x, y = shares.fillna(unknown).to_numpy().T
    removed = table["removed"].to_numpy(dtype=bool)
    ax = axes_of(ax, (5.2, 3.6))
    for label, color in LABEL_COLORS.items():
        rows = (table["label"] == label).to_numpy()
        if rows.any():
            size = 60 if label == "other" else 28
            ax.scatter(x[rows], y[rows], c=color, s=size, marker=LABEL_MARKERS[label], label=f"{label} ({rows.sum()})")
    if removed.any():
        ax.scatter(x[removed], y[removed], c=ink(), s=70, marker="x", linewidths=1, label=f"removed ({removed.sum()})")
    settings: Mapping[str, Any] = next((step for step in record.get("steps", {}).values() if "batch_r2" in step), {})
    if settings:
        ax.axhline(
            settings["batch_r2"], color=ink(), linestyle="--", linewidth=1, label=f"threshold {settings['batch_r2']:g}"
        )
    if settings.get("guard"):
        ax.plot([0, 1], [0, 1], color=ink(), linestyle=":", linewidth=1, label="equal shares (guard)")
    if shares["perturbation_r2"].isna().any():
        ax.text(unknown, 1.02, "unknown", ha="center", fontsize="small")
    ax.set(xlabel="share explained by perturbation", ylabel="share explained by batch", title=plain(key))
    legend(ax, *ax.get_legend_handles_labels())
    return ax


def removal_path(adata: ad.AnnData, key: str, *, ax: "Axes | None" = None) -> "Axes":
    """What would go with the components of a correction, one after the other, and what was done with each.

    Parameters
    ----------
    key
        Name of a correction that has components; their order is ``uns["cellica"][key]["removal_path"]``.

    Returns
    -------
    Axes: cumulative shares of what batch and what perturbation explain, and of all variance, over the number of components.
    Marks on the upper edge are components that were removed or freed of batch.

    Raises
    ------
    InputError
        There is no such correction, or its path is not recorded.
    """
    component_table(adata, key)
    path = adata.uns[UNS][key].get("removal_path")
    if path is None:
        raise InputError(f"the removal path of {key} is not recorded: correct again to see it")
    ax = axes_of(ax, (5.2, 3.6))
    at = np.arange(1, len(path) + 1)
    for i, (column, name) in enumerate(PATH_NAMES.items()):
        share = np.append(0, path[column].to_numpy(dtype=float))
        ax.plot(np.append(0, at), share, color=COLORS[i], linestyle=("-", "--", ":")[i], label=name)
    for action, marker in (("removed", "x"), ("regressed", "+")):
        rows = (path["action"] == action).to_numpy()
        if rows.any():
            style: dict[str, Any] = {"clip_on": False, "zorder": 3, "label": f"{action} ({rows.sum()})"}
            ax.scatter(at[rows], np.ones(rows.sum()), c=ink(), marker=marker, s=30, linewidths=1, **style)
    ax.set(xlabel="components, in the order in which they would go", ylabel="share of all components", ylim=(0, 1))
    ax.set(title=plain(key), xlim=(0, len(path)))
    legend(ax, *ax.get_legend_handles_labels())
    return ax


# ---------------------------------------------------------------------------------------------- values


def _rows(adata: ad.AnnData, use_rep: str | None) -> np.ndarray:
    """Rows (n, d) of a representation, float32."""
    if use_rep not in (None, "X") and use_rep not in adata.obsm:
        raise InputError(f"use_rep={use_rep!r} is not in obsm: it has {', '.join(adata.obsm) or 'nothing'}")
    x = adata.X if use_rep in (None, "X") else adata.obsm[use_rep]
    if x is None:
        raise InputError("adata has no X: name a key of obsm (use_rep)")
    return np.asarray(x.toarray() if hasattr(x, "toarray") else x, dtype=np.float32)
