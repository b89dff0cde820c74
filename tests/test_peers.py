"""Methods of others: equal to their public implementations, and right where users of such tools ran into trouble."""

import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

from cellica import correct, methods, normalize
from cellica.corrector import representation
from cellica.roles import Roles, roles_of, within
from cellica.schema import InputError


def screen(n_batches: int = 4, d: int = 8, seed: int = 0, shift: float = 2.0) -> ad.AnnData:
    """8 controls and 24 perturbations on each of two plates a batch; batches are shifted, the mean is far from 0."""
    rng = np.random.default_rng(seed)
    rows = [
        (f"b{b}", p, f"{chr(65 + i // 8)}{i % 8 + 1:02d}", "DMSO" if i < 8 else f"p{i:02d}")
        for b in range(n_batches)
        for p in "12"
        for i in rng.permutation(32)
    ]
    obs = pd.DataFrame(rows, columns=["experiment", "plate", "well", "perturbation"])
    obs["control"] = np.where(obs["perturbation"] == "DMSO", "negative", "")
    obs.index = pd.Index(
        [f"{e}_{p}_{w}" for e, p, w in zip(obs["experiment"], obs["plate"], obs["well"])], dtype=object
    )
    effect = 2 * rng.laplace(size=(25, d)) * (np.arange(25) > 0)[:, None]
    x = rng.laplace(size=(len(obs), d)) + effect[np.unique(obs["perturbation"], return_inverse=True)[1]]
    x += shift * rng.normal(size=(n_batches, d))[pd.factorize(obs["experiment"])[0]]
    return ad.AnnData((x @ rng.normal(size=(d, d)) + 50).astype(np.float32), obs=obs)


def exact(adata: ad.AnnData, chain: str, **options) -> np.ndarray:
    """Corrected rows in float64, as they are before they are written."""
    x, wells = representation(adata)[0], roles_of(adata.obs)
    return methods.fit_chain(x, wells, methods.chain_of(methods.parse(chain)), {"random_state": 0, **options})[2]


def z_scored(adata: ad.AnnData) -> np.ndarray:
    return exact(adata, "none")


def batch_of(adata: ad.AnnData) -> np.ndarray:
    return adata.obs["experiment"].to_numpy(dtype=object)


# ------------------------------------------------------------------------------------ equal to what others compute


@pytest.fixture(scope="module")
def efaar(shared):
    with np.load(shared / "reference" / "efaar" / "normalization.npz") as file:
        expected = dict(file)
    obs = pd.read_csv(shared / "reference" / "efaar" / "obs.csv")
    obs.index = obs.index.astype(str)
    obs["control"] = np.where(obs["perturbation"] == "EMPTY_control", "negative", "")
    return ad.AnnData(expected["X"], obs=obs), expected


@pytest.mark.parametrize(
    ("chain", "options", "name"),
    [
        ("center_scale", {"min_controls": 1}, "centerscale_by_experiment"),
        ("tvn", {"coral": False}, "tvn"),
        ("tvn", {}, "tvn_coral"),
        ("pca+center_scale", {"n_components": 8, "min_controls": 1}, "pca8_centerscale"),
    ],
)
def test_normalisations_equal_efaars(efaar, chain, options, name):
    adata, expected = efaar
    wanted = expected[name]
    found = exact(adata, chain, **options)[:, : wanted.shape[1]]
    signs = np.sign((found * wanted).sum(axis=0)) if name != "centerscale_by_experiment" else 1
    np.testing.assert_allclose(found * signs, wanted, atol=1e-6)


