"""File names and perturbations of any script, under any locale: paths with spaces, dashes and glob characters."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from cellica import artifacts, cli, simulate

FOLDER = "µ 日本 🧬 [1]* {a} --out"
PROGRAM = """
import json, os, sys
from cellica import cli
codes = []
for words in json.loads(sys.stdin.buffer.read()):
    try:
        cli.main(["--quiet", *(os.fsdecode(word.encode()) for word in words)])  # as a command line comes in
    except SystemExit as done:
        codes.append(done.code)
print(codes)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / FOLDER
    sizes = {"n_experiments": 2, "n_plates": 1, "n_treatments": 4, "n_controls": 4, "n_classes": 2}
    simulate.screen(folder / "screen", image_size=64, random_state=0, **sizes)
    adata = simulate.profiles("small", n_features=6, random_state=0, **sizes)
    table = adata.obs.join(adata.to_df())
    table["perturbation"] = "µ-オピオイド 🧬 " + table["perturbation"].astype(str).where(
        adata.obs["control"] == "", "対照"
    )
    table["experiment"] = "実験 " + table["experiment"].astype(str)
    table.to_csv(folder / "täble 表.csv", index=False)
    return folder


def commands(source: Path, out: Path) -> list[list[str]]:
    """Every verb once, on names of any script."""
    wells, corrected = out / "wells µ.h5ad", out / "corrected 日本.h5ad"
    rows = [
        ["ingest", "rxrx1", source / "screen", out / "plates 🧬", "--experiment", "HUVEC-01"],
        ["embed", out / "plates 🧬" / "HUVEC-01_1.zarr", "--out", out / "sites µ", "--encoder", "camae-mini"],
        ["profile", out / "sites µ" / "HUVEC-01_1.h5ad", "--out", out / "profiles 表.zarr"],
        ["import", "table", source / "täble 表.csv", "--out", wells],
        ["correct", wells, "--out", corrected, "--method", "sphere", "--save", out / "model µ.st"],
        ["correct", wells, "--out", out / "applied 🧬.h5ad", "--apply", out / "model µ.st"],
        ["evaluate", corrected, "--out", out / "scores 表.csv", "--score", "batch", "--details", out / "テーブル"],
        ["compare", wells, "--out", out / "c µ.csv", "--method", "none", "--jobs", "1", "--score", "batch"],
        ["report", corrected, "--out", out / "report 日本.html", "--scores", out / "scores 表.csv"],
    ]
    return [list(map(str, row)) for row in rows]


LOCALES = {
    "C, which Python takes for UTF-8": {"LC_ALL": "C"},
    "POSIX, ASCII and nothing else": {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("locale", LOCALES)
def test_any_script_under_any_locale(locale, source, tmp_path):
    out = tmp_path / FOLDER
    every = commands(source, out)
    rows = every if "ASCII" in locale else every[3:5]
    faults = [every[4], [*every[4][:2], "--out", str(out / "x µ.h5ad"), "--method", "sphere", "--control", "無"]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **LOCALES[locale]}
    environment.pop("LANG", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(rows + faults, ensure_ascii=False).encode(),
        env=environment,
        capture_output=True,
        check=False,
    )
    told = done.stderr.decode(errors="replace")
    assert done.stdout.decode(errors="replace").splitlines()[-1] == str([0] * len(rows) + [2] * len(faults)), told
    assert "Traceback" not in told
    assert told.count("error: ") == len(faults)
    wells = artifacts.read_adata(out / "corrected 日本.h5ad")
    assert wells.obs["perturbation"].str.startswith("µ-オピオイド 🧬").all()
    assert (wells.obs["control"] == "negative").any()
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == []
    if "ASCII" in locale:
        assert "X_sphere" in set(pd.read_csv(out / "scores 表.csv")["rep"])
        assert "実験" in (out / "report 日本.html").read_text("utf-8")


def test_a_file_name_that_is_no_text_is_read_and_shown(source, tmp_path, capsys):
    """Bytes that are not UTF-8, as names of another system are."""
    folder = os.fsencode(tmp_path / "a") + b"\xe4"
    try:
        os.mkdir(folder)
    except OSError as error:
        pytest.skip(f"the file system takes no such name: {error}")
    out = Path(os.fsdecode(folder))
    rows = commands(source, out)
    for row in (rows[3], rows[4], rows[-1][:4]):
        with pytest.raises(SystemExit) as done:
            cli.main(["--quiet", *row])
        assert done.value.code == 0, capsys.readouterr().err
    shutil.copytree(source / "screen", out / "screen")
    lost = next((out / "screen").rglob("*_w3.png"))
    lost.write_bytes(b"")
    for _ in range(2):  # the second time with the list of what was set aside
        with pytest.raises(SystemExit) as done:
            cli.main(["--quiet", "ingest", "rxrx1", str(out / "screen"), str(out / "plates")])
        assert done.value.code == 1
    (path,) = pd.read_csv(out / "plates" / "set_aside.csv")["path"]
    assert path.endswith(f"{lost.name}")
    assert "a\\udce4/screen" in path
    with pytest.raises(SystemExit) as done:
        cli.main(["report", str(out / "missing.h5ad"), "--out", str(out / "r.html")])
    assert done.value.code == 2
    assert "missing.h5ad" in capsys.readouterr().err


def test_names_that_begin_with_dashes_come_after_two_dashes(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    artifacts.write_adata(simulate.profiles("small", n_features=4, random_state=0), tmp_path / "--wells.h5ad")
    for words in (
        ["correct", "--method", "sphere", "--out=--corrected.h5ad", "--", "--wells.h5ad"],
        ["evaluate", "--score", "batch", "--out", "./-scores.csv", "--", "--corrected.h5ad"],
    ):
        with pytest.raises(SystemExit) as done:
            cli.main(["--quiet", *words])
        assert done.value.code == 0
    assert (tmp_path / "-scores.csv").exists()


def test_a_lock_and_what_killed_runs_left_are_found_beside_names_of_glob_characters(tmp_path):
    file = tmp_path / "[1]*.h5ad"
    other = tmp_path / ".1x.h5ad.abc.part"
    for folder in (other, tmp_path / ".[1]*.h5ad.abc.part"):
        folder.mkdir()
    artifacts.remove_left(file)
    assert list(tmp_path.iterdir()) == [other]
