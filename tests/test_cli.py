"""The command line: the whole way from images to a report, and one clear message at every door."""

import io
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cellica import artifacts, cli, correct, embedding, parts, simulate
from cellica.plates import Plate


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
    assert adata.shape == (3 * 10, 128)
    embedded = next(step for step in artifacts.provenance(adata) if step["verb"] == "embed")
    assert embedded["inputs"].keys() == {f"HUVEC-0{i}_1.zarr" for i in (1, 2, 3)}
    assert artifacts.provenance(adata)[-1]["inputs"].keys() == {f"HUVEC-0{i}_1.h5ad" for i in (1, 2, 3)}
    assert {"moa", "control", "intensity_w1", "n_sites"} <= set(adata.obs)


@pytest.fixture
def faulty_screen(screen, tmp_path):
    """A screen with an empty image, an absent one, and one that the table does not list."""
    folder = tmp_path / "faulty screen"
    shutil.copytree(screen, folder)
    images = sorted((folder / "images" / "HUVEC-01" / "Plate1").glob("*_w3.png"))
    images[0].write_bytes(b"")
    images[1].unlink()
    shutil.copyfile(images[2], images[2].with_name("P24_s1_w3.png"))
    return folder


def test_ingest_tells_what_was_set_aside_and_ends_with_1_or_strictly_with_2(faulty_screen, tmp_path, capsys):
    words = ("--quiet", "ingest", "rxrx1", faulty_screen, tmp_path / "plates", "--experiment", "HUVEC-01")
    run(*words, code=1)
    told = capsys.readouterr().out
    assert "1 plates, 8 sites" in told
    for reason in ("empty file", "file absent", "file not in the table"):
        assert f"set aside 1 images{'' if 'table' in reason else ' of 1 sites'}: {reason} ('{faulty_screen}" in told
    assert str(tmp_path / "plates" / "set_aside.csv") in told
    listed = pd.read_csv(tmp_path / "plates" / "set_aside.csv")
    assert len(listed) == 3
    run(*words, "--strict", code=2)
    assert len(pd.read_csv(tmp_path / "plates" / "set_aside.csv")) == 3
    run("--quiet", "ingest", "rxrx1", faulty_screen, tmp_path / "plates", "--experiment", "HUVEC-02", "--strict")
    stores = sorted(path.name for path in (tmp_path / "plates").glob("*.zarr"))
    assert stores == ["HUVEC-01_1.zarr", "HUVEC-02_1.zarr"]


def test_ingest_of_real_tiffs_one_row_a_file_with_percentiles(shared, tmp_path, capsys):
    files = sorted((shared / "data" / "hcs_tiff_samples" / "nf1_plate2").glob("*.tif"))
    rows = [(file.stem.split("_")[0], file.stem.split("_")[4], str(file)) for file in files]
    table = pd.DataFrame(rows, columns=["Well", "Stain", "File"]).assign(Plate="NF1_2", drug="DMSO")
    table.to_csv(tmp_path / "images.csv", index=False)
    roles = {"experiment": "Plate:^(.*)_", "plate": "Plate:_(.*)$", "well": "Well", "channel": "Stain", "path": "File"}
    words = ["ingest", "table", tmp_path / "images.csv", tmp_path / "plates", "--column", "perturbation=drug"]
    words += [word for role, spec in roles.items() for word in ("--column", f"{role}={spec}")]
    run(*words, code=2)
    assert "images of 16 bits" in capsys.readouterr().err
    words += ["--intensity-percentiles", 0.1, 99.9, "--intensity-from", "controls", "--control", "DMSO"]
    run(*words, "--pixel-size", 0.33)
    plate = Plate(tmp_path / "plates" / "NF1_2.zarr")
    assert (plate.shape, plate.channels) == ((3, 904, 1224), ["DAPI", "GFP", "RFP"])
    assert plate.sites["control"].tolist() == ["negative"] * 3
    step = plate.provenance[0]
    assert set(step["intensity_ranges"]) == {"DAPI", "GFP", "RFP"}
    assert step["parameters"]["pixel_size"] == 0.33
    for _, fields in plate.fields():
        assert all(0 < field.mean() < 255 for field in fields.reshape(-1, 904, 1224))