def test_pca_and_pca_sphering_are_scikit_learns():
    adata = screen()
    z = z_scored(adata)
    theirs = PCA(5).fit_transform(z)
    found = exact(adata, "pca", n_components=5)
    np.testing.assert_allclose(found[:, :5] * np.sign((found[:, :5] * theirs).sum(axis=0)), theirs, atol=1e-6)
    assert not found[:, 5:].any()
    control = (adata.obs["control"] == "negative").to_numpy()
    theirs = PCA(whiten=True).fit(z[control]).transform(z)
    found = exact(adata, "sphere", ridge=0.0, whitening="pca")
    np.testing.assert_allclose(found * np.sign((found * theirs).sum(axis=0)), theirs, atol=1e-6)


@given(st.sampled_from(normalize.WHITENINGS), st.integers(2, 10), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_sphered_controls_have_the_identity_as_covariance(whitening, d, seed):
    adata = screen(d=d, seed=seed)
    controls = exact(adata, "sphere", ridge=0.0, whitening=whitening)[(adata.obs["control"] == "negative").to_numpy()]
    np.testing.assert_allclose(np.cov(controls, rowvar=False), np.eye(d), atol=1e-6)


def test_zca_cor_is_the_nearest_to_scaled_features_and_zca_to_features():
    """Kessy, Lewin and Strimmer: ZCA maximises the summed covariance with the features, ZCA-cor the correlation."""
    adata = screen()
    control = (adata.obs["control"] == "negative").to_numpy()
    z = z_scored(adata)[control] * np.geomspace(0.2, 5, 8)
    wells = roles_of(adata.obs).take(control)
    near = {}
    for whitening in ("zca", "zca-cor"):
        y = normalize.sphere(z, wells, ridge=0.0, whitening=whitening)[0].apply(z, wells)
        cross = np.diag(np.cov(y, z, rowvar=False)[:8, 8:])
        near[whitening] = cross.sum(), (cross / z.std(axis=0)).sum()
    assert near["zca"][0] > near["zca-cor"][0]
    assert near["zca-cor"][1] > near["zca"][1]


def test_combat_equals_scanpys():
    import scanpy as sc

    adata = screen()
    theirs = ad.AnnData(z_scored(adata), obs=adata.obs.assign(experiment=adata.obs["experiment"].astype("category")))
    np.testing.assert_allclose(exact(adata, "combat"), sc.pp.combat(theirs, key="experiment", inplace=False), atol=1e-6)


@pytest.mark.parametrize("method", ["harmony", "harmony_full"])
def test_harmony_equals_harmonypys(method):
    import harmonypy

    adata = screen()
    z, meta = z_scored(adata), pd.DataFrame({"b": batch_of(adata)})
    if method == "harmony":
        _, _, vh = np.linalg.svd(z, full_matrices=False)
        theirs = harmonypy.run_harmony(z @ vh.T, meta, "b", verbose=False, random_state=0).Z_corr @ vh
        np.testing.assert_allclose(exact(adata, method) @ vh.T @ vh, theirs, atol=0.1)
    else:
        settings_ = {"nclust": len(z) // 4, "max_iter_harmony": 20, "verbose": False, "random_state": 0}
        theirs = harmonypy.run_harmony(z, meta, "b", **settings_).Z_corr
        np.testing.assert_allclose(exact(adata, method), theirs, atol=1e-6)


def test_ruv_equals_the_textbook_formula():
    """Y - W alpha with alpha = U'Y of the replicates' residuals and W by regression on all features (Molania et al., 2019)."""
    adata = screen()
    x, wells = z_scored(adata), roles_of(adata.obs)
    y = x[wells.anchor]
    cells = pd.factorize(wells.cells[wells.anchor])[0]
    m = np.eye(cells.max() + 1)[cells]
    residual = y - m @ np.linalg.solve(m.T @ m, m.T @ y)
    u = np.linalg.svd(residual)[0][:, :2]
    alpha = u.T @ y
    w = x @ alpha.T @ np.linalg.inv(alpha @ alpha.T)
    np.testing.assert_allclose(exact(adata, "ruv", n_factors=2), x - w @ alpha, atol=1e-6)
    assert exact(adata, "ruv").shape == x.shape


def test_leace_equals_concept_erasure():
    import torch

    with warnings.catch_warnings():  # some releases of torch deprecate what its import calls
        warnings.simplefilter("ignore", FutureWarning)
        from concept_erasure import LeaceFitter

    adata = screen()
    z = z_scored(adata)
    concept = np.eye(4)[pd.factorize(batch_of(adata))[0]]
    options = {"shrinkage": False, "constrain_cov_trace": False, "svd_tol": 1e-8}
    fitter = LeaceFitter.fit(torch.from_numpy(z), torch.from_numpy(concept), **options)
    theirs = fitter.eraser(torch.from_numpy(z)).numpy()
    np.testing.assert_allclose(exact(adata, "leace", on="all"), theirs, atol=1e-6)


@given(st.integers(2, 5), st.integers(6, 12), st.integers(0, 5))
@settings(max_examples=10, deadline=None)
def test_after_leace_no_linear_classifier_beats_chance(n_batches, d, seed):
    adata = screen(n_batches, d, seed)
    batch = batch_of(adata)
    corrected = exact(adata, "leace", on="all")
    means = within(corrected, np.full(len(batch), "all"))
    for name in np.unique(batch):
        np.testing.assert_allclose(means[batch == name].mean(axis=0), 0, atol=1e-7)
    found = LogisticRegression(C=1e4, max_iter=500).fit(corrected, batch)
    assert found.score(corrected, batch) <= 1 / n_batches + 0.06
    assert (
        LogisticRegression(max_iter=500).fit(z_scored(adata), batch).score(z_scored(adata), batch)
        > 1 / n_batches + 0.15
    )


def test_leace_on_anchors_erases_batch_and_leaves_what_is_confounded_with_it():
    adata = screen()
    adata.obs.loc[adata.obs["control"] == "", "perturbation"] += adata.obs["experiment"]
    wells = roles_of(adata.obs)
    corrected = exact(adata, "leace")
    controls = corrected[wells.control]
    means = [controls[batch_of(adata)[wells.control] == b].mean(axis=0) for b in ("b0", "b1", "b2", "b3")]
    np.testing.assert_allclose(means, np.broadcast_to(means[0], (4, 8)), atol=1e-6)
    treated = [corrected[wells.treated & (batch_of(adata) == b)].mean(axis=0) for b in ("b0", "b1", "b2", "b3")]
    assert np.ptp(treated, axis=0).max() > 0.1


# --------------------------------------------------------------------------------- where users ran into trouble

WHITENED = ["sphere", "wccn", "tvn", "ica", "ica_shrink"]


@pytest.mark.parametrize("method", ["center_scale", "tvn", "sphere", "ica"])
def test_a_feature_that_controls_hardly_vary_in_does_not_explode(method):
    adata = screen()
    adata.X[:, 2] = 1
    adata.X[~(adata.obs["control"] == "negative").to_numpy(), 2] = np.resize([1, 2, 1, 5], 192)
    adata.X[0, 2] += 1e-5
    correct.run(adata, method)
    assert np.abs(adata.obsm[f"X_{method}"]).max() < 1e3
    if method == "center_scale":
        notes = "\n".join(adata.uns["cellica"][method]["notes"])
        assert "4 of 32 spreads of a feature among the controls of a batch are below a thousandth" in notes


def test_missing_values_name_wells_and_features_and_constant_features_are_named():
    adata = screen()
    adata.X[3, 2] = adata.X[9, 5] = np.nan
    with pytest.raises(InputError, match=r"2 of 256 wells .*in 2 of 8 features \('2', '5'\): leave out these wells or"):
        correct.run(adata, "sphere")
    adata = screen()
    adata.X[:, 5] = 4
    for method in WHITENED:
        correct.run(adata, method)
        assert np.isfinite(adata.obsm[f"X_{method}"]).all()
        notes = "\n".join(adata.uns["cellica"][method]["notes"])
        assert "1 of 8 features do not vary within strata: left unscaled (number 5," in notes


@pytest.mark.parametrize(("method", "left"), [("center", 0), ("center_scale", 0), ("center_scale", 1), ("tvn", 1)])
def test_a_batch_without_enough_controls_is_an_error_that_names_it(method, left):
    adata = screen()
    batch, control = adata.obs["experiment"] == "b2", adata.obs["control"] == "negative"
    drop = adata.obs_names[batch & control][left:]
    adata = adata[~adata.obs_names.isin(drop)].copy()
    adata.obs["perturbation"] = np.where(adata.obs["control"] == "", adata.obs_names, "DMSO")
    with pytest.raises(InputError, match="b2"):
        correct.run(adata, method)


@pytest.mark.parametrize("method", [*WHITENED, "leace", "ruv"])
def test_fewer_controls_than_features_do_not_explode_and_the_rank_is_said(method):
    adata = screen(n_batches=2, d=60)
    keep = (adata.obs["control"] == "") | adata.obs_names.isin(adata.obs_names[adata.obs["control"] == "negative"][::2])
    adata = adata[keep].copy()
    options = {"ridge": 0.0} if method == "sphere" else {"coral": False} if method == "tvn" else {}
    correct.run(adata, method, **options)
    assert np.abs(adata.obsm[f"X_{method}"]).max() < 1e3
    notes = "\n".join(adata.uns["cellica"][method]["notes"])
    if method in ("sphere", "tvn"):
        assert "rank" in notes
        assert "15" in notes


@pytest.mark.parametrize("method", WHITENED)
def test_a_duplicated_feature_is_no_trouble(method):
    adata = screen()
    adata = ad.AnnData(np.hstack([adata.X, adata.X[:, :1]]), obs=adata.obs)
    correct.run(adata, method)
    assert np.abs(adata.obsm[f"X_{method}"]).max() < 1e3
    if method == "sphere":
        correct.run(adata, method, ridge=0.0)
        assert adata.uns["cellica"]["sphere"]["steps"]["1_sphere"]["rank"] == 8


@pytest.mark.parametrize("method", ["combat", "harmony", "ica", "leace", "ruv"])
def test_batches_of_any_dtype_work_alike(method):
    wanted = screen()
    correct.run(wanted, method)
    for dtype in (np.int64, "category", bool):
        adata = screen()
        code = pd.Series(pd.factorize(adata.obs["experiment"])[0], index=adata.obs_names)
        adata.obs["experiment"] = code.astype(dtype) if dtype is not bool else code > 1
        correct.run(adata, method)
        if dtype is not bool:
            np.testing.assert_allclose(adata.obsm[f"X_{method}"], wanted.obsm[f"X_{method}"], atol=1e-4)


def test_harmony_is_not_turned_over_where_there_are_as_many_wells_as_features():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 40)) + 3 * np.repeat(rng.normal(size=(4, 40)), 10, axis=0)
    obs = pd.DataFrame({"experiment": np.tile(["a", "b"], 20), "perturbation": [f"p{i % 4}" for i in range(40)]})
    obs.index = obs.index.astype(str)
    adata = ad.AnnData(x, obs=obs)
    for method in ("harmony", "harmony_full"):
        y, z = exact(adata, method), z_scored(adata)
        assert np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(y, z)]) > 0.9
        assert abs(np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(y.T, z)])) < 0.3


