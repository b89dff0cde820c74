"""Data manifests: which files a public data set consists of, where its owners publish them, and on which terms.

Those of cellica lie in the folder ``data_manifests``; its README describes their keys, and users write their own alike.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from cellica.artifacts import PathLike
from cellica.schema import InputError, MissingFileError, first_few

HUB = {"hf-model": "model", "hf-dataset": "dataset"}  # sources on the Hugging Face Hub, and their kind of repository
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
RESERVED = ("checksums.json", ".fetch.lock")
_TEXT, _FLAG = (str, "text"), (bool, "true or false")
_SET_KEYS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("name", "title", "purpose", "licence", "licence_url", "repository", "revision"), _TEXT),
    "non_commercial": _FLAG,
    "files": (list, "tables [[files]]"),
}
_FILE_KEYS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("path", "source", "sha256", "licence", "purpose"), _TEXT),
    **dict.fromkeys(("non_commercial", "approximate"), _FLAG),
    "size": (int, "a whole number of bytes"),
}
_OPTIONAL = {"repository", "revision", "sha256", "licence", "purpose", "non_commercial", "approximate"}


@dataclass(frozen=True)
class File:
    """One file: its place in the folder, its source as the manifest says it, its size in bytes, its terms, its use."""

    path: str
    source: str
    size: int
    approximate: bool
    sha256: str | None
    licence: str
    non_commercial: bool
    purpose: str


@dataclass(frozen=True)
class Manifest:
    """A data set: what it is, which stage reads it, its terms, its files."""

    name: str
    title: str
    purpose: str
    licence: str
    licence_url: str
    repository: str
    revision: str
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    @property
    def non_commercial_files(self) -> tuple[File, ...]:
        """Files that may not be used commercially."""
        return tuple(file for file in self.files if file.non_commercial)

    def url(self, file: File) -> str:
        """Address of a file, which a browser can open."""
        if file.source in HUB:
            kind = "datasets/" if HUB[file.source] == "dataset" else ""
            return f"https://huggingface.co/{kind}{self.repository}/resolve/{self.revision}/{quote(file.path)}"
        return file.source.format(path=quote(file.path), revision=self.revision)


def names() -> list[str]:
    """Names of the data sets that cellica has a manifest of."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def read_manifest(name: PathLike) -> Manifest:
    """Read a manifest.

    Parameters
    ----------
    name
        One of `names`, or the path of a TOML file.

    Raises
    ------
    InputError, MissingFileError
        No such manifest, or one with faults: all of them are named.
    """
    path = Path(name)
    if path.suffix != ".toml":
        if str(name) not in names():
            raise InputError(
                f"data set {str(name)!r} is not known: choose one of {', '.join(names())}, or name an own manifest (FILE.toml)"
            )
        path = _folder() / f"{name}.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"manifest {str(path)!r} does not exist (looked in {Path.cwd()})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"manifest {path} is no TOML: {error}") from error
    faults = list(_faults(table))
    if faults:
        raise InputError(f"manifest {path} has {len(faults)} faults: {first_few(faults, 8)}")
    files = tuple(file for entry in table["files"] for file in _expanded(entry, table))
    places = [file.path for file in files]
    twice = sorted(place for place, count in Counter(places).items() if count > 1)
    if twice:
        raise InputError(f"manifest {path} names files twice: {first_few(twice)}")
    folders = {str(parent) for place in places for parent in PurePosixPath(place).parents}
    apart = {*folders, *(f"{place}.part" for place in places)}
    clash = sorted(apart & set(places))
    if clash:
        raise InputError(
            f"manifest {path} names files that are also the folder or the unfinished part of another: {first_few(clash)}"
        )
    texts = {key: table.get(key, "") for key, (kind, _) in _SET_KEYS.items() if kind is str}
    return Manifest(**texts, files=files)


def _folder() -> Path:
    """Beside the modules where cellica is installed, beside the package in a checkout."""
    installed = Path(__file__).parent / "data_manifests"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "data_manifests"


