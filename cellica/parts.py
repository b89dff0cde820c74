"""Long computations that may be killed at any moment: one run an output, and parts from which the next run goes on."""

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
from filelock import Timeout

from cellica import artifacts, progress
from cellica.schema import OutputBusyError

EVERY = 60.0  # seconds of work that a killed run may lose
SETTINGS = "settings.json"


@contextlib.contextmanager
def claimed(output: artifacts.PathLike, *, wait: bool = False) -> Iterator[Path]:
    """Keep an output for this run alone, and give the folder for its parts: ``.NAME.parts`` beside it.

    The folder is removed when the block succeeds, and stays when it does not. The lock is the operating system's, on
    ``.NAME.lock``: it ends with the process that holds it, however that ends. With ``wait``, another run on this output
    is waited for.

    Raises
    ------
    OutputBusyError
        Another run works on this output, and ``wait`` is False.
    DiskFullError, NotWritableError
        There is no room for the lock; the folder does not allow writing.
    """
    output = Path(output)
    lock, folder = artifacts.beside(output)
    with contextlib.ExitStack() as held:
        try:
            with artifacts.writing(output):
                artifacts.make_folder(output.parent)
                try:
                    held.enter_context(artifacts.locked(lock))
                except Timeout:
                    if not wait:
                        raise
                    progress.say(f"another run is writing {output}: waiting for it")
                    held.enter_context(artifacts.locked(lock, wait=True))
        except Timeout:
            raise OutputBusyError(
                f"another run is writing {output} now: wait for it, stop it, or choose another output"
            ) from None
        artifacts.remove_left(output)
        yield folder
        shutil.rmtree(folder, ignore_errors=True)


def prepare(folder: Path, settings: Mapping[str, object]) -> None:
    """Make a folder for parts; those of an earlier run with other settings are discarded, and it is said."""
    settings = json.loads(json.dumps(settings))
    if folder.exists():
        try:
            earlier = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            other = [name for name in {**settings, **earlier} if settings.get(name) != earlier.get(name)]
        except (OSError, ValueError, TypeError):
            other = ["settings that cannot be read"]
        if other:
            progress.say(f"{folder}: parts of an earlier run are discarded, it had other {', '.join(sorted(other))}")
            shutil.rmtree(folder)
    if not folder.exists():
        artifacts.write_text(json.dumps(settings, indent=1), folder / SETTINGS)


class Parts:
    """Rows of a long computation, written to a folder about once a minute and when the block ends.

    Rows that an earlier run left are there from the start, if that run had the same settings.

    Attributes
    ----------
    n_rows
        Rows so far.
    n_found
        Those of them that an earlier run left.
    """

    def __init__(self, folder: artifacts.PathLike | None, settings: Mapping[str, object]) -> None:
        """Keep rows in ``folder`` (None: only in memory); ``settings`` are all that decides what the rows are."""
        self.folder = None if folder is None else Path(folder)
        self._kept: list[dict[str, np.ndarray]] = []
        self._new: list[dict[str, np.ndarray]] = []
        self._written = time.monotonic()
        self.n_rows = 0
        if self.folder:
            prepare(self.folder, settings)
            self._find(self.folder)
        self.n_found = self.n_rows

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._write()

    def add(self, rows: Mapping[str, np.ndarray]) -> None:
        """Add rows: arrays by name, one row each along the first axis; the same names every time."""
        self._new.append(dict(rows))
        self.n_rows += _length(rows)
        if time.monotonic() - self._written >= EVERY:
            self._write()

    def rows(self) -> dict[str, np.ndarray]:
        """All rows so far, in order: arrays by name."""
        return _joined([*self._kept, *self._new])

    def forget(self, why: str) -> None:
        """Discard the rows that an earlier run left; ``why`` is said."""
        progress.say(f"{self.folder}: parts of an earlier run are discarded, {why}")
        for file in self.folder.glob("*.npz") if self.folder else ():
            file.unlink()
        self._kept, self.n_rows, self.n_found = [], 0, 0

    def _find(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.npz")):
            try:
                if int(file.stem) != self.n_rows:
                    raise ValueError(f"rows {self.n_rows} to {int(file.stem)} are missing before it")
                with file.open("rb") as stream, np.load(stream) as arrays:
                    rows = dict(arrays)
                self.n_rows += _length(rows)
                self._kept.append(rows)
            except Exception as error:  # whatever a damaged archive raises, it means this
                progress.say(f"{file} is damaged and discarded ({error})")
                file.unlink()

    def _write(self) -> None:
        self._written = time.monotonic()
        if not (self.folder and self._new):
            return
        rows = _joined(self._new)
        with (
            artifacts.atomic(self.folder / f"{self.n_rows - _length(rows):09d}.npz") as file,
            file.open("wb") as stream,
        ):
            np.savez(stream, **rows)  # type: ignore[arg-type]
        self._kept.append(rows)
        self._new = []


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}


def _length(rows: Mapping[str, np.ndarray]) -> int:
    lengths = {len(values) for values in rows.values()}
    if len(lengths) != 1:
        raise ValueError(f"arrays of {sorted(lengths)} rows: all must have the same number")
    return lengths.pop()
