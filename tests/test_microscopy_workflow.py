"""The microscopy workflow: fits see training batches alone, bases matter where they can, and all parts work together."""

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import workflow_scripts
import yaml

from cellica import artifacts, profiles, schema, simulate

FOLDER = Path(__file__).parents[1] / "workflows" / "microscopy"


arms, probe, summary, figures = workflow_scripts.load(FOLDER, "arms", "probe", "summary", "figures")


run = workflow_scripts.run


def snakemake(cwd, *more, **code):
    return workflow_scripts.snakemake(FOLDER, cwd, FOLDER / "smoke.yaml", *more, **code)


def small_wells(random_state: int = 0) -> ad.AnnData:
    sizes = {"n_experiments": 3, "n_plates": 2, "n_treatments": 12, "n_controls": 12}
    return simulate.profiles("small", **sizes, n_features=24, n_factors=18, random_state=random_state)


def task_of(wells: ad.AnnData) -> "probe.Task":
    return probe.task_of(wells, "perturbation", "experiment", 12, None, 0)


def planted(n_sources: int = 12, n_batches: int = 3, random_state: int = 0) -> ad.AnnData:
    """Heavy-tailed sources under an invertible mixing; each of four perturbations moves one source."""
    rng = np.random.default_rng(random_state)
    batch = np.repeat(np.arange(n_batches), 400)
    label = np.tile(np.repeat(np.arange(5), 80), n_batches)  # 4: controls
    sources = rng.laplace(size=(len(batch), n_sources))
    for code in range(4):
        sources[label == code, code] += 2.5
    x = sources @ rng.standard_normal((n_sources, n_sources))
    names = np.where(label == 4, "EMPTY", np.char.add("gene", label.astype(str)))
    obs = pd.DataFrame({"experiment": np.char.add("E", batch.astype(str)), "perturbation": names})
    obs["control"] = np.where(label == 4, "negative", "")
    obs["plate"], obs.index = "1", obs.index.astype(str)
    return ad.AnnData(x.astype(np.float32), obs=obs)


