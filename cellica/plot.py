"""Figures from AnnData, score tables and plates. Each function draws on ``ax`` (or a new figure) and returns the Axes.

Figures are made without pyplot, so that nothing global changes and no screen is needed. Colours are Paul Tol's bright
scheme and matplotlib's perceptual maps, which colour-blind readers can tell apart; shape repeats what colour says.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from cellica.drawing import COLORS, GREY, MARKERS, axes_of, colormap, figure_of, ink, legend, plain, shortened
from cellica.schema import (
    EXPERIMENT,
    PLATE,
    QUALITY,
    UNS,
    WELL,
    InputError,
    labels,
    numbers,
    parse_well,
    plate_format,
    quality_columns,
    require_columns,
    row_letters,
)
from cellica.score_plots import activity, clusters, concentrations, gains, probes, scores, tradeoff

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cellica.plates import Plate

__all__ = [
    "activity",
    "clusters",
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
    "scores",
    "tradeoff",
]

MAX_CATEGORIES = len(COLORS) * len(MARKERS)
LABEL_COLORS = {"batch": COLORS[1], "biology": COLORS[2], "mixed": COLORS[3], "other": GREY}
LABEL_MARKERS = {"batch": "s", "biology": "o", "mixed": "D", "other": "."}
CHANNEL_COLORS = ("#0000FF", "#00FF00", "#FF0000", "#00FFFF", "#FF00FF", "#FFFF00")  # as the plates' own metadata

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
        Column of obs, or one value a well. Numbers are drawn on a scale; of categories the 12 largest have a colour and
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
    from sklearn.decomposition import PCA

    values, name = _values(adata, color)
    x = _rows(adata, use_rep)
    finite = np.isfinite(x).all(axis=1)
    if finite.sum() < 3 or x.shape[1] < 2:
        raise InputError(
            f"an embedding plot needs 3 finite wells and 2 features; {use_rep or 'X'} has {finite.sum()} x {x.shape[1]}"
        )
    pca = PCA(2, random_state=0)
    points = pca.fit_transform(x[finite])
    ax = axes_of(ax, (5.2, 3.6))
    if is_numeric_dtype(values) and not is_bool_dtype(values):
        _scatter_numbers(ax, points, values[finite].to_numpy(dtype=float), name)
    else:
        _scatter_categories(ax, points, labels(pd.DataFrame({name: values[finite]}), name), name)
    share = [f"{100 * ratio:.0f} %" for ratio in pca.explained_variance_ratio_]
    missing = f" ({np.sum(~finite)} wells not finite, not drawn)" if not finite.all() else ""
    ax.set(xlabel=f"PC 1 ({share[0]})", ylabel=f"PC 2 ({share[1]})", title=plain(f"{use_rep or 'X'}{missing}"))
    ax.set(xticks=[], yticks=[])
    return ax


def _scatter_numbers(ax: "Axes", points: np.ndarray, values: np.ndarray, name: str) -> None:
    order = np.random.default_rng(0).permutation(len(points))
    order = order[np.argsort(~np.isnan(values[order]), kind="stable")]  # missing ones, grey, below
    x, y = points[order].T
    style: dict[str, Any] = {"cmap": colormap("viridis"), "plotnonfinite": True}
    drawn = ax.scatter(x, y, c=values[order], s=_size(points), linewidths=0, rasterized=True, **style)
    figure_of(ax).colorbar(drawn, ax=ax, label=plain(name))


def _scatter_categories(ax: "Axes", points: np.ndarray, values: np.ndarray, name: str) -> None:
    from matplotlib.lines import Line2D

    blank = np.array([value in (None, "") for value in values], dtype=bool)
    counts = pd.Series(values[~blank], dtype=object).value_counts()
    shown = sorted(counts.index[:MAX_CATEGORIES])
    place = {value: i for i, value in enumerate(shown)}
    code = np.array([place.get(value, -1) for value in values])
    styles = [(COLORS[i % len(COLORS)], MARKERS[i // len(COLORS)]) for i in range(len(shown))]
    groups = [(-1, GREY, MARKERS[0]), *((i, *style) for i, style in enumerate(styles))]
    size = np.array([counts[value] for value in shown] + [np.inf])[code]
    shuffled = np.random.default_rng(0).random(len(points))
    order = np.argsort(shuffled / np.sqrt(size))  # no batch hides another, and rare ones tend to the top
    for marker in MARKERS:
        colors = {i: color for i, color, shape in groups if shape == marker}
        rows = order[np.isin(code[order], list(colors))]
        if len(rows):
            x, y = points[rows].T
            faces = [colors[i] for i in code[rows]]
            ax.scatter(x, y, c=faces, s=_size(points), marker=marker, alpha=0.8, linewidths=0, rasterized=True)
    names = [*shown]
    if len(counts) > len(shown):
        names.append(f"other ({len(counts) - len(shown)})")
        styles.append((GREY, MARKERS[0]))
    if blank.any():
        names.append("none")
        styles.append((GREY, MARKERS[0]))
    handles = [Line2D([], [], color=color, marker=marker, linestyle="") for color, marker in styles]
    legend(ax, handles, names, name)


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
    record = adata.uns.get(UNS, {}).get(key)
    if not isinstance(record, Mapping) or "components" not in record:
        have = [
            name for name, one in adata.uns.get(UNS, {}).items() if isinstance(one, Mapping) and "components" in one
        ]
        raise InputError(f"{key!r} is no correction with components; there are {', '.join(have) or 'none'}")
    table = record["components"]
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


# ---------------------------------------------------------------------------------------------- scores


# ---------------------------------------------------------------------------------------------- plates


def plate_names(obs: pd.DataFrame) -> np.ndarray:
    """Plate of each well as ``{experiment}_{plate}``, an object array of str."""
    parts = labels(obs, EXPERIMENT), labels(obs, PLATE)
    return np.array([f"{experiment}_{plate}" for experiment, plate in zip(*parts)], dtype=object)


def plate_map(
    adata: ad.AnnData,
    values: str | np.ndarray,
    *,
    plate: str,
    colorbar: bool = True,
    ax: "Axes | None" = None,
) -> "Axes":
    """Heat map of one value a well on the rows and columns of a plate.

    Parameters
    ----------
    values
        Numeric column of obs, or an array (n,) such as a column of ``obsm["ica_sources"]``. Sites of a well are averaged.
    plate
        ``{experiment}_{plate}``.
    colorbar
        Draw the scale beside it.

    Returns
    -------
    Axes with one image, rows x columns of the smallest standard plate that holds the wells; wells without a value are
    blank. Values of both signs have a diverging scale around 0, to the 99th percentile of all plates.

    Raises
    ------
    InputError
        No such plate or column, or values that are not numbers.
    """
    column, name = _values(adata, values)
    if not is_numeric_dtype(column):
        raise InputError(f"{name!r} is not numeric: a plate map shows numbers; give one number a well instead")
    numbers = column.to_numpy(dtype=float, na_value=np.nan)
    require_columns(adata.obs, [WELL], "obs")
    names = plate_names(adata.obs)
    on_plate = names == plate
    if not on_plate.any():
        have = list(dict.fromkeys(names))
        raise InputError(
            f"plate {plate!r} is not there; there are {', '.join(have[:5])}{' ...' if len(have) > 5 else ''}"
        )
    wells = labels(adata.obs, WELL)
    placed = on_plate & np.array([well is not None for well in wells], dtype=bool)
    frame = pd.DataFrame([parse_well(well) for well in wells[placed]], columns=["row", "column"])
    mean = frame.assign(value=numbers[placed]).pivot_table("value", "row", "column")
    rows, columns = plate_format(list(wells[placed]))
    grid = mean.reindex(index=range(rows), columns=range(columns)).to_numpy(dtype=float)

    known = numbers[np.isfinite(numbers)]
    style: dict[str, Any] = {"cmap": "cividis"}
    if len(known) and known.min() < 0 < known.max():
        limit = np.percentile(np.abs(known), 99)
        style = {"cmap": "PuOr_r", "vmin": -limit, "vmax": limit}
    ax = axes_of(ax, (5.2, 3.4))
    image = ax.imshow(np.ma.masked_invalid(grid), interpolation="none", extent=_extent(grid.shape), **style)
    _plate_ticks(ax, grid.shape)
    ax.set_title(plain(plate))
    if colorbar:
        figure_of(ax).colorbar(image, ax=ax, label=plain(name), shrink=0.8)
    return ax


def plate_summary(adata: ad.AnnData | pd.DataFrame, *, plate: str) -> "Axes":
    """Quality of a plate at a glance: a heat map over its wells for each measure of its fields.

    Parameters
    ----------
    adata
        Sites or wells, or their table (obs), with columns of `cellica.quality.measure`; sites of a well are averaged.
    plate
        ``{experiment}_{plate}``.

    Returns
    -------
    Axes of the first map, in a new figure; the others lie in it too: cell count and share of empty fields, then a row each
    of intensity, focus and saturation with a column a channel. Titles are the columns' names. Scales go from the 1st to
    the 99th percentile of all plates in the table, so that a plate that is off looks so. Wells without a value are blank.

    Raises
    ------
    InputError
        No such plate, no such columns, or text in them.
    """
    from matplotlib.figure import Figure

    obs = adata.obs if isinstance(adata, ad.AnnData) else adata
    kinds = (("cell_count", "empty"), ("intensity_",), ("focus_",), ("saturation_",))
    rows = [names for names in (quality_columns(obs, kind) for kind in kinds) if names]
    if not rows:
        raise InputError(f"no field of {plate} was measured: obs needs columns such as {', '.join(QUALITY)}")
    require_columns(obs, [EXPERIMENT, PLATE, WELL], "obs")
    values = numbers(obs, [name for names in rows for name in names])
    table = ad.AnnData(obs=obs[[EXPERIMENT, PLATE, WELL]].join(values).set_axis(obs.index.astype(str)))
    width = max(map(len, rows))
    figure = Figure(figsize=(2.4 * width + 0.2, 1.7 * len(rows) + 0.4), layout="constrained")
    grid = figure.subplots(len(rows), width, squeeze=False)
    for names, axes in zip(rows, grid):
        for name, ax in zip(names, axes):
            image = plate_map(table, name, plate=plate, colorbar=False, ax=ax).images[0]
            known = values[name].dropna()
            image.set(cmap="cividis", clim=np.percentile(known, (1, 99)) if len(known) else (0, 1))
            figure.colorbar(image, ax=ax, shrink=0.8)
            ax.set(title=plain(shortened(name, 24)), xticks=[], yticks=[])
        for ax in axes[len(names) :]:
            ax.remove()
    figure.suptitle(plain(f"{plate}, {table.obs.loc[plate_names(obs) == plate, WELL].nunique()} wells"))
    return grid[0, 0]


def composite(pixels: np.ndarray, *, low: np.ndarray | None = None, high: np.ndarray | None = None) -> np.ndarray:
    """Colour picture (..., Y, X, 3), uint8, of channels (..., C, Y, X), each in a colour of its own.

    ``low`` and ``high`` (C,) become black and full colour; by default the 1st and 99.8th percentile of each channel. One
    channel is grey. Colours are added, and divided by the number of channels that share each of red, green and blue.
    """
    n_channels = pixels.shape[-3]
    if low is None or high is None:
        low, high = _percentiles(pixels)
    stretched = _stretch(np.moveaxis(pixels, -3, -1), low, high)
    if n_channels == 1:
        return _to_uint8(np.repeat(stretched, 3, axis=-1))
    rgb = np.array([[int(CHANNEL_COLORS[i % 6][j : j + 2], 16) / 255 for j in (1, 3, 5)] for i in range(n_channels)])
    return _to_uint8(stretched @ (rgb / np.maximum(1, rgb.sum(axis=0) / 1.5)))


def field(plate: "Plate", site: str, *, ax: "Axes | None" = None) -> "Axes":
    """All channels of one site: a colour composite, then each channel in grey, stretched from its 1st to 99.8th percentile.

    Parameters
    ----------
    plate
        A `plates.Plate`.
    site
        Id of the site, in ``plate.sites.index``.

    Returns
    -------
    Axes with one image, the tiles side by side, at most 256 px each.

    Raises
    ------
    InputError
        The plate has no such site.
    """
    if site not in plate.sites.index:
        raise InputError(
            f"site {site!r} is not on plate {plate.name}; its sites are {', '.join(plate.sites.index[:3])}, ..."
        )
    pixels = next(_fields(plate, [site]))[1]
    small = _shrink(pixels, 256)
    low, high = _percentiles(small)
    grey = np.repeat(_to_uint8(_stretch(np.moveaxis(small, 0, -1), low, high))[..., None], 3, axis=-1)
    tiles = [composite(small, low=low, high=high), *np.moveaxis(grey, 2, 0)]
    height, width = small.shape[1:]
    gap = max(2, width // 40)
    strip = np.zeros((height, len(tiles) * (width + gap) - gap, 4), np.uint8)
    for i, tile in enumerate(tiles):
        strip[:, i * (width + gap) :][:, :width] = _opaque(tile)
    ax = axes_of(ax, (1.6 * len(tiles), 1.6 * height / width + 0.5))
    ax.imshow(strip, interpolation="none")
    middle = (np.arange(len(tiles)) * (width + gap)) + width / 2
    ax.set_xticks(middle, [plain(shortened(name, 16)) for name in ("all", *plate.channels)])
    ax.tick_params(length=0, bottom=False, labelbottom=False, labeltop=True)
    ax.set(yticks=[], title=plain(site))
    ax.spines[:].set_visible(False)
    return ax


def plate_picture(plate: "Plate", *, size: int = 32, ax: "Axes | None" = None) -> "Axes":
    """The plate at a glance: the first site of each well as a colour thumbnail at its place.

    Parameters
    ----------
    plate
        A `plates.Plate`.
    size
        Pixels of a well's side.

    Returns
    -------
    Axes with one RGBA image of (rows x (size + 1), columns x (size + 1)) px; wells without a site are transparent. Each
    channel is stretched alike on the whole plate, so that wells compare.
    """
    if not len(plate.sites):
        raise InputError(f"{plate.name} has no sites: there is nothing to draw")
    first = plate.sites.index[~plate.sites[WELL].duplicated()]
    thumbnails = np.stack([_shrink(pixels, size, square=True) for _, pixels in _fields(plate, list(first))])
    size = thumbnails.shape[-1]
    pictures = composite(thumbnails, **dict(zip(("low", "high"), _percentiles(thumbnails))))
    wells = [parse_well(well) for well in plate.sites.loc[first, WELL]]
    shape = plate_format(list(plate.sites[WELL]))
    mosaic = np.zeros((shape[0] * (size + 1), shape[1] * (size + 1), 4), np.uint8)
    for well, picture in zip(wells, pictures):
        mosaic[well.row * (size + 1) :, well.column * (size + 1) :][:size, :size] = _opaque(picture)
    ax = axes_of(ax, (8, 8 * shape[0] / shape[1] + 0.4))
    ax.imshow(mosaic, interpolation="none", extent=_extent(shape))
    _plate_ticks(ax, shape)
    ax.set_title(plain(plate.name))
    return ax


# ---------------------------------------------------------------------------------------------- pixels


def _fields(plate: "Plate", sites: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Id and pixels (C, Y, X) of the sites named, in the order of the plate."""
    part = copy.copy(plate)
    part.sites = plate.sites[plate.sites.index.isin(sites)]
    for rows, pixels in part.fields(chunk_size=8):
        yield from zip(rows.index, pixels)


