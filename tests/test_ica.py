import numpy as np
import picard
import pytest
from sklearn.decomposition import FastICA
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import parametrize_with_checks

from cellica.ica import ICA, canonical, fast_ica, matched_correlation
from cellica.whitening import Whitening

pytestmark = pytest.mark.filterwarnings("ignore:Skipping check:sklearn.exceptions.SkipTestWarning")


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks([ICA(random_state=0)])
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
def test_recovers_known_sources_and_agrees_with_scikit_learn(seed, dtype, fun):
    sources, x = mixture(seed)
    ours = ICA(fun=fun, random_state=seed, tol=1e-7).fit(x.astype(dtype))
    theirs = FastICA(fun=fun, whiten="unit-variance", random_state=seed, tol=1e-7, max_iter=1000).fit(x)
    assert matched_correlation(sources, ours.transform(x)).min() > 0.99
    assert amari(ours.components_ @ theirs.mixing_) < 1e-3
    assert ours.converged_.all()


def test_agrees_with_picard():
    _, x = mixture(0)
    theirs_k, theirs_w, _ = picard.picard(x.T, ortho=True, random_state=0, tol=1e-8)
    ours = ICA(random_state=1, tol=1e-8).fit(x)
    assert amari(theirs_w @ theirs_k @ ours.mixing_) < 1e-3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gaussian_directions_are_reported_and_do_not_break_the_rest(dtype):
    sources, x = mixture(3, n=20_000, n_gaussian=4)
    ica = ICA(random_state=0).fit(x.astype(dtype))
    assert matched_correlation(sources[:, :7], ica.transform(x)).min() > 0.99
    assert ica.converged_.tolist() == [True] * 7 + [False] * 4
    assert ica.n_iter_ < 200


def test_pure_noise_has_no_converged_component():
    ica = ICA(random_state=0).fit(np.random.default_rng(0).normal(size=(3000, 8)))
    assert not ica.converged_.any()


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


def test_rank_lowers_the_number_of_components():
    _, x = mixture(6)
    assert ICA(20, random_state=0).fit(np.hstack([x, x[:, :2]])).components_.shape == (7, 9)


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


@pytest.mark.parametrize("parameters", [{"fun": "relu"}, {"max_iter": 0}])
def test_unknown_settings_are_named(parameters):
    with pytest.raises(ValueError, match=str(next(iter(parameters.values())))):
        ICA(**parameters).fit(np.eye(5))
