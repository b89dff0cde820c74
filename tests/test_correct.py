import json
from importlib.metadata import version

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import artifacts, components, correct, normalize, roles, simulate
from cellica.ica import matched_correlation
from cellica.schema import InputError, OutputExistsError

assert version("cellica")


def screen(
    seed: int = 0, *, n_batches: int = 4, batch_effect: float = 2.0, cell_types: int = 1, d: int = 12
) -> ad.AnnData:
    """Wells from non-Gaussian factors mixed into features; factor 0 carries the batch, 1 to 3 the perturbation."""
    rng = np.random.default_rng(seed)
    rows = []
    for batch in range(n_batches):
        for plate in "12":
            wells = [("DMSO", "negative")] * 8 + [(f"p{i:02d}", "") for i in range(24)]
            rows += [
                (
                    f"exp-{batch}",
                    plate,
                    f"{chr(65 + i // 12)}{i % 12 + 1:02d}",
                    name,
                    control,
                    f"type{batch % cell_types}",
                )
                for i, (name, control) in enumerate(wells)
            ]
    obs = pd.DataFrame(rows, columns=["experiment", "plate", "well", "perturbation", "control", "cell_type"])
    obs.index = pd.Index([f"{r[0]}_{r[1]}_{r[2]}" for r in rows], dtype=object)
    factors = rng.laplace(size=(len(obs), d))
    factors[:, 0] = 0.5 * factors[:, 0] + batch_effect * pd.factorize(obs["experiment"])[0]
    effects = 3 * rng.laplace(size=(25, 3)) * (rng.random((25, 3)) < 0.5)
    effects[0] = 0
    factors[:, 1:4] += effects[pd.factorize(obs["perturbation"])[0]]
    factors[:, 4] += 5 * pd.factorize(obs["cell_type"])[0]
    mixing = rng.normal(size=(d, d))
    x = factors @ mixing.T + 10
    return ad.AnnData(x.astype(np.float32), obs=obs, obsm={"factors": factors}, varm={"mixing": mixing})


def share(adata: ad.AnnData, key: str, column: str) -> float:
    """Share of the total variance of a representation that lies between the groups of a column."""
    x = adata.obsm[key] - adata.obsm[key].mean(axis=0)
    groups = roles.Means.of(x, adata.obs[column].to_numpy()).at(adata.obs[column].to_numpy())
    return float((groups**2).sum() / (x**2).sum())


@pytest.mark.parametrize("method", sorted(correct.METHODS))
def test_every_method_writes_what_it_says_and_leaves_x_alone(method):
    adata = screen()
    before, names = adata.X.copy(), list(adata.obs_names)
    assert correct.METHODS[method](adata) is None
    np.testing.assert_array_equal(adata.X, before)
    assert list(adata.obs_names) == names
    assert adata.obsm[f"X_{method}"].shape == adata.shape
    assert adata.obsm[f"X_{method}"].dtype == np.float32
    assert np.isfinite(adata.obsm[f"X_{method}"]).all()
    assert adata.uns["cellica"][method]["method"] == method
    assert artifacts.provenance(adata)[-1]["parameters"]["method"] == method


@pytest.mark.parametrize("method", sorted(correct.METHODS))
def test_same_seed_same_output(method):
    a, b = screen(), screen()
    correct.run(a, method, random_state=7)
    correct.run(b, method, random_state=7)
    np.testing.assert_array_equal(a.obsm[f"X_{method}"], b.obsm[f"X_{method}"])


@pytest.mark.parametrize("method", ["ica", "center+sphere"])
def test_files_round_trip(method, tmp_path):
    a = screen()
    correct.run(a, method)
    for name in ("wells.h5ad", "wells.zarr"):
        artifacts.write_adata(a, tmp_path / name)
        read = artifacts.read_adata(tmp_path / name)
        np.testing.assert_array_equal(read.obsm[f"X_{method}"], a.obsm[f"X_{method}"])
        if method == "ica":
            pd.testing.assert_frame_equal(
                pd.DataFrame(read.uns["cellica"][method]["components"]),
                a.uns["cellica"][method]["components"],
                check_index_type=False,
                check_categorical=False,
            )


