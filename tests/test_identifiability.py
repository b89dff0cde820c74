import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import digamma
from scipy.stats import ortho_group
from sklearn.feature_selection import mutual_info_classif
from sklearn.metrics import mutual_info_score
from sklearn.preprocessing import StandardScaler

from cellica import identifiability
from cellica.ica import ICA
from cellica.identifiability import (
    GROUPS,
    align,
    alignment_error,
    bi_lipschitz,
    dci,
    efficiency,
    ica_stability,
    infomec,
    mcc,
    mig,
    rigid_bound,
)
from cellica.information import counted_information, jittered, mutual_information

SPREAD = np.array([1.0, 1.5, 2.0, 3.0, 4.0])
SCORES = ("infom", "infoe", "infoc", "infoe_converged")


def independent(seed: int, kind: str = "laplace", n: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal if kind == "gaussian" else rng.laplace)(size=(n, 5)) * SPREAD


def rotation(seed: int, d: int = 5) -> np.ndarray:
    return ortho_group.rvs(d, random_state=seed)


def mixing(seed: int, d: int = 5) -> np.ndarray:
    """Well conditioned, so that errors are not ruled by one direction."""
    return rotation(seed, d) * np.linspace(0.5, 2, d) @ rotation(seed + 1, d)


def signed_permutation(seed: int, d: int = 5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.eye(d)[rng.permutation(d)] * rng.choice([-1.0, 1.0], size=d)


def held_out(found, space: str) -> dict[str, float]:
    return {group: error.held_out for group, error in getattr(found, space).items()}


# ---------------------------------------------------------------------------------------------- alignment


@pytest.mark.parametrize("seed", range(3))
def test_equal_up_to_a_signed_permutation_and_a_translation_is_no_error_of_any_class(seed):
    a = independent(seed)
    found = align(a, a @ signed_permutation(seed) + 7)
    for space in ("raw", "whitened"):
        errors = held_out(found, space)
        assert max(errors[group] for group in ("permutation", "rigid", "linear")) < 1e-9
        assert errors["ica"] < 0.005  # two searches from other starts end within their tolerance
    assert np.isnan(found.efficiency)  # no way left to go


@pytest.mark.parametrize("seed", range(3))
def test_equal_up_to_a_rotation(seed):
    a = independent(seed)
    found = align(a, a @ rotation(seed) - 3)
    assert found.raw["rigid"].held_out < 1e-9
    assert found.raw["linear"].held_out < 1e-9
    assert found.raw["permutation"].held_out > 0.1
    assert found.whitened["rigid"].held_out < 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_equal_up_to_a_linear_map_is_rigid_once_whitened(seed):
    a = independent(seed)
    found = align(a, a @ mixing(seed))
    assert found.raw["linear"].held_out < 1e-9
    assert found.raw["rigid"].held_out > 0.05
    assert found.whitened["rigid"].held_out < 1e-9
    assert found.whitened["linear"].held_out < 1e-9


@pytest.mark.parametrize("solver", ["fastica", "picard"])
@pytest.mark.parametrize("seed", range(2))
def test_ica_undoes_two_mixings_of_non_gaussian_sources(seed, solver):
    sources = independent(seed)
    found = align(sources @ mixing(seed), sources @ mixing(seed + 10), ica=ICA(solver=solver))
    assert found.whitened["ica"].held_out < 0.02
    assert found.raw["ica"].held_out < 0.02
    assert found.whitened["permutation"].held_out > 0.1
    assert found.efficiency > 0.9
    assert found.n_converged == (5, 5)


@pytest.mark.parametrize("seed", range(2))
def test_ica_cannot_undo_mixings_of_gaussian_sources(seed):
    sources = independent(seed, "gaussian")
    found = align(sources @ mixing(seed), sources @ mixing(seed + 10))
    assert found.whitened["rigid"].held_out < 1e-9
    assert found.whitened["ica"].held_out > 0.1
    assert found.efficiency < 0.5
    assert found.n_converged == (0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_of_independent_noise_every_error_is_at_chance(seed):
    found = align(independent(seed, "gaussian"), independent(seed + 50, "gaussian"))
    for space in (found.raw, found.whitened):
        for error in space.values():
            assert error.held_out == pytest.approx(error.chance, rel=0.05)
    size = found.diameter["whitened"]
    assert found.whitened["rigid"].held_out == pytest.approx(np.sqrt(2 * 5) / size, rel=0.08)
    assert found.whitened["linear"].held_out == pytest.approx(np.sqrt(5) / size, rel=0.08)
    assert abs(found.efficiency) < 0.5 or np.isnan(found.efficiency)


def test_a_shared_part_lies_between_none_and_all():
    sources, rng = independent(0), np.random.default_rng(9)
    near = sources + 0.3 * SPREAD * rng.normal(size=sources.shape)
    errors = held_out(align(sources @ mixing(1), near @ mixing(2)), "whitened")
    chance = align(sources @ mixing(1), near @ mixing(2)).whitened["ica"].chance
    assert errors["rigid"] < errors["ica"] < 0.6 * chance
    assert errors["ica"] < errors["permutation"]


@pytest.mark.parametrize("seed", range(5))
def test_a_larger_class_fits_better(seed):
    rng = np.random.default_rng(seed)
    a = independent(seed, n=400)
    b = np.tanh(a @ rotation(seed)) + 0.3 * rng.normal(size=(400, 5))
    found = align(a, b)
    for space in (found.raw, found.whitened):
        assert space["linear"].fit_rms <= space["rigid"].fit_rms + 1e-12
        assert space["rigid"].fit_rms <= space["permutation"].fit_rms + 1e-12
        assert space["linear"].held_out <= space["rigid"].held_out * 1.05
        assert space["rigid"].held_out <= space["permutation"].held_out * 1.05
    assert (
        found.whitened["rigid"].fit_rms <= found.whitened["ica"].fit_rms + 1e-12
    )  # a signed permutation of a rotation


def test_the_permutation_is_the_best_of_all():
    import itertools

    from cellica.alignment import signed_permutation as matched

    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 30, 4))
    signed = [
        np.eye(4)[list(order)] * signs
        for order in itertools.permutations(range(4))
        for signs in itertools.product([-1, 1], repeat=4)
    ]
    best = min(np.sum((a @ one - b) ** 2) for one in signed)
    assert np.sum((a @ matched(a.T @ b) - b) ** 2) == pytest.approx(best)


