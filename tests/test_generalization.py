import anndata as ad
import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier

from cellica import correct, generalization, probes, screen, simulate
from cellica.generalization import OVER_BATCHES, PLATE_GROUP
from cellica.schema import INTERVAL_COLUMNS, SCORE_COLUMNS, InputError
from cellica.scores import PER_QUERY

SCORES = [generalization.holdout_auroc, generalization.knn_accuracy, generalization.probe_accuracy]


def wells(effect=1.0, batch_effect=0.5, n_batches=4, n_labels=8, n_each=3, n_features=16, seed=0):
    """Batches of 12 controls and three wells of each of eight perturbations."""
    rng = np.random.default_rng(seed)
    names = ["DMSO"] * 12 + [f"P{i}" for i in range(n_labels)] * n_each
    one = pd.DataFrame(
        {"perturbation": names, "well": [f"{'ABCDEFGH'[i // 12]}{i % 12 + 1:02d}" for i in range(len(names))]}
    )
    obs = pd.concat([one.assign(experiment=f"E{b:02d}", plate="1") for b in range(n_batches)], ignore_index=True)
    obs["control"] = np.where(obs["perturbation"] == "DMSO", "negative", "")
    obs.index = (obs["experiment"] + "_1_" + obs["well"]).to_numpy(dtype=object)
    code = np.array([-1 if name == "DMSO" else int(name[1:]) for name in obs["perturbation"]])
    x = rng.normal(size=(len(obs), n_features))
    x += batch_effect * rng.normal(size=(n_batches, n_features))[np.repeat(np.arange(n_batches), len(names))]
    x += np.where(code[:, None] >= 0, effect * rng.normal(size=(n_labels, n_features))[code], 0)
    return ad.AnnData(x.astype(np.float32), obs=obs)


def shuffled(adata, seed=0):
    """Labels of treated wells permuted within batches, controls among them."""
    rng = np.random.default_rng(seed)
    obs = adata.obs.copy()
    for _, rows in obs.groupby("experiment").indices.items():
        order = rng.permutation(rows)
        for column in ("perturbation", "control"):
            obs.iloc[rows, obs.columns.get_loc(column)] = adata.obs[column].to_numpy()[order]
    return ad.AnnData(adata.X, obs=obs)


def row(table, metric, group="all"):
    assert list(table.columns) == [*SCORE_COLUMNS, *INTERVAL_COLUMNS]
    found = table[(table["metric"] == metric) & (table["group"] == group)]
    assert len(found) == 1
    return found.iloc[0]


# ---------------------------------------------------------------------------------------------- probes of batches left out


def test_holdout_auroc_is_the_mean_of_its_detail():
    adata = wells()
    detail = generalization.holdout_probes(adata)
    assert len(detail) == 4 * 8
    assert (detail["n_perturbed"] == 3).all()
    assert (detail["n_controls"] == 12).all()
    table = generalization.holdout_auroc(adata, detail=detail)
    one, over = row(table, "holdout_auroc"), row(table, "holdout_auroc", OVER_BATCHES)
    assert one["value"] == pytest.approx(detail["auroc"].mean())
    assert (one["chance"], one["n_queries"], one["n_units"], over["n_units"]) == (0.5, 8, 8, 4)
    assert one["low"] < one["value"] < one["high"]
    assert "interval over perturbations" in one["note"]
    assert "interval over batches left out" in over["note"]
    for metric, column in (("probe_hoyer", "hoyer"), ("probe_top_quarter", "top_quarter")):
        assert row(table, metric)["value"] == pytest.approx(detail[column].mean())
        assert row(table, metric)["chance"] == pytest.approx(detail[f"permuted_{column}"].mean())
    pd.testing.assert_frame_equal(table, generalization.holdout_auroc(adata))
    assert table.attrs[PER_QUERY]["holdout_auroc"].value.index.tolist() == [f"all/P{i}" for i in range(8)]


