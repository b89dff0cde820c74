"""Bytes over the network: requests that are repeated, downloads that go on where they stopped, the Hugging Face Hub.

pooch speaks HTTP; huggingface_hub knows where its files lie, their sums and its own cache. Both download into files that
a kill leaves useless (pooch always, huggingface_hub since its release 2), so what arrives is kept in a ``.part`` file here.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from cellica import progress
from cellica.manifests import HUB, File, Manifest
from cellica.schema import CellicaError, FetchError

RETRIES = 5  # in a row without a new byte
RETRIES_OFFLINE = 1  # where not even the server's name is found
BACKOFF = 1.0  # seconds before the first retry; doubles with each
CHUNK = 1 << 16  # bytes written together; a connection that drops loses at most so many
TIMEOUT = (10, 60)  # seconds to connect, and without a byte
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """Where a file comes from, and what is known of it before it is there. ``cached``: another tool fetched it already."""

    url: str
    size: int | None = None
    sha256: str | None = None
    said_by: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    cached: Path | None = None


class UnreachableError(FetchError):
    """No answer from a server, however often it was asked."""


class _Failed(Exception):
    """A request that may be worth repeating. ``status`` is that of HTTP, None where no answer came or it was cut off."""

    def __init__(
        self, message: str, status: int | None = None, retries: int | None = None, answered: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.retries = status, RETRIES if retries is None else retries
        self.answered = answered or status is not None

    @classmethod
    def of(cls, error: BaseException, answered: bool = False) -> "_Failed":
        """What went wrong, in a line: of errors within errors without an answer of the server, the innermost."""
        status = _status(error)
        while status is None and (error.__cause__ or error.__context__):
            error = error.__cause__ or error.__context__  # type: ignore[assignment]
        retries = RETRIES_OFFLINE if isinstance(error, socket.gaierror) else RETRIES
        return cls(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", status, retries, answered)


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


# ---------------------------------------------------------------------------------------------- parts


def download(source: Source, part: Path, name: str) -> None:
    """Bring ``part`` to its whole size, from where it stands.

    Raises
    ------
    UnreachableError, FetchError
        The server does not answer, or cuts off again and again without a new byte (`RETRIES`); it answers that there is
        no such file, or with another one.
    """
    with progress.transfer(name) as show:
        _retried(lambda: _receive(source, part, show), name, lambda: size_of(part))


def _receive(source: Source, part: Path, show: Callable[[int, int | None], None]) -> None:
    """One request for what ``part`` lacks. The server starts over by itself where its file is another one by now."""
    from pooch import HTTPDownloader

    if not (source.sha256 or _mark(part).exists()):
        part.unlink(missing_ok=True)  # nothing would tell that the server has another file by now
    have = size_of(part)
    if have and have == source.size:
        return
    headers = {**source.headers, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if _mark(part).exists():
            headers["If-Range"] = _mark(part).read_text(encoding="utf-8")
    with open(part, "ab") as stream:
        arriving = _Arriving(stream, part, source, show)
        request = HTTPDownloader(chunk_size=CHUNK, headers=headers, timeout=TIMEOUT, hooks={"response": arriving.begin})
        try:
            request(source.url, arriving, None)
        except OSError as error:
            if isinstance(error, CellicaError) or not hasattr(error, "response"):
                raise  # of the disk, not of the network
            if _status(error) != 416:
                raise _Failed.of(error, arriving.answered) from error
            discard(part)  # there is more than the server has
            raise _Failed("what is there is no part of the server's file") from error
        finally:
            arriving.end()
    if arriving.total not in (None, size_of(part)):
        raise _Failed(f"the connection ended after {size_of(part)} of {arriving.total} bytes", answered=True)


class _Arriving:
    """The file that `_receive` writes to: it starts where the server starts, and shows how far it is."""

    def __init__(self, stream: Any, part: Path, source: Source, show: Callable[[int, int | None], None]) -> None:
        self.stream, self.part, self.source, self.show = stream, part, source, show
        self.total: int | None = None
        self.responses: list[Any] = []

    @property
    def answered(self) -> bool:
        """Whether the server said anything."""
        return bool(self.responses)

    def begin(self, response: Any, **_: Any) -> None:
        """Called with each response before its body is read."""
        self.responses.append(response)
        if response.is_redirect or not response.ok:
            return
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        start, total = (int(span[1]), span[2]) if span else (0, response.headers.get("Content-Length", "*"))
        self.total = int(total) if total.isdigit() else self.source.size
        wrong = ""
        if self.source.size not in (None, self.total):
            wrong = f"has {self.total} bytes, and {self.source.size} are right"
        elif start > self.stream.tell() or (response.status_code == 206 and not span):
            wrong = "answers with another part of the file than it was asked for"
        if wrong:
            raise FetchError(f"{response.url} {wrong}")
        self.stream.truncate(start)
        tag = response.headers.get("ETag", "W/")
        tag = response.headers.get("Last-Modified", "") if tag.startswith("W/") else tag
        _mark(self.part).write_text(tag, encoding="utf-8") if tag else _mark(self.part).unlink(missing_ok=True)

    def write(self, chunk: bytes) -> None:
        """Append what came."""
        self.stream.write(chunk)

    def flush(self) -> None:
        """Let a kill lose nothing, and show how far it is."""
        self.stream.flush()
        self.show(self.stream.tell(), self.total)

    def end(self) -> None:
        """Close the connections: pooch leaves one open whose answer was an error, until Python collects its garbage."""
        for response in self.responses:
            response.close()


def _retried(attempt: Callable[[], T], what: str, reached: Callable[[], int] = lambda: 0) -> T:
    """Try again after a failure that may pass: at most `RETRIES` times in a row without progress."""
    failures, before = 0, reached()
    while True:
        try:
            return attempt()
        except _Failed as error:
            passing = error.status is None or error.status in (408, 429) or error.status >= 500
            failures = 1 if reached() > before else failures + 1
            before = reached()
            if not passing:
                raise FetchError(f"{what}: {error}") from error
            if failures > error.retries:
                kind = FetchError if error.answered else UnreachableError
                raise kind(f"{what}: {error} (tried {failures} times)") from error
            wait = BACKOFF * 2 ** (failures - 1)
            progress.say(f"{what}: {error}; trying again in {wait:.0f} s ({failures} of {error.retries})")
            time.sleep(wait)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def _mark(part: Path) -> Path:
    """Where the server's own version of a file is kept, so that parts of two versions are never joined."""
    return part.with_name(f"{part.name}.etag")