def test_an_overfitted_map_shows_on_the_held_out_half():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 60, 20))
    error = align(a, b).raw["linear"]
    assert error.fit < 0.7 * error.held_out


def test_different_widths():
    sources = independent(0)
    rng = np.random.default_rng(1)
    a, b = sources @ rng.normal(size=(5, 9)), sources @ mixing(3)
    found = align(a, b)
    assert found.n_components == 5
    assert found.raw["linear"].held_out < 1e-9
    assert found.whitened["rigid"].held_out < 1e-9
    assert found.whitened["ica"].held_out < 0.02
    padded = np.pad(b, ((0, 0), (0, 4)))
    assert held_out(align(a, padded), "raw") == pytest.approx(held_out(found, "raw"))
    assert held_out(align(padded, b), "raw")["permutation"] < 1e-9  # columns of zeros say nothing and cost nothing
    back = align(b, a)
    assert back.raw["linear"].held_out < 1e-9
    assert back.raw["rigid"].held_out > 0.01


def test_what_only_the_wider_side_holds_is_an_error_of_a_rigid_map():
    a = independent(0)
    lost = align(a, a[:, :3])
    assert lost.raw["linear"].held_out < 1e-9
    assert lost.raw["rigid"].held_out > 0.1
    assert lost.n_components == 3


def test_fewer_components_keep_the_leading_directions():
    a = independent(0)
    noise = 1e-3 * np.random.default_rng(1).normal(size=(4000, 20))
    wide = np.hstack([a, noise])
    turned = np.hstack([a @ rotation(0), 1e-3 * np.random.default_rng(2).normal(size=(4000, 20))])
    assert alignment_error(wide, turned, "rigid", whiten=True, n_components=5) < 0.01
    assert alignment_error(wide, turned, "rigid", whiten=True) > 0.1


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("whiten", [True, False])
def test_one_error_is_that_of_all(group, whiten):
    sources = independent(0, n=1000)
    a, b = sources @ mixing(0), sources @ mixing(4)
    found = align(a, b, random_state=3)
    assert (
        alignment_error(a, b, group, whiten=whiten, random_state=3)
        == held_out(found, "whitened" if whiten else "raw")[group]
    )


def test_ica_is_whitened_and_the_rest_is_not_unless_asked():
    sources = independent(0, n=1000)
    a, b = sources @ mixing(0), sources @ mixing(4)
    found = align(a, b)
    assert alignment_error(a, b, "ica") == found.whitened["ica"].held_out
    assert alignment_error(a, b) == found.raw["permutation"].held_out


