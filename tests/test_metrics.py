import itertools
import tracemalloc
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import f_oneway
from sklearn.metrics import average_precision_score

from cellica import metrics, ranks
from cellica.metrics import Pairs

small_profiles = st.integers(4, 6).flatmap(
    lambda n: st.tuples(
        hnp.arrays(np.int64, (n, 3), elements=st.integers(-2, 2)),
        hnp.arrays(np.int64, n, elements=st.integers(-1, 1)),
        hnp.arrays(np.int64, n, elements=st.integers(0, 1)),
    )
)


def replicates(label, batch):
    return Pairs([label], [batch]), Pairs([], [label, batch])


def naive(x, label, batch, tie=metrics.TIE):
    """AP averaged over every order of tied candidates, pair by pair."""
    x = x.astype(float)
    usable = [i for i in range(len(x)) if len(set(x[i])) > 1]
    value = np.full(len(x), np.nan)
    for i in usable:
        candidates = [j for j in usable if j != i and batch[j] != batch[i] and min(label[i], label[j]) >= 0]
        cosine = {j: x[i] @ x[j] / np.sqrt((x[i] @ x[i]) * (x[j] @ x[j])) for j in candidates}
        found = []
        for order in itertools.permutations(candidates):
            if all(cosine[a] > cosine[b] - tie for a, b in itertools.pairwise(order)):
                hits = np.array([label[j] == label[i] for j in order], dtype=float)
                if hits.any():
                    found.append((np.cumsum(hits) / (1 + np.arange(len(hits))))[hits > 0].mean())
        if found:
            value[i] = np.mean(found)
    return value


# ---------------------------------------------------------------------------------------------- average precision


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_labels", [3, 60])  # positives sorted, positives counted
def test_average_precision_is_scikit_learns_without_ties(seed, n_labels):
    rng = np.random.default_rng(seed)
    x, label, batch = rng.normal(size=(150, 24)), rng.integers(n_labels, size=150), rng.integers(4, size=150)
    result = metrics.average_precision(x, *replicates(label, batch), chunk_size=64)
    units = x / np.linalg.norm(x, axis=1, keepdims=True)
    compared = 0
    for i in range(150):
        seen = batch != batch[i]
        positive = label[seen] == label[i]
        cosine = units[seen] @ units[i]
        if np.diff(np.sort(cosine)).min() <= metrics.TIE:
            continue
        assert result.n_pos[i] == positive.sum()
        assert result.n_neg[i] == (~positive).sum()
        if positive.any():
            compared += 1
            expected = average_precision_score(positive, cosine)
            assert result.value[i] == pytest.approx(expected, abs=1e-12)
        else:
            assert np.isnan(result.value[i])
    assert compared > 60


@settings(deadline=None, max_examples=40)
@given(small_profiles)
def test_ties_are_averaged_over_all_orders(case):
    x, label, batch = case
    result = metrics.average_precision(x, *replicates(label, batch))
    np.testing.assert_allclose(result.value, naive(x, label, batch), atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(small_profiles, st.randoms(use_true_random=False), st.floats(1e-30, 1e30))
def test_row_order_and_positive_scale_change_nothing(case, random, scale):
    x, label, batch = case
    before = metrics.average_precision(x, *replicates(label, batch)).value
    order = random.sample(range(len(x)), len(x))
    scales = np.array([random.choice([scale, 1.0]) for _ in x])[:, None]
    after = metrics.average_precision((x * scales)[order], *replicates(label[order], batch[order]), chunk_size=2).value
    np.testing.assert_allclose(after, before[order], atol=1e-12)


@pytest.mark.parametrize("n_pos", [1, 20])  # counted, sorted
@pytest.mark.parametrize(("gap", "expected"), [(5e-7, 1.0), (-5e-7, None), (5e-8, "tied"), (-5e-8, "tied")])
def test_ties_end_at_1e_7_where_float32_cannot_tell(n_pos, gap, expected):
    cosine = np.r_[np.full(n_pos, 0.5 + gap), np.full(10, 0.5)]
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(200, 200)))[0]
    x = np.zeros((len(cosine) + 1, 200))
    x[0, 0], x[1:, 0] = 1, cosine
    x[np.arange(1, len(x)), np.arange(1, len(x))] = np.sqrt(1 - cosine**2)
    far = np.zeros((1500, 200))  # with them, few enough are near for float32 to be used
    far[:, 1:] = np.random.default_rng(1).normal(size=(1500, 199))
    x = np.vstack([x, far])
    label = np.r_[0, np.zeros(n_pos, dtype=int), np.ones(1510, dtype=int)]
    value = metrics.average_precision(x @ rotation, Pairs([label]), Pairs([], [label]), queries=np.array([0])).value
    last = np.mean(np.arange(1, n_pos + 1) / np.arange(11, n_pos + 11))
    tied = metrics.chance_average_precision(n_pos, 10)
    assert value[0] == pytest.approx({None: last, "tied": tied}.get(expected, expected), abs=1e-9)


