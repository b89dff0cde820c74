"""What all figures share: colours, axes without pyplot, legends, text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")  # Tol, "bright"
MARKERS = ("o", "^")
GREY = "#A0A0A0"


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


def colormap(name: str) -> Any:
    """A colormap that shows missing values grey."""
    from matplotlib import colormaps

    return colormaps[name].with_extremes(bad=GREY)


def ink() -> str:
    """The colour of text, which tells from the background."""
    from matplotlib import rcParams

    return rcParams["text.color"]


def plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")


def shortened(text: str, most: int) -> str:
    """Text of at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
