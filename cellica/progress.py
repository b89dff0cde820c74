"""Progress on stderr, with rate and remaining time. Silent unless the command line (or a caller) turns it on."""

from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

T = TypeVar("T")
console = Console(stderr=True)
visible = False


class _Rate(ProgressColumn):
    def render(self, task) -> Text:  # type: ignore[no-untyped-def]
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.3g}/s" if speed else "")


def show(on: bool = True) -> None:
    """Turn progress bars and notes on stderr on or off."""
    global visible
    visible = on


def say(message: str) -> None:
    """Write a note to stderr, where progress is shown."""
    if visible:
        console.print(message, highlight=False, markup=False)


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate with a progress bar on stderr."""
    if not visible:
        yield from items
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=not console.is_terminal) as bar:
        if total is None and isinstance(items, Sized):
            total = len(items)
        yield from bar.track(items, total=total, description=description)