def test_alignment_is_deterministic_and_hangs_on_the_seed():
    a, b = independent(0, n=500), np.tanh(independent(0, n=500) @ rotation(1))
    assert align(a, b, random_state=1) == align(a, b, random_state=1)
    assert align(a, b, random_state=1) != align(a, b, random_state=2)


@pytest.mark.parametrize(
    ("row", "share"),
    [
        ((0.219, 0.202, 0.150), 0.25),
        ((0.197, 0.145, 0.109), 0.59),
        ((0.218, 0.175, 0.104), 0.38),
        ((0.382, 0.312, 0.206), 0.40),
    ],
)
def test_efficiency_of_published_rows(row, share):
    assert efficiency(*row) == pytest.approx(share, abs=0.006)


settled = settings(max_examples=15, deadline=None)


@settled
@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3), group=st.sampled_from(["permutation", "rigid", "linear"]))
def test_scale_translation_and_signs_do_not_count(seed, scale, group):
    a = independent(seed, n=120)
    b = a @ rotation(seed) + np.random.default_rng(seed).normal(size=a.shape)
    error = alignment_error(a, b, group)
    shift = np.arange(5) * scale
    assert alignment_error(scale * a + shift, scale * b - shift, group) == pytest.approx(error)
    assert alignment_error(a @ signed_permutation(seed), b, group) == pytest.approx(error)
    if group == "linear":
        assert alignment_error(a @ mixing(seed) * scale, b, group) == pytest.approx(error)


@settled
@given(seed=st.integers(0, 1000))
def test_linear_maps_of_either_side_do_not_count_once_whitened(seed):
    a = independent(seed, n=120)
    b = a @ rotation(seed) + np.random.default_rng(seed).normal(size=a.shape)
    for group in ("rigid", "linear"):
        error = alignment_error(a, b, group, whiten=True)
        assert alignment_error(a @ mixing(seed), b @ mixing(seed + 3), group, whiten=True) == pytest.approx(error)


def test_the_diameter_is_that_of_all_pairs():
    from scipy.spatial.distance import pdist

    from cellica.alignment import diameter

    rows = independent(0, n=3000)
    exact = np.percentile(pdist(rows), 99.9)
    assert diameter(rows) == pytest.approx(exact, rel=0.02)
    assert diameter(rows[:1000]) == np.percentile(pdist(rows[:1000]), 99.9)
    assert diameter(rows, 1) == diameter(rows, 1)


@settled
@given(seed=st.integers(0, 1000))
def test_the_order_of_rows_hardly_counts(seed):
    a = independent(seed, n=1000)
    b = a @ signed_permutation(seed) + np.random.default_rng(seed).normal(size=a.shape)
    order = np.random.default_rng(seed).permutation(1000)
    for group in ("permutation", "rigid", "linear"):
        assert alignment_error(a[order], b[order], group) == pytest.approx(alignment_error(a, b, group), rel=0.15)


# ---------------------------------------------------------------------------------------------- mcc


@settled
@given(seed=st.integers(0, 1000), method=st.sampled_from(["pearson", "spearman"]))
def test_mcc_is_1_up_to_order_sign_scale_and_offset(seed, method):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(50, 4))
    b = a @ signed_permutation(seed, 4) * rng.uniform(0.1, 10, size=4) + rng.normal(size=4)
    assert mcc(a, b, method=method) == pytest.approx(1)
    order = rng.permutation(50)
    assert mcc(a[order], rng.normal(size=(50, 4))[order], method=method) <= 1


@settled
@given(seed=st.integers(0, 1000))
def test_mcc_is_symmetric_and_ignores_the_order_of_rows(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(2, 40, 3))
    order = rng.permutation(40)
    assert mcc(a[order], b[order]) == pytest.approx(mcc(a, b))
    assert mcc(b, a) == pytest.approx(mcc(a, b))


def test_mcc_of_a_rotation_of_noise_and_of_other_widths():
    a = np.random.default_rng(0).normal(size=(5000, 2))
    assert mcc(a, a @ np.array([[1.0, 1.0], [-1.0, 1.0]])) == pytest.approx(np.sqrt(0.5), abs=0.03)
    assert mcc(a, np.random.default_rng(1).normal(size=(5000, 2))) < 0.05
    assert mcc(a, np.hstack([a, a])) == pytest.approx(1)
    assert mcc(np.hstack([a, a**2]), a) == pytest.approx(0.5, abs=1e-6)
    dead = np.hstack([a, np.full((5000, 1), 0.1)])
    assert mcc(a, dead) == pytest.approx(1)