def _expanded(entry: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[File]:
    """A file, or each of a numbered range, as in ``train-{00000..00034}.parquet``, which share the size."""
    span = _RANGE.search(entry["path"])
    numbers = range(int(span[1]), int(span[2]) + 1) if span else range(1)
    for number in numbers:
        path = entry["path"].replace(span[0], f"{number:0{len(span[1])}d}") if span else entry["path"]
        yield File(
            path=path,
            source=entry["source"],
            size=entry["size"] // len(numbers),
            approximate=entry.get("approximate", False) or span is not None,
            sha256=entry.get("sha256"),
            licence=entry.get("licence", table["licence"]),
            non_commercial=entry.get("non_commercial", table["non_commercial"]),
            purpose=entry.get("purpose", table["purpose"]),
        )


# ---------------------------------------------------------------------------------------------- faults


def _faults(table: Mapping[str, Any]) -> Iterator[str]:
    yield from _wrong_keys(table, _SET_KEYS, "")
    entries = table.get("files")
    for i, entry in enumerate(entries if isinstance(entries, list) else (), 1):
        where = f"file {i}: "
        if not isinstance(entry, dict):
            yield f"{where}is no table [[files]]"
            continue
        wrong = list(_wrong_keys(entry, _FILE_KEYS, where))
        yield from wrong or (f"{where}{fault}" for fault in _wrong_values(entry, table))
    if entries == []:
        yield "files is empty"


def _wrong_keys(table: Mapping[str, Any], keys: Mapping[str, tuple[type, str]], where: str) -> Iterator[str]:
    for key, (kind, words) in keys.items():
        if key not in table:
            if key not in _OPTIONAL or (key == "non_commercial" and not where):
                yield f"{where}{key} is missing"
        elif type(table[key]) is not kind:
            yield f"{where}{key} is {table[key]!r}, not {words}"
    yield from (f"{where}{key} is no key: use {', '.join(keys)}" for key in table if key not in keys)


def _wrong_values(entry: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[str]:
    path, source = entry["path"], entry["source"]
    parts = path.split("/")
    if not path or "\\" in path or ":" in path or {"", ".", ".."} & set(parts) or path in RESERVED:
        yield f"path {path!r} must lie in the folder: names joined by '/', none of them '..'"
    span = _RANGE.search(path)
    if set(_RANGE.sub("", path, count=1)) & set("{}"):
        yield f"path {path!r} may hold one range in braces, as in part-{{000..012}}.csv"
    elif span and not int(span[1]) <= int(span[2]) < int(span[1]) + 100_000:
        yield f"the range {span[0]} must rise"
    if entry["size"] <= 0:
        yield f"size is {entry['size']}, not a positive number of bytes"
    if not re.fullmatch(r"[0-9a-f]{64}", entry.get("sha256", "0" * 64)):
        yield f"sha256 {entry['sha256']!r} is not 64 digits of 0-9 and a-f"
    elif span and "sha256" in entry:
        yield "a range of files has no one sha256"
    yield from _wrong_source(source, table)


def _wrong_source(source: str, table: Mapping[str, Any]) -> Iterator[str]:
    repository, revision = str(table.get("repository", "")), str(table.get("revision", ""))
    if source in HUB:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            yield f"source {source} needs repository = 'owner/name' in the manifest, not {repository!r}"
        if not re.fullmatch(r"[0-9a-f]{7,40}", revision):
            yield f"source {source} needs revision = the hash of a commit (7 to 40 digits), not {revision!r}"
    elif not re.match(r"https?://[^/]+/", source):
        yield f"source {source!r} is none of {', '.join(HUB)} and no address that starts with http:// or https://"
    elif set(re.findall(r"\{.*?\}|[{}]", source)) - {"{path}", "{revision}"}:
        yield f"source {source!r} may hold {{path}} and {{revision}} in braces, and nothing else"
    elif "{revision}" in source and not revision:
        yield f"source {source!r} needs revision in the manifest"