@pytest.mark.parametrize("method", ["harmony", "harmony_full"])
def test_too_few_wells_for_harmony_is_one_clear_message(method):
    with pytest.raises(InputError, match="needs 30 of them, and found 10"):
        correct.run(screen()[::26].copy(), method)


@pytest.mark.parametrize("method", ["combat", "harmony", "ica", "wccn", "ruv", "leace"])
def test_a_batch_of_one_well_is_named(method):
    adata = screen()
    adata.obs.loc[adata.obs_names[40], "experiment"] = "lonely"
    with pytest.raises(InputError, match="'lonely' has one"):
        correct.run(adata, method)


def test_wells_without_a_label_form_no_group():
    adata = screen()
    lost = adata.obs_names[adata.obs["control"] == ""][:40]
    adata.obs["perturbation"] = adata.obs["perturbation"].astype(object)
    adata.obs.loc[lost, "perturbation"] = None
    adata.X[adata.obs_names.isin(lost)] += 100 * np.random.default_rng(1).normal(size=(40, 8)).astype(np.float32)
    others = adata[~adata.obs_names.isin(lost)].copy()
    wells, fewer = roles_of(adata.obs), roles_of(others.obs)
    assert not wells.anchor[adata.obs_names.isin(lost)].any()
    assert not wells.treated[adata.obs_names.isin(lost)].any()
    assert any("40 wells have no perturbation" in note for note in wells.notes)
    x = representation(adata)[0]
    found = normalize.wccn(x, wells)[0].matrix
    np.testing.assert_allclose(found, normalize.wccn(x[~adata.obs_names.isin(lost)], fewer)[0].matrix, atol=1e-9)