# ---------------------------------------------------------------------------------------------- information


def naive_information(x: np.ndarray, code: np.ndarray, k: int) -> float:
    """Ross, 2014, row by row."""
    terms, n_used = [], int(np.sum(np.bincount(code)[code] > 1))
    used = np.bincount(code)[code] > 1
    for i in np.flatnonzero(used):
        same = np.abs(x[code == code[i]] - x[i])
        here = min(k, len(same) - 1)
        distance = np.sort(same)[here]
        m = np.sum(np.abs(x[used] - x[i]) < distance)
        terms.append(digamma(here) - digamma(len(same)) - digamma(max(m, 1)))
    return max(0.0, digamma(n_used) + np.mean(terms)) if terms else 0.0  # every row is alone in its group


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(10, 120), n_values=st.integers(2, 30))
def test_information_is_that_of_its_definition(seed, n, n_values):
    rng = np.random.default_rng(seed)
    x, code = rng.normal(size=n), np.unique(rng.integers(0, n_values, n), return_inverse=True)[1]
    assert mutual_information(x, code) == pytest.approx(naive_information(x, code, 10), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rounded", [True, False])
def test_information_is_scikit_learns(seed, rounded):
    rng = np.random.default_rng(seed)
    code = rng.integers(0, 8, 2000)  # of smaller groups scikit-learn takes distances by a product, with rounding
    x = code + rng.normal(size=2000)
    x = np.round(x, 1) if rounded else x
    theirs = mutual_info_classif(
        StandardScaler().fit_transform(x[:, None]), code, n_neighbors=10, discrete_features=False, random_state=seed
    )
    assert mutual_information(jittered(x[:, None], seed)[:, 0], code) == pytest.approx(theirs[0], abs=1e-12)


@settled
@given(seed=st.integers(0, 1000))
def test_counted_information_is_scikit_learns(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, rng.integers(2, 6, size=2), size=(50, 2)).T
    assert counted_information(a, b) == pytest.approx(mutual_info_score(a, b), abs=1e-12)


# ---------------------------------------------------------------------------------------------- InfoMEC, DCI, MIG


@pytest.fixture(scope="module")
def factors() -> np.ndarray:
    """Every combination of 4, 5 and 6 values, 20 times each."""
    grid = np.stack(np.meshgrid(np.arange(4), np.arange(5), np.arange(6), indexing="ij"), axis=-1).reshape(-1, 3)
    return np.tile(grid, (20, 1))


def noisy(factors: np.ndarray, seed: int = 0, noise: float = 0.05) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (factors - factors.mean(axis=0)) / factors.std(axis=0) + noise * rng.normal(size=factors.shape)


@pytest.mark.parametrize("name", ["disentangled", "entangled", "quantized"])
def test_infomec_is_the_published_one(shared, name):
    with np.load(shared / "reference/infomec/io.npz") as arrays:
        sources, latents = arrays["sources"], arrays[name]
        nmi, active = arrays[f"{name}_nmi"], arrays[f"{name}_active"]
    expected = json.loads((shared / "reference/infomec/expected.json").read_text())[name]
    found = infomec(sources, latents, discrete_latents=name == "quantized")
    np.testing.assert_allclose(found["nmi"], nmi, atol=1e-12)
    assert found["active"].tolist() == active.tolist()
    assert found["infom"] == pytest.approx(expected["infom"], abs=1e-12)
    assert found["infoc"] == pytest.approx(expected["infoc"], abs=1e-12)
    assert found["infoe"] == pytest.approx(expected["infoe"], abs=1e-5)  # where its solver stops
    assert found["infoe_converged"] == pytest.approx(expected["infoe"], abs=1e-3)


def test_a_perfect_code_scores_1(factors):
    for latents, discrete in ((noisy(factors, noise=0.01), False), (factors[:, ::-1], True)):
        found = infomec(factors, latents, discrete_latents=discrete)
        assert [found[name] for name in SCORES] == pytest.approx([1, 1, 1, 1], abs=0.02)
    assert mig(factors, factors * 2.5) == pytest.approx(1)
    assert mig(factors, factors, discrete_latents=True) == pytest.approx(1)
    found = dci(factors, factors[:, ::-1] + 0.0, n_trees=5)
    assert [found[name] for name in ("disentanglement", "completeness", "informativeness")] == pytest.approx([1, 1, 1])


def test_any_number_of_bins_fits_in_memory():
    rng = np.random.default_rng(0)
    factors = rng.integers(0, 3, size=(200, 2))
    latents = rng.normal(size=(200, 2))
    assert mig(factors, latents, n_bins=10**9) == pytest.approx(0)  # each row in a bin of its own


def test_dci_does_not_take_a_noisy_code_for_an_entangled_one():
    rng = np.random.default_rng(0)
    factors = rng.integers(0, [4, 5, 8], size=(3000, 3))
    found = dci(factors, noisy(factors, noise=0.3), n_trees=20)
    assert min(found["disentanglement"], found["completeness"]) > 0.8
    assert 0.5 < found["informativeness"] < 0.9


def test_a_rotated_code_is_less_modular_and_as_explicit(factors):
    straight = noisy(factors, noise=0.01)
    turned = straight @ rotation(3, 3)
    before, after = infomec(factors, straight), infomec(factors, turned)
    assert after["infom"] < before["infom"] - 0.3
    assert after["infoc"] < before["infoc"] - 0.3
    assert after["infoe"] == pytest.approx(before["infoe"], abs=0.01)
    assert after["infoe_converged"] == pytest.approx(before["infoe_converged"], abs=0.01)
    assert mig(factors, turned) < mig(factors, straight) - 0.3
    found = dci(factors, turned, n_trees=5)
    assert max(found["disentanglement"], found["completeness"]) < 0.5


def test_two_latents_of_one_factor_are_not_compact_and_one_of_two_is_not_modular(factors):
    straight = noisy(factors)
    twice = infomec(factors, np.hstack([straight, noisy(factors, seed=1)]))
    assert twice["infom"] > 0.95
    assert twice["infoc"] < 0.7
    merged = np.column_stack([factors[:, 0] * 5 + factors[:, 1], factors[:, 2]]) + 0.0
    found = infomec(factors, merged + 0.01 * np.random.default_rng(0).normal(size=merged.shape))
    assert found["infom"] < 0.8


def test_published_infoe_rises_by_whitening_alone_and_the_converged_one_does_not(factors):
    ill = noisy(factors, noise=0.4) @ (rotation(0, 3) * np.geomspace(1, 1 / 1000, 3)) @ rotation(1, 3)
    whitened = noisy(factors, noise=0.4)
    before, after = infomec(factors, ill), infomec(factors, whitened)
    assert after["infoe"] > before["infoe"] + 0.02
    assert after["infoe_converged"] == pytest.approx(before["infoe_converged"], abs=1e-3)
    assert after["infoe_converged"] == pytest.approx(after["infoe"], abs=0.01)


def test_noise_scores_at_its_chance(factors):
    noise = np.random.default_rng(0).normal(size=(len(factors), 12))
    found = infomec(factors, noise, n_shuffles=5)
    for name in SCORES:
        assert found[name] == pytest.approx(found["chance"][name], abs=0.01 if "infoe" in name else 0.2)
    assert found["infoe"] < 0.03
    assert mig(factors, noise) < 0.02
    importances = dci(factors, noise, n_trees=20)
    assert max(importances["disentanglement"], importances["completeness"]) < 0.02
    assert importances["informativeness"] == pytest.approx(importances["informativeness_chance"], abs=0.05)


def test_chance_of_infom_is_not_0(factors):
    chance = infomec(factors, noisy(factors), n_shuffles=5)["chance"]
    assert 0.1 < chance["infom"] < 0.95


def test_pruning_rules(factors):
    still = 1e-3 * np.random.default_rng(0).normal(size=(len(factors), 1))
    rare = still.copy()
    rare[:3] = 2  # a wide range and a narrow middle
    latents = np.hstack([noisy(factors), still, rare])
    active = {rule: infomec(factors, latents, pruning=rule)["active"].tolist() for rule in ("range", "iqr", "none")}
    assert active["range"] == [True, True, True, False, True]
    assert active["iqr"] == [True, True, True, False, False]
    assert active["none"] == 5 * [True]
    codes = np.column_stack([factors, np.zeros(len(factors))]).astype(int)
    for rule in ("range", "iqr", "none"):
        assert infomec(factors, codes, discrete_latents=True, pruning=rule)["active"].tolist() == [
            True,
            True,
            True,
            False,
        ]


def test_a_silent_latent_counts_as_spread_evenly(factors):
    silent = np.repeat([0, 1], len(factors) // 2)  # each value with all combinations
    found = infomec(factors, np.column_stack([factors, silent]), discrete_latents=True)
    assert found["n_active"] == 4
    assert found["n_silent"] == 1
    assert found["infom"] == pytest.approx(0.75)


def test_one_active_latent_has_no_compactness(factors):
    found = infomec(factors, np.column_stack([factors[:, 0], np.zeros(len(factors))]), discrete_latents=True)
    assert np.isnan(found["infoc"])
    assert found["infom"] == pytest.approx(1)


def test_numbers_of_factors_do_not_count(factors):
    latents = noisy(factors)
    renamed = np.array([3, 0, 2, 5, 1, 4])[factors] * 0.25
    for score in (
        infomec(renamed, latents)["infom"] - infomec(factors, latents)["infom"],
        mig(renamed, latents) - mig(factors, latents),
    ):
        assert score == pytest.approx(0, abs=1e-9)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000))