def discard(part: Path) -> None:
    """Remove what there is of a download."""
    part.unlink(missing_ok=True)
    _mark(part).unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------- where it comes from


def source_of(manifest: Manifest, file: File) -> Source:
    """Where a file of a manifest is to be had, in Hugging Face's cache or over the network, and what is known of it."""
    size = None if file.approximate else file.size
    known = Source(manifest.url(file), size, file.sha256, "the manifest")
    if file.source not in HUB:
        return known
    cached = _in_hub_cache(manifest, file)
    return replace(known, cached=cached) if cached else _on_hub(manifest, file, known)


def _on_hub(manifest: Manifest, file: File, known: Source) -> Source:
    """Ask the Hub for the commit, and for size and SHA-256 of the file (its ETag, for large files)."""
    import huggingface_hub as hub
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    if constants.HF_HUB_OFFLINE:
        raise UnreachableError(f"{file.path}: HF_HUB_OFFLINE is set, and the file is not in {constants.HF_HUB_CACHE}")
    endpoint, kind = _endpoint(), HUB[file.source]
    commit = _commit(endpoint, manifest.repository, manifest.revision, kind)
    url = hub.hf_hub_url(manifest.repository, file.path, repo_type=kind, revision=commit, endpoint=endpoint)
    said = _retried(lambda: _asked(lambda: hub.get_hf_file_metadata(url)), file.path)
    headers = {key: value for key, value in build_hf_headers().items() if key.lower() != "accept-encoding"}
    if known.size is not None and said.size not in (None, known.size):
        raise FetchError(f"{url} has {said.size} bytes, and {known.size} are right")
    source = replace(known, url=url, size=known.size or said.size, headers=headers)
    if known.sha256 is None and re.fullmatch(r"[0-9a-f]{64}", said.etag or ""):
        source = replace(source, sha256=said.etag, said_by="the Hugging Face Hub")
    return source


@lru_cache(maxsize=32)
def _commit(endpoint: str | None, repository: str, revision: str, kind: str) -> str:
    """The whole hash of a commit: the Hub knows no short ones."""
    import huggingface_hub as hub

    if len(revision) == 40:
        return revision
    api = hub.HfApi(endpoint=endpoint)
    try:
        ask: dict[str, Any] = {"revision": revision, "repo_type": kind, "timeout": TIMEOUT[0]}
        commits = [str(_retried(lambda: _asked(lambda: api.repo_info(repository, **ask).sha), repository))]
    except UnreachableError:
        raise
    except FetchError:  # as it answers for a short hash
        found = _retried(lambda: _asked(lambda: api.list_repo_commits(repository, repo_type=kind)), repository)
        commits = [one.commit_id for one in found]
    matching = {commit for commit in commits if commit.startswith(revision)}
    if len(matching) != 1:
        raise FetchError(f"{repository} has {len(matching)} commits that start with {revision}: name the whole hash")
    return matching.pop()


def _asked(question: Callable[[], T]) -> T:
    try:
        return question()
    except Exception as error:  # which classes it raises depends on the HTTP library of its release
        raise _Failed.of(error) from error


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _in_hub_cache(manifest: Manifest, file: File) -> Path | None:
    """The file where huggingface_hub keeps it already, for another tool."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    repository = repo_folder_name(repo_id=manifest.repository, repo_type=HUB[file.source])
    snapshots = Path(constants.HF_HUB_CACHE, repository, "snapshots").glob(f"{manifest.revision}*")
    return next((one / file.path for one in sorted(snapshots) if (one / file.path).is_file()), None)
