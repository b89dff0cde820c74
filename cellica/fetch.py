"""Public data sets by manifest: what a set consists of, fetched from its owners, resumed, verified.

Nothing else in cellica reaches for the network.
"""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

import filelock

from cellica import artifacts, progress
from cellica.artifacts import PathLike
from cellica.download import Source, UnreachableError, discard, download, size_of, source_of
from cellica.manifests import RESERVED, File, Manifest, read_manifest
from cellica.schema import FetchError, InputError, first_few

LOCK = "checksums.json"


@dataclass(frozen=True)
class Outcome:
    """What became of one file: ``status`` is "fetched", "there", "to fetch" (dry run) or "failed", ``note`` says more."""

    file: File
    target: Path
    status: str
    sha256: str = ""
    note: str = ""


def fetch(
    name: PathLike,
    out_dir: PathLike,
    files: Sequence[str] | None = None,
    *,
    accept_license: bool = False,
    unpack: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> list[Outcome]:
    """Fetch files of a data set, and verify each before it has its name.

    Parameters
    ----------
    name
        A data set of `manifests.names`, or the path of an own manifest (``.toml``, see `manifests.read_manifest`).
    out_dir
        Folder to fetch into. ``checksums.json`` in it keeps the SHA-256 of all that was fetched.
    files
        Names of files in the manifest, or patterns such as ``data/*``; by default all.
    accept_license
        The user's word for the terms of files that may not be used commercially.
    unpack
        Also unpack zip archives, into ``out_dir``; what is there with its size is left as it is.
    force
        Fetch again what is there and is not the file it should be, and forget the sum that an earlier run recorded.
    dry_run
        Say what would be fetched; needs no network and no licence.

    Returns
    -------
    One outcome a file, in the manifest's order. A file that is there and right is not fetched again. A download that
    was killed or cut off goes on where it stopped, as long as the server still has the same file. SHA-256 is compared
    with the manifest's, with what the Hugging Face Hub says of the file, or with what an earlier run recorded; where none
    of these is known, what was found is recorded, and the outcome's note says so.

    Raises
    ------
    InputError
        An unknown name or file, a manifest that is not right, a licence that was not accepted.
    FetchError
        A server does not answer (the message lists what to put where), nothing could be fetched, the disk is too full,
        or an archive is not safe to unpack. Files that came before stay.
    DiskFullError, NotWritableError
        The disk became full on the way, and what came is kept; the folder does not allow writing.
    """
    manifest = read_manifest(name)
    wanted = chosen(manifest, files)
    folder = Path(out_dir)
    if dry_run:
        return [_planned(file, folder) for file in wanted]
    _require_licence(manifest, wanted, accept_license)
    with artifacts.writing(folder):
        artifacts.make_folder(folder)
    try:
        with artifacts.writing(folder), filelock.FileLock(folder / ".fetch.lock", timeout=0):
            artifacts.remove_left(folder / LOCK)
            outcomes = _fetch_all(manifest, wanted, folder, force)
            if unpack:
                for one in outcomes:
                    if one.status != "failed" and one.target.suffix == ".zip":
                        unpack_zip(one.target, folder, kept=(*RESERVED, *(file.path for file in manifest.files)))
            return outcomes
    except filelock.Timeout as error:
        raise FetchError(f"another cellica fetch is at work in {folder}: wait for it, or fetch elsewhere") from error


def _fetch_all(manifest: Manifest, wanted: Sequence[File], folder: Path, force: bool) -> list[Outcome]:
    found = [_there(file, folder, force) for file in wanted]
    missing = [file for file, one in zip(wanted, found) if one is None]
    _require_space(missing, folder)
    outcomes, unreachable = [], ""
    for file, there in zip(wanted, found):
        if there is None and not unreachable:
            try:
                recorded = None if force else _recorded(folder).get(file.path, {}).get("sha256")
                there = _fetch_one(manifest, file, folder, recorded)
            except UnreachableError as error:
                unreachable = str(error)
            except FetchError as error:
                there = Outcome(file, folder / file.path, "failed", note=str(error))
        outcomes.append(there or Outcome(file, folder / file.path, "failed", note=f"no server answers: {unreachable}"))
        progress.say(f"{file.path}: {outcomes[-1].status}{f' ({outcomes[-1].note})' if outcomes[-1].note else ''}")
    failed = [one for one in outcomes if one.status == "failed"]
    if unreachable:
        raise FetchError(f"{unreachable}. Without network, {_by_hand(manifest, failed)}")
    if failed and len(failed) == len(outcomes):
        reasons = "; ".join(dict.fromkeys(one.note for one in failed))
        raise FetchError(f"nothing could be fetched: {reasons}. If that lasts, {_by_hand(manifest, failed)}")
    return outcomes


def _fetch_one(manifest: Manifest, file: File, folder: Path, recorded: str | None) -> Outcome:
    source, target = source_of(manifest, file), folder / file.path
    if source.sha256 is None and recorded:
        source = replace(source, sha256=recorded, said_by=f"{LOCK}, of an earlier fetch,")
    part = target.with_name(f"{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = ""
    for start_over in (True, False) if part.exists() else (False,):
        if source.cached:
            shutil.copyfile(source.cached, part)
        else:
            try:
                download(source, part, file.path)
            finally:
                if not size_of(part):
                    discard(part)
        try:
            digest = _verified(part, source)
            break
        except FetchError as error:
            discard(part)
            if not start_over:
                raise FetchError(f"{error}; nothing of it was kept") from error
            progress.say(f"{file.path}: what an earlier run left is not of this file; starting over")
    os.replace(part, target)
    discard(part)
    _record(folder, file.path, sha256=digest, size=target.stat().st_size, url=source.url)
    note = "" if source.sha256 else f"no SHA-256 was known; recorded in {LOCK} what came: {digest}"
    return Outcome(file, target, "fetched", digest, note)


# ---------------------------------------------------------------------------------------------- what is wanted


def chosen(manifest: Manifest, names: Sequence[str] | None) -> list[File]:
    """Files of a manifest by names and patterns, all by default; an InputError where one names none."""
    known = [file.path for file in manifest.files]

    def named(path: str, name: str) -> bool:
        return path == name or fnmatch(path, name)

    for name in names or ():
        if not any(named(path, name) for path in known):
            raise InputError(f"{manifest.name} has no file {name!r}; it has {first_few(known, 8)}")
    return [file for file in manifest.files if not names or any(named(file.path, name) for name in names)]


def _require_licence(manifest: Manifest, wanted: Sequence[File], accepted: bool) -> None:
    for licence in dict.fromkeys(file.licence for file in wanted):
        progress.say(f"licence: {licence} ({manifest.licence_url})")
    closed = list(dict.fromkeys(file.licence for file in wanted if file.non_commercial))
    if closed and not accepted:
        raise InputError(
            f"{manifest.name} is not for commercial use: {', '.join(closed)}. Read the terms at {manifest.licence_url}, "
            "and pass --accept-license (accept_license=True) if you accept them; nothing was fetched"
        )


def _require_space(missing: Iterable[File], folder: Path) -> None:
    needed = sum(max(file.size - size_of(folder / f"{file.path}.part"), 0) for file in missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FetchError(
            f"{in_words(needed)} are to be fetched and {folder} has {in_words(free)} free: make room, name fewer files "
            "(--file), or choose another folder"
        )


def _planned(file: File, folder: Path) -> Outcome:
    target = folder / file.path
    begun = size_of(folder / f"{file.path}.part")
    note = f"{in_words(begun)} are there already" if begun else ""
    return Outcome(file, target, "there" if target.exists() else "to fetch", note=note)


def _there(file: File, folder: Path, force: bool) -> Outcome | None:
    """The outcome where the file is there and right; None where it is to be fetched."""
    target = folder / file.path
    if not target.exists():
        return None
    recorded = _recorded(folder).get(file.path, {}).get("sha256")
    source = Source("", None if file.approximate else file.size, file.sha256 or recorded)
    try:
        digest = _verified(target, replace(source, said_by="the manifest" if file.sha256 else LOCK))
    except FetchError as error:
        if force:
            return None
        raise FetchError(f"{error}: move the file away, or pass --force (force=True) to fetch it again") from error
    if source.sha256:
        return Outcome(file, target, "there", digest, "verified")
    _record(folder, file.path, sha256=digest, size=target.stat().st_size, url="")
    return Outcome(file, target, "there", digest, f"no SHA-256 was known; recorded in {LOCK} what was found: {digest}")


def _by_hand(manifest: Manifest, failed: Sequence[Outcome]) -> str:
    rows = (f"\n  {manifest.url(one.file)} -> {one.target} ({size_in_words(one.file)})" for one in failed)
    return f"fetch these elsewhere and put them where the arrows point, then run this again:{''.join(rows)}"


def size_in_words(file: File) -> str:
    """Size of a file, and whether the manifest knows it to the byte."""
    return f"{'about ' if file.approximate else ''}{in_words(file.size)}"


def in_words(size: float) -> str:
    """A number of bytes as people read it.

    >>> in_words(712), in_words(20_600_000), in_words(46e9)
    ('712 B', '20.6 MB', '46.0 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


# ---------------------------------------------------------------------------------------------- sums


def _verified(path: Path, source: Source) -> str:
    """SHA-256 of the file, or an error that names what was found and what should be."""
    size, wrong = path.stat().st_size, ""
    digest = artifacts.sha256(path) if source.size in (None, size) else ""
    if source.size not in (None, size):
        wrong = f"has {size} bytes, and {source.size} are right"
    elif source.sha256 not in (None, digest):
        wrong = f"has SHA-256 {digest}, and {source.said_by} says {source.sha256}"
    if wrong:
        raise FetchError(f"{str(path).removesuffix('.part')} {wrong}")
    return digest


def _recorded(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        known = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        if not isinstance(known, dict) or not all(isinstance(one, dict) for one in known.values()):
            raise ValueError("it holds no table of files")
        return known
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{folder / LOCK} is not what cellica wrote ({error}): delete it, and sums are taken anew"
        ) from error


def _record(folder: Path, path: str, **what: Any) -> None:
    known = _recorded(folder)
    known[path] = {**known.get(path, {}), **{key: value for key, value in what.items() if value}}
    artifacts.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", folder / LOCK, force=True)


# ---------------------------------------------------------------------------------------------- archives


def unpack_zip(archive: Path, folder: Path, kept: Collection[str] = ()) -> int:
    """Unpack a zip archive into a folder, and return the number of files written; those there with their size are left.

    Parameters
    ----------
    kept
        Paths in the folder that no member may have.

    Raises
    ------
    FetchError
        A member would leave the folder or replace a file that is kept, is a link or is encrypted (nothing is written
        then), the disk is too full, or the archive is damaged.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [member for member in opened.infolist() if not member.is_dir()]
            _refuse_unsafe(members, archive, folder, {(folder / path).resolve() for path in kept})
            _remove_left({folder / member.filename for member in members})
            missing = [member for member in members if size_of(folder / member.filename) != member.file_size]
            needed, free = sum(member.file_size for member in missing), shutil.disk_usage(folder).free
            if needed > free:
                raise FetchError(
                    f"{archive} unpacks to {in_words(needed)} and {folder} has {in_words(free)} free: make room"
                )
            for member in progress.track(missing, f"unpack {archive.name}"):
                _extract(opened, member, folder / member.filename)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise FetchError(f"{archive} cannot be unpacked: {error}") from error
    progress.say(f"{archive.name}: {len(missing)} files unpacked, {len(members) - len(missing)} there already")
    return len(missing)


def _remove_left(targets: Collection[Path]) -> None:
    """Remove what a killed run left beside files that it was unpacking; each folder is looked through once."""
    for folder in {target.parent for target in targets}:
        for left in folder.glob(".*.part"):
            if folder / left.name[1:].rsplit(".", 2)[0] in targets:
                shutil.rmtree(left, ignore_errors=True)


def _extract(opened: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    with artifacts.atomic(target, force=True) as new, opened.open(member) as packed, open(new, "wb") as plain:
        shutil.copyfileobj(packed, plain, 1 << 20)


def _refuse_unsafe(members: Iterable[zipfile.ZipInfo], archive: Path, folder: Path, kept: set[Path]) -> None:
    bad = [f"{member.filename}: {reason}" for member in members for reason in _unsafe(member, folder.resolve(), kept)]
    if bad:
        raise FetchError(f"{archive} is not safe to unpack, and nothing of it was written: {first_few(bad)}")


@lru_cache(maxsize=1024)
def _resolved(folder: Path) -> Path:
    return folder.resolve()


def _unsafe(member: zipfile.ZipInfo, folder: Path, kept: set[Path]) -> Iterator[str]:
    if (member.external_attr >> 16) & 0o170000 == 0o120000:
        yield "is a link"
    if member.flag_bits & 1:
        yield "is encrypted"
    parts = set(re.split(r"[/\\]", member.orig_filename))
    if ".." in parts or not _resolved((folder / member.filename).parent).is_relative_to(folder):
        yield "leaves the folder"
    elif _resolved((folder / member.filename).parent) / Path(member.filename).name in kept:
        yield "would replace a file that was fetched"