def test_infomec_ignores_row_order_scale_sign_and_column_order(seed):
    rng = np.random.default_rng(seed)
    factors = rng.integers(0, 3, size=(200, 2))
    latents = factors @ rng.normal(size=(2, 3)) + rng.normal(size=(200, 3))
    found = infomec(factors, latents, pruning="none")
    order = rng.permutation(200)
    other = latents[order] @ signed_permutation(seed, 3) * rng.uniform(0.1, 10, size=3) + 5
    again = infomec(factors[order], other, pruning="none")
    for name in SCORES:
        assert again[name] == pytest.approx(found[name], abs=1e-3)


def test_scores_are_deterministic(factors):
    latents = noisy(factors) @ rotation(0, 3)
    for score in (
        lambda: infomec(factors, latents, n_shuffles=1, random_state=3),
        lambda: dci(factors, latents, n_trees=3, random_state=3),
    ):
        one, two = score(), score()
        for name in one:
            np.testing.assert_equal(one[name], two[name])
    assert (
        dci(factors, latents, n_trees=3, random_state=3)["importance"].tolist()
        != dci(factors, latents, n_trees=3, random_state=4)["importance"].tolist()
    )


def test_infomec_of_ten_thousand_rows_takes_seconds():
    rng = np.random.default_rng(0)
    factors = rng.integers(0, [10, 10, 10, 8, 4, 15, 6], size=(10_000, 7))
    latents = factors @ rng.normal(size=(7, 10)) + rng.normal(size=(10_000, 10))
    start = time.process_time()
    infomec(factors, latents)
    assert time.process_time() - start < 60  # about 5 on one core


