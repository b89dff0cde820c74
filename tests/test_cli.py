"""The command line: the whole way from images to a report, and one clear message at every door."""

import shutil
import subprocess
import sys
from dataclasses import replace

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import artifacts, cli, correct, demo, simulate


def run(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([str(argument) for argument in arguments])
    assert done.value.code == code


@pytest.fixture(scope="module")
def screen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "a screen"
    sizes = {"n_experiments": 3, "n_plates": 1, "n_treatments": 6, "n_controls": 4, "n_classes": 3}
    simulate.screen(folder, image_size=128, random_state=0, **sizes)
    return folder


@pytest.fixture(scope="module")
def wells(screen, tmp_path_factory):
    """Wells that came all the way from images."""
    out = tmp_path_factory.mktemp("wells")
    run("--quiet", "ingest", "rxrx1", screen, out / "plates")
    stores = sorted((out / "plates").glob("*.zarr"))
    run("--quiet", "embed", *stores, "--out", out / "sites", "--encoder", "camae-mini", "--weights", "random")
    run("--quiet", "profile", *sorted((out / "sites").glob("*.h5ad")), "--out", out / "wells.h5ad")
    return out / "wells.h5ad"


def test_images_become_wells_with_provenance(wells):
    adata = artifacts.read_adata(wells)
    assert adata.shape == (3 * 10, 192)
    embedded = next(step for step in artifacts.provenance(adata) if step["verb"] == "embed")
    assert embedded["inputs"].keys() == {f"HUVEC-0{i}_1.zarr" for i in (1, 2, 3)}
    assert artifacts.provenance(adata)[-1]["inputs"].keys() == {f"HUVEC-0{i}_1.h5ad" for i in (1, 2, 3)}
    assert {"moa", "control", "intensity_w1", "n_sites"} <= set(adata.obs)


def test_several_plates_in_one_file_give_the_same_wells(wells, tmp_path):
    stores = sorted((wells.parent / "plates").glob("*.zarr"))
    run("embed", *stores, "--out", tmp_path / "sites.zarr", "--encoder", "camae-mini", "--weights", "random")
    run("profile", tmp_path / "sites.zarr", "--out", tmp_path / "wells.zarr")
    a, b = artifacts.read_adata(wells), artifacts.read_adata(tmp_path / "wells.zarr")
    np.testing.assert_allclose(a.X, b.X, atol=1e-6)
    assert list(a.obs_names) == list(b.obs_names)


def test_embed_goes_on_where_it_stopped_and_past_a_plate_that_fails(wells, tmp_path, capsys):
    stores = sorted((wells.parent / "plates").glob("*.zarr"))
    broken = tmp_path / "HUVEC-09_1.zarr"
    shutil.copytree(stores[1], broken)
    next(path for path in broken.rglob("c/*") if path.parent.name == "c").parent.rename(broken / "lost")
    words = ("--out", tmp_path / "sites", "--encoder", "camae-mini", "--weights", "random")
    run("embed", stores[0], *words)
    before = (tmp_path / "sites" / "HUVEC-01_1.h5ad").stat().st_mtime_ns
    run("embed", stores[0], broken, stores[2], *words, code=1)
    told = capsys.readouterr().out
    assert "1 plates embedded, 1 there already" in told
    assert "failed: HUVEC-09_1" in told
    assert (tmp_path / "sites" / "HUVEC-01_1.h5ad").stat().st_mtime_ns == before
    assert sorted(path.name for path in (tmp_path / "sites").iterdir()) == ["HUVEC-01_1.h5ad", "HUVEC-03_1.h5ad"]
    run("embed", stores[0], stores[0], *words, code=2)


def test_correct_save_apply_evaluate_compare_report(wells, tmp_path, capsys):
    corrected, scores = tmp_path / "corrected.h5ad", tmp_path / "scores.csv"
    run(
        "correct",
        wells,
        "--out",
        corrected,
        "--method",
        "ica",
        "--method",
        "center+sphere",
        "--n-components",
        4,
        code=2,
    )
    assert "center+sphere has no option 'n_components'" in capsys.readouterr().err
    run("correct", wells, "--out", corrected, "--method", "ica", "--method", "center+sphere")
    adata = artifacts.read_adata(corrected)
    assert {"X_ica", "X_center+sphere", "ica_sources"} <= set(adata.obsm)
    assert all(step["inputs"] == {"wells.h5ad": artifacts.sha256(wells)} for step in artifacts.provenance(adata)[-2:])

    model = tmp_path / "model.safetensors"
    run("correct", wells, "--out", tmp_path / "a.h5ad", "--method", "center+sphere", "--save", model)
    run("correct", wells, "--out", tmp_path / "b.h5ad", "--apply", model)
    again = artifacts.read_adata(tmp_path / "b.h5ad").obsm["X_center+sphere"]
    np.testing.assert_allclose(again, adata.obsm["X_center+sphere"], atol=1e-5)

    capsys.readouterr()
    run("evaluate", corrected, "--out", scores, "--rep", "X", "--rep", "X_ica", "--class-key", "moa")
    shown = capsys.readouterr().out
    assert "replicate_map" in shown
    assert "X_ica" in shown
    assert {"X", "X_ica", "baseline:position", "baseline:intensity"} == set(pd.read_csv(scores)["rep"])
    run("compare", wells, "--out", tmp_path / "comparison.csv", "--method", "none", "--method", "wccn")
    assert "X_wccn" in set(pd.read_csv(tmp_path / "comparison.csv")["rep"])

    page = tmp_path / "report.html"
    plate = wells.parent / "plates" / "HUVEC-01_1.zarr"
    run("report", corrected, "--out", page, "--scores", scores, "--plate", plate)
    assert "random" in page.read_text()


def test_demo_takes_all_stages(tmp_path, monkeypatch, capsys):
    small = replace(simulate.SMALL, n_experiments=3, n_plates=1, n_treatments=6, n_controls=4, n_classes=3)
    monkeypatch.setitem(simulate.PRESETS["screen"], "small", small)
    monkeypatch.setattr("cellica.correct.DEFAULT_COMPARISON", ("none", "center+sphere", "ica"))
    run("demo", tmp_path / "demo")
    told = capsys.readouterr()
    assert "random weights" in told.err
    assert str(tmp_path / "demo" / "report.html") in told.out
    made = {path.name for path in (tmp_path / "demo").iterdir() if not path.name.startswith(".")}
    assert made == {
        *("screen", "plates", "sites", "wells.h5ad", "corrected.h5ad", "comparison.csv", "report.html"),
    }
    run("demo", tmp_path / "demo", code=2)
    assert "--force" in capsys.readouterr().err
    assert demo.WEIGHTS == "random"


@pytest.fixture(scope="module")
def faulty(wells, tmp_path_factory):
    """Folder of inputs with one fault each."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "broken.h5ad").write_bytes(b"not HDF5")
    (folder / "table.csv").write_text("a,b\n1,2\n")
    adata = artifacts.read_adata(wells)
    changed = adata.copy()
    changed.X[2, 1] = np.nan
    artifacts.write_adata(changed, folder / "nan.h5ad")
    artifacts.write_adata(adata[adata.obs["experiment"] == "HUVEC-01"].copy(), folder / "one_batch.h5ad")
    changed = adata.copy()
    changed.obs["control"] = ""
    changed.obs["perturbation"] = list(changed.obs_names)
    artifacts.write_adata(changed, folder / "no_controls.h5ad")
    artifacts.write_adata(ad.AnnData(adata.X), folder / "bare.h5ad")
    correct.fit(adata, "sphere").save(folder / "model.safetensors")
    artifacts.write_adata(adata[:, :5].copy(), folder / "narrow.h5ad")
    return folder


DOORS = {
    "missing file": ("correct {wells}x --out {out} --method ica", "does not exist"),
    "not AnnData": ("correct {faulty}/broken.h5ad --out {out} --method ica", "cannot be read as AnnData"),
    "not a name for AnnData": ("correct {faulty}/table.csv --out {out} --method ica", "ends in .h5ad or .zarr"),
    "unknown method": (
        "correct {wells} --out {out} --method icaa",
        "method 'icaa' is not known: use one of none, center",
    ),
    "unknown method in compare": ("compare {wells} --out {out} --method icaa", "method 'icaa' is not known"),
    "no method": ("correct {wells} --out {out}", "neither of --method and --apply given"),
    "both": (
        "correct {wells} --out {out} --method ica --apply {faulty}/model.safetensors",
        "both of --method and --apply",
    ),
    "NaN rows": ("correct {faulty}/nan.h5ad --out {out} --method ica", "1 of 30 wells hold values that are not finite"),
    "one batch": ("correct {faulty}/one_batch.h5ad --out {out} --method ica", "holds one, 'HUVEC-01'"),
    "no controls": ("correct {faulty}/no_controls.h5ad --out {out} --method center", "found 0 in 30 wells"),
    "no obs": ("correct {faulty}/bare.h5ad --out {out} --method ica", "no column 'experiment'"),
    "unknown column": (
        "correct {wells} --out {out} --method ica --batch-key week",
        "no column 'week'; it has experiment",
    ),
    "unknown control": ("correct {wells} --out {out} --method sphere --control DMSO", "'DMSO' not found"),
    "other features": ("correct {faulty}/narrow.h5ad --out {out} --apply {faulty}/model.safetensors", "data has 5"),
    "unknown rep": ("evaluate {wells} --out {out} --rep X_ica", "X_ica"),
    "unknown class": ("evaluate {wells} --out {out} --class-key mechanism", "mechanism"),
    "no truth": ("evaluate {wells} --out {out} --truth {faulty}/nowhere", "nowhere"),
    "no screen": ("ingest rxrx1 {faulty} {out}", "metadata.csv"),
    "no column": ("ingest table {faulty}/table.csv {out}", "columns are 'a', 'b'"),
    "unknown experiment": ("ingest rxrx1 {screen} {out} --experiment HELA", "--experiment HELA is not in the screen"),
    "no plate": ("embed {faulty} --out {out} --encoder camae-mini --weights random", "faulty"),
    "no weights": ("embed {plate} --out {out} --encoder openphenom", "recursionpharma/OpenPhenom"),
    "unknown encoder": ("embed {plate} --out {out} --encoder vit --weights random", "camae-mini"),
    "import without columns": ("import table {faulty}/table.csv --out {out}", "no column"),
    "bad --column": ("import table {faulty}/table.csv --out {out} --column plate", "write role=SPEC"),
    "report without scores": ("report {wells} --out {out} --scores {faulty}/nowhere.csv", "nowhere.csv"),
    "profile of nothing": ("profile {faulty}/nowhere.h5ad --out {out}", "does not exist"),
}


@pytest.mark.parametrize("door", DOORS)
def test_bad_input_is_one_message_exit_2_and_nothing_written(door, wells, faulty, screen, tmp_path, capsys):
    template, message = DOORS[door]
    suffix = ".csv" if template.split()[0] in ("evaluate", "compare") else ".html" if "report" in template else ".h5ad"
    out = tmp_path / f"out{suffix}"
    places = {
        "wells": wells,
        "out": out,
        "faulty": faulty,
        "screen": screen,
        "plate": wells.parent / "plates/HUVEC-01_1.zarr",
    }
    run(*(word.format(**places) for word in template.split()), code=2)
    told = capsys.readouterr()
    assert message in told.err
    assert "Traceback" not in told.err
    assert told.err.count("error:") == 1
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_not_replaced_without_force(wells, tmp_path, capsys):
    run("correct", wells, "--out", tmp_path / "a.h5ad", "--method", "none")
    before = (tmp_path / "a.h5ad").read_bytes()
    run("correct", wells, "--out", tmp_path / "a.h5ad", "--method", "sphere", code=2)
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "a.h5ad").read_bytes() == before
    run("correct", wells, "--out", tmp_path / "a.h5ad", "--method", "sphere", "--force")


@pytest.mark.parametrize(
    "verb", ["demo", "ingest", "embed", "import", "profile", "correct", "evaluate", "compare", "report"]
)
def test_every_verb_has_help_with_an_example(verb, capsys):
    run(verb, "--help")
    assert f"Example: cellica {verb}" in capsys.readouterr().out


def test_help_tables_import_ingest_and_report_need_no_torch(wells, screen, tmp_path):
    source = f"""
import sys
from cellica import cli
def go(*words):
    try: cli.main(["--quiet", *map(str, words)])
    except SystemExit as done: assert not done.code, words
go("--help")
go("ingest", "rxrx1", {str(screen)!r}, {str(tmp_path / "plates")!r})
go("report", {str(wells)!r}, "--out", {str(tmp_path / "r.html")!r})
assert not {{"torch", "timm", "torchvision"}} & set(sys.modules), "torch was imported"
"""
    subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, timeout=120)


def test_import_of_the_package_is_light():
    source = "import cellica, sys; assert not {'torch', 'pandas', 'anndata'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", source], check=True)


def test_version_names_what_matters(capsys):
    run("--version")
    told = capsys.readouterr().out
    assert told.startswith("cellica 0.")
    assert "torch " in told
