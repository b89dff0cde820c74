import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.utils.estimator_checks import parametrize_with_checks

from cellica.whitening import Whitening

# scikit-learn skips its array-API check, with a warning, unless scipy's switch is set
pytestmark = pytest.mark.filterwarnings("ignore:Skipping check:sklearn.exceptions.SkipTestWarning")


@parametrize_with_checks([Whitening(), Whitening(method="zca", ridge=0.1)])
def test_is_a_scikit_learn_estimator(estimator, check):
    check(estimator)


@given(st.integers(0, 2**16), st.integers(2, 8), st.sampled_from(["pca", "zca"]), st.floats(-100, 100))
def test_whitened_covariance_is_identity_whatever_the_mean(seed, d, method, mean):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(60, d)) @ rng.normal(size=(d, d)) + mean
    whiten = Whitening(method=method).fit(x)
    covariance = np.cov(whiten.transform(x), rowvar=False)
    if method == "zca" and whiten.rank_ < d:
        covariance = whiten.directions_ @ covariance @ whiten.directions_.T
    np.testing.assert_allclose(covariance, np.eye(whiten.rank_), atol=1e-5)
    np.testing.assert_allclose(whiten.inverse_transform(whiten.transform(x)), x, atol=1e-6 * (1 + abs(mean)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_pca_whitening_of_scikit_learn(dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(200, 6)) @ rng.normal(size=(6, 6))).astype(dtype)
    ours, theirs = Whitening(4).fit_transform(x), PCA(4, whiten=True, svd_solver="full").fit_transform(x)
    assert ours.dtype == dtype
    signs = np.sign((ours * theirs).sum(axis=0))
    np.testing.assert_allclose(ours * signs, theirs, atol=1e-4 if dtype == np.float32 else 1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_duplicated_and_constant_columns_lower_the_rank(dtype):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(100, 5)).astype(dtype)
    x = np.column_stack([x, x[:, 0], x[:, 1] + x[:, 2], np.full(100, 3, dtype)])
    whiten = Whitening().fit(x)
    assert whiten.rank_ == 5
    assert np.abs(whiten.transform(x)).max() < 10


def test_ridge_keeps_all_directions_and_bounds_the_gain():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(10, 30))
    whiten = Whitening(method="zca", ridge=0.1).fit(x)
    floor = 0.1 * np.trace(np.cov(x, rowvar=False)) / 30
    gains = np.linalg.svd(whiten.whitening_, compute_uv=False)
    assert whiten.rank_ == 30
    np.testing.assert_allclose(gains.max(), floor**-0.5)


@pytest.mark.parametrize("parameters", [{"method": "cholesky"}, {"ridge": -1.0}, {"n_components": 0}])
def test_unknown_settings_are_named(parameters):
    with pytest.raises(ValueError, match=str(next(iter(parameters.values())))):
        Whitening(**parameters).fit(np.eye(4))