# ---------------------------------------------------------------------------------------------- stability


def test_stability_of_sources_and_of_noise():
    rng = np.random.default_rng(0)
    sources = rng.laplace(size=(4000, 4)) @ rng.normal(size=(4, 4))
    for kind in ("seed", "bootstrap"):
        found = ica_stability(sources, kind=kind, n_runs=2)
        assert found.correlation.min() > 0.98
        assert found.cosine.min() > 0.95
    noise = ica_stability(rng.normal(size=(4000, 4)), n_runs=4, kind="bootstrap")
    assert noise.correlation.mean() < 0.95
    again = ica_stability(sources, 3, random_state=5)
    assert again.correlation.tolist() == ica_stability(sources, 3, random_state=5).correlation.tolist()
    assert len(again.correlation) == 3


# ---------------------------------------------------------------------------------------------- bi-Lipschitz


def test_an_isometry_has_no_distortion_and_a_scaled_one_none_but_its_scale():
    turned = torch.tensor(rotation(0, 6)[:, :3].T.copy())
    points = np.random.default_rng(0).normal(size=(10, 3))
    found = bi_lipschitz(lambda z: z @ turned, torch.tensor(points))
    assert abs(found.L) < 1e-9
    assert rigid_bound(max(found.L, 0)) < 1e-4
    scaled = bi_lipschitz(lambda z: 5 * (z @ turned), torch.tensor(points))
    assert abs(scaled.L - 4) < 1e-9
    assert scaled.L_scaled == pytest.approx(0, abs=1e-9)


