import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import benchmarks, cli, correct, metrics, profiles, schema, simulate
from cellica.schema import INTERVAL_COLUMNS, SCORE_COLUMNS, InputError

N_GENES, N_COMPOUNDS, N_FEATURES = 90, 24, 32
DOSES = (0.025, 0.25, 2.5, 10.0)
PLATE_CONTROLS = ("PLK1", "MTOR", "SRC")
COLUMNS = (
    "well_id", "experiment_name", "plate", "address", "gene", "treatment", "SMILES", "concentration", "perturbation_type",
    "cell_type", "well_type_label",
)  # fmt: skip
SOURCES = ("CORUM", "HuMAP", "Reactome", "SIGNOR", "StringDB")
GENES = [f"GENE{i}" for i in range(N_GENES)]


def write_screen(folder, seed=0, batch_effect=3.0):
    """RxRx3-core in small, in its own files: complexes of three genes, compounds that look like one of them, batch effects."""
    rng = np.random.default_rng(seed)
    module = rng.normal(size=(N_GENES // 3, N_FEATURES))
    effect = {gene: module[i // 3] + 0.4 * rng.normal(size=N_FEATURES) for i, gene in enumerate(GENES)}
    effect |= {name: 3 * rng.normal(size=N_FEATURES) for name in (*PLATE_CONTROLS, "RXRX3-1234")}
    wells = []
    for e in range(6):
        of_experiment = [gene for i, gene in enumerate(GENES) if i % 6 == e]
        for plate in (1, 2):
            rows = [(gene, f"{gene}_guide_{guide}", "", np.nan) for gene in of_experiment for guide in (1, 2, 3)]
            rows += [(name, f"{name}_guide_{guide}", "", np.nan) for name in PLATE_CONTROLS for guide in (1, 2)]
            rows += [("RXRX3-1234", "RXRX3-1234_guide_1", "", np.nan)] * (e == 0)
            rows += [("EMPTY_control", "EMPTY_control", "", np.nan)] * 24
            wells += [(f"gene-{e + 1:03d}", plate, "CRISPR", *row) for row in rows]
    for e in (1, 2):
        for plate in range(1, 5):
            smiles = "CC(=O)C |c:1,13,21|"
            rows = [
                ("", f"Compound {i:02d}", smiles, dose) for i in range(N_COMPOUNDS) if i % 2 == e - 1 for dose in DOSES
            ]
            rows += [("", "EMPTY_control", "", np.nan)] * 24 + [("", "CRISPR_control", "", np.nan)] * 6
            wells += [(f"compound-{e:03d}", plate, "COMPOUND", *row) for row in rows]
    table = pd.DataFrame(
        wells, columns=["experiment_name", "plate", "perturbation_type", "gene", "treatment", "SMILES", "concentration"]
    )
    place = table.groupby(["experiment_name", "plate"]).cumcount().to_numpy()
    table["address"] = [schema.format_well(i // 48, i % 48) for i in place]
    table["well_id"] = table["experiment_name"] + "_" + table["plate"].astype(str) + "_" + table["address"]
    table = table.assign(cell_type="HUVEC", well_type_label="well")[list(COLUMNS)].replace("", np.nan)
    x = np.zeros((len(table), N_FEATURES))
    for i, (treatment, dose) in enumerate(zip(table["treatment"], table["concentration"])):
        if treatment.startswith("Compound"):
            x[i] = (1.5 * DOSES.index(dose) / 3) * effect[GENES[3 * int(treatment[-2:])]]
        elif "_guide_" in treatment:
            x[i] = effect[treatment.split("_")[0]]
    x += 0.7 * rng.normal(size=x.shape)
    batch = pd.factorize(table["experiment_name"])[0]
    scale = np.exp(0.3 * rng.normal(size=(8, N_FEATURES)))
    x = x * scale[batch] + batch_effect * rng.normal(size=(8, N_FEATURES))[batch] + 10
    values = pd.DataFrame(x.astype(np.float32), columns=[f"feature_{i}" for i in range(N_FEATURES)])
    values.insert(0, "well_id", table["well_id"].to_numpy())
    stranger = values.iloc[:2].assign(well_id=["gene-099_1_A01", "gene-099_1_A02"])
    values = pd.concat([values.drop(index=[5, 7, 900]), stranger]).sample(frac=1, random_state=seed)
    table.to_csv(folder / "metadata_rxrx3_core.csv", index=False)
    values.to_parquet(folder / "OpenPhenom_rxrx3_core_embeddings.parquet", index=False)
    (folder / "truth").mkdir()
    for k, source in enumerate(SOURCES):
        pairs = [
            (GENES[3 * m + a], GENES[3 * m + b]) for m in range(30) if m % 5 != k for a, b in ((0, 1), (2, 1), (0, 2))
        ]
        pairs += [(b, a) for a, b in pairs[:4]] + [(GENES[0], "NOTHERE"), ("ALSO", "NOTHERE")]
        pd.DataFrame(pairs, columns=["entity1", "entity2"]).to_csv(folder / "truth" / f"{source}.txt", index=False)
    known = [(GENES[3 * i + k], 50.0 + k, f"Compound {i:02d}") for i in range(N_COMPOUNDS) for k in (0, 1, 2)]
    known += [(GENES[(3 * i + 40) % N_GENES], 5000.0, f"Compound {i:02d}") for i in range(N_COMPOUNDS)]
    known += [("GENE0", 1.0, "Elsewhere"), ("NOTHERE", 1.0, "Compound 00")]
    known += [(gene, 133_000.0, "Compound 01") for gene in GENES if gene not in ("GENE3", "GENE4", "GENE5", "GENE43")]
    truth = pd.DataFrame(known, columns=["gene_symbol", "nM_value", "treatment"]).assign(
        measurement_type="ic50", database="none"
    )
    truth[["gene_symbol", "nM_value", "measurement_type", "database", "treatment"]].to_csv(
        folder / "compound_gene_interactions.csv", index=False
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_screen(tmp_path_factory.mktemp("rxrx3-core"))


@pytest.fixture(scope="module")
def wells(folder):
    return profiles.read_embeddings(folder / "OpenPhenom_rxrx3_core_embeddings.parquet", folder, "rxrx3-core")


def run(adata, folder, methods=(benchmarks.AUTHORS,), **keywords):
    table = folder / "compound_gene_interactions.csv"
    return benchmarks.rxrx3_core(adata, truth=folder / "truth", compound_gene=table, methods=methods, **keywords)


@pytest.fixture(scope="module")
def scores(wells, folder):
    return run(wells, folder, ("none", benchmarks.AUTHORS, "center+sphere"))


def values(scores, method, metric):
    return scores[(scores["rep"] == f"X_{method}") & (scores["metric"] == metric)].set_index("group")["value"]


def test_both_tables_are_there_for_each_method(scores):
    assert list(scores.columns) == [*SCORE_COLUMNS, *INTERVAL_COLUMNS]
    for method in ("none", benchmarks.AUTHORS, "center+sphere"):
        assert sorted(values(scores, method, "recall_0.05_0.95").index) == sorted(SOURCES)
        assert values(scores, method, "compound_gene_ap").index.tolist() == ["0.025", "0.25", "2.5", "10.0", "max"]
    assert scores["value"].notna().all()
    assert scores["chance"].notna().all()


def test_the_authors_correction_finds_what_is_planted_and_none_does_not(scores):
    assert (values(scores, benchmarks.AUTHORS, "recall_0.05_0.95") > 0.9).all()
    assert (values(scores, "none", "recall_0.05_0.95") < 0.5).all()
    at_dose = values(scores, benchmarks.AUTHORS, "compound_gene_ap")
    assert at_dose["10.0"] > 0.9
    assert at_dose["max"] > 0.8
    assert at_dose["0.025"] < 0.35  # without effect
    assert values(scores, benchmarks.AUTHORS, "compound_gene_auroc")["10.0"] > 0.95
    mine = scores[(scores["rep"] == f"X_{benchmarks.AUTHORS}") & scores["group"].isin(["10.0", *SOURCES])]
    assert (mine["low"] > mine["chance"]).all()


def test_notes_account_for_what_was_left_out(scores):
    note = scores.loc[scores["rep"] == f"X_{benchmarks.AUTHORS}", "note"].iloc[0]
    for said in (
        "queries are annotated pairs of 90 perturbations",
        "lost one member and 1 both, which are not on the map ('ALSO', 'NOTHERE')",
        "2 wells of 1 blinded genes left out ('RXRX3-1234')",
        "3 genes that stand in most experiments left out ('MTOR', 'PLK1', 'SRC')",
        "2 embeddings had no metadata (such as gene-099_1_A0",
        "3 rows of metadata had no embedding",
        "fitted on the scored wells (transductive)",
    ):
        assert said in note
    note = scores.loc[scores["metric"] == "compound_gene_ap", "note"].iloc[0]
    assert "of 25 compounds of the truth 1 are not on the screen ('Elsewhere')" in note
    assert "genes of the truth 1 are not on the map ('NOTHERE')" in note
    assert "4 concentrations" not in note


def test_shuffled_labels_are_at_chance(wells, folder):
    rng = np.random.default_rng(0)
    tables = []
    for _ in range(3):
        shuffled = wells.copy()
        kind = shuffled.obs["perturbation_type"].to_numpy()
        names = {key: shuffled.obs[key].to_numpy(dtype=object).copy() for key in ("perturbation", "treatment")}
        treated = schema.treated_mask(shuffled.obs)
        for one in ("CRISPR", "COMPOUND"):
            rows = np.flatnonzero(treated & (kind == one))
            order = rng.permutation(rows)
            for label in names.values():
                label[rows] = label[order]
        shuffled.obs = shuffled.obs.assign(**names)
        tables.append(run(shuffled, folder, plate_controls="keep"))
    mean = pd.concat(tables).groupby(["metric", "group"])[["value", "chance"]].mean()
    np.testing.assert_allclose(mean["value"], mean["chance"], atol=0.1)
    recall = mean[mean.index.get_level_values("metric").str.startswith("recall")]
    np.testing.assert_allclose(recall["value"].mean(), recall["chance"].mean(), atol=0.03)


def test_the_authors_correction_is_theirs(shared):
    """The chain equals the public values: scale and PCA on all wells, then centre-scale per experiment on controls."""
    obs = pd.read_csv(shared / "reference/efaar/obs.csv")
    obs.index = obs.index.astype(str)
    obs["control"] = np.where(obs["perturbation"] == "EMPTY_control", "negative", "")
    with np.load(shared / "reference/efaar/normalization.npz") as arrays:
        adata, expected = ad.AnnData(arrays["X"], obs=obs), arrays["pca8_centerscale"]
    correct.run(adata, benchmarks.AUTHORS, n_components=8)
    mine = adata.obsm[f"X_{benchmarks.AUTHORS}"][:, :8]  # filled up with zeros
    signs = np.sign((mine * expected).sum(axis=0))
    np.testing.assert_allclose(mine * signs, expected, atol=1e-4)


def test_plate_controls_may_be_sampled_or_kept(wells):
    dropped, _ = benchmarks.map_wells(wells.obs)
    sampled, notes = benchmarks.map_wells(wells.obs, plate_controls="sample")
    kept, _ = benchmarks.map_wells(wells.obs, plate_controls="keep")
    counts = wells.obs.loc[sampled, "perturbation"].value_counts()
    assert counts[list(PLATE_CONTROLS)].tolist() == [6, 6, 6]
    assert kept.sum() - dropped.sum() == wells.obs["perturbation"].isin(PLATE_CONTROLS).sum() == 3 * 24
    assert "6 wells sampled of each gene that stands in most experiments ('MTOR', 'PLK1', 'SRC')" in notes
    order = np.random.default_rng(0).permutation(len(sampled))
    again, _ = benchmarks.map_wells(wells.obs.iloc[order], plate_controls="sample")
    np.testing.assert_array_equal(again, sampled[order])
    assert not wells.obs.loc[kept, "perturbation"].str.contains("_control|RXRX3").any()


def test_a_method_that_cannot_run_is_a_row_and_bad_input_is_explained(wells, folder):
    bare = wells[(wells.obs["control"] != "negative").to_numpy()].copy()
    scores = run(bare, folder)
    assert scores["value"].isna().all()
    assert "needs at least 2 negative controls" in scores["note"].iloc[0]
    genes_only = wells[(wells.obs["perturbation_type"] == "CRISPR").to_numpy()].copy()
    scores = run(genes_only, folder, ("none",))
    assert (
        scores.loc[scores["metric"] == "compound_gene_ap", "note"]
        .iloc[0]
        .startswith("not applicable: no treated well has")
    )
    for keywords, message in (
        ({"truth": None, "compound_gene": None}, "name at least one truth"),
        ({"truth": folder, "plate_controls": "lose"}, "plate_controls='lose' is not allowed"),
        ({"truth": folder, "methods": ["magic"]}, "method 'magic' is not known"),
        ({"truth": folder, "options": {"tvn+none": {}}}, "options name 'tvn\\+none'"),
    ):
        with pytest.raises(InputError, match=message):
            benchmarks.rxrx3_core(wells, **keywords)


def test_input_is_left_as_it_is(wells, folder):
    before = wells.copy()
    run(wells, folder, (benchmarks.AUTHORS,), options={benchmarks.AUTHORS: {"n_components": 16}})
    assert list(wells.obsm) == list(before.obsm)
    np.testing.assert_array_equal(wells.X, before.X)
    pd.testing.assert_frame_equal(wells.obs, before.obs)
    assert metrics.usable_rows(np.asarray(wells.X)).all()


def test_one_command_makes_both_tables_from_the_files(folder, tmp_path, capsys):
    out = tmp_path / "rxrx3.csv"
    given = [
        *("benchmark", "rxrx3-core", folder / "OpenPhenom_rxrx3_core_embeddings.parquet", "--metadata", folder),
        *("--truth", folder / "truth", "--compound-gene", folder / "compound_gene_interactions.csv", "--out", out),
        *("--method", "none", "--method", benchmarks.AUTHORS),
    ]
    with pytest.raises(SystemExit) as done:
        cli.main(list(map(str, given)))
    assert done.value.code == 0
    table = pd.read_csv(out, keep_default_na=False, na_values={"value": [""]})
    assert set(table["rep"]) == {"X_none", f"X_{benchmarks.AUTHORS}"}
    assert {"recall_0.05_0.95", "compound_gene_ap", "guide_map"} <= set(table["metric"])
    told = capsys.readouterr().out
    assert "embeddings without metadata: 2" in told
    assert "metadata without embedding: 3" in told
    assert table["note"].str.contains("3 rows of metadata had no embedding").any()
    with pytest.raises(SystemExit) as done:
        cli.main(["benchmark", "rxrx3-core", "x.parquet", "--out", str(tmp_path / "other.csv")])
    assert done.value.code == 2
    assert "--truth FOLDER" in capsys.readouterr().err


def test_means_of_chromosome_arms_are_taken_off_where_positions_are_given(wells, folder):
    positions = pd.DataFrame({"gene": GENES, "arm": [f"{1 + i % 9}p" for i in range(N_GENES)]})
    positions.to_csv(folder / "positions.csv", index=False)
    plain = run(wells, folder)
    table = run(wells, folder, gene_positions=folder / "positions.csv")
    assert set(table["metric"]) - set(plain["metric"]) == {"arm_auroc"}
    assert table.loc[table["metric"] == "recall_0.05_0.95", "note"].str.contains("means of chromosome arms").all()
    assert values(table, benchmarks.AUTHORS, "arm_auroc").index.tolist() == ["all", "corrected"]


def test_rxrx1_is_scored_by_fits_to_its_training_experiments():
    wells = simulate.profiles("rxrx1-like", n_treatments=25, n_features=32, random_state=0)
    table = benchmarks.rxrx1(wells, methods=["none", "wccn", "combat"], classifiers=["knn"])
    of = table[(table["metric"] == "sirna_accuracy_knn") & (table["group"] == "all")].set_index("rep")
    assert of.loc["X_wccn", "value"] > of.loc["X_none", "value"] > of.loc["X_none", "chance"] * 3
    assert "of training experiments" in of.loc["X_wccn", "note"]
    lost = table[table["rep"] == "X_combat"].iloc[0]
    assert np.isnan(lost["value"])
    assert "corrects the" in lost["note"]
    with pytest.raises(InputError, match="method 'spehre' is not known"):
        benchmarks.rxrx1(wells, methods=["spehre"])


def test_rxrx1_says_where_a_fit_saw_what_is_scored():
    wells = simulate.profiles("rxrx1-like", n_treatments=12, n_features=16, random_state=0)
    test = benchmarks.rxrx1_test(wells.obs)
    wells.obs["perturbation"] = (
        wells.obs["perturbation"].astype(object).where(~test | (wells.obs["control"] != "").to_numpy())
    )
    table = benchmarks.rxrx1(wells, methods=["none", "wccn"], classifiers=["class_mean"])
    left_out = table[table["metric"].str.endswith("_left_out")].groupby("rep")["note"]
    assert left_out.apply(lambda notes: notes.str.contains("transductive").all())["X_wccn"]
    assert not left_out.apply(lambda notes: notes.str.contains("transductive").any())["X_none"]


def test_wells_of_no_kind_are_on_no_map_and_counted(wells):
    obs = wells.obs.copy()
    some = np.flatnonzero((obs["perturbation_type"] == "CRISPR") & (obs["perturbation"] == "GENE3"))
    obs["perturbation_type"] = obs["perturbation_type"].astype(object)
    obs.iloc[some, obs.columns.get_loc("perturbation_type")] = None
    on_map, notes = benchmarks.map_wells(obs)
    assert not on_map[some].any()
    assert f"{len(some)} wells left out: neither CRISPR nor COMPOUND in perturbation_type" in notes