@pytest.mark.parametrize("method", ["ica", "wccn", "center+sphere", "combat", "harmony", "ica_drop"])
def test_planted_batch_effect_falls_and_biology_stays(method):
    adata = screen(batch_effect=4)
    correct.run(adata, "none")
    correct.run(adata, method)
    assert share(adata, f"X_{method}", "experiment") < 0.6 * share(adata, "X_none", "experiment")
    assert share(adata, f"X_{method}", "perturbation") > share(adata, "X_none", "perturbation")


def test_ica_finds_the_planted_batch_factor_and_removes_nothing_else():
    adata = screen()
    correct.run(adata, "ica_drop")
    table = adata.uns["cellica"]["ica_drop"]["components"]
    assert table["removed"].sum() == 1
    removed = adata.obsm["ica_drop_sources"][:, table["removed"].to_numpy()][:, 0]
    assert abs(np.corrcoef(removed, adata.obsm["factors"][:, 0])[0, 1]) > 0.95
    assert list(table.columns) == [
        "batch_r2", "strata_r2", "perturbation_r2", "kurtosis", "batch_q", "plate_r2", "row_r2", "column_r2", "edge_r2",
        "converged", "stability", "stability_batches", "stability_bootstrap", "stability_rows", "stability_chance",
        "stability_rows_chance", "label", "removed",
    ]  # fmt: skip
    scaled = (adata.X - adata.X.mean(axis=0)) / adata.X.std(axis=0)
    np.testing.assert_allclose(adata.obsm["ica_drop_sources"] @ adata.varm["ica_drop_mixing"].T, scaled, atol=1e-3)


def test_without_a_batch_effect_nothing_is_removed_and_nothing_changes():
    adata = screen(batch_effect=0)
    for method in ("ica_drop", "pca_drop", "random_drop"):
        correct.run(adata, method)
        assert not adata.uns["cellica"][method]["components"]["removed"].any()
    correct.run(adata, "none")
    np.testing.assert_allclose(adata.obsm["X_ica_drop"], adata.obsm["X_none"], atol=1e-4)


def test_biology_guard_stops_a_component_that_perturbation_explains_better():
    adata = screen()
    adata.obsm["factors"][:, 0] += 0.7 * pd.factorize(adata.obs["perturbation"])[0] * (adata.obs["control"] == "")
    adata.X = (adata.obsm["factors"] @ adata.varm["mixing"].T).astype(np.float32)
    correct.run(adata, "ica_drop", key_added="guarded")
    correct.run(adata, "ica_drop", guard=False, key_added="unguarded")
    guarded = adata.uns["cellica"]["guarded"]
    assert (guarded["components"]["label"] == "mixed").sum() == 1
    assert not guarded["components"]["removed"].any()
    assert any("biology guard" in note for note in guarded["notes"])
    assert adata.uns["cellica"]["unguarded"]["components"]["removed"].sum() == 1


def test_no_replicates_means_no_removal():
    adata = screen()
    treated = adata.obs["control"] == ""
    adata.obs["perturbation"] = np.where(treated, adata.obs_names.to_numpy(), "DMSO")
    correct.run(adata, "ica_drop")
    assert not adata.uns["cellica"]["ica_drop"]["components"]["removed"].any()
    assert any("no perturbation has two treated wells" in note for note in adata.uns["cellica"]["ica_drop"]["notes"])


@pytest.mark.parametrize("method", ["ica", "center+sphere", "wccn", "ica_shrink", "harmony", "combat", "tvn"])
def test_cell_types_survive(method):
    adata = screen(n_batches=8, cell_types=2)
    correct.run(adata, "none")
    correct.run(adata, method, strata_key="cell_type")
    correct.run(adata, method, strata_key=None, key_added="pooled")
    assert share(adata, f"X_{method}", "cell_type") > 0.03
    if method in ("ica", "harmony", "combat"):
        assert share(adata, "X_pooled", "cell_type") < share(adata, f"X_{method}", "cell_type")


