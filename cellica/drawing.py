"""What all figures share: colors, axes without pyplot, legends, text, values of wells."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd

from cellica.schema import InputError, require_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")  # Tol, "bright"
MARKERS = ("o", "^")
GREY = "#A0A0A0"
MAX_CATEGORIES = len(COLORS) * len(MARKERS)


class Look(NamedTuple):
    """How a category is drawn."""

    name: str
    color: str
    marker: str


def axes_of(ax: "Axes | None", size: tuple[float, float]) -> "Axes":
    """These axes, or those of a new figure of ``size`` inches."""
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained").subplots()


def figure_of(ax: "Axes") -> Any:
    """The whole figure that axes belong to."""
    return ax.get_figure(root=True)


def legend(ax: "Axes", handles: Sequence[Any], names: Sequence[str], title: str = "") -> None:
    """A legend to the right of the axes."""
    texts = [plain(shortened(str(name), 24)) for name in names]
    ax.legend(
        handles,
        [f"\N{WORD JOINER}{text}" if text.startswith("_") else text for text in texts],  # matplotlib drops "_..."
        title=plain(title),
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0,
        frameon=False,
        fontsize="small",
        title_fontsize="small",
    )


def categories(values: np.ndarray) -> tuple[np.ndarray, list[Look]]:
    """Code of each value, and how each code is drawn: the 12 largest categories by name, then "other" and "none", both grey.

    >>> code, looks = categories(np.array(["b", "a", "b", None], dtype=object))
    >>> code.tolist(), [look.name for look in looks]
    ([1, 0, 1, 2], ['a', 'b', 'none'])
    """
    blank = np.array([value in (None, "") for value in values], dtype=bool)
    counts = pd.Series(values[~blank], dtype=object).value_counts()
    shown = sorted(counts.index[:MAX_CATEGORIES])
    looks = [Look(name, COLORS[i % len(COLORS)], MARKERS[i // len(COLORS)]) for i, name in enumerate(shown)]
    if len(counts) > len(shown):
        looks.append(Look(f"other ({len(counts) - len(shown)})", GREY, MARKERS[0]))
    if blank.any():
        looks.append(Look("none", GREY, MARKERS[0]))
    place = {name: i for i, name in enumerate(shown)}
    code = np.array([place.get(value, len(shown)) for value in values], dtype=np.uint8)
    code[blank] = len(looks) - 1
    return code, looks


def colormap(name: str) -> Any:
    """A colormap that shows missing values grey."""
    from matplotlib import colormaps

    return colormaps[name].with_extremes(bad=GREY)


def ink() -> str:
    """The color of text, which tells from the background."""
    from matplotlib import rcParams

    return rcParams["text.color"]


def plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def shortened(text: str, most: int) -> str:
    """Text of at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly chosen, the first and last among them.

    >>> spread("abcdefg", 3), spread("ab", 3)
    (['a', 'd', 'g'], ['a', 'b'])
    """
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int))]


def values_of(adata: ad.AnnData, values: str | Sequence[Any] | np.ndarray) -> tuple[pd.Series, str]:
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
