"""Fetching, against servers on this machine that fail in every way that servers on the network do. No test leaves it."""

import errno
import gc
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st

from cellica import download, fetch, progress
from cellica.schema import FetchError, InputError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def content(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Server(ThreadingHTTPServer):
    """Files by path, faults by path, and what was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.drops: dict[str, list[int]] = {}  # bytes after which each of the next answers ends
        self.errors: dict[str, list[int]] = {}  # statuses of the next answers
        self.ranges = True
        self.etags = True
        self.pause = 0.0
        self.asked: list[tuple[str, str, str | None]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_) -> None:  # clients that were killed
        pass


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        server, path = self.server, self.path
        server.asked.append((self.command, path, self.headers.get("Range")))
        server.headers.append(dict(self.headers))
        if server.errors.get(path):
            return self.refuse(server.errors[path].pop(0), body)
        data = server.files.get(path)
        if data is None:
            return self.refuse(404, body)
        tag, start, status = f'"{sha256(data)}"', 0, 200
        asked = self.headers.get("Range")
        if asked and server.ranges and self.headers.get("If-Range", tag) == tag:
            start, status = int(asked.removeprefix("bytes=").removesuffix("-")), 206
            if start >= len(data):
                return self.refuse(416, body)
        part = data[start:]
        self.send_response(status)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if server.etags:
            self.send_header("ETag", tag)
        self.end_headers()
        if not body:
            return None
        if server.drops.get(path):
            part = part[: server.drops[path].pop(0)]
            self.close_connection = True
        for i in range(0, len(part), 1 << 16):
            self.wfile.write(part[i : i + (1 << 16)])
            time.sleep(server.pause)
        return None

    def refuse(self, status: int, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "7")
        self.end_headers()
        if body:
            self.wfile.write(b"refused")


@pytest.fixture
def server():
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(download, "BACKOFF", 0.001)
    monkeypatch.setattr(download, "CHUNK", 1000)
    monkeypatch.setattr(progress, "visible", True)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def manifest(folder: Path, *files: dict, **keys) -> Path:
    """A manifest file of the given files."""
    top = {"name": "own", "title": "Own", "purpose": "test", "licence": "CC0", "licence_url": "http://127.0.0.1/terms"}
    top |= {"non_commercial": False} | keys
    lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
    for file in files:
        lines += ["[[files]]", *(f"{key} = {json.dumps(value)}" for key, value in file.items())]
    path = folder / "own.toml"
    path.write_text("\n".join(lines))
    return path


def entry(server: Server, path: str, data: bytes, *, known: bool = True, **keys) -> dict:
    server.files[f"/{path}"] = data
    said = {"path": path, "source": f"{server.address}/{{path}}", "size": len(data)}
    return said | ({"sha256": sha256(data)} if known else {}) | keys


def left(folder: Path) -> set[str]:
    """Files in a folder, without the lock that marks a fetch at work."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return found - {".fetch.lock", "checksums.json"}


# ---------------------------------------------------------------------------------------------- what arrives


def test_files_arrive_verified_and_are_recorded(server, tmp_path):
    a, b = content(0, 100_000), content(1, 30)
    file = manifest(tmp_path, entry(server, "a.bin", a), entry(server, "deep/b.bin", b, known=False))
    outcomes = fetch.fetch(file, tmp_path / "out")
    assert [one.status for one in outcomes] == ["fetched", "fetched"]
    assert left(tmp_path / "out") == {"a.bin", "deep/b.bin"}
    assert (tmp_path / "out" / "a.bin").read_bytes() == a
    assert [one.sha256 for one in outcomes] == [sha256(a), sha256(b)]
    assert outcomes[0].note == ""
    assert f"no SHA-256 was known; recorded in checksums.json what came: {sha256(b)}" in outcomes[1].note
    recorded = json.loads((tmp_path / "out" / "checksums.json").read_text())
    assert recorded["deep/b.bin"] == {"sha256": sha256(b), "size": 30, "url": f"{server.address}/deep/b.bin"}


def test_what_is_there_and_right_is_not_fetched_again(server, tmp_path):
    file = manifest(
        tmp_path, entry(server, "a.bin", content(0, 999)), entry(server, "b.bin", content(1, 99), known=False)
    )
    fetch.fetch(file, tmp_path)
    asked = len(server.asked)
    outcomes = fetch.fetch(file, tmp_path)
    assert [(one.status, one.note) for one in outcomes] == [("there", "verified")] * 2
    assert len(server.asked) == asked


def test_a_file_put_there_by_hand_is_taken_and_its_sum_recorded(server, tmp_path):
    file = manifest(tmp_path, entry(server, "a.bin", b"by hand", known=False))
    (tmp_path / "a.bin").write_bytes(b"by hand")
    (one,) = fetch.fetch(file, tmp_path)
    assert one.status == "there"
    assert "recorded in checksums.json what was found" in one.note
    (tmp_path / "a.bin").write_bytes(b"by harm")  # the same size
    with pytest.raises(FetchError, match=f"{sha256(b'by harm')}, and checksums.json says {sha256(b'by hand')}"):
        fetch.fetch(file, tmp_path)
    assert server.asked == []


@pytest.mark.parametrize("known", [True, False])
def test_a_file_that_was_changed_is_named_with_both_sums_and_replaced_only_by_force(server, tmp_path, known):
    data = content(0, 500)
    file = manifest(tmp_path, entry(server, "a.bin", data, known=known))
    fetch.fetch(file, tmp_path)
    (tmp_path / "a.bin").write_bytes(data[:-1] + b"?")
    with pytest.raises(FetchError, match=rf"{sha256(data[:-1] + b'?')}, and .* says {sha256(data)}: move the file"):
        fetch.fetch(file, tmp_path)
    assert fetch.fetch(file, tmp_path, force=True)[0].status == "fetched"
    assert (tmp_path / "a.bin").read_bytes() == data


def test_a_file_that_changed_at_its_source_since_the_first_fetch_is_refused(server, tmp_path):
    file = manifest(tmp_path, entry(server, "a.bin", b"first", known=False))
    fetch.fetch(file, tmp_path)
    (tmp_path / "a.bin").unlink()
    server.files["/a.bin"] = b"other"
    with pytest.raises(FetchError, match=f"SHA-256 {sha256(b'other')}, and checksums.json, of an earlier fetch"):
        fetch.fetch(file, tmp_path)
    assert left(tmp_path) == {"own.toml"}
    assert fetch.fetch(file, tmp_path, force=True)[0].sha256 == sha256(b"other")


def test_only_the_files_that_were_named(server, tmp_path):
    files = [entry(server, name, name.encode()) for name in ("a.csv", "data/1.bin", "data/2.bin")]
    file = manifest(tmp_path, *files)
    assert [one.file.path for one in fetch.fetch(file, tmp_path / "out", ["data/*"])] == ["data/1.bin", "data/2.bin"]
    assert left(tmp_path / "out") == {"data/1.bin", "data/2.bin"}
    with pytest.raises(InputError, match=r"own has no file 'b\.csv'; it has 'a\.csv', 'data/1\.bin'"):
        fetch.fetch(file, tmp_path / "out", ["a.csv", "b.csv"])


# ---------------------------------------------------------------------------------------------- faults on the way


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("ranges", [True, False])
def test_dropped_connections_go_on_where_they_stopped(server, tmp_path, known, ranges, capsys):
    data = content(0, 400_000)
    file = manifest(tmp_path, entry(server, "a.bin", data, known=known))
    server.drops["/a.bin"], server.ranges = [100_000, 150_000, 0], ranges
    (one,) = fetch.fetch(file, tmp_path)
    assert one.status == "fetched"
    assert (tmp_path / "a.bin").read_bytes() == data
    starts = [asked for _, _, asked in server.asked]
    assert starts[0] is None
    if ranges:
        assert starts[1:] == ["bytes=100000-", "bytes=250000-", "bytes=250000-"]
    assert "trying again in" in capsys.readouterr().err
    assert left(tmp_path) == {"own.toml", "a.bin"}


@settings(max_examples=15, deadline=None)
@given(
    drops=st.lists(st.integers(0, 3000), max_size=5),
    size=st.integers(1, 5000),
    etags=st.booleans(),
    known=st.booleans(),
)
def test_no_pattern_of_drops_changes_what_arrives(tmp_path_factory, drops, size, etags, known):
    folder, data = tmp_path_factory.mktemp("drops"), content(size, size)
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        file = manifest(folder, entry(server, "a.bin", data, known=known))
        server.drops["/a.bin"], server.etags = list(drops), etags
        fetch.fetch(file, folder)
        server.shutdown()
    assert (folder / "a.bin").read_bytes() == data


def test_a_server_that_only_drops_is_given_up_and_what_came_stays(server, tmp_path):
    data = content(0, 10_000)
    file = manifest(tmp_path, entry(server, "a.bin", data))
    server.drops["/a.bin"] = [3000] + [0] * 20
    with pytest.raises(FetchError, match=rf"7000 more expected\) \(tried {download.RETRIES + 1} times\)"):
        fetch.fetch(file, tmp_path)
    assert len(server.asked) == 1 + download.RETRIES
    assert left(tmp_path) == {"own.toml", "a.bin.part", "a.bin.part.etag"}
    server.drops.clear()
    fetch.fetch(file, tmp_path)
    assert server.asked[-1][2] == "bytes=3000-"
    assert (tmp_path / "a.bin").read_bytes() == data


def test_a_killed_fetch_goes_on(server, tmp_path):
    """A process is killed without warning half-way; the next one asks for the rest alone."""
    data = content(0, 4 << 20)
    file = manifest(tmp_path, entry(server, "a.bin", data, known=False))
    server.pause = 0.02
    words = [sys.executable, "-m", "cellica.cli", "--quiet", "fetch", str(file), str(tmp_path)]
    child = subprocess.Popen(words, cwd=Path(__file__).parents[1])
    part, until = tmp_path / "a.bin.part", time.monotonic() + 30
    while (not part.exists() or part.stat().st_size < 1 << 20) and time.monotonic() < until:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    have = part.stat().st_size
    assert 1 << 20 <= have < len(data)
    assert not (tmp_path / "a.bin").exists()
    server.pause = 0
    fetch.fetch(file, tmp_path)
    assert server.asked[-1] == ("GET", "/a.bin", f"bytes={have}-")
    assert (tmp_path / "a.bin").read_bytes() == data


@pytest.mark.parametrize("etags", [True, False])
def test_parts_of_two_versions_are_never_joined(server, tmp_path, etags):
    server.etags = etags
    old, new = content(0, 5000), content(1, 5000)
    file = manifest(tmp_path, entry(server, "a.bin", old, known=False))
    server.drops["/a.bin"] = [2000] + [0] * 20
    with pytest.raises(FetchError):
        fetch.fetch(file, tmp_path)
    server.drops.clear()
    server.files["/a.bin"] = new
    fetch.fetch(file, tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == new


def test_a_part_of_something_else_is_started_over(server, tmp_path, capsys):
    data = content(0, 5000)
    file = manifest(tmp_path, entry(server, "a.bin", data))
    for rubbish in (b"\0" * 2000, b"\0" * 5000, b"\0" * 9000):
        (tmp_path / "a.bin.part").write_bytes(rubbish)
        (tmp_path / "a.bin").unlink(missing_ok=True)
        fetch.fetch(file, tmp_path)
        assert (tmp_path / "a.bin").read_bytes() == data
    assert "is not of this file; starting over" in capsys.readouterr().err


def test_wrong_bytes_never_have_the_name(server, tmp_path):
    data = content(0, 1000)
    file = manifest(tmp_path, entry(server, "a.bin", data))
    server.files["/a.bin"] = b"?" + data[1:]
    with pytest.raises(FetchError) as caught:
        fetch.fetch(file, tmp_path)
    assert f"SHA-256 {sha256(b'?' + data[1:])}, and the manifest says {sha256(data)}; nothing of it" in str(
        caught.value
    )
    assert left(tmp_path) == {"own.toml"}


def test_another_size_is_seen_before_the_bytes_come(server, tmp_path):
    file = manifest(tmp_path, entry(server, "a.bin", content(0, 1000)))
    server.files["/a.bin"] = content(0, 4000)
    with pytest.raises(FetchError, match="has 4000 bytes, and 1000 are right"):
        fetch.fetch(file, tmp_path)
    assert left(tmp_path) <= {"own.toml", "a.bin.part"}
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("statuses", "n_asked"), [([503, 429, 500], 4), ([503] * 20, 1 + download.RETRIES), ([403], 1)]
)
def test_errors_that_pass_are_waited_for_and_others_are_not(server, tmp_path, statuses, n_asked):
    file = manifest(tmp_path, entry(server, "a.bin", b"data"))
    server.errors["/a.bin"] = list(statuses)
    if statuses[-1] == 500:
        assert fetch.fetch(file, tmp_path)[0].status == "fetched"
    else:
        with pytest.raises(FetchError, match=str(statuses[0])):
            fetch.fetch(file, tmp_path)
    assert len(server.asked) == n_asked


@pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc")
@pytest.mark.parametrize("failing", ["refused", "another size", "full disk"])
def test_no_connection_stays_open_after_a_failure(server, tmp_path, monkeypatch, failing):
    def n_sockets() -> int:
        links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        return sum(link.startswith("socket:") for link in links)

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = manifest(tmp_path, entry(server, "a.bin", content(0, 1_000_000)))
    if failing == "refused":
        server.errors["/a.bin"] = [503, 403]
    elif failing == "another size":
        server.files["/a.bin"] = content(0, 4_000_000)
    else:
        monkeypatch.setattr(download._Arriving, "write", full)
    gc.collect()
    gc.disable()
    try:
        before = n_sockets()
        with pytest.raises((FetchError, OSError)) as failure:
            fetch.fetch(file, tmp_path)
        until = time.monotonic() + 5
        while n_sockets() > before and time.monotonic() < until:
            time.sleep(0.01)  # the server's own end
        assert failure.value is not None
        assert n_sockets() <= before
    finally:
        gc.enable()


def test_one_missing_file_does_not_stop_the_others(server, tmp_path):
    file = manifest(tmp_path, entry(server, "a.bin", b"a"), entry(server, "b.bin", b"b"), entry(server, "c.bin", b"c"))
    del server.files["/b.bin"]
    outcomes = fetch.fetch(file, tmp_path)
    assert [one.status for one in outcomes] == ["fetched", "failed", "fetched"]
    assert "404" in outcomes[1].note
    with pytest.raises(FetchError, match=r"nothing could be fetched: b\.bin: .*404"):
        fetch.fetch(file, tmp_path, ["b.bin"])


def test_without_network_it_says_what_to_put_where(server, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    said = {"source": f"{nowhere}/{{path}}", "size": 20_600_000, "approximate": True}
    file = manifest(tmp_path, entry(server, "a.bin", b"a"), {"path": "b.bin", **said}, {"path": "c.bin", **said})
    with pytest.raises(FetchError) as caught:
        fetch.fetch(file, tmp_path / "out")
    told = str(caught.value)
    for name in ("b.bin", "c.bin"):
        assert f"{nowhere}/{name} -> {tmp_path / 'out' / name} (about 20.6 MB)" in told
    assert "a.bin ->" not in told
    assert f"tried {download.RETRIES + 1} times" in told
    assert left(tmp_path / "out") <= {"a.bin", "b.bin.part"}


def test_a_server_whose_name_is_not_found_is_asked_once_more_only(tmp_path):
    said = {"path": "b.bin", "source": "http://nowhere.invalid/{path}", "size": 9}
    with pytest.raises(FetchError, match=r"gaierror.*tried 2 times"):
        fetch.fetch(manifest(tmp_path, said), tmp_path / "out")


# ---------------------------------------------------------------------------------------------- before the first byte


def test_terms_that_forbid_commercial_use_are_to_be_accepted(server, tmp_path, capsys):
    closed = {"licence": "CC BY-NC 4.0", "non_commercial": True}
    file = manifest(tmp_path, entry(server, "free.bin", b"f"), entry(server, "closed.bin", b"c", **closed))
    with pytest.raises(InputError, match=r"CC BY-NC 4\.0.*http://127\.0\.0\.1/terms.*--accept-license"):
        fetch.fetch(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert server.asked == []
    assert fetch.fetch(file, tmp_path / "out", ["free.bin"])[0].status == "fetched"
    assert fetch.fetch(file, tmp_path / "out", accept_license=True)[1].status == "fetched"
    assert "licence: CC BY-NC 4.0" in capsys.readouterr().err


def test_a_full_disk_is_seen_first(server, tmp_path, monkeypatch):
    file = manifest(tmp_path, entry(server, "a.bin", content(0, 5000)))
    usage = shutil.disk_usage(tmp_path)._replace(free=4999)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(FetchError, match=r"5\.0 kB are to be fetched and .* has 5\.0 kB free: make room"):
        fetch.fetch(file, tmp_path)
    assert server.asked == []
    (tmp_path / "a.bin.part").write_bytes(server.files["/a.bin"][:2])  # what is there needs no room
    assert fetch.fetch(file, tmp_path)[0].status == "fetched"


def test_a_dry_run_asks_nobody_and_writes_nothing(server, tmp_path):
    file = manifest(tmp_path, entry(server, "a.bin", b"data"), entry(server, "b.bin", b"more"), non_commercial=True)
    (tmp_path / "a.bin.part").write_bytes(b"da")
    (tmp_path / "b.bin").write_bytes(b"more")
    outcomes = fetch.fetch(file, tmp_path, dry_run=True)
    assert [(one.status, one.note) for one in outcomes] == [("to fetch", "2 B are there already"), ("there", "")]
    assert server.asked == []
    assert left(tmp_path) == {"own.toml", "a.bin.part", "b.bin"}


def test_two_fetches_into_one_folder_do_not_meet(server, tmp_path):
    import filelock

    file = manifest(tmp_path, entry(server, "a.bin", b"data"))
    with (
        filelock.FileLock(tmp_path / ".fetch.lock"),
        pytest.raises(FetchError, match="another cellica fetch is at work"),
    ):
        fetch.fetch(file, tmp_path)


def test_a_damaged_record_is_named(server, tmp_path):
    file = manifest(tmp_path, entry(server, "a.bin", b"data"))
    (tmp_path / "checksums.json").write_text("{")
    with pytest.raises(InputError, match=r"checksums\.json is not what cellica wrote"):
        fetch.fetch(file, tmp_path)


def test_importing_it_loads_nothing_that_speaks_to_the_network():
    source = (
        "import sys; from cellica import fetch; assert not {'huggingface_hub', 'pooch', 'requests'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


# ---------------------------------------------------------------------------------------------- the Hugging Face Hub


@pytest.fixture
def hub(server, monkeypatch, tmp_path):
    """A Hub on this machine with one dataset of one commit, an empty cache, and nobody signed in."""
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    one = {"id": COMMIT, "title": "first", "message": "", "date": "2024-01-01T00:00:00.000Z", "authors": []}
    server.files["/api/datasets/owner/set/commits/main"] = json.dumps([one]).encode()
    download._commit.cache_clear()
    return server


def on_hub(hub: Server, path: str, data: bytes, **keys) -> dict:
    hub.files[f"/datasets/owner/set/resolve/{COMMIT}/{path}"] = data
    return {"path": path, "source": "hf-dataset", "size": 1_000_000, "approximate": True} | keys


OF_HUB = {"repository": "owner/set", "revision": COMMIT[:7]}


def test_files_of_the_hub_are_verified_by_its_own_word(hub, tmp_path):
    data = content(0, 300_000)
    file = manifest(tmp_path, on_hub(hub, "data/a.parquet", data), **OF_HUB)
    hub.drops[f"/datasets/owner/set/resolve/{COMMIT}/data/a.parquet"] = [100_000]
    (one,) = fetch.fetch(file, tmp_path / "out")
    assert (one.status, one.sha256, one.note) == ("fetched", sha256(data), "")
    assert (tmp_path / "out" / "data" / "a.parquet").read_bytes() == data
    assert [asked for _, _, asked in hub.asked if asked] == ["bytes=100000-"]

    (tmp_path / "out" / "data" / "a.parquet").unlink()
    other = manifest(tmp_path, on_hub(hub, "data/a.parquet", data, sha256="0" * 64), **OF_HUB)
    with pytest.raises(FetchError, match=f"SHA-256 {sha256(data)}, and the manifest says {'0' * 64}"):
        fetch.fetch(other, tmp_path / "out")


def test_a_commit_that_the_hub_does_not_have_is_named(hub, tmp_path):
    file = manifest(tmp_path, on_hub(hub, "a.csv", b"a"), repository="owner/set", revision="fedcba9")
    with pytest.raises(FetchError, match="owner/set has 0 commits that start with fedcba9: name the whole hash"):
        fetch.fetch(file, tmp_path)


def test_a_file_that_the_hub_does_not_have_is_named(hub, tmp_path):
    file = manifest(tmp_path, {**on_hub(hub, "a.csv", b"a"), "path": "b.csv"}, **OF_HUB)
    with pytest.raises(FetchError, match=r"b\.csv: \w+: .*404.*Not Found"):
        fetch.fetch(file, tmp_path)


def in_cache(folder: Path, path: str, data: bytes) -> Path:
    cached = folder / "cache" / "datasets--owner--set" / "snapshots" / COMMIT / path
    cached.parent.mkdir(parents=True)
    cached.write_bytes(data)
    return cached


def test_what_the_hub_s_own_cache_holds_is_taken_from_there_even_offline(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    in_cache(tmp_path, "data/a.bin", b"cached")
    entries = [on_hub(hub, "data/a.bin", b"on the hub", sha256=sha256(b"cached")), on_hub(hub, "b.bin", b"b")]
    file = manifest(tmp_path, *entries, **OF_HUB)
    assert fetch.fetch(file, tmp_path / "out", ["data/a.bin"])[0].status == "fetched"
    assert (tmp_path / "out" / "data" / "a.bin").read_bytes() == b"cached"
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE is set") as caught:
        fetch.fetch(file, tmp_path / "out")
    place = f"https://huggingface.co/datasets/owner/set/resolve/{COMMIT[:7]}/b.bin -> {tmp_path / 'out' / 'b.bin'}"
    assert f"{place} (about 1.0 MB)" in str(caught.value)
    assert hub.asked == []


def test_a_cache_with_other_bytes_is_not_believed(hub, tmp_path):
    in_cache(tmp_path, "a.bin", b"spoilt")
    file = manifest(tmp_path, on_hub(hub, "a.bin", b"right", sha256=sha256(b"right")), **OF_HUB)
    with pytest.raises(FetchError, match=f"SHA-256 {sha256(b'spoilt')}"):
        fetch.fetch(file, tmp_path / "out")
    assert left(tmp_path / "out") == set()


def test_a_hub_that_does_not_answer_is_no_network(hub, tmp_path, monkeypatch):
    file = manifest(tmp_path, on_hub(hub, "a.csv", b"a"), **OF_HUB)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(FetchError, match=r"Without network, fetch these elsewhere.*\n.*resolve/0123456/a\.csv -> "):
        fetch.fetch(file, tmp_path)


# ---------------------------------------------------------------------------------------------- archives


def packed(folder: Path, members: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(folder / "packed.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return (folder / "packed.zip").read_bytes()


def test_archives_are_unpacked_and_what_is_there_stays(server, tmp_path):
    data = packed(
        tmp_path, {"rxrx1/metadata.csv": b"site_id\n", "rxrx1/images/": b"", "rxrx1/images/a.png": b"a" * 999}
    )
    file = manifest(tmp_path, entry(server, "images.zip", data))
    out = tmp_path / "out"
    fetch.fetch(file, out)
    assert left(out) == {"images.zip"}
    fetch.fetch(file, out, unpack=True)
    assert left(out) == {"images.zip", "rxrx1/metadata.csv", "rxrx1/images/a.png"}
    assert (out / "rxrx1/images/a.png").read_bytes() == b"a" * 999
    (out / "rxrx1/metadata.csv").write_bytes(b"site")  # as cut off by a kill
    assert fetch.unpack_zip(out / "images.zip", out) == 1
    assert (out / "rxrx1/metadata.csv").read_bytes() == b"site_id\n"


@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped", "/tmp/escaped", "link/escaped", "..\\escaped"])
def test_no_archive_writes_outside_its_folder(tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (out / "link").symlink_to(tmp_path / "elsewhere")
    packed(tmp_path, {"good.txt": b"good", name: b"bad"})
    with pytest.raises(FetchError, match=r"not safe to unpack, and nothing of it was written: .*leaves the folder"):
        fetch.unpack_zip(tmp_path / "packed.zip", out)
    assert not list(tmp_path.rglob("escaped"))
    assert left(out) == set()


@pytest.mark.parametrize("name", ["checksums.json", ".fetch.lock", "images.zip", "sub/../a.csv", "a.csv"])
def test_no_archive_replaces_what_was_fetched(server, tmp_path, name):
    archive = packed(tmp_path, {"good.txt": b"good", name: b"bad"})
    file = manifest(tmp_path, entry(server, "images.zip", archive), entry(server, "a.csv", b"right"))
    with pytest.raises(FetchError, match=r"nothing of it was written: .*(would replace|leaves the folder)"):
        fetch.fetch(file, tmp_path / "out", unpack=True)
    assert left(tmp_path / "out") == {"images.zip", "a.csv"}
    assert (tmp_path / "out" / "a.csv").read_bytes() == b"right"


def test_odd_names_are_asked_for_as_they_are_and_chosen_by_their_name(server, tmp_path):
    names = ("b#1.txt", "c d%41.txt", "a[1].txt")
    files = [entry(server, name, name.encode()) for name in names]
    for name in names:
        server.files[f"/{quote(name)}"] = server.files.pop(f"/{name}")
    file = manifest(tmp_path, *files)
    for name in names:
        assert [one.status for one in fetch.fetch(file, tmp_path / "out", [name])] == ["fetched"]
        assert (tmp_path / "out" / name).read_text() == name


@pytest.mark.parametrize("names", [("x", "x.part"), ("a", "a/b.txt")])
def test_names_that_would_meet_in_the_folder_are_refused(server, tmp_path, names):
    file = manifest(tmp_path, *(entry(server, name, b"x") for name in names))
    with pytest.raises(InputError, match="folder or the unfinished part of another"):
        fetch.fetch(file, tmp_path / "out")


def test_a_file_that_is_cut_off_again_and_again_does_not_stop_the_others(server, tmp_path):
    file = manifest(tmp_path, entry(server, "n.bin", content(0, 100)), entry(server, "a.bin", b"a"))
    server.drops["/n.bin"] = [0] * 20
    assert [one.status for one in fetch.fetch(file, tmp_path / "out")] == ["failed", "fetched"]


def test_links_in_archives_are_refused(tmp_path):
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr(link, "/etc")
        archive.writestr("link/passwd", "root")
    (tmp_path / "out").mkdir()
    with pytest.raises(FetchError, match="link: is a link"):
        fetch.unpack_zip(tmp_path / "packed.zip", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_damaged_archives_are_named_and_leave_no_file_behind(tmp_path, monkeypatch):
    data = packed(tmp_path, {"a.txt": content(0, 5000)})
    (tmp_path / "packed.zip").write_bytes(data[:1000] + bytes(50) + data[1050:])
    (tmp_path / "out").mkdir()
    with pytest.raises(FetchError, match=r"packed\.zip cannot be unpacked"):
        fetch.unpack_zip(tmp_path / "packed.zip", tmp_path / "out")
    (tmp_path / "packed.zip").write_bytes(data[:-30])
    with pytest.raises(FetchError, match=r"packed\.zip cannot be unpacked: File is not a zip"):
        fetch.unpack_zip(tmp_path / "packed.zip", tmp_path / "out")
    (tmp_path / "packed.zip").write_bytes(data)
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(FetchError, match=r"unpacks to 5\.0 kB and .* has 10 B free"):
        fetch.unpack_zip(tmp_path / "packed.zip", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


# ---------------------------------------------------------------------------------------------- progress


def test_progress_tells_bytes_rate_and_remaining_time_in_a_log(monkeypatch, capsys):
    clock = iter([0.0, 0.0, 40.0, 41.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.transfer("a.bin") as show:
        for done in (10_000_000, 90_000_000, 100_000_000):
            show(done, 410_000_000)
    assert capsys.readouterr().err == "a.bin: 90 of 410 MB, 2 MB/s, 160 s left\n"
