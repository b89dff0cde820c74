import os
import subprocess
import sys
import warnings

import anndata as ad
import h5py
import numpy as np
import picard
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from picard.densities import Exp
from sklearn.decomposition import FastICA
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import parametrize_with_checks
from threadpoolctl import threadpool_limits

from cellica import contrast, fastica, ica
from cellica.ica import ICA, canonical, fast_ica, matched_correlation, stability
from cellica.whitening import Whitening

pytestmark = pytest.mark.filterwarnings("ignore:Skipping check:sklearn.exceptions.SkipTestWarning")


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks([ICA(random_state=0), ICA(solver="picard", random_state=0)])
def test_is_a_scikit_learn_estimator(estimator, check):
    check(estimator)


def mixture(seed: int, n: int = 5000, n_gaussian: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sources = [rng.laplace(size=(n, 4)), rng.uniform(-1, 1, size=(n, 3)), rng.normal(size=(n, n_gaussian))]
    s = np.hstack(sources)
    s /= s.std(axis=0)
    return s, s @ rng.normal(size=(s.shape[1], s.shape[1])) + rng.normal(size=s.shape[1])


def amari(a: np.ndarray) -> float:
    """0 where a matrix is a scaled permutation, at most 1."""
    a = np.abs(a)
    rows = (a.sum(axis=1) / a.max(axis=1) - 1).sum()
    columns = (a.sum(axis=0) / a.max(axis=0) - 1).sum()
    return float(rows + columns) / (2 * len(a) * (len(a) - 1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fun", ["logcosh", "exp", "cube"])
@pytest.mark.parametrize("solver", ["fastica", "picard"])
def test_recovers_known_sources_and_agrees_with_scikit_learn(seed, dtype, fun, solver):
    sources, x = mixture(seed)
    ours = ICA(fun=fun, solver=solver, random_state=seed, tol=1e-7).fit(x.astype(dtype))
    theirs = FastICA(fun=fun, whiten="unit-variance", random_state=seed, tol=1e-7, max_iter=1000).fit(x)
    assert matched_correlation(sources, ours.transform(x)).min() > 0.99
    assert amari(ours.components_ @ theirs.mixing_) < 1e-3
    assert ours.converged_.all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("fun", "density"), [("logcosh", "tanh"), ("exp", Exp({"alpha": 1.0})), ("cube", "cube")])
@pytest.mark.parametrize("solver", ["fastica", "picard"])
def test_agrees_with_picard(seed, fun, density, solver):
    _, x = mixture(seed)
    theirs_k, theirs_w, _ = picard.picard(x.T, fun=density, ortho=True, random_state=seed, tol=1e-8, max_iter=1000)
    ours = ICA(fun=fun, solver=solver, random_state=seed + 1, tol=1e-8).fit(x)
    assert amari(theirs_w @ theirs_k @ ours.mixing_) < 1e-3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gaussian_directions_are_reported_and_do_not_break_the_rest(dtype):
    sources, x = mixture(3, n=20_000, n_gaussian=4)
    ica = ICA(random_state=0).fit(x.astype(dtype))
    assert matched_correlation(sources[:, :7], ica.transform(x)).min() > 0.99
    assert ica.converged_.tolist() == [True] * 7 + [False] * 4
    assert ica.n_iter_ < 200


@pytest.mark.parametrize("solver", ["fastica", "picard"])
@pytest.mark.parametrize(("n", "k"), [(3000, 8), (1000, 30), (632, 100), (10_500, 100)])
def test_pure_noise_has_no_converged_component(solver, n, k):
    """Below k^2 rows FastICA finds directions in noise that stand still and whose contrast is 6 standard errors off."""
    found = ICA(solver=solver, random_state=0).fit(np.random.default_rng(0).normal(size=(n, k)).astype(np.float32))
    assert not found.converged_.any()
    assert not found.non_gaussian_.any()


def ground_truth(name: str, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Sources, and how many Gaussian ones they are mixed with."""
    n = 8000
    return {
        "one in many": (rng.exponential(size=(5000, 1)), 39),
        "weak": (rng.choice([-1, 1], size=(n, 6)) * rng.gamma(1 / 1.4, size=(n, 6)) ** (1 / 1.4), 10),
        "heavy tails": (np.hstack([rng.standard_t(2.2, size=(n, 8)), np.exp(1.5 * rng.normal(size=(n, 8)))]), 10),
        "rows barely above k^2": (rng.laplace(size=(1800, 40)), 0),
        "discrete and sparse": (
            np.hstack([rng.choice([-1.0, 1.0], (n, 6)), (rng.random((n, 6)) < 0.03) * rng.normal(size=(n, 6))]),
            8,
        ),
    }[name]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("solver", ["fastica", "picard"])
@pytest.mark.parametrize("name", ["one in many", "weak", "heavy tails", "rows barely above k^2", "discrete and sparse"])
def test_finds_what_there_is_and_claims_nothing_else(name, solver, seed):
    rng = np.random.default_rng(seed)
    sources, n_gaussian = ground_truth(name, rng)
    all_sources = np.hstack([sources / sources.std(axis=0), rng.normal(size=(len(sources), n_gaussian))])
    x = (all_sources @ rng.normal(size=(all_sources.shape[1],) * 2)).astype(np.float32)
    model = ICA(solver=solver, random_state=seed).fit(x)
    correlation = np.abs(np.corrcoef(sources.T, model.transform(x).T))[: sources.shape[1], sources.shape[1] :]
    assert correlation.max(axis=1).min() > 0.9
    assert correlation.max(axis=0)[model.converged_].min() > 0.9
    assert model.converged_.sum() >= 0.85 * sources.shape[1]
    assert model.n_iter_ < 100


@pytest.mark.parametrize("draw", ["laplace", "uniform", "exponential"])
def test_leaves_a_saddle(draw):
    """(s_1 + s_2, s_1 - s_2) is a fixed point of FastICA where s_1 and s_2 are alike, but no optimum."""
    sources = getattr(np.random.default_rng(0), draw)(size=(6000, 4))
    whitened = Whitening().fit_transform(sources)
    rotation, *_ = fast_ica(whitened, np.eye(4), tol=1e-9)
    at_saddle = np.eye(4)
    at_saddle[:2, :2] = np.array([[1, 1], [1, -1]]) / 2**0.5
    rows = contrast.Rows(torch.tensor(whitened @ (at_saddle @ rotation).T))
    turn, stuck = fastica.off_saddles(rows, 4)
    assert stuck.tolist() == [True, True, False, False]
    assert amari(turn.numpy() @ at_saddle) < 1e-9
    assert not fastica.off_saddles(contrast.Rows(torch.tensor(whitened @ rotation.T)), 4)[1].any()
    again, *_ = fast_ica(whitened, at_saddle @ rotation)
    assert amari(again @ rotation.T) < 0.02 < amari(at_saddle)


def third_gaussian(n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Laplace sources, and their float32 mixture with half as many Gaussian ones."""
    rng = np.random.default_rng(seed)
    sources = np.hstack([rng.laplace(size=(n, k - k // 3)), rng.normal(size=(n, k // 3))])
    return sources[:, : k - k // 3], (sources @ rng.normal(size=(k, k))).astype(np.float32)


def test_does_not_break_down_in_float32_however_long_it_runs(monkeypatch):
    """scikit-learn's FastICA does on these rows, within 200 iterations: from a correlation of .99 to .08."""
    sources, x = third_gaussian(10_000, 96)
    monkeypatch.setattr(fastica, "PATIENCE", 10**6)
    with pytest.warns(ConvergenceWarning, match="64 of 64"):  # all went into the search
        model = ICA(random_state=0, max_iter=200).fit(x)
    assert matched_correlation(sources, model.transform(x)).mean() > 0.98


def test_order_and_sign_do_not_depend_on_the_seed():
    _, x = mixture(4)
    a, b = (ICA(random_state=seed, tol=1e-9).fit(x).transform(x) for seed in (0, 1))
    np.testing.assert_allclose(a, b, atol=1e-3)
    np.testing.assert_allclose(a.std(axis=0, ddof=1), 1, atol=1e-6)
    assert (np.mean(a**3, axis=0) >= 0).all()


def test_same_seed_same_output_and_inverse():
    _, x = mixture(5)
    a, b = ICA(random_state=3).fit(x), ICA(random_state=3).fit(x)
    np.testing.assert_array_equal(a.components_, b.components_)
    np.testing.assert_allclose(a.inverse_transform(a.transform(x)), x, atol=1e-8)


def test_rank_lowers_the_number_of_components_and_says_so():
    _, x = mixture(6)
    with pytest.warns(UserWarning, match="n_components is 7 instead of 20: 5000 rows of 9 features vary in 7"):
        model = ICA(20, random_state=0).fit(np.hstack([x, x[:, :2]]))
    assert model.components_.shape == (7, 9)


def noisy(n: int, k: int = 6, d: int = 40) -> np.ndarray:
    """Rows with k directions above isotropic noise."""
    rng = np.random.default_rng(0)
    return (rng.laplace(size=(n, k)) @ rng.normal(size=(k, d)) + 0.3 * rng.normal(size=(n, d))).astype(np.float32)


def test_auto_takes_the_directions_above_the_noise_that_the_rows_can_carry():
    assert len(ICA("auto", random_state=0).fit(noisy(3000)).components_) == 6
    with pytest.warns(UserWarning, match=r"n_components is 4 instead of 6: 100 rows carry 4 \(5 k\^2 rows"):
        assert len(ICA("auto", random_state=0).fit(noisy(100)).components_) == 4


def test_stopping_short_warns_with_the_remedy():
    _, x = mixture(7)
    with pytest.warns(ConvergenceWarning, match="max_iter=3"):
        ICA(random_state=0, max_iter=3, tol=1e-12).fit(x)


def test_kernel_gives_an_orthogonal_rotation():
    _, x = mixture(8, n_gaussian=2)
    whitened = Whitening().fit_transform(x)
    rotation, *_ = fast_ica(whitened, np.eye(9), max_iter=5)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(9), atol=1e-12)


def test_canonical_order_is_by_distance_from_a_gaussian():
    rng = np.random.default_rng(0)
    sources = np.column_stack([rng.normal(size=50_000), -rng.exponential(size=50_000) + 1])
    order, sign = canonical(sources)
    assert order.tolist() == [1, 0]
    assert sign[0] == -1


def test_matched_correlation_is_one_to_one():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(500, 3))
    assert matched_correlation(a, -a[:, ::-1]).min() == pytest.approx(1)
    assert matched_correlation(a, a[:, :2])[2] == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("solver", ["fastica", "picard"])
def test_the_number_of_threads_does_not_matter(dtype, solver):
    _, x = mixture(9, n=3000, n_gaussian=3)
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with threadpool_limits(threads):
                found.append(ICA(solver=solver, random_state=0).fit(x.astype(dtype)).transform(x))
        finally:
            torch.set_num_threads(before)
    np.testing.assert_allclose(*found, atol=1e-4)


def test_gaussian_directions_do_not_hang_on_the_seed():
    """Where rows are many, what is left over is the principal directions of its span, and the last in order."""
    _, x = mixture(10, n=20_000, n_gaussian=3)
    a, b = (ICA(random_state=seed, tol=1e-8).fit(x) for seed in (0, 1))
    assert not a.converged_[7:].any()
    np.testing.assert_allclose(a.transform(x), b.transform(x), atol=1e-3)
    left_over = a.mixing_[:, 7:].T @ a.mixing_[:, 7:]
    np.testing.assert_allclose(left_over, np.diag(np.diag(left_over)), atol=1e-6 * left_over.max())
    assert (np.diff(np.diag(left_over)) < 0).all()


def test_few_rows_keep_weak_sources_where_they_were_found():
    """200 rows of 12 sources tell none from noise by its score, but most directions are good."""
    rng = np.random.default_rng(0)
    sources = rng.laplace(size=(200, 6))
    x = np.hstack([sources, rng.normal(size=(200, 6))]) @ rng.normal(size=(12, 12))
    found = ICA(random_state=0).fit(x)
    assert not found.converged_.any()
    assert matched_correlation(sources, found.transform(x)).mean() > 0.8


def test_the_callback_hears_of_each_iteration():
    heard = []
    _, x = mixture(11)
    model = ICA(random_state=0, callback=lambda n_iter, n_settled: heard.append((n_iter, n_settled))).fit(x)
    assert [n_iter for n_iter, _ in heard] == list(range(1, model.n_iter_ + 1))
    assert heard[-1][1] == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("solver", ["fastica", "picard"])
def test_cuda_gives_what_the_cpu_gives(dtype, solver):
    _, x = mixture(12, n=20_000, n_gaussian=3)
    cpu, cuda = (ICA(solver=solver, device=device, random_state=0).fit(x.astype(dtype)) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(cpu.transform(x), cuda.transform(x), atol=1e-3)


# ------------------------------------------------------------------------------------------------- rows from a disk


@pytest.fixture(params=["memmap", "h5py", "zarr", "anndata"])
def on_disk(request, tmp_path):
    """A function from an array to the same on disk."""

    def write(x: np.ndarray):
        if request.param == "memmap":
            np.save(tmp_path / "x.npy", x)
            return np.load(tmp_path / "x.npy", mmap_mode="r")
        if request.param == "h5py":
            return h5py.File(tmp_path / "x.h5", "w").create_dataset("X", data=x)
        if request.param == "anndata":
            ad.AnnData(x).write_h5ad(tmp_path / "x.h5ad")
            return ad.read_h5ad(tmp_path / "x.h5ad", backed="r").X
        return zarr.create_array(tmp_path / "x.zarr", data=x)

    return write


@pytest.mark.parametrize("solver", ["fastica", "picard"])
def test_rows_on_disk_give_what_an_array_gives(on_disk, solver):
    _, x = mixture(13, n=9000, n_gaussian=2)
    x = x.astype(np.float32)
    source = on_disk(x)
    held, read = (ICA(solver=solver, random_state=0).fit(rows) for rows in (x, source))
    np.testing.assert_array_equal(held.components_, read.components_)
    np.testing.assert_array_equal(held.transform(x), read.transform(source))
    np.testing.assert_array_equal(held.transform(x[:5]), read.transform(source[:5]))


def test_sources_are_written_by_chunks_into_a_matrix_on_disk(on_disk, tmp_path):
    _, x = mixture(13, n=9000, n_gaussian=2)
    x = x.astype(np.float32)
    model = ICA(5, random_state=0).fit(x)
    with h5py.File(tmp_path / "sources.h5", "w") as file:
        out = file.create_dataset("S", (9000, 5), "f4")
        assert model.transform(on_disk(x), out=out) is out
        np.testing.assert_array_equal(out[:], model.transform(x))
        with pytest.raises(ValueError, match=r"out has the shape \(9000, 5\): \(8999, 5\) is needed"):
            model.transform(x[1:], out=out)


@pytest.mark.parametrize("solver", ["fastica", "picard"])
def test_more_rows_than_are_held_are_searched_by_sample_and_polished_on_all(on_disk, solver, monkeypatch):
    sources, x = mixture(14, n=40_000, n_gaussian=2)
    x = x.astype(np.float32)
    whole = ICA(solver=solver, random_state=0, tol=1e-7).fit(x)
    monkeypatch.setattr(ica, "IN_MEMORY", 9 * 4 * 8000)
    sampled = ICA(solver=solver, random_state=0, tol=1e-7).fit(on_disk(x))
    assert amari((sampled.components_ @ whole.mixing_)[:7, :7]) < 1e-4
    assert sampled.converged_.tolist() == [True] * 7 + [False] * 2
    assert matched_correlation(sources[:, :7], sampled.transform(x)).min() > 0.99


def test_nan_on_disk_is_named_by_row(on_disk):
    x = np.random.default_rng(0).normal(size=(5000, 3)).astype(np.float32)
    x[4321, 1] = np.nan
    with pytest.raises(ValueError, match="row 4321 holds NaN or infinity"):
        ICA().fit(on_disk(x))


def test_rows_on_disk_with_other_features_are_refused(on_disk):
    model = ICA(random_state=0).fit(mixture(15)[1])
    with pytest.raises(ValueError, match="X has 3 features, but ICA is expecting 7"):
        model.transform(on_disk(np.zeros((4, 3), np.float32)))


PEAK = """
import re, threading
import numpy as np
from cellica import contrast, fastica, ica, picard
def anonymous():
    return int(re.search("RssAnon:\\\\s+([0-9]+)", open("/proc/self/status").read())[1]) * 1024
seen = []
def watch():
    while not done.wait(0.002):
        seen.append(anonymous())
ica.ICA(random_state=0).fit_transform(np.random.default_rng(0).normal(size=(500, 48)).astype("f4"))
rng, done = np.random.default_rng(0), threading.Event()
before = anonymous()
x = rng.standard_exponential((150_000, 48), dtype="f4")
threading.Thread(target=watch, daemon=True).start()
for solver in ("fastica", "picard"):
    seen = []
    sources = ica.ICA(random_state=0, solver=solver).fit_transform(x)
    print((max(seen) - before) / x.nbytes)
    del sources
done.set()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from Linux's /proc")
def test_peak_memory_is_under_two_and_a_half_times_the_data():
    """The data themselves, one whitened copy, and chunks; then the sources in its place."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, env=environment)
    fastica_peak, picard_peak = map(float, found.stdout.split())
    assert 1.9 < fastica_peak < 2.5
    assert 1.9 < picard_peak < 2.5


# --------------------------------------------------------------------------------------------------------- stability


@pytest.mark.parametrize("kind", ["seed", "bootstrap"])
def test_stability_tells_sources_from_gaussian_directions(kind):
    _, x = mixture(16, n=6000, n_gaussian=6)
    model = ICA(random_state=0).fit(x)
    found = stability(model, x, kind=kind, n_runs=2, random_state=1)
    assert found.correlation.shape == found.cosine.shape == (13,)
    assert found.correlation[:7].min() > 0.99
    assert found.correlation[7:].mean() < 0.8
    assert 0.3 < found.chance < 0.6
    again = stability(model, x, kind=kind, n_runs=2, random_state=1)
    np.testing.assert_array_equal(found.correlation, again.correlation)


def test_stability_is_the_correlation_of_the_sources():
    _, x = mixture(17)
    model = ICA(random_state=0, tol=1e-9).fit(x)
    found = stability(model, x, n_runs=1, random_state=1)
    other = ICA(random_state=1, tol=1e-9).fit(x)
    np.testing.assert_allclose(
        found.correlation, matched_correlation(model.transform(x), other.transform(x)), atol=1e-6
    )
    np.testing.assert_allclose(found.cosine, 1, atol=1e-6)


def test_a_bootstrap_moves_components_more_than_a_seed():
    _, x = mixture(17)
    model = ICA(random_state=0, tol=1e-9).fit(x)
    seed, bootstrap = (stability(model, x, n_runs=1, kind=kind, random_state=1) for kind in ("seed", "bootstrap"))
    assert (seed.correlation > bootstrap.correlation).all()
    assert (seed.cosine > bootstrap.cosine).all()


@given(st.integers(0, 2**16), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_stability_does_not_depend_on_sign_and_order(seed, k):
    rng = np.random.default_rng(seed)
    x = rng.laplace(size=(300, k))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = ICA(random_state=0).fit(x)
    first = stability(model, x, n_runs=1, random_state=2)
    order = rng.permutation(k)
    for name in ("components_", "rotation_"):
        setattr(model, name, -getattr(model, name)[order])
    np.testing.assert_allclose(stability(model, x, n_runs=1, random_state=2).correlation, first.correlation[order])


@pytest.mark.parametrize("parameters", [{"kind": "jackknife"}, {"n_runs": 0}])
def test_unknown_stability_settings_are_named(parameters):
    model = ICA(random_state=0).fit(mixture(18)[1])
    with pytest.raises(ValueError, match=str(next(iter(parameters.values())))):
        stability(model, mixture(18)[1], **parameters)


@pytest.mark.parametrize(
    "parameters", [{"fun": "relu"}, {"max_iter": 0}, {"solver": "jade"}, {"n_components": 0}, {"n_components": "all"}]
)
def test_unknown_settings_are_named(parameters):
    with pytest.raises(ValueError, match=str(next(iter(parameters.values())))):
        ICA(**parameters).fit(np.eye(5))