def test_normalisations_equal_the_public_implementation(shared):
    expected = np.load(shared / "reference" / "efaar" / "normalization.npz")
    obs = pd.read_csv(shared / "reference" / "efaar" / "obs.csv")
    obs.index = obs.index.astype(str)
    obs["control"] = np.where(obs["perturbation"] == "EMPTY_control", "negative", "")
    adata = ad.AnnData(expected["X"], obs=obs)
    correct.run(adata, "center_scale", min_controls=1)
    correct.run(adata, "tvn", coral=False, key_added="plain")
    correct.run(adata, "tvn")
    np.testing.assert_allclose(adata.obsm["X_center_scale"], expected["centerscale_by_experiment"], atol=1e-5)
    signs = np.sign((adata.obsm["X_plain"] * expected["tvn"]).sum(axis=0))
    np.testing.assert_allclose(adata.obsm["X_plain"] * signs, expected["tvn"], atol=1e-5)
    np.testing.assert_allclose(adata.obsm["X_tvn"] * signs, expected["tvn_coral"], atol=1e-5)


def test_combat_and_harmony_are_the_peers_own():
    import harmonypy
    import scanpy as sc

    adata = screen()
    adata.X = (adata.X - adata.X.mean(axis=0)) / adata.X.std(axis=0)
    for method in ("combat", "harmony"):
        correct.run(adata, method, strata_key=None)
    theirs = adata.copy()
    theirs.X = adata.X.astype(np.float64)
    theirs.obs["experiment"] = theirs.obs["experiment"].astype("category")
    np.testing.assert_allclose(adata.obsm["X_combat"], sc.pp.combat(theirs, key="experiment", inplace=False), atol=1e-4)
    meta = pd.DataFrame({"b": adata.obs["experiment"].to_numpy()})
    _, _, vh = np.linalg.svd(adata.X.astype(np.float64) - adata.X.mean(axis=0), full_matrices=False)
    z = harmonypy.run_harmony(adata.X @ vh.T, meta, "b", verbose=False, random_state=0).Z_corr
    np.testing.assert_allclose(adata.obsm["X_harmony"] @ adata.obsm["X_harmony"].T, z @ z.T, atol=0.5)


def test_sphered_controls_have_identity_covariance_and_say_the_rank():
    adata = screen()
    correct.run(adata, "sphere", ridge=0.0)
    controls = adata.obsm["X_sphere"][adata.obs["control"] == "negative"]
    np.testing.assert_allclose(np.cov(controls, rowvar=False), np.eye(12), atol=1e-4)
    few = adata[(adata.obs["control"] == "") | (adata.obs["experiment"] == "exp-0")].copy()
    few = few[~((few.obs["control"] == "negative") & (few.obs["plate"] == "2"))].copy()
    correct.run(few, "sphere", ridge=0.0)
    assert few.uns["cellica"]["sphere"]["steps"]["1_sphere"]["rank"] == 7
    assert np.abs(few.obsm["X_sphere"]).max() < 1e3
    assert "8 wells for 12 features; rank 7 used" in few.uns["cellica"]["sphere"]["notes"][-1]


def test_centring_puts_each_plates_controls_at_the_origin():
    adata = screen()
    correct.run(adata, "center")
    controls = adata[adata.obs["control"] == "negative"]
    means = roles.Means.of(controls.obsm["X_center"], controls.obs["experiment"].to_numpy()).values
    np.testing.assert_allclose(means, 0, atol=1e-5)


def test_one_control_a_plate_is_centred_on_anchors_and_said():
    adata = screen()
    keep = (adata.obs["control"] == "") | adata.obs["well"].eq("A01")
    adata = adata[keep].copy()
    correct.run(adata, "center")
    notes = adata.uns["cellica"]["center"]["notes"]
    assert any("8 of 8 plates have fewer than 3 negative controls" in note for note in notes)
    correct.run(adata, "none")
    assert share(adata, "X_center", "experiment") < 0.2 * share(adata, "X_none", "experiment")


@pytest.mark.parametrize("method", ["ica", "center+sphere", "wccn", "tvn", "ica_shrink"])
def test_saved_corrections_give_the_same_rows(method, tmp_path):
    adata = screen(n_batches=4, cell_types=2)
    corrector = correct.fit(adata, method)
    assert f"X_{method}" not in adata.obsm
    corrector.save(tmp_path / "model.safetensors")
    with pytest.raises(OutputExistsError, match="--force"):
        corrector.save(tmp_path / "model.safetensors")
    correct.run(adata, method)
    later = adata[adata.obs["experiment"].isin(["exp-1", "exp-2"])].copy()
    correct.load(tmp_path / "model.safetensors").transform(later, key_added="later")
    np.testing.assert_allclose(later.obsm["X_later"], later.obsm[f"X_{method}"], atol=1e-5)
    json.dumps(artifacts.provenance(later)[-1])


