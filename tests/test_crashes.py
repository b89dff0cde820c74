"""Runs killed at any moment: nothing half-written has a name, and the same command then gives what one run gives."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from filelock import FileLock

from cellica import artifacts, fetch, simulate
from cellica.schema import OutputExistsError

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads and processes in /proc")

# Imports what the verbs need once. Each request is a fork that runs one command line, killed after some seconds.
PARENT = """
import gc, json, os, signal, sys, time
import torch
torch.set_num_threads(1)
import matplotlib.backends.backend_agg, pydantic, scanpy, zarr
from pandas.io.formats import string
from cellica import artifacts, cli, correct, demo, drawing, evaluation, fetch, parts, plot, shards
parts.EVERY = 0.0  # parts are written with each chunk
threads = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
assert set(threads[1:]) <= {"jemalloc_bg_thd"}, f"a fork of several threads may hang: {threads}"

def alive(group):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, its_group = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if its_group == str(group) and state not in "ZX":
            found.append(name)
    return found

def wait(check, seconds):
    until = time.monotonic() + seconds
    while not check():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True

def ended():
    for child in set(children) - set(codes):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            codes[child] = os.waitstatus_to_exitcode(status)
    return len(codes) == len(children)

gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    started = time.monotonic()
    children, codes = [], {}
    for told in request["told"]:
        child = os.fork()
        if not child:
            break
        children.append(child)
    if not child:
        break
    if not wait(ended, request["after"]):
        for child in children:
            try:
                (os.kill if request["alone"] else os.killpg)(child, signal.SIGKILL)
            except ProcessLookupError:  # it has ended, or has no group of its own yet
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
        wait(ended, 60)
    seconds = time.monotonic() - started
    wait(lambda: not any(map(alive, children)), 60)
    orphans = sum(len(alive(child)) for child in children)
    print(json.dumps({"codes": [codes[child] for child in children], "seconds": seconds, "orphans": orphans}), flush=True)
else:
    sys.exit()
os.setsid()
os.chdir(request["folder"])
told = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for stream in (1, 2):
    os.dup2(told, stream)
try:
    cli.main(request["words"])
except SystemExit as done:
    sys.stdout.flush()
    os._exit(done.code)  # without a clean-up, which would copy all that was imported
