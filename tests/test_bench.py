"""The benchmark of speed: its rows at the smallest sizes, its memory, its tables, history and figure. No speed is asserted."""

import dataclasses
import importlib.util
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).parents[1] / "workflows" / "bench"
sys.path.append(str(BENCH))  # also for the processes that measure memory

from speed import figure, groups, machine, measure, tables  # noqa: E402
from speed.cases import Agreement, Case, Limit, Row, Spec  # noqa: E402

from cellica import encoder  # noqa: E402

PEERS = {"ica": "picard", "scores": "copairs", "correct": "harmonypy"}
MACHINE = {"date": "2026-01-02 03:04 UTC", "cellica": "0.1.0 abc1234+", "cpu": "A CPU", "cores": "2 usable of 2"}
ROWS = [
    Row("ica", "20 x 4, a third Gaussian", 1.0, 4.0, 2.0, 3.0, {}, "correlation 1, peer 1; ratio 3 to 5"),
    Row("read", "2 fields", 0.25, 0.5, np.nan, np.nan, {"decoding alone": 0.87, "memcpy": 0.052}, "pixels equal: True"),
    Row("embed", "2 fields", 2.0, 1.5, 8.0, 8.0, {"the encoder alone": 0.75}, "least cosine 1"),
]


def run_py():
    spec = importlib.util.spec_from_file_location("bench_run", BENCH / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize("group", groups.GROUPS)
def test_rows_agree_with_their_peers(group, tmp_path):
    if group in PEERS:
        pytest.importorskip(PEERS[group], reason=f"{PEERS[group]} is not installed: pip install -e '.[dev]'")
    found = groups.specs(group, "tiny")
    assert {spec.row for spec in found} <= set(groups.ROWS[group])
    for spec in found:
        row = measure.row(dataclasses.replace(spec, rounds=1), tmp_path, memory=False)
        assert np.isfinite([row.ours_s, row.peer_s, row.speedup]).all()
        assert min(row.ours_s, row.peer_s) > 0
        assert "DISAGREES" not in row.quality
        assert all(0 < value < np.inf for value in row.limit.values())
        assert bool(row.limit) == (row.row not in ("harmony", "combat", *groups.ROWS["ica"], *groups.ROWS["scores"]))


def test_results_that_differ_too_much_are_said(tmp_path):
    def build(folder, seed):
        return Case("1", lambda: 1.0, lambda: 2.0, lambda a, b: Agreement(f"difference {b - a}", b - a, 0.5))

    quality = measure.row(Spec("row", build), tmp_path, memory=False).quality
    assert quality.startswith("DISAGREES: difference 1.0")
    undefined, good = Agreement("undefined", float("nan"), 0.5), Agreement("good", 0.1, 0.5)
    times = np.ones((1, 2))
    for both in ([undefined, good], [good, undefined]):
        assert measure.quality(Spec("row", build), both, times, 1.0) == "DISAGREES: undefined"


def test_a_limit_is_the_work_alone_over_ours():
    case = Case("1", int, int, lambda a, b: Agreement("", 0, 0), (Limit("peer"), Limit("half", int, 0.5)))
    assert measure.fractions(case, np.array([2.0, 1.0, 3.0])) == {"peer": 0.5, "half": 0.75}


def test_operations_of_the_encoder_are_those_that_torch_counts():
    import torch
    from plain_camae import PlainCAMAE
    from speed import rows_encoder
    from torch.utils.flop_counter import FlopCounterMode

    g = encoder.NAMED["openphenom"]
    plain = PlainCAMAE(g.embed_dim, g.depth, g.num_heads, g.img_size, g.patch_size, g.max_in_chans).eval().to("meta")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        plain(torch.zeros(1, 6, g.img_size, g.img_size, dtype=torch.uint8, device="meta"))
    assert rows_encoder.operations(g, 6) == pytest.approx(counter.get_total_flops(), rel=0.01)


# ------------------------------------------------------------------------------------------------ memory


def allocate(mib):
    """A case whose calls hold, or touch and let go, so many MiB, after data of the same size were let go."""
    del_first = np.ones(mib * 2**17)
    del del_first

    def held():
        return np.ones(mib * 2**17)

    def let_go():
        return float(np.ones(mib * 2**17).sum())

    return Case("1", held, let_go, lambda a, b: Agreement("", 0, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from Linux's /proc")
def test_memory_of_a_known_allocation(tmp_path):
    for side in ("ours", "peer"):
        case = allocate(64)
        assert measure.peak(getattr(case, side)) == pytest.approx(64, abs=8)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from Linux's /proc")
def test_memory_is_measured_in_a_fresh_process(tmp_path):
    (spec,) = (spec for spec in groups.specs("correct", "tiny") if spec.row == "sphere")
    large = dataclasses.replace(spec, arguments=spec.arguments | {"n": 100_000, "d": 32})  # 12 MiB in, 12 MiB out
    parent = os.getpid()
    assert measure.in_fresh_process(os.getpid) != parent
    assert 12 <= measure.added_memory(large, tmp_path, "ours") < 80


# ------------------------------------------------------------------------------------------------ tables


def test_a_table_comes_back_with_its_machine(tmp_path):
    tables.write(tables.frame(ROWS), MACHINE, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text().startswith("# date: 2026-01-02 03:04 UTC\n# cellica: 0.1.0 abc1234+\n")
    table, about = tables.read(tmp_path / "table.csv")
    assert about == MACHINE
    assert list(table) == tables.COLUMNS
    for found, given in zip(tables.rows_of(table), ROWS, strict=True):
        np.testing.assert_equal(dataclasses.asdict(found), dataclasses.asdict(given))


def test_the_machine_is_described_without_names_of_hosts_and_folders(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.4, 0, 0))
    about = machine.describe()
    assert {"date", "cellica", "cpu", "flags", "cores", "memory", "system", "python", "numpy", "torch"} <= set(about)
    assert not machine.is_busy(about)
    assert "/" not in "".join(about.values())
    assert os.uname().nodename not in " ".join(about.values()).split()
    monkeypatch.setattr(os, "getloadavg", lambda: (1.7, 0, 0))
    busy = machine.describe()
    assert machine.is_busy(busy)
    assert "# BUSY: " in tables.printed(tables.frame(ROWS), busy)


def test_history_reads_old_and_new_tables(tmp_path):
    old = "# cellica 0.1.0, Python 3.11.7\nrow,size,ours_s,peer_s,speedup,quality\nread,2 fields,1,1,1.0,\n"
    (tmp_path / "2026-01-01_aaaaaaa.csv").write_text(old)
    recall = "row,size,ours_s,peer_s,speedup,quality,ours_peak_gib\nrelationship recall,5,1,20,20,same,0.5\n"
    (tmp_path / "2026-01-01_bbbbbbb.csv").write_text(recall)
    names = [tables.keep(tables.frame(ROWS), MACHINE, tmp_path).name for _ in range(2)]
    assert names == ["2026-01-02_abc1234.csv", "2026-01-02_abc1234_2.csv"]
    kept = tables.history(tmp_path)
    assert list(kept["run"].unique()) == ["2026-01-01_aaaaaaa", "2026-01-01_bbbbbbb", *(n[:-4] for n in names)]
    assert kept.set_index("row").loc["relationship recall", "ours_mib"] == 512
    (line,) = (line for line in tables.changes(kept).splitlines() if line.startswith("read"))
    assert line.split()[-4:] == ["1", "2", "2", "2"]  # three runs that have the row, and the last over the first
    assert tables.changes(tables.history(tmp_path / "none")) == "no run is kept"


def test_tables_that_are_kept_can_be_read():
    kept = tables.history(BENCH / "results" / "history")
    assert kept["run"].nunique() >= 3
    assert np.isfinite(kept["speedup"]).all()
    assert "other" not in set(kept["row"].map(groups.group_of))
    assert tables.changes(kept)


# ------------------------------------------------------------------------------------------------ figure


def test_the_figure_has_a_bar_for_each_row(tmp_path):
    drawn = figure.draw(ROWS, MACHINE)
    left, right = drawn.axes
    assert len(left.patches) == len(ROWS)
    assert len(right.patches) == 3
    assert sorted(text.get_text() for text in left.texts) == ["0.75", "2.0", "4.0"]
    ends = [bar.get_x() + bar.get_width() for bar in left.patches]
    assert ends == pytest.approx([4.0, 2.0, 0.75])
    assert left.get_xscale() == "log"
    assert "A CPU" in drawn.get_supxlabel()
    figure.save(ROWS, {**MACHINE, "BUSY": "yes"}, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_a_figure_without_limits_is_drawn():
    left, right = figure.draw(ROWS[:1], {}).axes
    assert (len(left.patches), len(right.patches)) == (1, 0)


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_prints_writes_and_keeps(tmp_path, monkeypatch, capsys):
    bench = run_py()
    monkeypatch.setattr(bench, "measured", lambda options, folder: iter(ROWS))
    monkeypatch.setattr(machine, "describe", lambda: dict(MACHINE, BUSY="others ran"))
    bench.main(["--out", str(tmp_path / "table.csv"), "--keep", "--results", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "BUSY" in printed
    assert re.search(r"read .* 2 fields .*0\.87 of decoding alone; 0\.052 of memcpy .*busy machine; pixels", printed)
    assert (tmp_path / "table.csv").exists()
    assert (tmp_path / "history" / "2026-01-02_abc1234.csv").exists()
    assert (tmp_path / "speed.png").exists()
    bench.main(["--history", "--results", str(tmp_path)])
    assert "2026-01-02_abc1234 (busy)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="whole tables"):
        bench.main(["--keep", "--quick", "--results", str(tmp_path)])


def test_a_peer_that_is_not_installed_leaves_its_rows_out(capsys, monkeypatch):
    bench = run_py()

    def build(folder, seed):
        raise ModuleNotFoundError("No module named 'copairs'", name="copairs")

    monkeypatch.setattr(bench, "specs", lambda group, scale, **options: [Spec("average precision", build)])
    bench.main(["--only", "scores"])
    assert "average precision is left out: copairs is not installed" in capsys.readouterr().err


def test_the_command_measures_the_group_that_is_asked_for(tmp_path, capsys, monkeypatch):
    bench = run_py()
    monkeypatch.setattr(bench, "specs", lambda group, scale, **options: groups.specs(group, "tiny")[:1])
    monkeypatch.setattr(measure, "added_memory", lambda *arguments: 1.0)
    bench.main(["--only", "scores", "--quick", "--out", str(tmp_path / "table.csv")])
    table, about = tables.read(tmp_path / "table.csv")
    assert list(table["row"]) == ["average precision"]
    assert {"cpu", "minutes"} <= set(about)
    assert "120 x 128" in capsys.readouterr().out
