"""Progress on stderr, with rate and remaining time. Silent unless the command line (or a caller) turns it on."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

T = TypeVar("T")
EVERY = 30.0  # seconds between lines where stderr is no terminal
WORTH_A_LINE = 3.0  # seconds of work that a log should show
console = Console(stderr=True, soft_wrap=True)
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
    """Iterate with a progress bar on stderr; in a log file, with a line now and then."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    if not visible:
        yield from items
    elif console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            yield from bar.track(items, total=total, description=description)
    else:
        yield from _logged(items, description, total)


def iterations(description: str) -> Callable[[int, int], None]:
    """Give a function of an iteration and the number that has settled, which says both now and then: nobody knows the end."""
    began = last = time.monotonic()

    def tell(iteration: int, settled: int) -> None:
        nonlocal began, last
        now = time.monotonic()
        if iteration == 1:
            began = last = now
        if now - last >= EVERY:
            last = now
            say(f"{description}: iteration {iteration}, {settled} settled, {now - began:.0f} s")

    return tell


@contextlib.contextmanager
def transfer(description: str) -> Iterator[Callable[[int, int | None], None]]:
    """Give a function of the bytes that are there and of all that come (None: not known), which shows both, rate and
    remaining time; in a log file, with a line now and then."""
    if visible and console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task(description, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    began = last = time.monotonic()
    first: int | None = None

    def log(done: int, total: int | None) -> None:
        nonlocal last, first
        first, now = done if first is None else first, time.monotonic()
        if now - last >= EVERY and done > first:
            last, rate = now, (done - first) / (now - began)
            of = f" of {total / 1e6:.0f} MB" if total else " MB"
            remaining = f", {(total - done) / rate:.0f} s left" if total else ""
            say(f"{description}: {done / 1e6:.0f}{of}, {rate / 1e6:.3g} MB/s{remaining}")

    yield log


def _logged(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    start = last = time.monotonic()
    done = 0
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - last >= EVERY:
            last, rate = now, done / (now - start)
            remaining = f", {(total - done) / rate:.0f} s left" if total else ""
            say(f"{description}: {done}{f' of {total}' if total else ''}, {rate:.3g}/s{remaining}")
    if time.monotonic() - start > WORTH_A_LINE:
        say(f"{description}: {done} done in {time.monotonic() - start:.1f} s")
