"""The main job on real data: BBBC021's profiles, RxRx1's plate maps, RxRx1's images."""

import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cellica import artifacts, cli, correct, encoder, plates, profiles, retrieval, screen, simulate


def run(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([str(argument) for argument in ("--quiet", *arguments)])
    assert done.value.code == code


# ------------------------------------------------------------------------------------------------------ BBBC021

PUBLISHED = {  # class mAP of an independent run of the same methods on the same wells
    "none": 0.592,
    "center": 0.509,
    "sphere": 0.658,
    "center+sphere": 0.672,
    "combat": 0.414,
    "harmony": 0.352,
    "ica": 0.708,
    "ica_drop": 0.582,
}


@pytest.fixture(scope="module")
def bbbc021(shared, tmp_path_factory):
    """Wells imported by the very command that the README gives."""
    readme = (Path(__file__).parents[1] / "README.md").read_text().replace("\\\n", " ")
    (command,) = [line for line in readme.splitlines() if line.startswith("cellica import table ljosa")]
    folder = tmp_path_factory.mktemp("bbbc021")
    for file in (shared / "data" / "bbbc021_profiles").iterdir():
        (folder / file.name).symlink_to(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(*shlex.split(command)[1:])
    return folder / "bbbc021.h5ad"


def test_bbbc021_is_imported_whole(bbbc021):
    wells = artifacts.read_adata(bbbc021)
    assert wells.shape == (632, 516)
    assert wells.obs["plate"].nunique() == 55
    assert wells.obs["experiment"].nunique() == 10
    assert wells.obs.loc[wells.obs["control"] != "negative", "perturbation"].nunique() == 103
    assert (wells.obs["control"] == "negative").sum() == 330
    assert wells.obs["moa"].notna().all()
    assert wells.uns["cellica"]["import"]["join_unmatched_rows"].tolist() == [0, 0]


def test_bbbc021_comparison_reproduces_the_table(bbbc021, tmp_path):
    methods = [flag for name in PUBLISHED for flag in ("--method", name)]
    run("compare", bbbc021, "--out", tmp_path / "scores.csv", "--class-key", "moa", "--group-key", "compound", *methods)
    scores = pd.read_csv(tmp_path / "scores.csv")
    classes = scores[scores["metric"] == "class_map"].set_index("rep")
    assert (classes["n_queries"] == 274).all()
    found = classes["value"].rename(lambda rep: rep.removeprefix("X_"))
    for method, value in PUBLISHED.items():
        assert found[method] == pytest.approx(value, abs=0.03), method
    assert found["ica"] >= 0.69
    assert found["center+sphere"] >= 0.67
    assert found["ica"] > found["baseline:position"]


@pytest.mark.parametrize("seed", range(1, 4))
def test_bbbc021_ica_holds_over_seeds(bbbc021, seed):
    wells = artifacts.read_adata(bbbc021)
    correct.run(wells, "ica", random_state=seed)
    score = retrieval.class_retrieval(wells, class_key="moa", group_key="compound", use_rep="X_ica")
    assert score["value"].iloc[0] >= 0.69
    table = wells.uns["cellica"]["ica"]["components"]
    assert 3 <= table["removed"].sum() <= 8
    assert (table.loc[table["removed"], "batch_r2"] > table.loc[table["removed"], "perturbation_r2"]).all()


def test_bbbc021_a_random_basis_finds_no_batch_component(bbbc021):
    wells = artifacts.read_adata(bbbc021)
    correct.run(wells, "random_drop")
    correct.run(wells, "pca_drop+sphere", guard=False)
    assert not wells.uns["cellica"]["random_drop"]["components"]["removed"].any()
    score = retrieval.class_retrieval(wells, class_key="moa", group_key="compound", use_rep="X_pca_drop+sphere")
    assert score["value"].iloc[0] == pytest.approx(0.463, abs=0.03)


# --------------------------------------------------------------------------------------------- RxRx1's plate maps


@pytest.fixture(scope="module")
def rxrx1_shape(shared):
    """Simulated profiles over the real plate maps of all 51 experiments."""
    sites = screen.read_rxrx1(shared / "data" / "rxrx1_metadata_kaggle")
    wells = sites[sites["site"] == 1].drop(columns=["site", *sites.columns[sites.columns.str.startswith("path_")]])
    adata = simulate.profiles("rxrx1-like", layout=wells, random_state=0)
    assert adata.n_obs == 62_755
    assert adata.obs["experiment"].nunique() == 51
    return adata


def cell_type_share(adata, key):
    x = adata.obsm[key] - adata.obsm[key].mean(axis=0)
    means = pd.DataFrame(x).groupby(adata.obs["cell_type"].to_numpy()).transform("mean").to_numpy()
    return float((means**2).sum() / (x**2).sum())


def test_rxrx1_shape_is_corrected_within_cell_types(rxrx1_shape, tmp_path):
    wells = tmp_path / "wells.h5ad"
    artifacts.write_adata(rxrx1_shape, wells)
    methods = ("none", "ica", "center+sphere", "wccn")
    flags = [flag for name in methods for flag in ("--method", name)]
    run("correct", wells, "--out", tmp_path / "corrected.h5ad", *flags)
    corrected = artifacts.read_adata(tmp_path / "corrected.h5ad")
    reps = [flag for name in methods for flag in ("--rep", f"X_{name}")]
    run("evaluate", tmp_path / "corrected.h5ad", "--out", tmp_path / "scores.csv", "--max-queries", 1500, *reps)
    scores = pd.read_csv(tmp_path / "scores.csv")
    replicate = scores[scores["metric"] == "replicate_map"].set_index("rep")
    share = {name: cell_type_share(corrected, f"X_{name}") for name in methods}
    print(replicate[["value", "chance", "n_queries", "note"]], share)
    for method in ("ica", "wccn"):
        assert replicate.loc[f"X_{method}", "value"] > replicate.loc["X_none", "value"]
        assert share[method] > 0.05
    assert share["center+sphere"] > 0.05
    notes = corrected.uns["cellica"]["center+sphere"]["notes"]
    assert any("of 204 plates have fewer than 3 negative controls" in note for note in notes)
    assert corrected.uns["cellica"]["ica"]["components"]["removed"].any()


# ------------------------------------------------------------------------------------------------- RxRx1's images


def test_real_images_go_from_png_to_wells(shared, tmp_path, capsys):
    source, tables = shared / "data" / "rxrx1_images", shared / "data" / "rxrx1_metadata_kaggle"
    found = ["HEPG2-01", "HUVEC-01", "RPE-01"]
    experiments = [flag for name in found for flag in ("--experiment", name)]
    run("ingest", "rxrx1", source, tmp_path / "plates", "--metadata", tables, *experiments, code=1)
    aside = pd.read_csv(tmp_path / "plates" / "set_aside.csv")
    incomplete = aside[aside["well"].eq("B02") & aside["site"].eq(2)]
    assert incomplete.groupby("experiment").size().to_dict() == dict.fromkeys(found, 8)  # w5 and w6 on four plates
    assert set(incomplete["channel"]) == {"w5", "w6"}
    stores = sorted((tmp_path / "plates").glob("*.zarr"))
    assert len(stores) == 12
    assert all(list(plates.Plate(store).sites.index) == [f"{store.stem}_B02_1"] for store in stores)

    model = encoder.load("openphenom", "random", device="cpu", random_state=0)
    sites = [encoder.embed(store, model) for store in stores]
    wells = profiles.wells(sites)
    assert wells.shape == (12, 384)
    assert wells.obs_names[0] == "HEPG2-01_1_B02"
    assert wells.obs["n_sites"].eq(1).all()
    assert wells.obs["control"].eq("negative").all()
    assert np.isfinite(wells.X).all()
    assert len(np.unique(wells.X.round(5), axis=0)) == 12
    step = next(one for one in artifacts.provenance(wells) if one["verb"] == "embed")
    assert step["parameters"]["crops_per_field"] == 4
    assert "random" in step["parameters"]["weights"]