@pytest.mark.parametrize("fill", [0.0, 3.0, np.nan, np.inf])
def test_rows_without_direction_are_left_out(fill):
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(40, 8)), np.repeat(np.arange(10), 4)
    bad = np.arange(0, 40, 5)
    good = np.setdiff1d(np.arange(40), bad)
    broken = x.copy()
    broken[bad] = fill
    result = metrics.average_precision(broken, Pairs([label]), Pairs([], [label]))
    alone = metrics.average_precision(x[good], Pairs([label[good]]), Pairs([], [label[good]]))
    np.testing.assert_allclose(result.value[good], alone.value, atol=1e-12)
    assert np.isnan(result.value[bad]).all()
    assert not result.n_pos[bad].any()


@pytest.mark.parametrize("kind", ["zero", "identical", "float16 overflow"])
def test_an_embedding_that_says_nothing_is_never_right(kind):
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(20), 4)
    row = rng.normal(size=16)
    with np.errstate(over="ignore"):
        x = {
            "zero": np.zeros((80, 16)),
            "identical": np.tile(row, (80, 1)),
            "float16 overflow": ((1000 + rng.normal(size=(80, 16))) * 300).astype(np.float16),
        }[kind]
    result = metrics.average_precision(x, Pairs([label]), Pairs([], [label]))
    if kind == "identical":
        np.testing.assert_allclose(result.value, metrics.chance_average_precision(3, 76), rtol=1e-9)
    else:
        assert np.isnan(result.value).all()


def test_noise_scores_at_chance():
    rng = np.random.default_rng(1)
    label = rng.permutation(np.repeat(np.arange(200), 5))
    result = metrics.average_precision(rng.normal(size=(1000, 64)), Pairs([label]), Pairs([], [label]))
    chance = metrics.chance_average_precision(result.n_pos, result.n_neg)
    error = result.value.std() / np.sqrt(len(label))
    assert abs(result.value.mean() - chance.mean()) < 4 * error
    assert result.value.mean() - 4 / 999 > 4 * error  # the share of positives is no chance level


@pytest.mark.parametrize(("n_pos", "n_neg"), [(1, 0), (1, 1), (2, 3), (3, 2), (1, 5), (4, 0)])
def test_chance_is_the_mean_over_all_rankings(n_pos, n_neg):
    n = n_pos + n_neg
    values = []
    for places in itertools.combinations(range(1, n + 1), n_pos):
        values.append(np.mean([(k + 1) / place for k, place in enumerate(places)]))
    assert metrics.chance_average_precision(n_pos, n_neg) == pytest.approx(np.mean(values), abs=1e-12)
    assert np.isnan(metrics.chance_average_precision(0, 3))


def test_missing_codes_pair_with_nothing():
    label, batch = np.array([0, 0, 0, -1, -1, 1]), np.array([0, 1, -1, 0, 1, 1])
    positive, negative = replicates(label, batch)
    rows = np.arange(6)
    assert np.argwhere(positive.mask(rows, rows)).tolist() == [[0, 1], [1, 0]]
    assert np.argwhere(negative.mask(rows, rows)).tolist() == [[0, 5], [5, 0]]


def test_queries_and_candidates_are_chosen():
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(30, 5)), rng.integers(3, size=30)
    queries, candidates = np.array([7, 2]), np.arange(10, 30)
    result = metrics.average_precision(x, Pairs([label]), Pairs([], [label]), queries=queries, candidates=candidates)
    cosine = metrics.unit_rows(x)[queries] @ metrics.unit_rows(x)[candidates].T
    expected = [average_precision_score(label[candidates] == label[q], cosine[i]) for i, q in enumerate(queries)]
    np.testing.assert_allclose(result.value, expected, atol=1e-12)


