"""Parts of long computations: what a run that was killed leaves, and that one run has an output for itself."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellica import parts, progress
from cellica.schema import OutputBusyError

SETTINGS = {"encoder": "a", "weights": "b", "crop_size": 32}
ROWS = {
    "embedding": np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32),
    "cell_count": np.arange(40, dtype=np.int32),
    "empty": np.arange(40) % 3 == 0,
    "focus_ER/RNA": np.linspace(-1, 1, 40, dtype=np.float32),
}


def some(first, last):
    return {name: values[first:last] for name, values in ROWS.items()}


def assert_rows(found, last):
    assert found.keys() == ROWS.keys()
    for name, values in some(0, last).items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


@pytest.fixture
def said(monkeypatch):
    notes = []
    monkeypatch.setattr(progress, "say", notes.append)
    return notes


class Killed(Exception):
    pass


@settings(deadline=None, max_examples=25)
@given(size=st.integers(1, 9), lives=st.lists(st.integers(0, 8), max_size=4), every=st.sampled_from([0.0, 60.0]))
def test_rows_are_the_same_however_often_a_run_is_killed(tmp_path_factory, size, lives, every):
    """Killed without a word, runs lose at most what they had not written; each goes on from the rest."""
    folder = tmp_path_factory.mktemp("parts") / ".out.h5ad.parts"
    written = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "EVERY", every)
        for life in lives:  # chunks that a run lives to add
            kept = parts.Parts(folder, SETTINGS)
            assert kept.n_found == written
            for _ in range(life):
                if kept.n_rows < 40:
                    kept.add(some(kept.n_rows, kept.n_rows + size))
            written = 0 if every else kept.n_rows
    with parts.Parts(folder, SETTINGS) as kept:
        for first in range(written, 40, size):
            kept.add(some(first, first + size))
        assert_rows(kept.rows(), 40)
    assert_rows(parts.Parts(folder, SETTINGS).rows(), 40)


def test_rows_are_written_when_the_block_ends_in_an_error_too(tmp_path):
    def run():
        with parts.Parts(tmp_path / "p", SETTINGS) as kept:
            kept.add(some(0, 7))
            raise Killed

    with pytest.raises(Killed):
        run()
    again = parts.Parts(tmp_path / "p", SETTINGS)
    assert again.n_found == 7
    assert_rows(again.rows(), 7)


def test_without_a_folder_rows_stay_in_memory(tmp_path):
    with parts.Parts(None, SETTINGS) as kept:
        kept.add(some(0, 3))
        kept.add(some(3, 9))
    assert_rows(kept.rows(), 9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"weights": "c"}, {"dtype": "float16"}, None])
def test_parts_of_other_settings_are_discarded_with_a_word(tmp_path, said, change):
    with parts.Parts(tmp_path / "p", SETTINGS) as kept:
        kept.add(some(0, 7))
    if change is None:
        (tmp_path / "p" / "settings.json").write_text("{")
    other = SETTINGS | (change or {})
    assert parts.Parts(tmp_path / "p", other).n_rows == 0
    assert f"discarded, it had other {next(iter(change or ['settings']))}" in said[0]
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["settings.json"]


@pytest.mark.parametrize("damage", ["truncated", "emptied", "removed"])
def test_a_damaged_part_and_what_follows_it_are_made_again(tmp_path, said, damage):
    for first in (0, 5, 10):
        with parts.Parts(tmp_path / "p", SETTINGS) as kept:
            kept.add(some(first, first + 5))
    second = tmp_path / "p" / "000000005.npz"
    if damage == "removed":
        second.unlink()
    else:
        second.write_bytes(second.read_bytes()[: 0 if damage == "emptied" else -100])
    again = parts.Parts(tmp_path / "p", SETTINGS)
    assert_rows(again.rows(), 5)
    assert "discarded" in said[-1]
    again.add(some(5, 40))
    again.__exit__(None, None, None)
    assert_rows(parts.Parts(tmp_path / "p", SETTINGS).rows(), 40)


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"arrays of \[1, 2\] rows"):
        parts.Parts(None, {}).add({"a": np.zeros(1), "b": np.zeros(2)})


# ---------------------------------------------------------------------------------------------- one run an output


def test_an_output_is_one_runs_and_parts_go_when_it_is_whole(tmp_path):
    output = tmp_path / "new" / "sites.h5ad"
    with parts.claimed(output) as folder:
        with parts.Parts(folder, SETTINGS) as kept:
            kept.add(some(0, 3))
        with pytest.raises(OutputBusyError, match=r"another run is writing .*sites\.h5ad"), parts.claimed(output):
            raise AssertionError("two runs at once")
        with parts.claimed(tmp_path / "new" / "other.h5ad"):
            pass
        output.write_text("whole")
    assert [path.name for path in output.parent.iterdir()] == ["sites.h5ad"]


def test_what_a_killed_write_left_goes_with_the_next_run(tmp_path):
    for name in (".sites.h5ad.x1.part", ".other.h5ad.x1.part"):
        (tmp_path / name).mkdir()
    with parts.claimed(tmp_path / "sites.h5ad"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".other.h5ad.x1.part"]


def test_parts_stay_when_a_run_fails(tmp_path):
    output = tmp_path / "sites.h5ad"

    def run():
        with parts.claimed(output) as folder, parts.Parts(folder, SETTINGS) as kept:
            kept.add(some(0, 3))
            raise Killed

    with pytest.raises(Killed):
        run()
    with parts.claimed(output) as folder:
        assert parts.Parts(folder, SETTINGS).n_found == 3


def test_a_killed_run_holds_nothing(tmp_path):
    source = f"""
import time
from cellica import parts
with parts.claimed({str(tmp_path / "sites.h5ad")!r}):
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()
        with pytest.raises(OutputBusyError), parts.claimed(tmp_path / "sites.h5ad"):
            pass
        os.kill(run.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while True:
        try:
            with parts.claimed(tmp_path / "sites.h5ad"):
                break
        except OutputBusyError:
            assert time.monotonic() < deadline