def test_ingest_of_parquet_shards(shared, tmp_path, capsys):
    folder = shared / "data" / "rxrx3_jp2_sample"
    keys = [f"gene-001/Plate9/AA41_s1_{i}" for i in range(1, 7)]
    images = [(folder / f"AA41_s1_{i}.jp2").read_bytes() for i in range(1, 7)]
    core = tmp_path / "core"
    (core / "data").mkdir(parents=True)
    for i in range(2):
        shard = pa.table({"__key__": keys[i::2], "jp2": [{"bytes": image, "path": None} for image in images[i::2]]})
        pq.write_table(shard, core / "data" / f"train-{i:05d}-of-00002.parquet")
    well = {"treatment": "EMPTY_control", "gene": "EMPTY_control", "SMILES": None, "concentration": None}
    well |= {"perturbation_type": "CRISPR", "cell_type": "HUVEC"}
    names = ["gene-001_9_AA41", "gene-002_1_A01"]
    pd.DataFrame([{"well_id": name, **well} for name in names]).to_csv(core / "metadata_rxrx3_core.csv", index=False)
    run("ingest", "rxrx3-core", core, tmp_path / "one", "--experiment", "gene-001", "--plate", "9")
    assert "1 plates, 1 sites" in capsys.readouterr().out
    run("ingest", "rxrx3-core", core, tmp_path / "all", code=1)
    assert "set aside 1 plates: no image of the plate" in capsys.readouterr().out
    run("ingest", "rxrx3-core", core, tmp_path / "all", "--z", "max", code=2)
    run("ingest", "rxrx3-core", core, tmp_path / "all", "--column", "well=address", code=2)
    assert "--column is not for 'ingest rxrx3-core'" in capsys.readouterr().err


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
    assert sorted(path.name for path in (tmp_path / "sites").glob("[!.]*")) == ["HUVEC-01_1.h5ad", "HUVEC-03_1.h5ad"]
    run("embed", stores[0], stores[0], *words, code=2)


def test_embed_tells_files_that_are_not_what_was_asked_for(wells, tmp_path, capsys, monkeypatch):
    store = wells.parent / "plates" / "HUVEC-01_1.zarr"
    words = ("--out", tmp_path / "sites", "--encoder", "camae-mini", "--weights", "random")
    monkeypatch.chdir(store)
    run("embed", ".", *words)
    run("embed", store, *words)
    capsys.readouterr()
    run("embed", store, *words, "--channels", "concat", code=1)
    assert "1 of these are not what these plates and options give, or are damaged" in capsys.readouterr().out
    target = tmp_path / "sites" / "HUVEC-01_1.h5ad"
    target.write_bytes(b"")
    run("embed", store, *words, code=1)
    run("embed", store, *words, "--force")
    assert artifacts.read_adata(target).n_obs == 10


def test_embed_leaves_an_output_to_the_run_that_writes_it(wells, tmp_path, capsys):
    store = wells.parent / "plates" / "HUVEC-01_1.zarr"
    words = ("embed", store, "--encoder", "camae-mini", "--weights", "random", "--out")
    for out, target in ((tmp_path / "a.h5ad",) * 2, (tmp_path / "sites", tmp_path / "sites" / "HUVEC-01_1.h5ad")):
        with parts.claimed(target):
            run(*words, out, code=2)
            assert f"another run is writing {target} now" in capsys.readouterr().err
            assert not target.exists()
        run(*words, out)
        assert target.exists()