@pytest.mark.parametrize("times", [10, 0.1])
def test_a_plate_of_another_scale_is_named_before_it_is_fitted(times):
    adata = screen()
    plate = ((adata.obs["experiment"] == "b1") & (adata.obs["plate"] == "2")).to_numpy()
    adata.X[plate] *= times
    correct.run(adata, "sphere")
    notes = "\n".join(adata.uns["cellica"]["sphere"]["notes"])
    assert "1 plates spread far more or less than the others: 'b1_2" in notes
    correct.run(screen(), "sphere", key_added="fine")
    adata = screen()
    correct.run(adata, "sphere")
    assert "spread far more" not in "\n".join(adata.uns["cellica"]["sphere"]["notes"])


def one_of(role: str) -> tuple[np.ndarray, Roles]:
    """Rows with a single control, or a single anchor."""
    adata = screen()
    wells = roles_of(adata.obs)
    mask = np.zeros(len(wells.batch), dtype=bool)
    mask[np.flatnonzero(wells.control)[0]] = True
    wells.control, wells.anchor = (mask, wells.anchor) if role == "control" else (np.zeros_like(mask), mask)
    return z_scored(adata), wells


@pytest.mark.parametrize(
    ("method", "role"),
    [
        *(("sphere", "control"), ("tvn", "control"), ("center_scale", "control")),
        *((name, "anchor") for name in ("center", "wccn", "ruv", "leace", "ica_shrink", "ica_drop", "pca_drop")),
    ],
)
def test_one_control_or_anchor_is_refused_with_what_is_needed(method, role):
    x, wells = one_of(role)
    with pytest.raises(InputError, match="needs"):
        methods.FITS[method](x, wells)
    assert "eed" in methods.FITS[method].__doc__


@pytest.mark.parametrize("method", sorted(methods.FITS))
def test_every_method_says_what_it_needs(method):
    doc = " ".join(methods.FITS[method].__doc__.split())
    assert any(word in doc for word in ("control", "anchor")) or "steps of ``ica_drop``" in doc
    assert "eed" in doc or "steps of" in doc


def test_leace_refuses_to_erase_everything_and_says_when_it_erases_much():
    with pytest.raises(InputError, match="would erase all 3 directions"):
        correct.run(screen(n_batches=5, d=3), "leace")
    adata = screen(n_batches=6, d=8)
    correct.run(adata, "leace")
    assert any("5 of 8 directions are erased" in note for note in adata.uns["cellica"]["leace"]["notes"])
    with pytest.raises(InputError, match="on='controls' is not known"):
        correct.run(adata, "leace", on="controls")
    with pytest.raises(InputError, match="whitening='ZCA' is not known"):
        correct.run(adata, "sphere", whitening="ZCA")