"""
KILLS = {
    "ingest": 10,
    "fetch": 6,
    "embed": 6,
    "embed one file": 2,
    "profile": 6,
    "import": 6,
    "correct": 10,
    "correct zarr": 2,
    "evaluate": 6,
    "compare": 4,
    "report": 2,
}


class Run(NamedTuple):
    """One or several runs of one command line at once: how they ended, and what they told."""

    codes: list[int]
    seconds: float
    orphans: int
    told: list[str]

    @property
    def code(self) -> int:
        return self.codes[0]


@pytest.fixture(scope="module")
def go(tmp_path_factory):
    files = [tmp_path_factory.mktemp("told") / "told.txt" for _ in range(2)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    words = [sys.executable, "-c", PARENT]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as parent:

        def run(folder: Path, words: list[str], after: float = 120, *, alone: bool = False, at_once: int = 1) -> Run:
            told = files[:at_once]
            request = {"folder": str(folder), "words": words, "after": after, "alone": alone}
            assert parent.stdin
            assert parent.stdout
            parent.stdin.write(json.dumps({**request, "told": list(map(str, told))}) + "\n")
            parent.stdin.flush()
            answer: dict[str, Any] = json.loads(parent.stdout.readline())
            return Run(**answer, told=[file.read_text(errors="replace") for file in told])

        yield run
        assert parent.stdin
        parent.stdin.close()
        parent.wait(30)


def finished(run: Run) -> Run:
    assert run.code == 0, run.told
    return run


@pytest.fixture(scope="module")
def source(go, tmp_path_factory):
    """Inputs of every verb."""
    folder = tmp_path_factory.mktemp("source")
    sizes = {"n_experiments": 2, "n_plates": 1, "n_treatments": 6, "n_controls": 4, "n_classes": 3}
    simulate.screen(folder / "screen", image_size=64, random_state=0, **sizes)
    for verb in ("ingest", "embed", "profile"):
        finished(go(folder, words_of(verb, folder)))
    finished(go(folder, words_of("correct", folder)))
    adata = artifacts.read_adata(folder / "wells.h5ad")
    adata.obs.join(adata.to_df()).to_csv(folder / "table.csv", index=False)
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for i in range(200):
            archive.writestr(f"images/{i // 50}/{i}.png", np.random.default_rng(i).bytes(20_000))
    size = (folder / "images.zip").stat().st_size
    (folder / "own.toml").write_text(
        'name = "own"\ntitle = "Own"\npurpose = "test"\nlicence = "CC0"\nlicence_url = "u"\nnon_commercial = false\n'
        f'[[files]]\npath = "images.zip"\nsource = "http://127.0.0.1:9/{{path}}"\nsize = {size}\n'
    )
    return folder


def words_of(case: str, source: Path) -> list[str]:
    """A command line whose inputs lie in ``source`` and whose outputs are relative."""
    plates = [str(source / "plates" / f"HUVEC-0{i}_1.zarr") for i in (1, 2)]
    wells, corrected = str(source / "wells.h5ad"), str(source / "corrected.h5ad")
    embed = ["embed", *plates, "--encoder", "camae-mini", "--weights", "random", "--device", "cpu", "--chunk-size", "1"]
    scores = ["--score", "retrieval", "--score", "batch", "--class-key", "moa"]
    methods = ["--method", "none", "--method", "center+sphere", "--jobs", "1", "--no-held-out"]
    of_case = {
        "ingest": ["ingest", "rxrx1", str(source / "screen"), "plates"],
        "fetch": ["fetch", str(source / "own.toml"), "data", "--unpack"],
        "embed": [*embed, "--out", "sites"],
        "embed one file": [*embed, "--out", "sites.h5ad"],
        "profile": ["profile", *(str(source / "sites" / f"HUVEC-0{i}_1.h5ad") for i in (1, 2)), "--out", "wells.h5ad"],
        "import": ["import", "table", str(source / "table.csv"), "--out", "imported.h5ad"],
        "correct": [*("correct", wells, "--out", "corrected.h5ad", "--method", "center+sphere", "--save", "model.st")],
        "correct zarr": ["correct", wells, "--out", "corrected.zarr", "--method", "none"],
        "evaluate": [
            *("evaluate", corrected, "--out", "scores.csv", "--store", "scored.h5ad", "--details", "details"),
            *scores,
        ],
        "compare": ["compare", wells, "--out", "comparison.csv", "--figure", "tradeoff.png", *methods, *scores],
        "report": ["report", corrected, "--out", "report.html", "--plate", plates[0]],
    }
    return ["--quiet", *of_case[case]]


def begin(case: str, folder: Path, source: Path) -> Path:
    """A folder as it is before the command."""
    folder.mkdir()
    if case == "fetch":  # it is there already, and is verified and unpacked
        (folder / "data").mkdir()
        shutil.copyfile(source / "images.zip", folder / "data" / "images.zip")
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def has_a_name(path: str) -> bool:
    return not any(part.startswith(".") for part in Path(path).parts)


def assert_finished_or_refused(run: Run) -> None:
    """Done; or refused, where a run was killed between the last of its work and its end."""
    assert run.code == 0 or (run.code == 2 and "exists already" in run.told[0]), run.told


def assert_what_is_named_is_whole(folder: Path, whole: dict[str, bytes], when: str) -> None:
    half = [path for path, content in tree(folder).items() if has_a_name(path) and whole.get(path) != content]
    assert not half, when


@pytest.mark.parametrize("case", KILLS)
def test_kill_9_at_any_moment(go, source, tmp_path, case):
    """Each run is killed, so is the next one in its place, and the third is not."""
    words = words_of(case, source)
    seconds = [finished(go(begin(case, tmp_path / name, source), words)).seconds for name in ("first", "second")]
    whole = tree(tmp_path / "first")
    assert tree(tmp_path / "second") == whole
    n, rng = KILLS[case], np.random.default_rng(list(KILLS).index(case))
    moments = rng.permutation((np.arange(n) + rng.random(n)) / n)
    killed, usual = 0, min(seconds)
    while killed < n:
        folder = begin(case, tmp_path / "killed", source)
        for _ in range(2):
            run = go(folder, words, usual * moments[killed % n])
            assert_what_is_named_is_whole(folder, whole, f"killed at {moments[killed % n]:.3f} of {usual:.3f} s")
            if run.code != -9:  # it was faster than that
                usual *= 0.9
                assert_finished_or_refused(run)
                break
            killed += 1
        else:
            assert_finished_or_refused(go(folder, words))
        assert tree(folder) == whole
        shutil.rmtree(folder)


def test_a_kill_while_an_output_is_replaced_leaves_the_old_one_or_the_new_one(go, source, tmp_path):
    words = [*words_of("correct", source), "--force"]
    old = begin("correct", tmp_path / "old", source)
    finished(go(old, [*words_of("correct", source), "--ridge", "1"]))
    new = begin("correct", tmp_path / "new", source)
    usual = finished(go(new, words))
    before, after = tree(old), tree(new)
    assert before != after
    for part in (0.3, 0.6, 0.9, 0.95):
        folder = tmp_path / str(part)
        shutil.copytree(old, folder)
        go(folder, words, usual.seconds * part)
        for path, content in tree(folder).items():
            assert not has_a_name(path) or content in (before[path], after[path])
        finished(go(folder, words))
        assert tree(folder) == after


def test_the_processes_of_a_killed_comparison_end_with_it(go, source, tmp_path):
    """Only the process that was started is killed: those that it started must notice."""
    words = words_of("compare", source)
    words[words.index("--jobs") + 1] = "2"
    whole, folder = (begin("compare", tmp_path / name, source) for name in ("whole", "killed"))
    usual = finished(go(whole, words))
    run = go(folder, words, usual.seconds * 0.7, alone=True)
    assert (run.code, run.orphans) == (-9, 0)
    finished(go(folder, words_of("compare", source)))
    assert tree(folder) == tree(whole)


@pytest.mark.parametrize("case", [case for case in KILLS if case not in ("embed one file", "correct zarr")])
def test_two_runs_at_once_leave_what_one_run_leaves(go, source, tmp_path, case):
    words = words_of(case, source)
    whole, folder = (begin(case, tmp_path / name, source) for name in ("whole", "twice"))
    finished(go(whole, words))
    run = go(folder, words, at_once=2)
    assert set(run.codes) <= {0, 2}
    assert 0 in run.codes
    for code, told in zip(run.codes, run.told):
        if code:
            assert told.startswith("error: ")
            assert told.count("error: ") == 1
            assert any(words in told for words in ("another run is writing", "exists already", "is at work in")), told
    assert tree(folder) == tree(whole)


# ---------------------------------------------------------------------------------------------- what a killed run left


@pytest.fixture
def left(tmp_path):
    """An output that has its name, and what a run that was killed right then leaves beside it."""
    output = tmp_path / "wells.h5ad"
    lock, folder = artifacts.beside(output)
    for path in (
        folder / "0-E_1" / "settings.json",
        tmp_path / ".wells.h5ad.abcdefgh.part" / "wells.h5ad",
        lock,
        output,
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return output


def refused(output: Path) -> list[str]:
    with pytest.raises(OutputExistsError, match="exists already"):
        artifacts.refuse_existing(output)
    return sorted(path.name for path in output.parent.iterdir())


def test_what_a_run_left_that_was_killed_at_its_end_goes_when_the_next_is_refused(left):
    assert refused(left) == ["wells.h5ad"]


def test_parts_of_a_run_that_was_to_replace_an_output_stay(left):
    later = left.stat().st_mtime_ns + 10**9
    os.utime(artifacts.beside(left)[1] / "0-E_1" / "settings.json", ns=(later, later))
    assert refused(left) == [".wells.h5ad.parts", "wells.h5ad"]


def test_nothing_of_a_run_that_is_at_work_goes(left):
    everything = sorted(path.name for path in left.parent.iterdir())
    with FileLock(artifacts.beside(left)[0]):
        assert refused(left) == everything


def test_what_was_being_unpacked_goes_and_what_is_a_user_s_stays(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("b/c.txt", "c")
    for name in (".c.txt.abcdefgh.part", ".mine.part", ".other.txt.abcdefgh.part"):
        (tmp_path / "b" / name).mkdir(parents=True)
    fetch.unpack_zip(tmp_path / "a.zip", tmp_path)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        ".mine.part",
        ".other.txt.abcdefgh.part",
        "c.txt",
    ]
