"""What stages leave behind: atomic writes, hashes, provenance, AnnData files.

Nothing here appears under its final name before it is whole.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
from anndata.io import write_elem
from filelock import FileLock, Timeout

from cellica import __version__
from cellica.schema import (
    UNS,
    CellicaError,
    DiskFullError,
    InputError,
    MissingFileError,
    NotWritableError,
    OutputExistsError,
)

PathLike = str | os.PathLike[str]
SUFFIXES = (".h5ad", ".zarr")


@contextlib.contextmanager
def atomic(path: PathLike, *, force: bool = False) -> Iterator[Path]:
    """Give a temporary path beside ``path``; rename it into place if the block succeeds, remove it if not.

    Raises
    ------
    OutputExistsError
        ``path`` is there and ``force`` is False.
    DiskFullError, NotWritableError
        The disk is full; the folder does not allow writing.
    """
    path = Path(path)
    refuse_existing(path, force=force)
    with writing(path):
        make_folder(path.parent)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        with writing(path):
            yield folder / path.name
            new = folder / path.name
            if not new.exists():
                raise RuntimeError(f"nothing was written for {path}")
            if path.exists() and path.is_dir() != new.is_dir():
                kinds = ("folder", "file") if path.is_dir() else ("file", "folder")
                raise OutputExistsError(
                    f"{path} is a {kinds[0]}, and a {kinds[1]} was to be written: choose another name"
                )
            if new.is_dir() and (path.is_dir() or path.is_symlink()):  # of a link, the link itself
                os.replace(path, folder / "replaced")
            os.replace(new, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; a NotWritableError where a file is in the place of one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotWritableError(
            f"the folder {folder} cannot be made, a file is in its place ({error}): choose another name for the output"
        ) from error


@contextlib.contextmanager
def writing(path: PathLike) -> Iterator[None]:
    """Say of a block that writes ``path`` why it cannot: a full disk, a folder that allows no writing, too long a name.

    Raises
    ------
    DiskFullError, NotWritableError
        In place of the system's or a library's own error.
    """
    try:
        yield
    except Exception as error:
        named = isinstance(error, DiskFullError | NotWritableError)  # by a block within, for what it wrote on the way
        cause = error.__cause__ or error if named else error
        if isinstance(cause, CellicaError):
            raise
        if _says(cause, errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"{path} was not written, the disk is full ({cause}): make room and start again"
            ) from cause
        if _says(cause, errno.EROFS, errno.EACCES, errno.EPERM):
            raise NotWritableError(
                f"{path} was not written, its folder does not allow it ({cause}): choose another folder, or have this one "
                "opened for writing"
            ) from cause
        if _says(cause, errno.ENAMETOOLONG):
            raise NotWritableError(f"{path} was not written, its name is too long: choose a shorter one") from cause
        raise


def _says(error: BaseException, *numbers: int) -> bool:
    """Whether an error is one of the system's by its number, or as libraries put it into words."""
    return getattr(error, "errno", None) in numbers or any(os.strerror(number) in str(error) for number in numbers)


def refuse_existing(path: PathLike, *, force: bool = False) -> None:
    """Raise an OutputExistsError where ``path`` exists, unless ``force``; what a killed run left beside it goes."""
    if Path(path).exists() and not force:
        _sweep(Path(path))
        raise OutputExistsError(
            f"{path} exists already: choose another name, or pass --force (force=True) to replace it"
        )


def beside(output: Path) -> tuple[Path, Path]:
    """Where a run keeps its lock and its parts: ``.NAME.lock`` and ``.NAME.parts`` beside the output."""
    return output.with_name(f".{output.name}.lock"), output.with_name(f".{output.name}.parts")


