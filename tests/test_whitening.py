import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import zarr
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA
from sklearn.utils.estimator_checks import parametrize_with_checks

from cellica.whitening import Whitening, is_row_source, mean_and_covariance, sample, signal_rank

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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(st.integers(0, 2**16), st.integers(2, 9000), st.floats(-1e4, 1e4))
def test_mean_and_covariance_in_one_pass_are_numpys(dtype, seed, n, mean):
    """Also where the first chunk lies far from the rest, as where rows are sorted by batch."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(n, 3)) + np.where(np.arange(n) < 4096, 0, 100)[:, None] + mean).astype(dtype)
    found_mean, found_covariance = mean_and_covariance(x)
    np.testing.assert_allclose(found_mean, x.mean(axis=0, dtype=np.float64), rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(found_covariance, np.cov(x.astype(np.float64), rowvar=False), rtol=1e-6, atol=1e-9)


def isotropic(n: int, d: int, k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, k)) @ rng.normal(size=(k, d)) + 0.5 * rng.normal(size=(n, d))


@pytest.mark.parametrize(("n", "d", "k"), [(2000, 50, 5), (300, 50, 20), (100, 400, 3), (5000, 20, 1)])
def test_auto_counts_the_directions_above_the_noise(n, d, k):
    assert Whitening("auto").fit(isotropic(n, d, k)).rank_ == k


def test_auto_takes_one_direction_where_there_is_nothing_but_noise():
    x = np.random.default_rng(0).normal(size=(1000, 30))
    assert signal_rank(np.linalg.eigvalsh(np.cov(x, rowvar=False))[::-1], 1000) == 1


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "u1"])
@pytest.mark.parametrize("kind", ["memmap", "h5py", "zarr"])
def test_rows_on_disk_give_what_an_array_gives(kind, dtype, tmp_path):
    x = (20 * isotropic(5000, 6, 6) + 100).clip(0, 255).astype(dtype)
    if kind == "memmap":
        np.save(tmp_path / "x.npy", x)
        source = np.load(tmp_path / "x.npy", mmap_mode="r")
    elif kind == "h5py":
        source = h5py.File(tmp_path / "x.h5", "w").create_dataset("X", data=x)
    else:
        source = zarr.create_array(tmp_path / "x.zarr", data=x)
    held = x.astype(np.float64 if dtype == "f8" else np.float32)
    expected = Whitening().fit(held)
    found = Whitening().fit(source)
    np.testing.assert_array_equal(found.whitening_, expected.whitening_)
    np.testing.assert_array_equal(found.transform(source), expected.transform(held))
    np.testing.assert_array_equal(found.inverse_transform(found.transform(source)).dtype, held.dtype)
    chosen = np.array([0, 3, 4095, 4096, 4999])
    np.testing.assert_allclose(
        sample(source, chosen, found.whitening_, found.mean_), expected.transform(held)[chosen], rtol=1e-4, atol=1e-5
    )


def test_what_is_read_by_rows_and_what_is_held():
    x = np.eye(3)
    held = [x, x.tolist(), pd.DataFrame(x), scipy.sparse.csr_array(x), np.ma.array(x)]
    assert not any(is_row_source(rows) for rows in held)


@pytest.mark.parametrize("shape", [(5,), (1, 4), (5, 0)])
def test_a_source_of_another_shape_is_refused(shape, tmp_path):
    source = h5py.File(tmp_path / "x.h5", "w").create_dataset("X", shape=shape, dtype="f4")
    with pytest.raises(ValueError, match="use two axes, 2 rows and 1 feature at least"):
        Whitening().fit(source)


@pytest.mark.parametrize(
    "parameters", [{"method": "cholesky"}, {"ridge": -1.0}, {"n_components": 0}, {"n_components": "all"}]
)
def test_unknown_settings_are_named(parameters):
    with pytest.raises(ValueError, match=str(next(iter(parameters.values())))):
        Whitening(**parameters).fit(np.eye(4))