def test_detail_is_that_of_a_hand_made_split():
    adata = wells()
    detail = generalization.holdout_probes(adata).set_index(["held_out", "perturbation"])
    label = np.array([-1 if name == "DMSO" else int(name[1:]) for name in adata.obs["perturbation"]])
    batch = adata.obs["experiment"].str[1:].astype(int).to_numpy()
    x = np.asarray(adata.X, dtype=float)
    training = batch != 2
    z = (x - x[training].mean(axis=0)) / x[training].std(axis=0)
    for p in range(8):
        fit, asked = (mask & ((label < 0) | (label == p)) for mask in (training, ~training))
        C = detail.loc[("E02", f"P{p}"), "C"]
        model = LogisticRegression(C=C, tol=1e-10, max_iter=10_000).fit(z[fit], label[fit] >= 0)
        expected = roc_auc_score(label[asked] >= 0, z[asked] @ model.coef_[0])
        assert detail.loc[("E02", f"P{p}"), "auroc"] == pytest.approx(expected, abs=1e-9)


def test_many_batches_are_left_out_in_ten_groups():
    adata = wells(n_batches=13, n_each=1)
    detail = generalization.holdout_probes(adata)
    assert len(detail) == 13 * 8
    assert any("13 batches in 10 groups" in note for note in detail.attrs["notes"])
    single = generalization.holdout_probes(adata, max_batches=13)
    assert not any("groups" in note for note in single.attrs["notes"])
    assert single["auroc"].mean() == pytest.approx(detail["auroc"].mean(), abs=0.03)


def test_a_correction_is_fitted_on_the_training_batches_only():
    adata = wells(effect=1.0)
    detail = generalization.holdout_probes(adata, method="sphere")
    held = (adata.obs["experiment"] == "E01").to_numpy()
    fitted = correct.fit(adata[~held].copy(), "sphere")
    work = adata.copy()
    fitted.transform(work)
    x = work.obsm["X_sphere"]
    label = np.array([-1 if name == "DMSO" else int(name[1:]) for name in adata.obs["perturbation"]])
    batch = adata.obs["experiment"].str[1:].astype(int).to_numpy()
    expected = probes.held_out_probes(x, label, batch, batch, 1)
    mine = detail[detail["held_out"] == "E01"].sort_values("perturbation")
    np.testing.assert_allclose(mine["auroc"], expected.auroc, atol=1e-6)
    changed = adata.copy()
    changed.X[held] = changed.X[held] * 3 + 1
    other = generalization.holdout_probes(changed, method="sphere")
    np.testing.assert_allclose(other[other["held_out"] == "E01"]["hoyer"], mine["hoyer"], atol=1e-6)
    table = generalization.holdout_auroc(adata, method="sphere")
    assert set(table["rep"]) == {"X_sphere"}
    assert "sphere fitted on the training batches only" in table["note"].iloc[0]


@pytest.mark.parametrize("score", SCORES)
def test_methods_that_cannot_meet_new_batches_are_not_applicable(score):
    table = score(wells(), method="combat")
    assert table["value"].isna().all()
    assert table["note"].str.startswith("not applicable: combat corrects").all()
    assert not score(wells(), method="center+sphere")["value"].isna().any()
    with pytest.raises(InputError, match="method 'nothing' is not known"):
        score(wells(), method="nothing")


@pytest.mark.parametrize("score", SCORES)
def test_a_correction_fitted_before_is_said_to_be_transductive(score):
    adata = wells()
    correct.run(adata, "sphere")
    table = score(adata, use_rep="X_sphere")
    assert set(table["rep"]) == {"X_sphere"}
    assert table["note"].str.contains("transductive").all()
    assert not score(adata)["note"].str.contains("transductive").any()
    assert set(score(adata)["rep"]) == {"X"}


def test_what_cannot_be_probed_is_counted():
    adata = wells()
    keep = ~((adata.obs["experiment"] == "E03") & (adata.obs["control"] == "negative"))
    keep &= (adata.obs["perturbation"] != "P0") | (adata.obs["experiment"] == "E01")
    adata = adata[keep].copy()
    adata.obs.iloc[20, adata.obs.columns.get_loc("perturbation")] = None
    detail = generalization.holdout_probes(adata)
    notes = "; ".join(detail.attrs["notes"])
    assert "21 wells left out: 1 batches without negative controls" in notes
    assert "3 wells left out: 1 perturbations that lie in one batch" in notes
    assert "1 wells left out: without perturbation" in notes
    assert detail.attrs["n_dropped"] == 25
    assert set(detail["held_out"]) == {"E00", "E01", "E02"}
    assert "P0" not in set(detail["perturbation"])