@contextlib.contextmanager
def locked(lock: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file, which is the operating system's and ends with its holder; filelock's Timeout where another has it."""
    held = FileLock(lock, timeout=-1 if wait else 0)
    while True:
        held.acquire()
        try:
            with FileLock(lock, timeout=0):
                pass  # the one who held it before had removed the file of that name: this lock is on no name
        except Timeout:
            break
        held.release()
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        held.release()


def remove_left(output: Path) -> None:
    """Remove the temporary folders that killed runs left of an output. The caller holds its lock."""
    for left in output.parent.glob(f".{glob.escape(output.name)}.*.part"):
        shutil.rmtree(left, ignore_errors=True)


def _sweep(output: Path) -> None:
    """Remove what a run left that was killed when its output had the name already; parts that are newer stay."""
    lock, parts = beside(output)
    if lock.exists():
        with contextlib.suppress(OSError), locked(lock):
            remove_left(output)
            newest = max((file.stat().st_mtime for file in parts.rglob("*") if file.is_file()), default=0)
            if newest <= output.stat().st_mtime:
                shutil.rmtree(parts, ignore_errors=True)


def check_adata_name(path: PathLike, *, force: bool = False) -> None:
    """Raise an error, before hours of work, where an AnnData could not be written to ``path``."""
    _check_suffix(Path(path))
    if Path(path).is_dir() and Path(path).suffix != ".zarr":
        raise OutputExistsError(f"{path} is a folder: choose another name for the file")
    refuse_existing(path, force=force)


def refuse_inputs(path: PathLike, inputs: Iterable[PathLike]) -> None:
    """Raise an InputError where an output would replace one of the inputs."""
    same = [str(one) for one in inputs if Path(one).resolve() == Path(path).resolve()]
    if same:
        raise InputError(f"{path} is to be written and is also an input, {same[0]}: choose another name for the output")


def require_file(path: PathLike, what: str = "input") -> Path:
    """Return the path, or raise a MissingFileError that names it."""
    path = Path(path)
    if not path.exists():
        raise MissingFileError(f"{what} {str(path)!r} does not exist (looked in {Path.cwd()})")
    return path


def read_csv(path: PathLike, what: str = "table") -> Any:
    """A CSV table of text, every value a string or missing.

    Raises
    ------
    MissingFileError, InputError
        It is not there, or is no CSV file in UTF-8.
    """
    import pandas as pd

    path = require_file(path, what)
    try:
        return pd.read_csv(path, dtype=str, encoding="utf-8")
    except (ValueError, OSError) as error:  # pandas' own errors are ValueErrors
        raise InputError(f"{path} cannot be read as a {what}, a CSV file in UTF-8 ({error})") from error


def sha256(path: PathLike) -> str:
    """SHA-256 of a file, or of a folder's files (names and contents) in sorted order."""
    path = Path(path)
    digest = hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        if path.is_dir():
            digest.update(os.fsencode(file.relative_to(path)) + b"\0")
        with open(file, "rb") as stream:
            for block in iter(lambda: stream.read(1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- provenance


def step(
    verb: str, parameters: Mapping[str, Any], inputs: Mapping[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    """One step of provenance: verb, version of cellica, parameters, inputs (name to SHA-256)."""
    return {
        "verb": verb,
        "cellica": __version__,
        "anndata": version("anndata"),
        "parameters": {key: value for key, value in parameters.items() if value is not None},
        "inputs": dict(inputs or {}),
        **more,
    }


def add_step(adata: ad.AnnData, new: Mapping[str, Any]) -> None:
    """Append a step to ``uns["cellica"]["provenance"]``, an array of JSON texts, one a step."""
    _set_provenance(adata, [*provenance(adata), new])


def name_inputs(adata: ad.AnnData, inputs: Mapping[str, str], *, steps: int = 1) -> None:
    """Set the inputs (name to SHA-256) of the last steps: what only the caller that read the files knows."""
    known = provenance(adata)
    for one in known[len(known) - steps :]:
        one["inputs"] = dict(inputs)
    _set_provenance(adata, known)


def provenance(adata: ad.AnnData) -> list[dict[str, Any]]:
    """Read the steps that made an AnnData, oldest first."""
    try:
        steps = [json.loads(text) for text in adata.uns.get(UNS, {}).get("provenance", [])]
        if not all(isinstance(step, dict) and {"verb", "parameters"} <= step.keys() for step in steps):
            raise ValueError("a step has no verb or no parameters")
        return steps
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"uns['cellica']['provenance'] is not as cellica writes it ({error}): delete it") from error


def _set_provenance(adata: ad.AnnData, steps: Sequence[Mapping[str, Any]]) -> None:
    texts = [json.dumps(one, sort_keys=True, default=str) for one in steps]
    adata.uns.setdefault(UNS, {})["provenance"] = np.array(texts, dtype=object)


# ---------------------------------------------------------------------------------------------- files


def read_adata(path: PathLike) -> ad.AnnData:
    """Read a ``.h5ad`` or ``.zarr`` file.

    Raises
    ------
    MissingFileError, InputError
        The file is not there, or is neither.
    """
    path = require_file(path)
    _check_suffix(path)
    try:
        return ad.read_h5ad(path) if path.suffix == ".h5ad" else ad.read_zarr(path)
    except Exception as error:
        raise InputError(
            f"{path} cannot be read as AnnData ({type(error).__name__}: {error}): it is damaged or of another kind; let the "
            "stage that made it write it again"
        ) from error


def write_adata(adata: ad.AnnData, path: PathLike, *, force: bool = False) -> None:
    """Write ``.h5ad`` or ``.zarr`` atomically, leaving the caller's AnnData as it is."""
    _check_suffix(Path(path))
    with atomic(path, force=force) as temporary, ad.settings.override(allow_write_nullable_strings=False):
        copy = adata.copy()
        copy.obs, copy.var = _plain_strings(copy.obs), _plain_strings(copy.var)
        if temporary.suffix == ".h5ad":
            temporary.write_bytes(_h5ad(copy))
        else:
            _write_zarr(copy, temporary)


def _h5ad(adata: ad.AnnData) -> memoryview:
    """The content of a ``.h5ad`` file. HDF5 itself crashes where the disk is full."""
    with h5py.File("memory", "w", driver="core", backing_store=False, block_size=2**22) as file:
        write_elem(file, "/", adata, dataset_kwargs={"compression": "gzip", "compression_opts": 1})
        file.flush()
        return memoryview(file.id.get_file_image())


def write_table(table: pd.DataFrame, path: PathLike, *, force: bool = False) -> None:
    """Write a CSV (UTF-8) atomically; bytes of file names that are no text become ``\\udc..``."""
    with atomic(path, force=force) as temporary:
        table.to_csv(temporary, index=False, errors="backslashreplace")


def write_text(text: str, path: PathLike, *, force: bool = False) -> None:
    """Write a text file (UTF-8) atomically; bytes of file names that are no text become ``\\udc..``."""
    with atomic(path, force=force) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def _write_zarr(adata: ad.AnnData, path: Path) -> None:
    # anndata 0.12 needs both said; later ones do this by default, and warn when it is said
    options = {"zarr_write_format": 3, "auto_shard_zarr_v3": False} if version("anndata").startswith("0.12.") else {}
    with ad.settings.override(**options), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*sharding.*|.*consolidated.*|.*zarr.*", category=UserWarning)
        adata.write_zarr(path)


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise InputError(f"{str(path)!r} is not a name for AnnData: use one that ends in {' or '.join(SUFFIXES)}")


def _plain_strings(frame: pd.DataFrame) -> pd.DataFrame:
    """String columns as categories, so that missing values survive on every anndata; a plain object index."""
    frame = frame.copy()
    for name in frame.columns:
        column = frame[name]
        if isinstance(column.dtype, pd.CategoricalDtype):
            if pd.api.types.is_string_dtype(column.cat.categories.dtype):
                frame[name] = column.cat.rename_categories(list(column.cat.categories))
        elif pd.api.types.is_object_dtype(column.dtype) or pd.api.types.is_string_dtype(column.dtype):
            frame[name] = pd.Categorical([None if pd.isna(v) else str(v) for v in column.to_numpy(dtype=object)])
    frame.index = pd.Index(frame.index.to_numpy(dtype=object), name=frame.index.name)
    return frame