def _shrink(pixels: np.ndarray, size: int, *, square: bool = False) -> np.ndarray:
    """Block means of (C, Y, X), about ``size`` px a side and never enlarged; ``square`` cuts out the central square."""
    y, x = pixels.shape[1:]
    if square:
        side = min(y, x)
        pixels = pixels[:, (y - side) // 2 :, (x - side) // 2 :][:, :side, :side]
    step = max(1, -(-max(pixels.shape[1:]) // size))
    y, x = (max(n // step, 1) for n in pixels.shape[1:])
    blocks = pixels[:, : y * step, : x * step].reshape(len(pixels), y, -1, x, step)
    return blocks.mean(axis=(2, 4), dtype=np.float32)


def _percentiles(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = np.moveaxis(pixels, -3, 0).reshape(pixels.shape[-3], -1)
    low, high = np.percentile(flat, (1, 99.8), axis=1)
    return low, high


def _stretch(pixels: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """0 to 1; channels are last. A constant channel is black."""
    return np.clip((pixels - low) / np.where(high > low, high - low, np.inf), 0, 1)


def _to_uint8(values: np.ndarray) -> np.ndarray:
    return np.rint(255 * np.clip(values, 0, 1)).astype(np.uint8)


def _opaque(picture: np.ndarray) -> np.ndarray:
    return np.concatenate([picture, np.full((*picture.shape[:2], 1), 255, np.uint8)], axis=-1)


# ---------------------------------------------------------------------------------------------- axes and labels


def _plate_ticks(ax: "Axes", shape: tuple[int, ...]) -> None:
    rows, columns = shape
    every = 1 if columns <= 12 else 2 if columns <= 24 else 4
    ax.set_xticks(np.arange(1, columns + 1, every))
    ax.set_yticks(np.arange(1, rows + 1, every), [row_letters(row) for row in range(0, rows, every)])
    ax.spines[:].set(visible=True, linewidth=0.6)
    ax.tick_params(length=0, labelsize="small", bottom=False, labelbottom=False, labeltop=True)


def _extent(shape: tuple[int, ...]) -> tuple[float, float, float, float]:
    return 0.5, shape[1] + 0.5, shape[0] + 0.5, 0.5


# ---------------------------------------------------------------------------------------------- values


def _values(adata: ad.AnnData, values: str | Sequence[Any] | np.ndarray) -> tuple[pd.Series, str]:
    """A column of obs, or one value a well, and its name."""
    if isinstance(values, str):
        require_columns(adata.obs, [values], "obs")
        return adata.obs[values], values
    if len(values) != adata.n_obs:
        raise InputError(
            f"{len(values)} values were given for {adata.n_obs} wells: give one a well, or name a column of obs"
        )
    series = pd.Series(values)
    return series.set_axis(adata.obs_names), str(series.name or "")


def _rows(adata: ad.AnnData, use_rep: str | None) -> np.ndarray:
    """Rows (n, d) of a representation, float32."""
    if use_rep not in (None, "X") and use_rep not in adata.obsm:
        raise InputError(f"use_rep={use_rep!r} is not in obsm: it has {', '.join(adata.obsm) or 'nothing'}")
    x = adata.X if use_rep in (None, "X") else adata.obsm[use_rep]
    if x is None:
        raise InputError("adata has no X: name a key of obsm (use_rep)")
    return np.asarray(x.toarray() if hasattr(x, "toarray") else x, dtype=np.float32)