def test_without_replicates_the_columns_are_named():
    adata = wells()
    adata.obs["perturbation"] = np.where(adata.obs["control"] == "negative", "DMSO", adata.obs_names)
    with pytest.raises(
        InputError, match=r"no perturbation of obs\['perturbation'\] lies in two batches of obs\['experiment'\]"
    ):
        generalization.holdout_probes(adata)
    for score in SCORES:
        table = score(adata)
        assert table["value"].isna().all()
        assert table["note"].str.startswith("not applicable: no ").all()
    plain = wells()
    plain.obs["control"] = ""
    assert (
        "two batches of obs['experiment'] that have negative controls"
        in generalization.holdout_auroc(plain)["note"].iloc[0]
    )


@pytest.mark.parametrize("score", SCORES)
def test_wrong_names_are_refused(score):
    for wrong in ({"batch_key": "week"}, {"use_rep": "X_none"}, {"controls": ["water"]}, {"strata_key": "cell"}):
        with pytest.raises(InputError):
            score(wells(), **wrong)


# ---------------------------------------------------------------------------------------------- naming perturbations


@pytest.mark.parametrize("metric", ["knn_accuracy", "probe_accuracy"])
def test_accuracy_is_that_of_a_hand_made_loop(metric):
    adata = wells(effect=0.7)
    table = getattr(generalization, metric)(adata, **({"k": 1} if metric == "knn_accuracy" else {}))
    treated = (adata.obs["control"] == "").to_numpy()
    x, y = np.asarray(adata.X, dtype=float)[treated], adata.obs["perturbation"].to_numpy()[treated]
    batch = adata.obs["experiment"].to_numpy()[treated]
    right = []
    for b in sorted(set(batch)):
        if metric == "knn_accuracy":
            model = KNeighborsClassifier(1, metric="cosine").fit(x[batch != b], y[batch != b])
            right.append(model.predict(x[batch == b]) == y[batch == b])
        else:
            names, code = np.unique(y[batch != b], return_inverse=True)
            scores = np.vstack([s for _, s in probes.discriminants(x[batch != b], code, 8, x[batch == b])])
            right.append(names[scores.argmax(axis=1)] == y[batch == b])
    one = row(table, metric)
    assert one["value"] == pytest.approx(np.mean(right))
    assert one["chance"] == pytest.approx(1 / 8)
    assert (one["n_queries"], one["n_units"]) == (96, 8)
    over = row(table, metric, OVER_BATCHES)
    assert (over["value"], over["n_units"]) == (one["value"], 4)
    assert one["low"] < one["value"] < one["high"]


def test_strata_are_trained_apart_and_unseen_perturbations_counted():
    adata = wells(n_batches=5)
    adata.obs["cell_type"] = np.where(adata.obs["experiment"].isin(["E00", "E01"]), "RPE", "HUVEC")
    adata.obs.loc[adata.obs["experiment"] == "E04", "cell_type"] = "U2OS"
    table = generalization.probe_accuracy(adata)
    assert table["group"].tolist() == ["all", OVER_BATCHES, "HUVEC", "RPE"]
    one = row(table, "probe_accuracy")
    assert one["n_queries"] == 96
    assert one["n_dropped"] == 24
    assert "24 wells of 8 perturbations that are in no training batch of their stratum are not scored" in one["note"]
    assert row(generalization.probe_accuracy(adata, strata_key=None), "probe_accuracy")["n_queries"] == 120


def test_neighbors_that_are_too_few_are_said():
    adata = wells(n_batches=2, n_labels=3, n_each=1)
    one = row(generalization.knn_accuracy(adata, k=5), "knn_accuracy")
    assert "3 neighbours where there are no more training wells" in one["note"]
    with pytest.raises(InputError, match="k is 0"):
        generalization.knn_accuracy(adata, k=0)


def test_chance_is_the_best_constant_guess():
    adata = wells(n_labels=4, effect=0.0)
    adata.obs.loc[adata.obs["perturbation"].isin(["P1", "P2"]), "perturbation"] = "P0"
    assert row(generalization.probe_accuracy(adata), "probe_accuracy")["chance"] == pytest.approx(3 / 4)