def test_memory_stays_far_below_all_pairs():
    n = 5000
    rng = np.random.default_rng(0)
    x, label = rng.normal(size=(n, 8)).astype(np.float32), np.arange(n) // 3
    tracemalloc.start()
    metrics.average_precision(x, Pairs([label]), Pairs([], [label]), queries=np.arange(0, n, 4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * n * 4 / 4


# ---------------------------------------------------------------------------------------------- nearest neighbour


def test_nearest_neighbor_by_hand():
    x = np.array([[1, 0.1], [1, 0.2], [0, 1.0], [0, 0], [0.1, 1]])
    label, group = np.array([0, 0, 1, 1, 1]), np.array([0, 1, 2, 3, 4])
    value, chance = metrics.nearest_neighbor(x, Pairs([label], [group]), Pairs([], [label, group]))
    np.testing.assert_array_equal(value, [1, 1, 1, np.nan, 1])
    np.testing.assert_allclose(chance, [1 / 3, 1 / 3, 1 / 3, np.nan, 1 / 3])


def test_tied_neighbors_share_the_answer():
    x = np.array([[1, 0, 1.0], [1, 0, 0], [0, 0, 1]])
    label = np.array([0, 0, 1])
    value, _ = metrics.nearest_neighbor(x, Pairs([label]), Pairs([], [label]))
    np.testing.assert_array_equal(value, [0.5, 1, np.nan])


# ---------------------------------------------------------------------------------------------- known relationships


@pytest.mark.parametrize("source", ["CORUM", "HuMAP", "Reactome", "SIGNOR", "StringDB"])
def test_recall_is_the_public_one(shared, source):
    table = pd.read_csv(shared / "reference/efaar/relationship_map.csv.gz")
    expected = pd.read_csv(shared / "reference/efaar/relationship_recall.csv").set_index("source").loc[source]
    pairs = pd.read_csv(shared / f"data/efaar_truth/{source}.txt").to_numpy()
    recall = metrics.relationship_recall(table.iloc[:, 1:].to_numpy(), list(table["gene"]), pairs, chunk_size=300)
    assert recall.n_pairs == expected["query_distribution_size"]
    assert recall.null_size == expected["null_distribution_size"]
    np.testing.assert_allclose(recall.value, [expected["recall_0.05_0.95"], expected["recall_0.1_0.9"]], atol=1e-8)


def test_recall_counts_pairs_once_and_leaves_out_strangers():
    x = np.random.default_rng(0).normal(size=(30, 6))
    x[1] = x[0] + 0.01
    names = [f"G{i}" for i in range(30)]
    once = metrics.relationship_recall(x, names, np.array([["G0", "G1"]], dtype=object))
    many = [["G0", "G1"], ["G1", "G0"], ["G2", "G2"], ["G3", "elsewhere"]]
    again = metrics.relationship_recall(x, names, np.array(many, dtype=object))
    assert once.n_pairs == again.n_pairs == 1
    np.testing.assert_array_equal(once.value, again.value)
    assert once.value.tolist() == [1, 1]
    nothing = metrics.relationship_recall(x, names, np.array(many[2:], dtype=object))
    assert nothing.n_pairs == 0
    assert np.isnan(nothing.value).all()


def test_recall_of_chance_pairs_is_chance():
    rng = np.random.default_rng(0)
    names = [str(i) for i in range(200)]
    pairs = np.array(list(itertools.combinations(names, 2)), dtype=object)
    recall = metrics.relationship_recall(rng.normal(size=(200, 10)), names, pairs, chunk_size=64)
    np.testing.assert_allclose(recall.value, [0.1, 0.2], atol=2e-4)


# ---------------------------------------------------------------------------------------------- variance shares


def by_regression(y, groups, strata):
    """1 - (residual mean square of groups and strata) / (residual mean square of strata), by least squares."""

    def mean_square(*factors):
        design = np.column_stack([f[:, None] == np.unique(f) for f in factors]).astype(float)
        residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
        return (residual**2).sum(axis=0) / (len(y) - np.linalg.matrix_rank(design))

    return 1 - mean_square(strata, groups) / mean_square(strata)


def test_adjusted_eta2_is_that_of_one_way_anova():
    rng = np.random.default_rng(0)
    group = rng.integers(5, size=60)
    y = rng.normal(size=(60, 3)) + group[:, None] * [0, 0.3, 2]
    n, k = 60, 5
    f = np.array([f_oneway(*(column[group == g] for g in range(k))).statistic for column in y.T])
    eta2 = f * (k - 1) / (f * (k - 1) + n - k)
    np.testing.assert_allclose(metrics.adjusted_eta2(y, group), 1 - (1 - eta2) * (n - 1) / (n - k), atol=1e-12)


@pytest.mark.parametrize("design", ["nested", "crossed"])
def test_adjusted_eta2_within_strata(design):
    rng = np.random.default_rng(0)
    if design == "nested":
        group = rng.integers(9, size=120)
        stratum = group // 3
    else:
        group, stratum = np.divmod(np.tile(np.arange(12), 10), 3)
    y = rng.normal(size=(120, 4)) + 50.0 * stratum[:, None] + rng.normal(size=(9, 4))[group]
    share = metrics.adjusted_eta2(y, group, stratum)
    np.testing.assert_allclose(share, by_regression(y, group, stratum), atol=1e-10)
    only_strata = metrics.adjusted_eta2(50.0 * stratum[:, None] + rng.normal(size=(120, 200)), group, stratum)
    assert abs(only_strata.mean()) < 0.02


def test_adjusted_eta2_of_noise_is_zero_on_average():
    y = np.random.default_rng(0).normal(size=(60, 2000))
    group = np.arange(60) // 2
    assert abs(metrics.adjusted_eta2(y, group).mean()) < 0.02  # eta^2 itself is 29 / 59


@pytest.mark.parametrize(
    ("groups", "strata"),
    [(["a"] * 6, None), (list("abcdef"), None), (list("aabbcc"), list("aabbcc")), ([None] * 6, None)],
    ids=["a single group", "a row a group", "strata are groups", "all missing"],
)
def test_adjusted_eta2_where_nothing_can_be_said(groups, strata):
    y = np.random.default_rng(0).normal(size=(6, 2))
    strata = None if strata is None else np.array(strata)
    assert np.isnan(metrics.adjusted_eta2(y, np.array(groups, dtype=object), strata)).all()


def test_adjusted_eta2_leaves_missing_rows_and_constant_columns_out():
    rng = np.random.default_rng(0)
    y = np.column_stack([rng.normal(size=40), np.full(40, 0.1)])
    group = np.array([*"ab" * 20], dtype=object)
    group[[3, 8]] = None, np.nan
    known = [i for i in range(40) if i not in (3, 8)]
    share = metrics.adjusted_eta2(y, group)
    assert share[0] == pytest.approx(metrics.adjusted_eta2(y[known, :1], group[known])[0])
    assert np.isnan(share[1])


@given(hnp.arrays(np.float64, (12, 2), elements=st.floats(-100, 100)), st.floats(0.5, 100), st.floats(-100, 100))
@settings(deadline=None, max_examples=30)
def test_adjusted_eta2_ignores_units(y, scale, offset):
    y = np.round(y, 3)
    group = np.arange(12) % 3
    before, after = metrics.adjusted_eta2(y, group), metrics.adjusted_eta2(y * scale + offset, group)
    np.testing.assert_allclose(after, before, atol=1e-6)
    assert not (before > 1 + 1e-12).any()


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_cluster_interval_is_that_of_units_not_of_values(seed, n_values):
    """Of means: the normal one. The same value many times over tells no more than once."""
    rng = np.random.default_rng(seed)
    values, units = rng.normal(size=300), rng.permutation(300)
    low, high = metrics.cluster_interval(values, units, random_state=seed)
    half = 1.96 * values.std() / 300**0.5
    np.testing.assert_allclose([low, high], [values.mean() - half, values.mean() + half], atol=0.2 * half)
    again = metrics.cluster_interval(values.repeat(n_values), units.repeat(n_values), random_state=seed)
    np.testing.assert_allclose(again, (low, high))


def test_cluster_interval_weighs_units_by_their_values():
    values, units = np.array([0.0] * 90 + [1.0] * 10), np.arange(100) // 10
    assert metrics.cluster_interval(values, units) == (0.0, pytest.approx(0.3))


def test_one_unit_has_no_interval():
    assert np.isnan(metrics.cluster_interval(np.arange(4.0), np.zeros(4))).all()


@pytest.mark.parametrize(("n_pos", "n_neg"), [(1, 1), (2, 5), (5, 2), (3, 300), (4, 0)])
def test_random_rankings_have_the_analytic_mean(n_pos, n_neg):
    drawn = metrics.random_average_precision(n_pos, n_neg, 20_000, np.random.default_rng(0))
    expected = metrics.chance_average_precision(np.array(n_pos), np.array(n_neg)) if n_neg else 1.0
    assert drawn.mean() == pytest.approx(expected, abs=5 * drawn.std() / 20_000**0.5 + 1e-12)
    assert drawn.min() > 0
    assert drawn.max() <= 1


# ------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ties", [False, True])
def test_torch_counts_what_numpy_counts(device, ties):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 6)).astype(np.float32)
    x = np.sign(x) if ties else x
    x[5] = 0
    label, batch = rng.integers(-1, 40, 300), rng.integers(0, 4, 300)
    positive, negative = metrics.Pairs([label], [batch]), metrics.Pairs([], [label, batch])
    some = {"queries": rng.permutation(300)[:200], "candidates": rng.permutation(300)}
    here = metrics.average_precision(x, positive, negative, **some)
    there = metrics.average_precision(x, positive, negative, **some, counter=partial(ranks.counter, device=device))
    np.testing.assert_array_equal(there.n_pos, here.n_pos)
    np.testing.assert_array_equal(there.n_neg, here.n_neg)
    np.testing.assert_allclose(there.value, here.value, atol=1e-12)