def write_rxrx3_core(folder: Path) -> None:
    """Three gene experiments and a compound experiment in the files of RxRx3-core."""
    rng = np.random.default_rng(0)
    genes = ["SRC", "MTOR", "PLK1", "EIF3H"]
    effect = {name: 1.5 * rng.standard_normal(12) for name in genes} | {"EMPTY_control": np.zeros(12)}
    rows = [
        (f"gene-{e:03d}", "CRISPR", gene, f"{gene}_guide_{i % 2}" if gene in genes else gene)
        for e in (1, 2, 3)
        for gene in [*genes, *["EMPTY_control"] * 10]
        for i in range(6)
    ]
    rows += [("compound-001", "COMPOUND", np.nan, "EMPTY_control")] * 40
    table = pd.DataFrame(rows, columns=["experiment_name", "perturbation_type", "gene", "treatment"])
    table["address"] = [schema.format_well(i // 48, i % 48) for i in table.groupby("experiment_name").cumcount()]
    table["well_id"] = table["experiment_name"] + "_1_" + table["address"]
    empty = {"SMILES": np.nan, "concentration": np.nan}
    table = table.assign(plate=1, cell_type="HUVEC", well_type_label="well", **empty)
    x = np.stack([effect.get(gene, np.zeros(12)) for gene in table["gene"]]) + rng.laplace(size=(len(table), 12))
    values = pd.DataFrame(x.astype(np.float32), columns=[f"feature_{i}" for i in range(12)])
    values.insert(0, "well_id", table["well_id"])
    table.to_csv(folder / "metadata_rxrx3_core.csv", index=False)
    values.to_parquet(folder / "OpenPhenom_rxrx3_core_embeddings.parquet", index=False)


# ---------------------------------------------------------------------------------------------- arms


def test_fits_see_training_batches_alone():
    task = task_of(small_wells())
    training = task.group != 0
    wild = task.x.copy()
    wild[~training] = 1000 * np.random.default_rng(0).standard_cauchy(wild[~training].shape)
    found, other = (
        list(arms.fold_arms(x, task.roles, training, n_components=6, n_rotations=1)) for x in (task.x, wild)
    )
    assert [arm.name for arm in found] == ["base", *arms.ROTATED, *arms.DROPPED]
    for one, two in zip(found, other):
        np.testing.assert_array_equal(one.x[training], two.x[training], err_msg=one.name)
        assert not np.allclose(one.x[~training], two.x[~training])


def test_rotated_arms_are_white_on_the_training_wells_and_rotations_of_each_other():
    task = task_of(small_wells())
    training = task.group != 1
    white = [a.x for a in arms.fold_arms(task.x, task.roles, training, n_components=6) if a.name in arms.ROTATED]
    for x in white:
        np.testing.assert_allclose(np.cov(x[training].T), np.eye(6), atol=1e-2)
        np.testing.assert_allclose(x @ x.T, white[0] @ white[0].T, rtol=2e-2, atol=2e-2)


def test_the_same_number_is_dropped_in_each_basis():
    task = task_of(simulate.profiles("small", n_plates=4, n_controls=16, n_features=24, n_factors=18))
    dropped = {a.name: a.n_dropped for a in arms.fold_arms(task.x, task.roles, task.group != 0, n_components=12)}
    assert dropped["ica_drop"] == dropped["pca_drop"] == dropped["random_drop"] > 0


# ---------------------------------------------------------------------------------------------- probes


def test_planted_components_are_found_and_only_sparsity_hangs_on_the_basis():
    found, batches = probe.probed(task_of(planted()), n_components=None, n_rotations=2)
    means = found.groupby(["penalty", "arm"])[["auroc", "hoyer", "top_quarter"]].mean()
    l1, l2 = means.loc["l1"], means.loc["l2"]
    assert l1.loc["pca+ica", "hoyer"] > l1.loc["pca+random", "hoyer"] + 0.1
    assert l1.loc["pca+ica", "top_quarter"] > l1.loc["pca+random", "top_quarter"]
    assert l1.loc["pca+ica", "auroc"] > 0.85
    at = ["rotation", "perturbation", "held_out"]
    by_arm = found[(found["penalty"] == "l2") & (found["rotation"] == 0)].set_index(["arm", *at])["auroc"]
    for arm in ("pca+ica", "pca+random"):  # whitened, an L2 probe does not see the basis
        np.testing.assert_allclose(by_arm[arm], by_arm["pca"], atol=2e-3)
    assert l2.loc["pca+ica", "hoyer"] > l2.loc["pca+random", "hoyer"]
    assert (batches["batch_chance"] - 1 / 3).abs().max() < 0.1


def test_weights_of_an_l1_probe_that_are_all_zero_score_chance():
    task = task_of(planted())
    rows = probe.l1_rows(task.x, task, task.group != 0, task.group == 0, 1e-9, np.array([0]))
    (row,) = rows
    assert row[2] == 0.5
    assert np.isnan(row[3])


def test_controls_are_thinned_by_batch_and_perturbations_stay():
    wells = planted()
    task = probe.task_of(wells, "perturbation", "experiment", 12, 10, 0)
    assert np.bincount(task.batch[task.label < 0]).tolist() == [10, 10, 10]
    assert (task.label >= 0).sum() == 3 * 320


def test_published_wells_of_rxrx3_core(tmp_path, monkeypatch):
    write_rxrx3_core(tmp_path)
    wells = profiles.read_embeddings(tmp_path / "OpenPhenom_rxrx3_core_embeddings.parquet", tmp_path, "rxrx3-core")
    artifacts.write_adata(wells, tmp_path / "wells.h5ad")
    full = yaml.safe_load((FOLDER / "full.yaml").read_text(encoding="utf-8"))["sets"]["rxrx3-core"]
    out = {name: tmp_path / f"{name}.csv" for name in ("probes", "batches")}
    options = ["--label-key", full["label_key"], "--where", full["where"], "--max-controls", full["max_controls"]]
    options += [
        "--perturbations",
        2,
        "--always",
        *full["always"],
        "--l1-perturbations",
        1,
        "--rotations",
        1,
        "--components",
        4,
    ]
    run(probe, monkeypatch, tmp_path / "wells.h5ad", "--probes", out["probes"], "--batches", out["batches"], *options)
    found = pd.read_csv(out["probes"])
    assert found["held_out"].str.startswith("gene-").all()  # no compound plates
    assert found.loc[found["penalty"] == "l1", "perturbation"].unique().tolist() == full["always"]
    assert found.loc[found["penalty"] == "l2", "perturbation"].nunique() == 2
    assert found.loc[found["arm"] == "base", "auroc"].mean() > 0.8
    assert (found["n_controls"] <= full["max_controls"]).all()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"control": ""}, [], "needs at least 2 negative controls and found 0"),
        ({"experiment": "E0"}, [], "holds one, 'E0'"),
        ({}, ["--label-key", "gene"], "'gene'"),
        ({}, ["--always", "EIF3H"], "no perturbation in two batches is called 'EIF3H'"),
        ({"cell_type": ["A", "B"] * 600}, [], "several cell types"),
    ],
)
def test_bad_inputs_are_one_clear_message(tmp_path, monkeypatch, capsys, change, options, message):
    wells = planted()
    wells.obs = wells.obs.assign(**change)
    artifacts.write_adata(wells, tmp_path / "wells.h5ad")
    words = [tmp_path / "wells.h5ad", "--probes", tmp_path / "p.csv", "--batches", tmp_path / "b.csv", *options]
    run(probe, monkeypatch, *words, code=2)
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("Error: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "p.csv").exists()


# ---------------------------------------------------------------------------------------------- tables and figures


@pytest.mark.parametrize(
    ("found", "sign", "said"),
    [
        ((0.2, 0.1, 0.3), 1, "holds"),
        ((-0.2, -0.3, -0.1), -1, "holds"),
        ((0.004, 0.002, 0.006), 1, "holds weakly"),
        ((0.2, 0.1, 0.3), -1, "refuted"),
        ((0.2, -0.1, 0.3), 1, "open"),
        ((0.0, -0.001, 0.001), 0, "holds"),
        ((0.0, -0.001, 0.001), 1, "no difference"),
        ((0.0, 0.0, 0.0), -1, "no difference"),
        ((0.1, 0.05, 0.2), 0, "refuted"),
        ((0.0, -0.1, 0.1), 0, "open"),
        ((0.1, np.nan, np.nan), 1, "open"),
    ],
)
def test_verdicts_follow_the_interval(found, sign, said):
    assert summary.verdict(*found, sign) == said


def test_committed_tables_draw_the_figures(tmp_path):
    tables = FOLDER / "results" / "small"
    figures.draw(tables, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["auroc.png", "batches.png", "claims.png", "sparsity.png"]
    paper = pd.read_csv(tables / "paper.csv").set_index("arm")
    pd.testing.assert_frame_equal(paper, summary.PAPER.set_index("arm"))


def test_committed_verdicts_are_those_of_their_intervals():
    table = pd.read_csv(FOLDER / "results" / "small" / "claims.csv")
    signs = {(said, score): sign for said, score, *_, sign, _ in summary.CLAIMS}
    idle = table["verdict"] == "nothing dropped"
    assert set(table.loc[idle, "arm"]) == {"ica_drop"}
    assert set(table.loc[idle, "data"]) == {"profiles", "screen"}
    for row in table[~idle].itertuples():
        assert row.verdict == summary.verdict(row.mean, row.low, row.high, signs[row.claim, row.score])


# ---------------------------------------------------------------------------------------------- the workflow


def config_of(name: str) -> dict:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["smoke", "small", "full"])
def test_configurations_are_right(name):
    probe.validation.checked(config_of(name), FOLDER / "config.schema.yaml")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"rotations": 0}, "rotations: 0 is less than"),
        ({"sets": {}}, "sets"),
        ({"rotation": 1}, "'rotation' was unexpected"),
        ({"sets": {"a": {"source": "images"}}}, r"sets\.a"),
        ({"out": "--help"}, "out: '--help' does not match"),
    ],
)
def test_faults_of_a_configuration_are_named(fault, message):
    with pytest.raises(ValueError, match=message):
        probe.validation.checked({**config_of("smoke"), **fault}, FOLDER / "config.schema.yaml")


def test_smoke_from_nothing_to_figures_and_then_nothing_to_do(tmp_path):
    assert "the configuration has to be mended" in snakemake(tmp_path, "rotations=0", code=1)
    snakemake(tmp_path)
    results = tmp_path / "out" / "results"
    tables = {"probes.csv", "batches.csv", "summary.csv", "claims.csv", "eif3h.csv", "paper.csv"}
    assert {p.name for p in results.glob("*.csv")} == tables
    assert len(list(results.glob("*.png"))) == 4
    probes = pd.read_csv(results / "probes.csv")
    assert set(probes["arm"]) == {"base", *arms.ROTATED, *arms.DROPPED}
    assert set(probes["data"]) == {"profiles", "screen"}
    assert "Nothing to be done" in snakemake(tmp_path)
    redone = snakemake(tmp_path, "--dry-run", "rotations=2")
    assert "rule probe" in redone
    assert "rule wells" not in redone