def test_singular_values_of_a_curve_and_of_images():
    points = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
    found = bi_lipschitz(
        lambda z: torch.stack([z[:, 0] ** 3, torch.sin(z[:, 1]), z[:, 1]], dim=1), points, chunk_size=7
    )
    expected = np.stack([3 * points[:, 0] ** 2, np.sqrt(1 + np.cos(points[:, 1]) ** 2)], axis=1)
    np.testing.assert_allclose(found.singular_values, -np.sort(-expected, axis=1), rtol=1e-4)
    assert found.quantiles[0.5] == pytest.approx(np.median(expected), rel=1e-4)
    assert (found.lower, found.upper) == pytest.approx((expected.min(), expected.max()), rel=1e-4)
    images = bi_lipschitz(lambda z: z[:, :, None, None].expand(-1, -1, 4, 4), points)
    np.testing.assert_allclose(images.singular_values, 4, rtol=1e-6)


@pytest.mark.parametrize("leak", [0.5, 0.8])
def test_a_leaky_network_is_within_its_bound(leak):
    torch.manual_seed(0)
    layers = []
    for i in range(3):
        linear = torch.nn.Linear(4, 4, bias=True)
        linear.weight.data = torch.tensor(rotation(i, 4)).float()
        layers += [linear, torch.nn.LeakyReLU(leak)]
    network = torch.nn.Sequential(*layers).eval()
    found = bi_lipschitz(network, np.random.default_rng(0).normal(size=(200, 4)))
    assert found.upper <= 1 + 1e-5
    assert found.lower >= leak**3 - 1e-5
    assert abs((1 + found.L) * found.lower - 1) < 1e-6
    assert rigid_bound(leak**-3 - 1) == pytest.approx(np.sqrt(leak**-6 - 1))


def test_a_lost_direction_is_infinite():
    found = bi_lipschitz(lambda z: z[:, :1], np.zeros((2, 2)))
    assert found.singular_values.tolist() == [[1, 0], [1, 0]]
    assert np.isinf([found.L, found.L_scaled]).all()
    assert np.isinf(rigid_bound(found.L))


def test_convolutions_and_norms_in_eval_mode():
    decoder = torch.nn.Sequential(
        torch.nn.Linear(3, 16),
        torch.nn.Unflatten(1, (4, 2, 2)),
        torch.nn.BatchNorm2d(4),
        torch.nn.GELU(),
        torch.nn.ConvTranspose2d(4, 2, 4, 2, 1),
    )
    with pytest.raises(ValueError, match=r"call decoder.eval\(\)"):
        bi_lipschitz(decoder, np.zeros((1, 3)))
    found = bi_lipschitz(decoder.eval(), np.random.default_rng(0).normal(size=(5, 3)))
    assert 0 < found.lower < found.upper


# ---------------------------------------------------------------------------------------------- wrong input


def pair(n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).normal(size=(n, 3)), np.random.default_rng(1).normal(size=(n, 3))