def test_a_saved_centring_knows_its_anchors_on_one_later_plate(tmp_path):
    adata = screen()
    adata = adata[(adata.obs["control"] == "") | adata.obs["well"].eq("A01")].copy()
    correct.run(adata, "center", save=tmp_path / "model.safetensors")
    plate = (adata.obs["experiment"] == "exp-2") & (adata.obs["plate"] == "1")
    later = adata[plate].copy()
    correct.load(tmp_path / "model.safetensors").transform(later, key_added="later")
    np.testing.assert_allclose(later.obsm["X_later"], later.obsm["X_center"], atol=1e-5)


def test_saved_corrections_refuse_other_features_and_other_files(tmp_path):
    adata = screen()
    corrector = correct.fit(adata, "sphere")
    with pytest.raises(InputError, match="12 features and the data has 11"):
        corrector.transform(adata[:, :11].copy())
    with pytest.raises(InputError, match="fitted on"):
        correct.fit(adata, "combat").transform(adata[:40].copy())
    (tmp_path / "x.safetensors").write_bytes(b"not a model")
    with pytest.raises(InputError, match=r"x\.safetensors is not a saved correction"):
        correct.load(tmp_path / "x.safetensors")


def faulty(change: str) -> ad.AnnData:
    adata = screen()
    if change == "nan":
        adata.X[3, 2] = np.nan
    if change == "one batch":
        adata = adata[adata.obs["experiment"] == "exp-0"].copy()
    if change == "no controls":
        adata.obs["control"] = ""
        adata.obs["perturbation"] = adata.obs_names.to_numpy()
    if change == "plate without":
        plate = (adata.obs["experiment"] == "exp-2") & (adata.obs["plate"] == "1")
        adata = adata[~(plate & (adata.obs["control"] == "negative"))].copy()
        adata.obs["perturbation"] = np.where(adata.obs["control"] == "", adata.obs_names.to_numpy(), "DMSO")
    if change == "batch of one":
        adata.obs["experiment"] = adata.obs["experiment"].astype(object)
        adata.obs.loc[adata.obs_names[40], "experiment"] = "lonely"
    if change == "batch missing":
        adata.obs["experiment"] = adata.obs["experiment"].astype(object)
        adata.obs.loc[adata.obs_names[40], "experiment"] = None
    return adata


