import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from scipy.stats import ks_2samp
from sklearn.metrics import average_precision_score, roc_auc_score

from cellica import maps, metrics
from cellica.extremes import extremes


def simple_recall(x, names, pairs, thresholds):
    """As it is defined: ranks of each pair's cosine in the sorted cosines of all pairs."""
    units = metrics.unit_rows(x)
    upper = np.triu_indices(len(x), 1)
    null = np.sort(np.vecdot(units[upper[0]], units[upper[1]]))
    place = {name: i for i, name in enumerate(names)}
    asked = sorted({tuple(sorted((place[a], place[b]))) for a, b in pairs if a in place and b in place and a != b})
    query = np.array([np.vecdot(units[i], units[j]) for i, j in asked])
    left, right = (np.searchsorted(null, query, side=side) / len(null) for side in ("left", "right"))
    return [np.mean((right <= low) | (left >= high)) for low, high in thresholds]


# ---------------------------------------------------------------------------------------------- recall


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(3, 60),
    d=st.integers(2, 8),
    chunk=st.integers(1, 70),
    seed=st.integers(0, 10**6),
    repeat=st.booleans(),
    thresholds=st.lists(st.tuples(st.integers(0, 49), st.integers(51, 100)), min_size=1, max_size=3),
)
def test_recall_of_several_sources_is_its_definition(n, d, chunk, seed, repeat, thresholds):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    if repeat:  # tied cosines
        x = x[rng.integers(max(n // 3, 2), size=n)]
    names = [f"G{i}" for i in range(n)]
    sources = [np.array(names, dtype=object)[rng.integers(n, size=(size, 2))] for size in (1, 5, 40)]
    sources.append(np.array([["elsewhere", "G0"]], dtype=object))
    ends = [(low / 100, high / 100) for low, high in thresholds]
    found = metrics.relationship_recalls(x, names, sources, thresholds=ends, chunk_size=chunk)
    for recall, pairs in zip(found, sources):
        if recall.n_pairs:
            np.testing.assert_allclose(recall.value, simple_recall(x, names, pairs, ends), atol=1e-12)
        else:
            assert np.isnan(recall.value).all()


def test_order_statistics_are_exact_in_chunks_of_any_size():
    rng = np.random.default_rng(0)
    units = metrics.unit_rows(rng.normal(size=(700, 24)))
    upper = np.triu_indices(700, 1)
    null = np.vecdot(units[upper[0]], units[upper[1]])
    ranks = np.array([0, 5, 12_232, 100_000, len(null) - 12_233, len(null) - 1])
    codes = np.sort(upper[0] * 700 + upper[1])[::37]
    for chunk in (64, 700):
        found = extremes(units, codes, ranks, chunk_size=chunk)
        np.testing.assert_array_equal(found.ends, np.sort(null)[ranks])
        np.testing.assert_allclose(found.similarity, np.vecdot(units[codes // 700], units[codes % 700]), atol=1e-6)


def test_a_map_of_few_different_cosines_is_ranked_all_the_same():
    x = np.repeat(np.eye(4), 50, axis=0)  # cosines are 0 or 1
    names = [f"G{i}" for i in range(200)]
    pairs = np.array([["G0", "G1"], ["G0", "G60"]], dtype=object)
    recall = metrics.relationship_recall(x, names, pairs)
    np.testing.assert_allclose(recall.value, simple_recall(x, names, pairs, metrics.THRESHOLDS))


def test_interval_over_genes_covers_recall_and_is_wider_than_over_pairs():
    rng = np.random.default_rng(1)
    covered, width, naive = [], [], []
    for _ in range(60):
        of_gene = rng.random(80) < 0.35  # genes whose pairs are recalled
        pairs = np.array([pair for pair in itertools.combinations(range(80), 2) if rng.random() < 0.1])
        hit = (of_gene[pairs].sum(axis=1) + rng.random(len(pairs))) > 1.2
        low, high, n = maps.pair_interval(pairs, hit[:, None], n_bootstraps=300)
        covered.append(low[0] <= 0.35**2 + 2 * 0.35 * 0.65 * 0.8 <= high[0])
        width.append(high[0] - low[0])
        naive.append(2 * 1.96 * np.sqrt(hit.mean() * (1 - hit.mean()) / len(hit)))
        assert n == len(np.unique(pairs))
    assert np.mean(covered) > 0.85
    assert np.mean(width) > 1.5 * np.mean(naive)


def test_interval_over_genes_needs_genes():
    low, high, n = maps.pair_interval(np.array([[0, 1]]), np.array([[True]]))
    assert np.isnan([low[0], high[0]]).all()
    assert n == 2
    assert maps.pair_interval(np.zeros((0, 2), dtype=int), np.zeros((0, 2), dtype=bool))[2] == 0


# ---------------------------------------------------------------------------------------------- clusters and replicates


def test_clusters_are_scipys_test():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 8))
    x[:12] += 1
    found = maps.cluster_test(x, [np.arange(12), np.arange(20, 35)])
    c = metrics.unit_rows(x) @ metrics.unit_rows(x).T
    expected = ks_2samp(c[:12, :12][np.triu_indices(12, 1)], c[:12, 12:].ravel())
    assert found.statistic[0] == pytest.approx(expected.statistic)
    assert found.p[0] == pytest.approx(expected.pvalue)
    assert found.within[0] > 0.3 > found.within[1]


def test_mean_cosine_is_that_of_all_pairs():
    rng = np.random.default_rng(0)
    x, code = rng.normal(size=(40, 6)), np.r_[np.repeat(np.arange(6), 6), 6, 7, 7, 7]
    c = metrics.unit_rows(x) @ metrics.unit_rows(x).T
    found = maps.mean_cosine(x, code)
    for group in (0, 5, 7):
        rows = np.flatnonzero(code == group)
        assert found[group] == pytest.approx(c[np.ix_(rows, rows)][np.triu_indices(len(rows), 1)].mean())
    assert np.isnan(found[6])


def test_drawn_replicates_are_distinct_and_from_their_pools():
    units = np.repeat(np.eye(6), 2, axis=0)  # each direction twice
    rng = np.random.default_rng(0)
    pools = [np.array([0, 2, 4]), np.array([1, 3, 5])]
    apart = maps.drawn_mean_cosine(units, [pools[0]], [3], 50, rng)
    np.testing.assert_allclose(apart, 0, atol=1e-12)
    across = maps.drawn_mean_cosine(units, pools, [1, 1], 3000, rng)
    assert across.mean() == pytest.approx(1 / 3, abs=0.03)


# ---------------------------------------------------------------------------------------------- energy distance


def simple_energy(x, y):
    across, of_x, of_y = cdist(x, y).mean(), cdist(x, x).sum(), cdist(y, y).sum()
    n, m = len(x), len(y)
    return 2 * across - of_x / n**2 - of_y / m**2, 2 * across - of_x / n / (n - 1) - of_y / m / (m - 1)


@pytest.mark.parametrize("n", [5, 60])
def test_energy_distance_is_its_definition_and_p_that_of_permutations(n):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n + 100, 7))
    x[:n] += 0.2
    groups, controls = [np.arange(n)], np.arange(n, n + 100)
    found = maps.energy_distance(x, groups, controls, n_permutations=400)
    biased, unbiased = simple_energy(x[:n], x[n:])
    assert found.biased[0] == pytest.approx(biased, abs=1e-4)
    assert found.unbiased[0] == pytest.approx(unbiased, abs=1e-6)
    order = [rng.permutation(n + 100) for _ in range(400)]
    null = [simple_energy(x[one[:n]], x[one[n:]])[1] for one in order]
    expected = (1 + np.sum(np.array(null) >= unbiased)) / 401
    assert found.p[0] == pytest.approx(expected, abs=0.08)


def test_energy_of_equal_distributions_is_zero_on_average_and_p_uniform():
    rng = np.random.default_rng(0)
    x = rng.standard_t(4, size=(1600, 5))
    groups = [np.arange(6 * i, 6 * i + 6) for i in range(200)]
    found = maps.energy_distance(x, groups, np.arange(1200, 1600), n_permutations=200)
    assert abs(found.unbiased.mean()) < 3 * found.unbiased.std() / np.sqrt(200) + 0.02
    assert found.biased.mean() > 0.3
    assert 0.02 < np.mean(found.p <= 0.05) < 0.09
    assert 0.4 < found.p.mean() < 0.6


# ---------------------------------------------------------------------------------------------- compounds, arms


@settings(max_examples=60, deadline=None)
@given(p=st.integers(1, 8), q=st.integers(1, 20), seed=st.integers(0, 10**6), ties=st.booleans())
def test_ranking_scores_are_scikit_learns(p, q, seed, ties):
    rng = np.random.default_rng(seed)
    draw = (lambda *shape: rng.integers(4, size=shape).astype(float)) if ties else (lambda *shape: rng.random(shape))
    positives, negatives = draw(p), draw(3, q)
    ap, auroc = maps.ranking_scores(positives, negatives)
    truth = np.r_[np.ones(p), np.zeros(q)]
    for i in range(3):
        scores = np.r_[positives, negatives[i]]
        assert ap[i] == pytest.approx(average_precision_score(truth, scores))
        assert auroc[i] == pytest.approx(roc_auc_score(truth, scores))


def test_arm_means_go_and_biology_stays():
    rng = np.random.default_rng(0)
    arms = np.repeat(np.arange(10), 30)
    arms[-3:] = -1
    arms[-6:-3] = 10  # an arm of three
    pathway = rng.integers(12, size=300)
    x = rng.normal(size=(300, 40)) + 1.5 * rng.normal(size=(11, 40))[arms] + rng.normal(size=(12, 40))[pathway]
    corrected, changed = maps.without_arm_means(x, arms)
    assert changed.sum() == 294
    np.testing.assert_array_equal(corrected[-6:], x[-6:])
    before, after = (np.nanmean(maps.group_auroc(one, arms)) for one in (x, corrected))
    assert before > 0.9
    assert abs(after - 0.5) < 0.1
    assert maps.group_auroc(corrected, pathway).mean() > maps.group_auroc(x, pathway).mean() + 0.05
    basis = np.arange(300) % 2 == 0
    expected = x[:30] - x[:30][basis[:30]].mean(axis=0)
    np.testing.assert_allclose(maps.without_arm_means(x, arms, basis)[0][:30], expected)


def test_auroc_of_groups_is_scikit_learns():
    rng = np.random.default_rng(0)
    x, code = rng.normal(size=(50, 5)), rng.integers(-1, 4, size=50)
    code[0] = 9
    found, similarity = maps.group_auroc(x, code), metrics.unit_rows(x) @ metrics.unit_rows(x).T
    for i in np.flatnonzero((code >= 0) & (code < 9)):
        others = (code >= 0) & (np.arange(50) != i)
        assert found[i] == pytest.approx(roc_auc_score(code[others] == code[i], similarity[i, others]))
    assert np.isnan(found[(code < 0) | (code == 9)]).all()


def test_recall_equals_the_public_one_for_all_sources_at_once(shared):
    table = pd.read_csv(shared / "reference/efaar/relationship_map.csv.gz")
    expected = pd.read_csv(shared / "reference/efaar/relationship_recall.csv").set_index("source")
    sources = [pd.read_csv(shared / f"data/efaar_truth/{name}.txt").to_numpy() for name in expected.index]
    found = metrics.relationship_recalls(table.iloc[:, 1:].to_numpy(), list(table["gene"]), sources)
    np.testing.assert_allclose([one.value for one in found], expected.filter(like="recall"), atol=1e-8)
