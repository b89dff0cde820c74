"""What stages leave behind: atomic writes, hashes, provenance, AnnData files.

Nothing here appears under its final name before it is whole.
"""

import contextlib
import errno
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

from cellica import __version__
from cellica.schema import UNS, DiskFullError, InputError, MissingFileError, OutputExistsError

PathLike = str | os.PathLike[str]
SUFFIXES = (".h5ad", ".zarr")


@contextlib.contextmanager
def atomic(path: PathLike, *, force: bool = False) -> Iterator[Path]:
    """Give a temporary path beside ``path``; rename it into place if the block succeeds, remove it if not.

    Raises
    ------
    OutputExistsError
        ``path`` is there and ``force`` is False.
    DiskFullError
        The disk is full.
    """
    path = Path(path)
    refuse_existing(path, force=force)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        yield folder / path.name
        new = folder / path.name
        if not new.exists():
            raise RuntimeError(f"nothing was written for {path}")
        if path.exists() and path.is_dir() != new.is_dir():
            kinds = ("folder", "file") if path.is_dir() else ("file", "folder")
            raise OutputExistsError(f"{path} is a {kinds[0]}, and a {kinds[1]} was to be written: choose another name")
        if path.is_dir() and not path.is_symlink():
            os.replace(path, folder / "replaced")
        os.replace(new, path)
    except Exception as error:
        if _is_disk_full(error):
            raise DiskFullError(
                f"{path} was not written, the disk is full ({error}): make room and start again"
            ) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_disk_full(error: BaseException) -> bool:
    """Whether an error says so, as of the system or as libraries put it into words."""
    full = errno.ENOSPC, errno.EDQUOT
    return getattr(error, "errno", None) in full or any(os.strerror(number) in str(error) for number in full)


def refuse_existing(path: PathLike, *, force: bool = False) -> None:
    """Raise an OutputExistsError where ``path`` exists, unless ``force``."""
    if Path(path).exists() and not force:
        raise OutputExistsError(
            f"{path} exists already: choose another name, or pass --force (force=True) to replace it"
        )


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
            digest.update(str(file.relative_to(path)).encode() + b"\0")
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
        return [json.loads(text) for text in adata.uns.get(UNS, {}).get("provenance", [])]
    except (ValueError, TypeError, AttributeError) as error:
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
        raise InputError(f"{path} cannot be read as AnnData ({type(error).__name__}: {error})") from error


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
    """Write a CSV atomically."""
    with atomic(path, force=force) as temporary:
        table.to_csv(temporary, index=False)


def write_text(text: str, path: PathLike, *, force: bool = False) -> None:
    """Write a text file (UTF-8) atomically."""
    with atomic(path, force=force) as temporary:
        temporary.write_text(text, encoding="utf-8")


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