# ---------------------------------------------------------------------------------------------- properties of all


@pytest.mark.parametrize("score", SCORES)
def test_scores_rise_with_the_effect_and_are_at_chance_on_shuffled_labels(score):
    table = {effect: score(wells(effect=effect)).iloc[0] for effect in (0.3, 1.0, 3.0)}
    values = [one["value"] for one in table.values()]
    assert values == sorted(values)
    assert table[1.0]["low"] > table[1.0]["chance"]
    assert table[3.0]["value"] > 0.95
    blind = [score(shuffled(wells(effect=1.0, seed=s), s)).iloc[0] for s in range(8)]
    mean = np.mean([one["value"] for one in blind])
    assert mean == pytest.approx(blind[0]["chance"], abs=0.04)
    assert np.mean([one["low"] <= one["chance"] <= one["high"] for one in blind]) >= 0.6


@pytest.mark.parametrize("score", SCORES)
def test_row_order_does_not_matter_and_seeds_repeat(score):
    adata = wells(effect=0.6)
    first = score(adata, random_state=3)
    pd.testing.assert_frame_equal(score(adata, random_state=3), first)
    order = np.random.default_rng(0).permutation(adata.n_obs)
    pd.testing.assert_frame_equal(score(adata[order].copy(), random_state=3), first, atol=1e-6)


def test_scores_take_integer_and_categorical_batches():
    adata = wells()
    first = [score(adata)["value"] for score in SCORES]
    adata.obs["week"] = adata.obs["experiment"].str[1:].astype(int)
    adata.obs["perturbation"] = adata.obs["perturbation"].astype("category")
    for score, expected in zip(SCORES, first):
        np.testing.assert_allclose(score(adata, batch_key="week")["value"], expected, atol=1e-6)


# ---------------------------------------------------------------------------------------------- RxRx1's task


@pytest.fixture(scope="module")
def rxrx1_like():
    return simulate.profiles("rxrx1-like", n_treatments=25, n_features=32, random_state=0)


def test_sirna_accuracy_on_the_design_of_rxrx1(rxrx1_like):
    table = generalization.sirna_accuracy(rxrx1_like)
    groups = ["all", OVER_BATCHES, "HEPG2", "HUVEC", "RPE", "U2OS", PLATE_GROUP]
    for name in ("knn", "lda", "class_mean"):
        metric = f"sirna_accuracy_{name}"
        assert table.loc[table["metric"] == metric, "group"].tolist() == groups
        one, among = row(table, metric), row(table, metric, PLATE_GROUP)
        assert one["chance"] == pytest.approx(1 / 100)
        assert among["chance"] == pytest.approx(1 / 25)
        assert one["n_queries"] == 18 * 100
        assert row(table, metric, OVER_BATCHES)["n_units"] == 18
        assert among["value"] > one["value"] > 0.2
        assert one["low"] > one["chance"]
    assert row(table, "sirna_accuracy_lda")["value"] > row(table, "sirna_accuracy_knn")["value"]
    named = rxrx1_like.copy()
    number = named.obs["experiment"].str.rpartition("-")[2].astype(int)
    first = named.obs["cell_type"].astype(str).map({"HEPG2": 8, "HUVEC": 17, "RPE": 8, "U2OS": 4})
    named.obs["dataset"] = np.where(number >= first, "test", "train")
    pd.testing.assert_frame_equal(generalization.sirna_accuracy(named), table)


def test_sirna_accuracy_is_at_chance_on_shuffled_labels(rxrx1_like):
    blind = rxrx1_like.copy()
    rng = np.random.default_rng(0)
    treated = (blind.obs["control"] == "").to_numpy()
    names = blind.obs["perturbation"].to_numpy(dtype=object)
    plate = blind.obs["experiment"].astype(str) + blind.obs["plate"].astype(str)
    for rows in pd.Series(np.flatnonzero(treated)).groupby(plate[treated].to_numpy()):
        names[rows[1]] = rng.permutation(names[rows[1]])
    blind.obs["perturbation"] = names
    table = generalization.sirna_accuracy(blind)
    for name in ("knn", "lda", "class_mean"):
        for group in ("all", PLATE_GROUP):
            one = row(table, f"sirna_accuracy_{name}", group)
            assert one["value"] == pytest.approx(one["chance"], abs=0.02)