def with_nan(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[4, 0] = np.nan
    return x


CODES = np.random.default_rng(0).integers(0, 3, size=(40, 2))
WRONG = {
    "group": (
        lambda: alignment_error(*pair(), "affine"),
        r"group='affine' is not known: use one of 'permutation', 'rigid'",
    ),
    "rows differ": (
        lambda: align(pair()[0], pair(41)[1]),
        r"a has 40 rows and b has 41: give both for the same inputs",
    ),
    "nan": (lambda: align(pair()[0], with_nan(pair()[1])), r"row 4 of b holds NaN or infinity: leave such rows out"),
    "one axis": (lambda: align(pair()[0][:, 0], pair()[1]), r"a has the shape \(40,\): use rows by columns"),
    "text": (lambda: mcc(np.array([["a"], ["b"], ["c"]]), np.ones((3, 1))), r"a holds <U1: use real numbers"),
    "few rows": (lambda: align(*pair(8)), r"8 rows give 4 to fit 3 columns on.*give 9 rows at least"),
    "constant side": (lambda: align(pair()[0], np.ones((40, 3))), r"all 20 rows of b to fit on are identical"),
    "hardly a pair that differs": (
        lambda: align(pair(4002)[0], np.arange(4002.0)[:, None].clip(max=1), random_state=3),
        r"at least 99.9 % of the pairs of rows of b are equal",
    ),
    "components": (lambda: align(*pair(), n_components=4), r"n_components=4 is not allowed: .* use 1 to 3, or None"),
    "method": (
        lambda: mcc(*pair(), method="kendall"),
        r"method='kendall' is not known: use one of 'pearson', 'spearman'",
    ),
    "constant factor in mcc": (
        lambda: mcc(np.column_stack([pair()[0], np.ones(40)]), pair()[1]),
        r"column 3 of a is constant",
    ),
    "constant latents in mcc": (lambda: mcc(pair()[0], np.ones((40, 2))), r"all columns of b are constant"),
    "two rows in mcc": (lambda: mcc(*pair(2)), r"2 rows are too few"),
    "pruning": (
        lambda: infomec(CODES, pair()[1], pruning="std"),
        r"pruning='std' is not known: use one of 'range', 'iqr'",
    ),
    "one source": (lambda: infomec(CODES[:, :1], pair()[1]), r"there is 1 source: .* give 2 or more"),
    "one value": (
        lambda: infomec(np.column_stack([CODES, np.ones(40)]), pair()[1]),
        r"source 2 takes one value only.*leave it out",
    ),
    "continuous sources": (
        lambda: infomec(pair()[0], pair()[1]),
        r"source 0 takes 40 values in 40 rows.*bin it, or use mcc",
    ),
    "constant latents": (lambda: infomec(CODES, np.ones((40, 2))), r"all 2 latents are constant"),
    "narrow middle": (lambda: infomec(CODES, np.eye(40)[:, :2], pruning="iqr"), r"use pruning='range'"),
    "wide latents": (
        lambda: infomec(CODES, np.random.default_rng(0).normal(size=(40, 40))),
        r"40 rows are too few for 40 latents",
    ),
    "nan in sources": (lambda: mig(with_nan(CODES + 0.0), pair()[1]), r"row 4 of sources holds NaN"),
    "one latent in mig": (lambda: mig(CODES, pair()[1][:, :1]), r"there is 1 latent"),
    "constant latents in mig": (lambda: mig(CODES, np.ones((40, 2))), r"all 2 latents are constant"),
    "bins": (lambda: mig(CODES, pair()[1], n_bins=1), r"n_bins=1 is not allowed"),
    "shuffles": (lambda: infomec(CODES, pair()[1], n_shuffles=1.5), r"n_shuffles=1.5 is not allowed"),
    "one latent in dci": (lambda: dci(CODES, pair()[1][:, :1]), r"2 sources and 1 latents: .* give 2 or more"),
    "constant latents in dci": (lambda: dci(CODES, np.ones((40, 2))), r"all 2 latents are constant"),
    "trees": (lambda: dci(CODES, pair()[1], n_trees=0), r"n_trees=0 is not allowed"),
    "few rows for stability": (lambda: ica_stability(pair(3)[0]), r"3 rows are too few for 3 columns"),
    "kind": (lambda: ica_stability(pair()[0], kind="fold"), r"kind='fold' is not known"),
    "points": (lambda: bi_lipschitz(lambda z: z, np.zeros(3)), r"points has the shape \(3,\)"),
    "nan points": (lambda: bi_lipschitz(lambda z: z, np.full((1, 3), np.nan)), r"row 0 of points holds NaN"),
    "levels": (lambda: bi_lipschitz(lambda z: z, np.zeros((1, 3)), quantiles=(2,)), r"quantiles=\(2,\) is not allowed"),
    "chunks": (lambda: bi_lipschitz(lambda z: z, np.zeros((1, 3)), chunk_size=0), r"chunk_size=0 is not allowed"),
    "bound": (lambda: rigid_bound(-0.1), r"L=-0.1 is not allowed"),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named_with_the_remedy(case):
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_all_that_is_public_is_documented():
    for name in identifiability.__all__:
        assert getattr(identifiability, name).__doc__, name


@pytest.mark.parametrize("scale", [1e-12, 1e9])
def test_scores_of_codes_do_not_hang_on_the_scale_of_a_latent(scale):
    rng = np.random.default_rng(0)
    sources = rng.integers(0, 4, (400, 3))
    latents = sources + 0.1 * rng.normal(size=(400, 3))
    one, other = (dci(sources, x, n_trees=20) for x in (latents, latents * scale + 3 * scale))
    assert other["disentanglement"] == pytest.approx(one["disentanglement"], abs=0.02)
    uneven = np.column_stack([latents, scale * rng.normal(size=400)])
    even = np.column_stack([latents, uneven[:, 3] / scale])
    assert infomec(sources, uneven)["infoe_converged"] == pytest.approx(
        infomec(sources, even)["infoe_converged"], abs=1e-3
    )
