from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier

from cellica import metrics, probes


def two_class_problems(n_shared=200, sizes=(5, 40, 17), n_features=30, effect=0.5, seed=0):
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(n_features, n_features))
    own = [rng.normal(size=(n, n_features)) + effect * rng.normal(size=n_features) for n in sizes]
    rows = np.vstack([rng.normal(size=(n_shared, n_features)), *own]) @ mix
    rows = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    starts = np.append(0, np.cumsum(sizes))
    return probes.Problems(rows[:n_shared], rows[n_shared:], np.ones(sum(sizes)), starts)


def peer(problems, p, C):
    part = slice(problems.starts[p], problems.starts[p + 1])
    kept = slice(None) if problems.kept is None else problems.kept[:, p] > 0
    x = np.vstack([problems.shared[kept], problems.own[part]])
    y = np.append(np.full(len(problems.shared[kept]), -1), problems.sign[part])
    return LogisticRegression(C=C, tol=1e-10, max_iter=100_000).fit(x, y)


@pytest.mark.parametrize("C", [1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("n_shared", [200, 12], ids=["more rows than features", "fewer"])
def test_logistic_regressions_are_those_of_scikit_learn(C, n_shared):
    problems = two_class_problems(n_shared)
    found = probes.logistic_regressions(problems, C)
    for p in range(3):
        model = peer(problems, p, C)
        np.testing.assert_allclose(found[p, :-1], model.coef_[0], atol=1e-4)
        np.testing.assert_allclose(found[p, -1], model.intercept_[0], atol=5e-4)


def test_logistic_regressions_take_own_negatives_and_leave_out_shared_ones():
    problems = two_class_problems()
    rng = np.random.default_rng(1)
    sign = np.where(rng.random(len(problems.sign)) < 0.4, -1.0, 1.0)
    problems = problems._replace(sign=sign, kept=(rng.random((200, 3)) < 0.8).astype(float))
    C = np.array([0.01, 0.1, 1.0])
    found = probes.logistic_regressions(problems, C)
    for p in range(3):
        np.testing.assert_allclose(found[p, :-1], peer(problems, p, C[p]).coef_[0], atol=1e-4)
    warm = probes.logistic_regressions(problems, C, start=found)
    np.testing.assert_allclose(warm, found, atol=1e-5)


def test_many_problems_are_solved_in_parts(monkeypatch):
    problems = two_class_problems(sizes=(4,) * 25)
    whole = probes.logistic_regressions(problems, 0.1)
    monkeypatch.setattr(probes, "MARGINS_AT_ONCE", 1000)
    np.testing.assert_allclose(probes.logistic_regressions(problems, 0.1), whole, atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_mean_share_below_is_the_auroc_of_scikit_learn(positive, negative):
    y = np.append(np.ones(len(positive)), np.zeros(len(negative)))
    expected = roc_auc_score(y, np.array([*positive, *negative], dtype=float))
    assert probes.share_below(np.array(positive), np.array(negative)).mean() == pytest.approx(expected)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 40), st.integers(0, 100))
def test_sparsity_is_between_equal_weights_and_one(n, seed):
    w = np.random.default_rng(seed).normal(size=(3, n))
    one, equal = np.eye(n)[:1], np.ones((1, n))
    for measure, least in ((probes.hoyer_sparsity, 0), (probes.top_share, np.ceil(n / 4) / n)):
        assert (measure(w) >= least - 1e-9).all()
        assert (measure(w) <= 1 + 1e-9).all()
        np.testing.assert_allclose(measure(-3 * w), measure(w))
        assert measure(one)[0] == pytest.approx(1)
        assert measure(equal)[0] == pytest.approx(least)
    assert np.isnan(probes.hoyer_sparsity(np.zeros((1, n)))).all()
    assert np.isnan(probes.top_share(np.zeros((1, n)))).all()


# ---------------------------------------------------------------------------------------------- batches left out


def plates(effect, seed=0, n_batches=4, n_labels=6, n_features=24, batch_effect=1.0):
    """Each batch: 20 controls and 4 wells of each of the perturbations."""
    rng = np.random.default_rng(seed)
    label = np.tile(np.append(np.full(20, -1), np.repeat(np.arange(n_labels), 4)), n_batches)
    batch = np.repeat(np.arange(n_batches), len(label) // n_batches)
    x = rng.normal(size=(len(label), n_features)) + batch_effect * rng.normal(size=(n_batches, n_features))[batch]
    x += np.where(label[:, None] >= 0, effect * rng.normal(size=(n_labels, n_features))[label], 0)
    return x, label, batch


@pytest.mark.parametrize("n_features", [24, 150], ids=["fewer features than wells", "more"])
def test_held_out_probes_are_the_nested_loop_of_scikit_learn(n_features):
    x, label, batch = plates(0.7, n_features=n_features)
    found = probes.held_out_probes(x, label, batch, batch, held=2, Cs=(1e-3, 1e-1))
    training = batch != 2
    z = (x - x[training].mean(axis=0)) / x[training].std(axis=0)

    def scored(fit, asked, p, C):
        rows, others = (mask & ((label < 0) | (label == p)) for mask in (fit, asked))
        model = LogisticRegression(C=C, tol=1e-10, max_iter=100_000).fit(z[rows], label[rows] >= 0)
        return roc_auc_score(label[others] >= 0, z[others] @ model.coef_[0]), model.coef_

    for i, p in enumerate(found.label):
        inner = {
            C: np.mean([scored(training & (batch != b), batch == b, p, C)[0] for b in (0, 1, 3)]) for C in (1e-3, 1e-1)
        }
        assert inner[found.C[i]] == pytest.approx(max(inner.values()))
        area, weights = scored(training, ~training, p, found.C[i])
        assert found.auroc[i] == pytest.approx(area, abs=1e-9)
        assert found.hoyer[i] == pytest.approx(probes.hoyer_sparsity(weights)[0], abs=1e-3)
        assert found.top_share[i] == pytest.approx(probes.top_share(weights)[0], abs=1e-3)
    assert found.label.tolist() == list(range(6))
    assert set(found.n_perturbed) == {4}
    assert set(found.n_controls) == {20}


def test_held_out_auroc_rises_with_the_effect_and_is_half_without():
    def mean(effect):
        return np.mean(
            [
                probes.held_out_probes(*plates(effect, seed), plates(effect, seed)[2], 0).auroc.mean()
                for seed in range(12)
            ]
        )

    nothing, weak, strong = mean(0), mean(0.4), mean(1.5)
    assert abs(nothing - 0.5) < 0.06
    assert nothing + 0.1 < weak < strong - 0.05
    assert strong > 0.95


def test_weights_of_a_sparse_effect_are_sparser_than_those_of_permuted_labels():
    x, label, batch = plates(0)
    x[label >= 0, 3] += 6.0
    found = probes.held_out_probes(x, label, batch, batch, 1)
    assert found.auroc.mean() > 0.97
    assert found.hoyer.mean() > found.permuted_hoyer.mean() + 0.1
    assert found.top_share.mean() > found.permuted_top_share.mean() + 0.05


def test_nothing_is_probed_without_controls_or_training_wells():
    x, label, batch = plates(1.0)
    assert not len(probes.held_out_probes(x, np.maximum(label, 0), batch, batch, 0).label)
    only_there = np.where(batch == 0, label, -1)
    assert not len(probes.held_out_probes(x, only_there, batch, batch, 0).label)
    two = batch < 2
    assert set(probes.held_out_probes(x[two], label[two], batch[two], batch[two], 0).C) == {probes.DEFAULT_C}


def test_batches_are_dealt_evenly_within_strata():
    batch = np.repeat(np.arange(51), 3)
    stratum = np.repeat([0] * 11 + [1] * 24 + [2] * 11 + [3] * 5, 3)
    group = probes.batch_groups(batch, stratum)
    assert set(group) == set(range(10))
    assert pd_counts(group[stratum == 3]) == {3}
    assert pd_counts(group[stratum == 1]) == {6, 9}
    shuffled = np.random.default_rng(0).permutation(len(batch))
    np.testing.assert_array_equal(probes.batch_groups(batch[shuffled], stratum[shuffled]), group[shuffled])
    assert (probes.batch_groups(batch, stratum, most=51) == batch).all()
    assert (probes.batch_groups(batch, stratum, random_state=1) != group).any()


def pd_counts(values):
    return set(np.unique(values, return_counts=True)[1].tolist())


# ---------------------------------------------------------------------------------------------- many classes


def classes(n_classes=8, n_each=6, n_features=15, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    code = np.repeat(np.arange(n_classes), 2 * n_each)
    mix = rng.normal(size=(n_features, n_features))
    x = spread * rng.normal(size=(n_classes, n_features))[code] + rng.normal(size=(len(code), n_features)) @ mix * 0.5
    train = np.tile([True, False], len(code) // 2)
    return x[train], code[train], x[~train], code[~train]


@pytest.mark.parametrize("k", [1, 3])
def test_neighbor_votes_are_those_of_scikit_learn(k):
    x, code, queries, right = classes()
    votes = np.zeros((len(queries), 8))
    for rows, found in probes.neighbor_votes(x, code, 8, queries, k=k):
        votes[rows] = found
    model = KNeighborsClassifier(k, metric="cosine").fit(x, code)
    near = model.kneighbors(queries, return_distance=False)
    np.testing.assert_array_equal(votes, np.stack([np.bincount(code[row], minlength=8) for row in near]))
    (hits,) = probes.expected_hits(probes.neighbor_votes(x, code, 8, queries, k=k), right)
    if k == 1:
        assert hits.mean() == pytest.approx(model.score(queries, right))
    best = votes.max(axis=1)
    tied = (votes == best[:, None]).sum(axis=1)
    np.testing.assert_allclose(hits, (votes[np.arange(len(right)), right] == best) / tied)


def test_neighbors_are_found_by_blocks_of_columns():
    rng = np.random.default_rng(0)
    similarity = np.round(rng.normal(size=(7, 1000)), 1)
    row, column, value = probes._at_least_nearest(similarity, 3)
    for i in range(7):
        mine = value[row == i]
        np.testing.assert_array_equal(mine, similarity[i, column[row == i]])
        np.testing.assert_array_equal(mine[:3], np.sort(similarity[i])[::-1][:3])
        assert np.count_nonzero(mine >= mine[2]) == np.count_nonzero(similarity[i] >= mine[2])
    assert len(row) < similarity.size / 4


def test_ties_of_neighbors_are_worth_their_expected_value():
    x = np.array([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 1.0], [1.0, 0.9]])
    code, k = np.array([0, 0, 1, 2, 1]), 3  # the first three are tied
    queries = np.array([[1.0, 0.0], [1.0, 0.9]])
    right = np.array([0, 0])
    (hits,) = probes.expected_hits(probes.neighbor_votes(x, code, 3, queries, k=k), right)
    fair = []
    for first, tied in (([0, 1, 2], []), ([4], [0, 1, 2])):
        ends = [np.bincount(code[[*first, *more]], minlength=3) for more in combinations(tied, k - len(first))]
        fair.append(np.mean([(one[0] == one.max()) / (one == one.max()).sum() for one in ends]))
    np.testing.assert_allclose(hits, fair, atol=0.05)
    (one,) = probes.expected_hits(
        probes.neighbor_votes(np.ones((30, 2)) * [1, 2], np.arange(30) % 3, 3, queries), right
    )
    assert one == pytest.approx(1 / 3, abs=0.1)  # identical rows: chance
    (few,) = probes.expected_hits(probes.neighbor_votes(x, code, 3, queries, k=50), right)
    assert few == pytest.approx(1 / 2)  # all five rows: two votes each for 0 and 1


@pytest.mark.parametrize("n_features", [15, 80], ids=["fewer features than rows", "more"])
def test_discriminants_are_those_of_scikit_learn(monkeypatch, n_features):
    x, code, queries, right = classes(spread=0.5, n_features=n_features)
    monkeypatch.setattr(probes, "ledoit_wolf_shrinkage", lambda *_, **__: 0.1)
    scale = x.std(axis=0)
    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.1).fit(x / scale, code)
    expected = model.decision_function(queries / scale)
    found = np.vstack([scores for _, scores in probes.discriminants(x, code, 8, queries)])
    np.testing.assert_allclose(
        found - found.mean(axis=1, keepdims=True), expected - expected.mean(axis=1, keepdims=True), atol=1e-5
    )
    (hits,) = probes.expected_hits(probes.discriminants(x, code, 8, queries), right)
    assert hits.mean() == pytest.approx(model.score(queries / scale, right))


@pytest.mark.parametrize("classify", [probes.neighbor_votes, probes.discriminants, probes.class_mean_cosines])
def test_classifiers_find_classes_and_are_at_chance_without_them(classify):
    def accuracy(spread, seed):
        x, code, queries, right = classes(20, spread=spread, seed=seed)
        return probes.expected_hits(classify(x, code, 20, queries), right)[0].mean()

    assert accuracy(3.0, 0) > 0.9
    assert np.mean([accuracy(0.0, seed) for seed in range(20)]) == pytest.approx(1 / 20, abs=0.015)


def test_one_row_a_class_and_identical_rows_are_classified():
    x, code = np.eye(4), np.arange(4)
    for classify in (probes.neighbor_votes, probes.discriminants, probes.class_mean_cosines):
        scores = classify(x, code, 4, x, k=1) if classify is probes.neighbor_votes else classify(x, code, 4, x)
        assert probes.expected_hits(scores, code)[0] == pytest.approx(1)
    same = np.ones((6, 3)) * [1, 2, 3]
    assert probes.expected_hits(probes.discriminants(same, np.arange(6) % 3, 3, same), np.arange(6) % 3)[
        0
    ] == pytest.approx(1 / 3)


def test_choices_limit_the_classes_to_choose_from():
    scores = [(np.arange(2), np.array([[3.0, 2.0, 1.0, 0.0], [0.0, 0.0, 5.0, 5.0]]))]
    allowed = np.array([[False, True, True, False], [True, True, False, False]])
    whole, among = probes.expected_hits(iter(scores), np.array([1, 1]), [None, allowed])
    assert whole.tolist() == [0.0, 0.0]
    assert among.tolist() == [1.0, 0.5]


def test_zero_rows_point_nowhere():
    assert not metrics.usable_rows(np.zeros((1, 3))).any()
    x, code, queries, right = classes()
    queries[0] = 0
    (hits,) = probes.expected_hits(probes.class_mean_cosines(x, code, 8, queries), right)
    assert hits[0] == pytest.approx(1 / 8)