def test_embed_waits_for_the_run_that_writes_its_output(wells, tmp_path):
    store = wells.parent / "plates" / "HUVEC-01_1.zarr"
    target = tmp_path / "sites" / "HUVEC-01_1.h5ad"
    words = ["embed", store, "--encoder", "camae-mini", "--weights", "random", "--out", tmp_path / "sites", "--wait"]
    with parts.claimed(target):
        waiting = subprocess.Popen(
            [sys.executable, "-m", "cellica.cli", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "waiting for it" in waiting.stderr.readline()
        target.write_bytes(wells.read_bytes())  # what the other run makes: here, something else
    told = waiting.communicate()[0]
    assert (waiting.returncode, "0 plates embedded, 1 there already" in told) == (1, True)
    assert "1 of these are not what these plates and options give" in told


def test_dry_runs_check_and_tell_and_write_nothing(screen, wells, tmp_path, capsys):
    def table():
        return pd.read_csv(io.StringIO(capsys.readouterr().out))

    stores = sorted((wells.parent / "plates").glob("*.zarr"))
    run("ingest", "rxrx1", screen, tmp_path / "plates", "--dry-run")
    told = table()
    assert list(told.columns) == ["name", "experiment", "plate", "wells", "sites", "state", "sha256"]
    assert (list(told["name"]), set(told["state"])) == ([store.stem for store in stores], {"to do"})
    run("ingest", "rxrx1", screen, wells.parent / "plates", "--dry-run")
    assert set(table()["state"]) == {"finished"}
    run("ingest", "rxrx1", screen, wells.parent / "plates", "--pixel-size", 0.6, "--dry-run")
    assert set(table()["state"]) == {"outdated"}
    run("ingest", "rxrx1", screen, tmp_path / "plates", "--intensity-from", "controls", "--dry-run", code=2)
    run("embed", *stores, "--out", tmp_path / "sites", "--encoder", "camae-mini", "--weights", "random", "--dry-run")
    told = table()
    assert (list(told["crops"]), set(told["there_already"])) == ([40, 40, 40], {False})
    run("pretrain", *stores, "--out", tmp_path / "m.safetensors", "--steps", 3, "--batch-size", 10, "--dry-run")
    told = table()
    assert (told["sites"].sum() + told["held_out"].sum(), set(told["held_out"]) <= {0, 1}) == (30, True)
    run("correct", wells, "--out", tmp_path / "c.h5ad", "--method", "ica", "--dry-run")
    assert "30 wells x 128 features" in capsys.readouterr().out
    run("compare", tmp_path / "later.h5ad", "--out", tmp_path / "c.csv", "--dry-run")
    assert "later.h5ad is not there yet: the options were checked, and nothing else" in capsys.readouterr().out
    run("compare", wells, "--out", tmp_path / "c.csv", "--method", "icaa", "--dry-run", code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_plate_without_images_is_kept_and_told_to_the_end(screen, tmp_path, capsys):
    broken = tmp_path / "screen"
    shutil.copytree(screen, broken)
    shutil.rmtree(broken / "images" / "HUVEC-02")
    folder = tmp_path / "plates"
    one = ("ingest", "rxrx1", broken, folder, "--experiment", "HUVEC-02")
    run(*one, code=2)
    assert "none of the 60 image files of the screen table is there" in capsys.readouterr().err
    run(*one, "--keep-empty", code=1)
    assert "set aside 1 plates: no image of the plate" in capsys.readouterr().out
    run("ingest", "rxrx1", broken, folder, "--keep-empty", code=1)
    for channels in ("mean", "concat"):
        out = tmp_path / channels
        run("embed", *sorted(folder.iterdir())[1:4], "--out", out, "--encoder", "camae-mini", "--channels", channels)
        run("profile", *sorted(out.glob("*.h5ad")), "--out", out / "wells.h5ad")
        assert "plates without sites: 'HUVEC-02_1: no image of the plate'" in capsys.readouterr().out
    stores = sorted(folder.iterdir())[1:4]
    layout = tmp_path / "layout.csv"
    layout.write_text("well,dose\nB02,1\n")
    run("embed", *stores, "--out", tmp_path / "laid", "--encoder", "camae-mini", "--layout", layout)
    run("pretrain", *stores, "--out", tmp_path / "m.safetensors", "--steps", 1, "--dry-run")
    assert "1 plates without sites are left out: 'HUVEC-02_1'" in capsys.readouterr().err
    left_out = ("--left-out", "HUVEC-01_1=dust")
    run("profile", *sorted(out.glob("HUVEC*.h5ad")), "--out", out / "no.h5ad", *left_out, code=2)
    assert "left_out (--left-out) names 'HUVEC-01_1', which is among the sites" in capsys.readouterr().err
    run("profile", out / "HUVEC-02_1.h5ad", "--out", out / "none.h5ad", code=2)
    assert "not one of 1 plates has a site: see what ingest set aside" in capsys.readouterr().err
    run("report", out / "wells.h5ad", "--out", out / "r.html", "--plate", folder / "HUVEC-02_1.zarr")
    page = (out / "r.html").read_text(encoding="utf-8")
    assert "HUVEC-02_1: no image of the plate" in page
    assert "set aside: no image of the plate" in page


def test_an_update_that_cannot_be_made_ends_with_2_and_says_that_the_older_plate_stays(screen, tmp_path, capsys):
    broken = tmp_path / "screen"
    shutil.copytree(screen, broken)
    words = ("ingest", "rxrx1", broken, tmp_path / "plates", "--experiment", "HUVEC-02")
    run(*words)
    shutil.rmtree(broken / "images" / "HUVEC-02")
    run(*words, "--keep-empty", "--update")  # nothing else is asked for, so no image is needed
    run(*words, "--keep-empty", "--update", "--pixel-size", 0.5, code=2)
    assert "no image of it can be used now, and the plate of before stays as it was" in capsys.readouterr().out


def test_progress_goes_to_stderr_and_quiet_silences_it(screen, tmp_path):
    def go(*flags):
        words = ["ingest", "rxrx1", str(screen), str(tmp_path / "plates"), "--force", *flags]
        done = subprocess.run([sys.executable, "-m", "cellica.cli", *words], capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    run("ingest", "rxrx1", screen, tmp_path / "plates", "--quiet")
    assert go("--quiet") == ("3 plates, 30 sites\n", "")
    words = [sys.executable, "-m", "cellica.cli", "ingest", "rxrx1", str(screen), str(tmp_path / "plates")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("3 plates, 30 sites\n")
    assert done.stderr.count("is finished already and was skipped") == 3


def test_completion_knows_the_verbs():
    words = {"_CELLICA_COMPLETE": "complete_bash", "COMP_WORDS": "cellica co", "COMP_CWORD": "1"}
    program = Path(sys.executable).with_name("cellica")
    done = subprocess.run([program], env={**os.environ, **words}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["correct", "compare"]


def test_embed_goes_on_from_plates_that_a_stopped_run_finished(wells, tmp_path, capsys, monkeypatch):
    """Three plates in one file: the third fails, and the first two are not computed again."""
    stores = sorted((wells.parent / "plates").glob("*.zarr"))
    words = (*stores, "--out", tmp_path / "sites.h5ad", "--encoder", "camae-mini", "--weights", "random")
    embed = embedding.embed
    with monkeypatch.context() as patch:
        patch.setattr(
            "cellica.encoder.embed", lambda plate, *a, **k: 1 / 0 if "-03" in plate.name else embed(plate, *a, **k)
        )
        run("embed", *words, code=2)
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".h5ad")] == []
    capsys.readouterr()
    run("embed", *words)
    told = capsys.readouterr().err
    assert told.count("10 of 10 sites are embedded already") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["sites.h5ad"]


def test_embed_verifies(wells, tmp_path, capsys):
    store = wells.parent / "plates" / "HUVEC-01_1.zarr"
    adata = artifacts.read_adata(wells)
    published = adata.to_df().assign(well_id=adata.obs_names)
    published.to_parquet(tmp_path / "same.parquet")
    published.assign(feature_0=100 * published["feature_0"].abs() + 100).to_parquet(tmp_path / "other.parquet")
    published.drop(columns="feature_7").to_parquet(tmp_path / "narrow.parquet")
    words = ("embed", store, "--encoder", "camae-mini", "--weights", "random", "--verify")
    run(*words, tmp_path / "same.parquet", "--out", tmp_path / "a.h5ad")
    assert "10 wells shared with" in capsys.readouterr().out
    assert artifacts.read_adata(tmp_path / "a.h5ad").uns["cellica"]["verify"]["n_shared"] == 10
    run(*words, tmp_path / "other.parquet", "--out", tmp_path / "sites", code=1)
    assert "WARNING: these are NOT the published embeddings: 10 of 10 wells" in capsys.readouterr().out
    assert not artifacts.read_adata(tmp_path / "sites" / "HUVEC-01_1.h5ad").uns["cellica"]["verify"]["agrees"]
    run(*words, tmp_path / "narrow.parquet", "--out", tmp_path / "b.h5ad", code=2)
    assert "embeddings of 127 features, not of 128" in capsys.readouterr().err
    assert not (tmp_path / "b.h5ad").exists()


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
    run("correct", wells, "--out", tmp_path / "c.h5ad", "--method", "ica", "--mixed", "regress", "--tune")
    shown = capsys.readouterr().out
    assert "confounding: 1 of 6 perturbations" in shown
    assert "tune: " in shown
    assert artifacts.read_adata(tmp_path / "c.h5ad").uns["cellica"]["ica"]["parameters"]["mixed"] == "regress"

    run("evaluate", corrected, "--out", scores, "--rep", "X", "--rep", "X_ica", "--class-key", "moa")
    shown = capsys.readouterr().out
    assert "replicate_map" in shown
    assert "X_ica" in shown
    baselines = {f"baseline:{name}" for name in ("position", "intensity", "quality", "cell_count")}
    assert {"X", "X_ica"} | baselines == set(pd.read_csv(scores)["rep"])
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
    assert "camae-mini, a small encoder trained on simulated screens" in told.err
    assert str(tmp_path / "demo" / "report.html") in told.out
    made = {path.name for path in (tmp_path / "demo").iterdir() if not path.name.startswith(".")}
    assert made == {
        *("screen", "plates", "sites", "wells.h5ad", "corrected.h5ad", "comparison.csv", "report.html"),
    }
    run("demo", tmp_path / "demo", code=2)
    assert "--force" in capsys.readouterr().err


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
    "options that --apply ignores": (
        "correct {wells} --out {out} --apply {faulty}/model.safetensors --batch-key plate --ridge 1 --random-state 3 --tune",
        "--apply keeps these as they were in its fit: leave out --batch-key, --ridge, --tune, --random-state",
    ),
    "nothing to tune": ("correct {wells} --out {out} --method none --tune", "nothing to tune: none has no ridge"),
    "a correction over its input": (
        "correct {wells} --out {out} --method sphere --save {wells} --force",
        "is also an input",
    ),
    "a correction under the name of the output": (
        "correct {wells} --out {out} --method sphere --save {out}",
        "is also an input",
    ),
    "no correction to apply": ("correct {wells} --out {out} --apply {faulty}/nowhere.st", "does not exist"),
    "unknown mixed": ("correct {wells} --out {out} --method ica --mixed drop", "mixed='drop' is not known"),
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
    "no image": ("ingest rxrx1 {faulty} {out} --metadata {screen}", "none of the"),
    "percentiles and range": (
        "ingest rxrx1 {screen} {out} --intensity-range 0 9 --intensity-percentiles 1 99",
        "both intensity_range and intensity_percentiles",
    ),
    "unknown wells for percentiles": (
        "ingest rxrx1 {screen} {out} --intensity-percentiles 1 99 --intensity-from some",
        "choose one of all, controls",
    ),
    "unknown z": ("ingest rxrx1 {screen} {out} --z sum", "choose 'max', 'mean' or the number of a plane"),
    "metadata for a table": ("ingest table {faulty}/table.csv {out} --metadata {screen}", "--metadata is not for"),
    "unknown experiment": ("ingest rxrx1 {screen} {out} --experiment HELA", "--experiment HELA is not in the screen"),
    "no plate": ("embed {faulty} --out {out} --encoder camae-mini --weights random", "faulty"),
    "no weights": ("embed {plate} --out {out} --encoder openphenom", "recursionpharma/OpenPhenom"),
    "no published embeddings": (
        "embed {plate} --out {out} --encoder camae-mini --weights random --verify {faulty}/table.csv",
        "needs a column well_id or site_id",
    ),
    "no such channel": (
        "embed {plate} --out {out} --encoder camae-mini --weights random --nuclei DNA",
        "no channel 'DNA' of nuclei",
    ),
    "rules for a plate that has its pixels": (
        "embed {plate} --out {out} --encoder camae-mini --intensity-range 0 9",
        "was made by an ingest, single planes of 8 bits: leave out",
    ),
    "a plate to be replaced": ("embed {plate} --out {plate} --encoder camae-mini --force", "is also an input"),
    "sites to be replaced": ("profile {wells} --out {wells} --force", "is also an input"),
    "z of another script": ("ingest rxrx1 {screen} {out} --z \u00b2", "choose 'max', 'mean' or the number of a plane"),
    "one plate twice in training": (
        "pretrain {plate} {plate} --out {out}.safetensors --steps 1",
        "plates are named twice",
    ),
    "one plate twice": ("embed {plate} {plate} --out {out} --encoder camae-mini", "name each plate once"),
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
    "verb", ["demo", "fetch", "ingest", "embed", "import", "profile", "correct", "evaluate", "compare", "report"]
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


def test_help_answers_at_once():
    source = """
import sys
from cellica import cli
try: cli.main(["--help"])
except SystemExit as done: assert not done.code
heavy = {"numpy", "pandas", "torch", "anndata", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", source], check=True, capture_output=True)


def test_import_of_the_package_is_light():
    source = "import cellica, sys; assert not {'torch', 'pandas', 'anndata'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", source], check=True)


def test_version_names_what_matters(capsys):
    run("--version")
    told = capsys.readouterr().out
    assert told.startswith("cellica 0.")
    assert "torch " in told


def test_fetch_lists_plans_asks_for_the_terms_and_takes_what_is_there(tmp_path, capsys):
    run("fetch", "--list")
    assert "rxrx3-core: RxRx3-core: 222,601 wells" in capsys.readouterr().out
    run("fetch", "rxrx3-core", "--list")
    assert "data/train-00034-of-00035.parquet (about 496.9 MB): the images" in capsys.readouterr().out
    run("fetch", "rxrx1", tmp_path / "a", "--file", "*metadata*", "--dry-run")
    assert f"{tmp_path / 'a' / 'rxrx1-metadata.zip'} (about 1.0 MB): to fetch" in capsys.readouterr().out
    run("fetch", "rxrx1", tmp_path / "a", code=2)
    told = capsys.readouterr().err
    assert "CC BY-NC-SA 4.0" in told
    assert "--accept-license" in told
    assert not (tmp_path / "a").exists()
    run("fetch", code=2)
    assert "name a data set (openphenom" in capsys.readouterr().err
    run("fetch", "rxrx2", tmp_path, code=2)
    assert "'rxrx2' is not known" in capsys.readouterr().err

    head = """name = "own"\ntitle = "Own"\npurpose = "test"\nlicence = "CC0"\nlicence_url = "u"\nnon_commercial = false\n"""
    own = tmp_path / "own.toml"
    own.write_text(head + """[[files]]\npath = "a.csv"\nsource = "http://127.0.0.1:9/{path}"\nsize = 3\n""")
    (tmp_path / "a.csv").write_text("a,b")
    run("fetch", own, tmp_path)
    assert "a.csv (3 B): there, no SHA-256 was known" in capsys.readouterr().out


def test_pretrain_makes_an_encoder_and_goes_on(wells, tmp_path, capsys):
    stores = sorted((wells.parent / "plates").glob("*.zarr"))
    out = tmp_path / "model.safetensors"
    run("pretrain", *stores, "--out", out, "--steps", 2, "--batch-size", 2, "--device", "cpu")
    assert "2 steps, mean squared error" in capsys.readouterr().out
    assert {out, out.with_suffix(".csv"), out.with_suffix(".png")} == set(tmp_path.iterdir())
    run("embed", stores[0], "--out", tmp_path / "s.h5ad", "--encoder", "camae", "--weights", out)
    run("pretrain", *stores, "--out", out, "--steps", 2, code=2)
    assert "exists already" in capsys.readouterr().err


def test_the_command_line_samples_as_python_does():
    from cellica import evaluation

    assert cli.MANY_QUERIES == evaluation.MAX_QUERIES


def test_a_report_replaces_no_input(tmp_path, capsys):
    file = tmp_path / "wells.h5ad"
    artifacts.write_adata(simulate.profiles("small", n_features=4, random_state=0), file)
    before = file.read_bytes()
    run("report", file, "--out", file, "--force", code=2)
    assert "is also an input" in capsys.readouterr().err
    assert file.read_bytes() == before