@pytest.mark.parametrize(
    ("change", "method", "keywords", "message"),
    [
        ("nan", "sphere", {}, r"1 of 256 wells hold values that are not finite \('exp-0_1_A04'\)"),
        ("one batch", "ica", {}, "holds one, 'exp-0'"),
        ("one batch", "combat", {}, "holds one"),
        ("no controls", "sphere", {}, "at least 2 negative controls and found 0"),
        ("plate without", "center", {}, r"'exp-2_1' \(1 of 8\) lack them"),
        ("batch of one", "combat", {}, "'lonely' has one"),
        ("batch missing", "none", {}, "missing in 1 wells"),
        ("", "spheer", {}, "method 'spheer' is not known: use one of none, center"),
        ("", "sphere", {"rigde": 1}, "has no option 'rigde': it has rank, ridge"),
        ("", "ica_drop", {"n_components": 0}, "n_components=0"),
        ("", "sphere", {"batch_key": "week"}, "no column 'week'; it has experiment"),
        ("", "sphere", {"controls": ["dmso"]}, "controls 'dmso' not found in .*'perturbation'.*DMSO"),
        ("", "sphere", {"use_rep": "X_pca"}, "'X_pca' is not in obsm: it has factors"),
        ("", "sphere", {"key_added": "a/b"}, "holds a '/'"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(change, method, keywords, message):
    adata = faulty(change)
    keys = set(adata.obsm)
    with pytest.raises(InputError, match=message):
        correct.run(adata, method, **keywords)
    assert set(adata.obsm) == keys
    assert "cellica" not in adata.uns


def test_too_little_to_centre_or_whiten_on_is_refused():
    adata = screen()
    one_a_plate = adata[adata.obs["well"].eq("A01")].copy()
    with pytest.raises(InputError, match=r"needs 3 negative controls \(or 3 anchors\) on each plate"):
        correct.run(one_a_plate, "center")
    with pytest.raises(InputError, match="nothing does"):
        correct.run(one_a_plate, "center+sphere", min_controls=1)
    with pytest.raises(InputError, match="needs 30 of them, and found 8"):
        correct.run(one_a_plate, "harmony")


def test_integer_batches_constant_features_and_more_features_than_wells_work():
    adata = screen()
    adata.obs["experiment"] = pd.factorize(adata.obs["experiment"])[0]
    adata.X[:, 4] = 2.5
    correct.run(adata, "ica+center")
    assert any("1 of 12 features do not vary" in note for note in adata.uns["cellica"]["ica+center"]["notes"])
    wide = screen(d=40)[::8].copy()
    correct.run(wide, "ica", n_components=35)
    assert np.isfinite(wide.obsm["X_ica"]).all()


def test_labels_cover_the_four_cases_and_unknown_shares_keep_the_component():
    batch, perturbation = np.array([0.9, 0.5, 0.1, 0.0, 0.9]), np.array([0.2, 0.8, 0.7, 0.1, np.nan])
    labels = components.classify(batch, perturbation)
    assert labels.tolist() == ["batch", "mixed", "biology", "other", "mixed"]
    path = components.removal_path(labels, batch, perturbation, np.ones(5))
    assert path["component"][path["action"] == "removed"].tolist() == [0]


def test_shrinkage_goes_to_the_diagonal_with_few_wells_and_away_with_many():
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(6, 6))
    _, few = normalize.shrink_to_diagonal(rng.normal(size=(8, 6)) @ mixing)
    covariance, many = normalize.shrink_to_diagonal(rng.normal(size=(50_000, 6)) @ mixing)
    assert many < 0.01 < few <= 1
    np.testing.assert_allclose(covariance, mixing.T @ mixing, atol=0.5)


def test_ica_finds_batch_factors_that_are_not_gaussian_and_loses_on_those_that_are():
    found = {}
    for preset in ("rxrx1-like", "gaussian"):
        adata = simulate.profiles(preset, n_experiments=12, n_treatments=40, random_state=1)
        correct.run(adata, "ica_drop", check_stability=False)
        batch = adata.obsm["factors"][:, adata.uns["cellica"]["simulation"]["roles"] == "batch"]
        found[preset] = matched_correlation(batch, adata.obsm["ica_drop_sources"]).mean()
    assert found["gaussian"] < 0.55 < 0.75 < found["rxrx1-like"]


@pytest.mark.parametrize("method", ["combat", "harmony"])
def test_joint_methods_are_neither_saved_nor_applied_to_other_rows_and_say_what_is_confounded(method, tmp_path):
    adata = screen()
    corrector = correct.fit(adata, method)
    with pytest.raises(InputError, match="nothing to save"):
        corrector.save(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="fitted on"):
        corrector.transform(adata[::-1].copy())
    assert not any("in one batch only" in note for note in corrector.notes)
    adata.obs["perturbation"] = adata.obs["perturbation"] + "@" + adata.obs["experiment"]
    assert "96 of 96 perturbations lie in one batch only" in correct.fit(adata, method).notes[0]


@pytest.mark.parametrize("method", ["ica", "sphere", "tvn", "wccn"])
def test_identical_wells_are_an_error_not_a_traceback_or_nan(method):
    adata = screen()
    adata.X[:] = 3.0
    with pytest.raises(InputError, match=r"vary|varies|identical"):
        correct.run(adata, method)
    with pytest.raises(InputError, match="there is no X to correct: name a representation, of factors"):
        correct.run(ad.AnnData(obs=adata.obs, obsm={"factors": adata.obsm["factors"]}), method)


def test_damaged_corrections_are_named(tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import save_file

    correct.fit(screen(), "sphere").save(tmp_path / "good.safetensors")
    with safe_open(tmp_path / "good.safetensors", framework="numpy") as file:
        arrays, header = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["cellica"])  # noqa: SIM118
    for change in ({"transform": {"class": "Popen"}}, {"features": 3}, {"method": "provenance"}, {"anchors": None}):
        changed = {**header, **change}
        save_file(arrays, tmp_path / "bad.safetensors", metadata={"cellica": json.dumps(changed)})
        with pytest.raises(InputError, match=r"damaged correction|not known"):
            correct.load(tmp_path / "bad.safetensors")


# ------------------------------------------------------------------------------------------------- what users ran into


def test_columns_of_a_frame_in_obsm_keep_their_names():
    adata = screen()
    adata.obsm["D"] = pd.DataFrame(np.asarray(adata.X), adata.obs_names, [f"f{i}" for i in range(adata.n_vars)])
    fitted = correct.fit(adata, "sphere", use_rep="D")
    adata.obsm["D"] = adata.obsm["D"].iloc[:, ::-1]
    with pytest.raises(InputError, match="in another order"):
        fitted.transform(adata, use_rep="D")
    adata.obsm["D"] = adata.obsm["D"].assign(f0="text")
    with pytest.raises(InputError, match="columns that are not numbers: 'f0'"):
        correct.run(adata, "none", use_rep="D")
    adata.obsm["D"] = np.zeros((len(adata), 2, 2))
    with pytest.raises(InputError, match="wells x features are needed"):
        correct.run(adata, "none", use_rep="D")


def test_plates_are_apart_whatever_their_names():
    adata = screen(n_batches=2)
    other = adata.copy()
    first, plate = adata.obs["experiment"] == "exp-0", adata.obs["plate"]
    other.obs["experiment"] = np.where(first, "A", "A_1")
    other.obs["plate"] = np.where(first, np.where(plate == "1", "1_2", "3"), np.where(plate == "1", "2", "4"))
    for one in (adata, other):
        correct.run(one, "center")
    np.testing.assert_array_equal(adata.obsm["X_center"], other.obsm["X_center"])


def test_what_an_earlier_correction_left_under_a_key_goes():
    adata = screen()
    correct.run(adata, "pca_drop", key_added="k")
    assert "k_sources" in adata.obsm
    correct.run(adata, "sphere", key_added="k")
    assert "k_sources" not in adata.obsm
    assert "k_mixing" not in adata.varm


@pytest.mark.parametrize("key", ["provenance", "simulation", "a/b"])
def test_keys_that_are_taken_are_refused_before_anything_is_written(key, tmp_path):
    adata = screen()
    adata.uns["cellica"] = {"simulation": {"seed": 1}}
    with pytest.raises(InputError, match="choose another key_added"):
        correct.run(adata, "sphere", key_added=key, save=tmp_path / "model")
    assert not list(tmp_path.iterdir())
    assert list(adata.obsm) == ["factors"]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("sphere", {"ridge": np.inf}),
        ("sphere", {"ridge": 1e300}),
        ("ica_shrink", {"ridge": -0.5}),
        ("ruv", {"n_factors": -2}),
        ("ruv", {"n_factors": 0}),
        ("tvn", {"coral": "no"}),
        ("pca_drop", {"n_components": 2.5}),
    ],
)
def test_options_that_mean_nothing_are_refused(method, options):
    with pytest.raises(InputError, match="is not allowed"):
        correct.fit(screen(), method, **options)


@pytest.mark.parametrize("method", ["wccn", "ruv", "leace", "ica_shrink"])
def test_anchors_of_one_batch_each_say_nothing_of_batches(method):
    adata = screen()
    adata.obs["stratum"] = adata.obs["experiment"]
    with pytest.raises(InputError, match="anchors that lie in several batches"):
        correct.run(adata, method, strata_key="stratum")
    said = correct.confounding(adata, strata_key="stratum").sentences
    assert any("each stratum holds one batch" in sentence for sentence in said)


def test_a_column_of_controls_in_other_words_is_shown():
    adata = screen()
    adata.obs["control"] = np.where(adata.obs["control"] == "negative", "Negative", "")
    with pytest.raises(InputError, match=r"found 0 .* \(it holds 'Negative'\)"):
        correct.run(adata, "sphere")


def test_a_fitted_correction_is_shown_in_a_line():
    assert len(repr(correct.fit(screen(), "center+sphere"))) < 1500