def test_sirna_accuracy_of_sites_and_of_their_wells(rxrx1_like):
    some = rxrx1_like[rxrx1_like.obs["cell_type"] == "U2OS"].copy()
    noise = np.random.default_rng(0).normal(size=some.shape) * np.asarray(some.X).std()
    obs = pd.concat([some.obs.assign(site=site) for site in (1, 2)])
    obs.index = [f"{name}_{site}" for name, site in zip(obs.index, obs["site"])]
    sites = ad.AnnData(np.vstack([some.X + noise, some.X - noise]).astype(np.float32), obs=obs)
    table = generalization.sirna_accuracy(sites, classifiers=["lda"])
    well, site = row(table, "sirna_accuracy_lda"), row(table, "sirna_accuracy_lda_sites")
    assert site["n_queries"] == 2 * well["n_queries"] == 2 * 2 * 100
    assert well["value"] > site["value"]
    assert well["value"] == pytest.approx(
        row(generalization.sirna_accuracy(some, classifiers=["lda"]), "sirna_accuracy_lda")["value"], abs=0.01
    )


@pytest.mark.parametrize("edition", [".", "v2_named_sirna"])
def test_sirna_accuracy_on_the_real_plate_maps(shared, edition):
    sites = screen.read_rxrx1(shared / "data/rxrx1_metadata_kaggle" / edition)
    layout = sites[sites["site"] == 1].drop(columns=["site", *sites.columns[sites.columns.str.startswith("path_")]])
    adata = simulate.profiles("rxrx1-like", layout=layout, random_state=0)
    table = generalization.sirna_accuracy(adata, classifiers=["lda"])
    absent, left_out = row(table, "sirna_accuracy_lda"), row(table, "sirna_accuracy_lda_left_out")
    assert np.isnan(absent["value"])
    assert absent["note"].startswith("not applicable: the 19")
    assert "Kaggle's tables name none" in absent["note"]
    assert left_out["value"] > 0.5
    assert left_out["n_queries"] > 36_000
    assert left_out["chance"] == pytest.approx(1 / 1108, rel=0.01)
    assert row(table, "sirna_accuracy_lda_left_out", PLATE_GROUP)["chance"] == pytest.approx(1 / 277, rel=0.01)
    assert row(table, "sirna_accuracy_lda_left_out", OVER_BATCHES)["n_units"] == 33


def test_sirna_accuracy_without_sets_or_with_a_wrong_name():
    adata = wells()
    adata.obs["experiment"] = adata.obs["experiment"].map(
        {"E00": "RPE-01", "E01": "RPE-02", "E02": "RPE-08", "E03": "RPE-09"}
    )
    table = generalization.sirna_accuracy(adata, classifiers=["lda"])
    assert table["group"].tolist() == ["all", OVER_BATCHES]
    assert row(table, "sirna_accuracy_lda")["n_queries"] == 48
    with pytest.raises(InputError, match="classifier 'svm' is not known: use 'knn', 'lda', 'class_mean'"):
        generalization.sirna_accuracy(adata, classifiers=["svm"])
    plain = generalization.sirna_accuracy(wells(), classifiers=["lda"])
    assert plain["note"].iloc[0].startswith("not applicable: there are no wells of test experiments")
    assert row(plain, "sirna_accuracy_lda_left_out")["n_queries"] == 96


def test_queries_may_be_a_sample_and_are_said_to_be():
    adata = wells()
    table = generalization.accuracies(adata, max_queries=40)
    every = generalization.accuracies(adata)
    for metric in ("knn_accuracy", "probe_accuracy"):
        some = row(table, metric)
        assert some["n_queries"] == 40
        assert "40 of 96 queries sampled (random_state 0)" in some["note"]
        assert some["value"] == pytest.approx(row(every, metric)["value"], abs=0.2)
    pd.testing.assert_frame_equal(table, generalization.accuracies(adata, max_queries=40))
