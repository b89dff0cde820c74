import logging

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score

from cellica import baselines, correct, metrics, retrieval
from cellica.schema import INTERVAL_COLUMNS, SCORE_COLUMNS, InputError, MissingFileError
from cellica.scores import GAIN

N_BATCHES, N_LABELS = 3, 12


def screen(seed=0, noise=2.0, batch_effect=0.0, n_features=20):
    """Each batch is a plate of 12 perturbations in four mechanisms, one well each in its own place, and 4 controls."""
    rng = np.random.default_rng(seed)
    names = [f"P{i}" for i in range(N_LABELS)] + ["DMSO"] * 4
    wells = [f"{'ABCD'[i // 4]}{i % 4 + 1:02d}" for i in range(16)]
    classes = [f"M{i % 4}" for i in range(N_LABELS)] + [None] * 4
    one = pd.DataFrame({"perturbation": names, "well": wells, "moa": classes})
    obs = pd.concat([one.assign(experiment=f"E{b}", plate=str(b)) for b in range(N_BATCHES)], ignore_index=True)
    obs["control"] = np.where(obs["perturbation"] == "DMSO", "negative", "")
    obs.index = (obs["experiment"] + "_" + obs["plate"] + "_" + obs["well"]).to_numpy(dtype=object)
    number = metrics.label_codes(obs["perturbation"].to_numpy())
    mechanism = metrics.label_codes(obs["moa"].to_numpy(dtype=object)) + 1
    x = rng.normal(size=(N_LABELS + 1, n_features))[number] + rng.normal(size=(5, n_features))[mechanism]
    x += batch_effect * rng.normal(size=(N_BATCHES, n_features))[np.repeat(np.arange(N_BATCHES), 16)]
    x += noise * rng.normal(size=x.shape)
    return ad.AnnData(x.astype(np.float32), obs=obs)


def one(table):
    assert list(table.columns) in (
        [*SCORE_COLUMNS, *INTERVAL_COLUMNS],
        [*SCORE_COLUMNS, *INTERVAL_COLUMNS, *GAIN],
    )
    assert len(table) == 1
    return table.iloc[0]


def score(table, metric):
    return one(table[table["metric"] == metric])


@pytest.fixture(scope="module")
def bbbc021(shared):
    folder = shared / "data/bbbc021_profiles"
    profiles = pd.read_csv(folder / "ljosa_jbiomolscreen_2013_per_well_mean.csv.gz")
    wells = pd.read_csv(folder / "BBBC021_feature_selected_mad_robustize.csv").filter(like="Metadata_")
    table = profiles.merge(
        wells, left_on=["Image_Metadata_Plate", "Image_Metadata_Well"], right_on=["Metadata_Plate", "Metadata_Well"]
    )
    x = table[profiles.columns[2:]].to_numpy(dtype=float)
    dmso = table["Metadata_Compound"] == "DMSO"
    obs = pd.DataFrame(
        {
            "experiment": table["Metadata_Plate"].str.split("_").str[0],
            "plate": table["Metadata_Plate"],
            "well": table["Metadata_Well"],
            "compound": table["Metadata_Compound"],
            "perturbation": table["Metadata_Compound"] + "@" + table["Metadata_Concentration"].astype(str),
            "moa": table["Metadata_moa"].where(~dmso),
            "control": np.where(dmso, "negative", ""),
        }
    )
    obs.index = (obs["plate"] + "_" + obs["well"]).to_numpy(dtype=object)
    return ad.AnnData(((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32), obs=obs)


def multi_batch(shared, name):
    table = pd.read_parquet(shared / f"data/multi_batch_profiles/{name}.parquet")
    x = table.iloc[:, 7:].to_numpy(dtype=float)
    scale = x.std(axis=0)
    obs = table.iloc[:, :7].set_index(pd.Index([str(i) for i in range(len(table))], dtype=object))
    return ad.AnnData((x - x.mean(axis=0)) / np.where(scale > 1e-9, scale, 1), obs=obs)


# ---------------------------------------------------------------------------------------------- average precision


@pytest.mark.parametrize(
    "rule",
    [
        {"pos_sameby": ["perturbation"], "pos_diffby": [], "neg_sameby": [], "neg_diffby": ["perturbation"]},
        {
            "pos_sameby": ["perturbation"],
            "pos_diffby": ["experiment"],
            "neg_sameby": ["experiment"],
            "neg_diffby": ["perturbation", "control"],
        },
        {"pos_sameby": ["moa"], "pos_diffby": ["perturbation"], "neg_sameby": [], "neg_diffby": ["moa"]},
    ],
    ids=["replicates", "activity", "classes, some missing"],
)
def test_average_precision_is_that_of_copairs(rule):
    copairs = pytest.importorskip("copairs.map")
    adata = screen()
    logging.getLogger("copairs").setLevel(logging.ERROR)
    known = adata.obs["moa"].notna().to_numpy() if rule["pos_sameby"] == ["moa"] else np.ones(len(adata), dtype=bool)
    x = np.asarray(adata.X)[known]
    expected = copairs.average_precision(adata.obs[known].reset_index(drop=True), x, **rule, progress_bar=False)
    table = retrieval.average_precision(adata, **rule)
    assert table.index.equals(adata.obs_names)
    assert table["average_precision"][~known].isna().all()
    mine, theirs = table[known], expected
    scored = theirs["n_pos_pairs"].to_numpy() > 0
    assert scored.sum() > 30
    np.testing.assert_array_equal(mine["n_pos"], theirs["n_pos_pairs"])
    np.testing.assert_array_equal((mine["n_pos"] + mine["n_neg"]), theirs["n_total_pairs"])
    np.testing.assert_allclose(mine["average_precision"][scored], theirs["average_precision"][scored], atol=1e-6)
    normalized = (mine["average_precision"] - mine["chance"]) / (1 - mine["chance"])
    np.testing.assert_allclose(normalized[scored], theirs["normalized_average_precision"][scored], atol=1e-6)


def test_average_precision_names_the_columns_without_pairs():
    adata = screen()
    adata.obs["unique"] = adata.obs_names
    with pytest.raises(InputError, match=r"no query has a positive.*\['unique'\]"):
        retrieval.average_precision(adata, pos_sameby=["unique"], neg_diffby=["perturbation"])
    with pytest.raises(InputError, match=r"no query has a negative.*\['control', 'perturbation'\]"):
        retrieval.average_precision(
            adata[:5], pos_sameby=["control"], neg_sameby=["control", "perturbation"], neg_diffby=["control"]
        )
    with pytest.raises(InputError, match="no column 'nowhere'; it has perturbation"):
        retrieval.average_precision(adata, pos_sameby=["nowhere"], neg_diffby=["perturbation"])
    with pytest.raises(InputError, match="name at least one column"):
        retrieval.average_precision(adata, pos_sameby=[], neg_diffby=["perturbation"])


def test_average_precision_of_chosen_wells():
    adata = screen()
    treated = (adata.obs["control"] == "").to_numpy()
    table = retrieval.average_precision(
        adata, pos_sameby=["moa"], neg_diffby=["moa"], queries=treated, candidates=treated
    )
    assert table.index.equals(adata.obs_names[treated])
    assert (table["n_pos"] == 8).all()
    assert (table["n_neg"] == 27).all()


# ---------------------------------------------------------------------------------------------- retrieval tables


def test_replicates_are_found_across_batches_and_labels_without_signal_are_not():
    found, shuffled = screen(noise=0.1), screen(noise=0.1)
    shuffled.X = np.random.default_rng(0).permutation(shuffled.X)
    row, blind = one(retrieval.replicate_retrieval(found)), one(retrieval.replicate_retrieval(shuffled))
    assert row["value"] > 0.95
    assert row["n_queries"] == N_BATCHES * N_LABELS
    assert row["n_dropped"] == 0
    assert row["chance"] == pytest.approx(metrics.chance_average_precision(2, 22))
    assert abs(blind["value"] - blind["chance"]) < 0.1


def test_replicate_retrieval_of_real_plates(shared):
    plates = multi_batch(shared, "varchamp_b14p2_raw")
    row = one(retrieval.replicate_retrieval(plates, batch_key="batch"))
    assert row["value"] == pytest.approx(0.257, abs=0.005)
    assert row["n_queries"] == 1220
    dyes = multi_batch(shared, "dye_std4")
    other = one(retrieval.replicate_retrieval(dyes, batch_key="batch", pos_diffby=["well"]))
    assert other["metric"] == "replicate_map_other_well"
    assert other["value"] == pytest.approx(0.376, abs=0.001)


def test_class_retrieval_on_bbbc021(bbbc021):
    row = one(retrieval.class_retrieval(bbbc021, class_key="moa", group_key="compound"))
    assert row["value"] == pytest.approx(0.592, abs=0.001)
    assert row["n_queries"] == 274
    assert "28 queries without a positive" in row["note"]
    x = metrics.unit_rows(bbbc021.X)
    obs = bbbc021.obs
    treated = (obs["control"] == "").to_numpy()
    values, chance = [], []
    for i in np.flatnonzero(treated):
        seen = treated & (obs["compound"] != obs["compound"].iloc[i]) & (obs["experiment"] != obs["experiment"].iloc[i])
        positive = (obs["moa"] == obs["moa"].iloc[i])[seen]
        if positive.any():
            values.append(average_precision_score(positive, x[seen] @ x[i]))
            chance.append(metrics.chance_average_precision(positive.sum(), (~positive).sum()))
    assert row["value"] == pytest.approx(np.mean(values), abs=1e-6)
    assert row["chance"] == pytest.approx(np.mean(chance), abs=1e-12)


def test_chance_of_class_retrieval_is_what_shuffled_wells_score(bbbc021):
    values = []
    for seed in range(6):
        shuffled = bbbc021.copy()
        shuffled.X = np.random.default_rng(seed).permutation(shuffled.X)
        values.append(
            one(retrieval.class_retrieval(shuffled, class_key="moa", group_key="compound"))[["value", "chance"]]
        )
    values = pd.DataFrame(values)
    assert values["value"].mean() == pytest.approx(values["chance"].mean(), abs=0.006)


def test_nearest_neighbor_on_bbbc021(bbbc021):
    table = retrieval.nearest_neighbor(bbbc021, class_key="moa", group_key="compound")
    nsc, nscb = score(table, "nsc"), score(table, "nscb")
    assert (nsc["n_queries"], nscb["n_queries"]) == (103, 92)
    means = pd.DataFrame(np.asarray(bbbc021.X, dtype=float)).groupby(bbbc021.obs["perturbation"].to_numpy()).mean()
    info = bbbc021.obs.drop_duplicates("perturbation").set_index("perturbation").loc[means.index]
    treated = (info["control"] == "").to_numpy()
    info, units = info[treated], metrics.unit_rows(means.to_numpy())[treated]
    right = []
    for i in range(len(info)):
        seen = (info["compound"] != info["compound"].iloc[i]).to_numpy()
        nearest = np.argmax(np.where(seen, units @ units[i], -2))
        right.append(info["moa"].iloc[nearest] == info["moa"].iloc[i])
    assert nsc["value"] == pytest.approx(np.mean(right))


def test_strata_keep_replicates_apart():
    adata = screen(noise=0.1)
    adata.obs["cell_type"] = np.where(adata.obs["experiment"] == "E2", "RPE", "HUVEC")
    row = one(retrieval.replicate_retrieval(adata))
    assert row["n_queries"] == 2 * N_LABELS
    assert row["chance"] == pytest.approx(metrics.chance_average_precision(1, 11))
    assert one(retrieval.replicate_retrieval(adata, strata_key=None))["n_queries"] == 3 * N_LABELS


def test_sampled_queries_are_said_and_repeatable():
    adata = screen()
    first, again, other = (one(retrieval.replicate_retrieval(adata, max_queries=10, random_state=s)) for s in (0, 0, 1))
    assert first["n_queries"] == 10
    assert "10 of 36 queries sampled (random_state 0)" in first["note"]
    assert first.equals(again)
    assert first["value"] != other["value"]


def test_wells_that_cannot_be_scored_are_counted_with_the_reason():
    adata = screen()
    adata.obs.loc[adata.obs_names[0], "perturbation"] = np.nan
    adata.obs.loc[adata.obs_names[1], "experiment"] = None
    adata.X[2], adata.X[3] = 0, np.nan
    row = one(retrieval.replicate_retrieval(adata))
    assert row["n_dropped"] == 4
    for reason in (
        "1 wells left out: without perturbation",
        "1 wells left out: without experiment",
        "2 wells left out: all",
    ):
        assert reason in row["note"]
    kept = adata[4:].copy()
    assert row["value"] == pytest.approx(one(retrieval.replicate_retrieval(kept))["value"])


# ---------------------------------------------------------------------------------------------- known relationships


def test_relationship_recall_of_wells(shared, tmp_path):
    table = pd.read_csv(shared / "reference/efaar/relationship_map.csv.gz")
    expected = pd.read_csv(shared / "reference/efaar/relationship_recall.csv").set_index("source")
    profiles = table.iloc[:, 1:].to_numpy()
    spread = np.random.default_rng(0).normal(size=profiles.shape)
    obs = pd.DataFrame({"perturbation": [*table["gene"], *table["gene"]], "experiment": "E"})
    obs.index = [str(i) for i in range(len(obs))]
    adata = ad.AnnData(np.vstack([profiles + spread, profiles - spread]), obs=obs)
    recall = retrieval.relationship_recall(adata, shared / "data/efaar_truth")
    assert sorted(set(recall["group"])) == sorted(expected.index)
    for source, row in expected.iterrows():
        for metric, chance in (("recall_0.05_0.95", 0.1), ("recall_0.1_0.9", 0.2)):
            mine = one(recall[(recall["group"] == source) & (recall["metric"] == metric)])
            assert mine["value"] == pytest.approx(row[metric], abs=1e-8)
            assert mine["chance"] == pytest.approx(chance)
            assert mine["n_queries"] == row["query_distribution_size"]


def test_relationship_recall_where_it_does_not_apply(tmp_path):
    adata = screen()
    with pytest.raises(MissingFileError, match="nowhere"):
        retrieval.relationship_recall(adata, tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"holds no \.txt"):
        retrieval.relationship_recall(adata, tmp_path)
    (tmp_path / "SMALL.txt").write_text("entity1,entity2\nP1,P2\n")
    recall = retrieval.relationship_recall(adata, tmp_path)
    assert recall["value"].isna().all()
    assert recall["note"].str.contains("12 perturbations, and at least 20 are needed").all()
    (tmp_path / "SMALL.txt").write_text("a,b\nP1,P2\n")
    with pytest.raises(InputError, match=r"SMALL\.txt has no column 'entity1', 'entity2'"):
        retrieval.relationship_recall(adata, tmp_path)


# ---------------------------------------------------------------------------------------------- batch effect


def test_batch_share_finds_the_planted_effect_and_nothing_in_its_absence():
    values = [score(retrieval.batch_effect(screen(s)), "batch_share")["value"] for s in range(8)]
    assert abs(np.mean(values)) < 0.02
    planted = retrieval.batch_effect(screen(batch_effect=8.0))
    assert score(planted, "batch_share")["value"] > 0.8
    assert score(planted, "batch_share_weighted")["value"] > 0.8
    assert (planted["n_queries"] == 48).all()


def test_batch_share_is_weighted_by_variance():
    adata = screen()
    batch = metrics.label_codes(adata.obs["experiment"].to_numpy())
    adata.X[:, 0] = 100 * batch + np.random.default_rng(0).normal(size=48)
    table = retrieval.batch_effect(adata)
    assert score(table, "batch_share")["value"] < 0.2
    assert score(table, "batch_share_weighted")["value"] > 0.95


def test_strata_are_no_batch_effect():
    adata = screen()
    adata.obs["cell_type"] = adata.obs["experiment"]
    adata.X += 20 * metrics.label_codes(adata.obs["experiment"].to_numpy())[:, None]
    assert score(retrieval.batch_effect(adata, strata_key=None), "batch_share")["value"] > 0.8
    nested = score(retrieval.batch_effect(adata), "batch_share")
    assert np.isnan(nested["value"])
    assert "not applicable" in nested["note"]


def test_centred_wells_are_said_to_be_so():
    adata = screen(batch_effect=1.0)
    control = (adata.obs["control"] == "negative").to_numpy()
    batch = metrics.label_codes(adata.obs["experiment"].to_numpy())
    adata.obsm["X_center"] = adata.X - metrics.group_means(adata.X[control], batch[control])[batch]
    adata.obsm["X_mine"] = adata.obsm["X_center"]
    adata.uns["cellica"] = {"mine": {"method": "center+sphere"}}
    for key in ("X_center", "X_mine"):
        row = score(retrieval.batch_effect(adata, anchors=["DMSO"], use_rep=key), "batch_share")
        assert row["value"] < 0
        assert "center took batch means from these very wells" in row["note"]
    assert "center" not in score(retrieval.batch_effect(adata), "batch_share")["note"]


# ---------------------------------------------------------------------------------------------- evaluate


def test_evaluate_scores_every_representation_alike_and_states_its_key():
    adata = screen(noise=0.3)
    adata.obsm["X_noise"] = np.random.default_rng(0).normal(size=(48, 5))
    adata.obsm["ica_sources"] = np.zeros((48, 2))
    scores = retrieval.evaluate(adata, class_key="moa", design=False)
    assert list(dict.fromkeys(scores["rep"])) == ["X", "X_noise", "baseline:position"]
    metrics_of = scores.groupby("rep")["metric"].agg(list)
    assert metrics_of["X"] == metrics_of["X_noise"] == metrics_of["baseline:position"]
    of_rep = dict(list(scores.groupby("rep")))
    for metric in ("replicate_map", "class_map", "nsc"):
        x, noise = (score(of_rep[key], metric) for key in ("X", "X_noise"))
        assert x["value"] > 2 * x["chance"]
        assert abs(noise["value"] - noise["chance"]) < 0.15
    assert score(of_rep["baseline:position"], "replicate_map")["value"] == 1  # a layout that never changes
    no_other = score(of_rep["X"], "replicate_map_other_well")
    assert np.isnan(no_other["value"])
    assert "no two treated wells share perturbation and differ in experiment, well" in no_other["note"]
    named = retrieval.evaluate(adata, ["X_noise"], class_key="moa", baselines=False, design=False).reset_index(
        drop=True
    )
    pd.testing.assert_frame_equal(named, of_rep["X_noise"].reset_index(drop=True))


def test_evaluate_ignores_the_order_of_wells():
    adata = screen()
    shuffled = adata[np.random.default_rng(0).permutation(48)].copy()
    before, after = retrieval.evaluate(adata, class_key="moa"), retrieval.evaluate(shuffled, class_key="moa")
    pd.testing.assert_frame_equal(before, after, rtol=1e-9, atol=1e-9)


def test_evaluate_refuses_what_is_not_there():
    adata = screen()
    with pytest.raises(InputError, match="'X_lost' is not in obsm: use X"):
        retrieval.evaluate(adata, ["X_lost"])
    with pytest.raises(InputError, match="no column 'plates', 'mechanism'"):
        retrieval.evaluate(adata, batch_key="plates", class_key="mechanism")
    with pytest.raises(InputError, match="controls 'water' not found"):
        retrieval.evaluate(adata, controls=["water"])


@pytest.mark.parametrize("fault", ["one batch", "no replicates", "all zero", "overflow", "no labels", "no controls"])
def test_evaluate_never_crashes_on_what_does_not_apply(fault):
    adata = screen()
    if fault == "one batch":
        adata.obs["experiment"] = "E0"
    elif fault == "no replicates":
        adata.obs["perturbation"] = [f"Q{i}" for i in range(48)]
    elif fault == "all zero":
        adata.X = np.zeros_like(adata.X)
    elif fault == "overflow":
        with np.errstate(over="ignore"):
            adata.obsm["X_half"] = (adata.X * 1e6).astype(np.float16)
    elif fault == "no labels":
        adata.obs["perturbation"] = None
    elif fault == "no controls":
        del adata.obs["control"]
    scores = retrieval.evaluate(adata, class_key="moa")
    absent = scores["value"].isna()
    assert (scores.loc[absent, "note"] != "").all()
    x = scores[scores["rep"] == ("X_half" if fault == "overflow" else "X")]
    if fault == "no controls":
        assert score(x, "replicate_map")["n_queries"] == 48
    else:
        assert np.isnan(score(x, "replicate_map")["value"])
    if fault in ("all zero", "overflow", "no labels"):
        labelled = x["metric"] != "batch_probe"  # of controls, which need no labels
        assert x.loc[labelled | (fault != "no labels"), "value"].isna().all()
        assert (x["n_dropped"] > 0).all() or fault == "no labels"


@pytest.mark.parametrize("dtype", ["int", "category", "float with gaps"])
def test_batches_and_labels_may_be_of_any_type(dtype):
    adata = screen()
    expected = one(retrieval.replicate_retrieval(adata))
    number = metrics.label_codes(adata.obs["experiment"].to_numpy())
    adata.obs["experiment"] = {
        "int": number,
        "category": pd.Categorical(number),
        "float with gaps": np.where(np.arange(48) < 4, np.nan, number),
    }[dtype]
    row = one(retrieval.replicate_retrieval(adata))
    if dtype == "float with gaps":
        assert row["n_dropped"] == 4
    else:
        assert row["value"] == expected["value"]


def test_baselines_need_no_image():
    adata = screen()
    rng = np.random.default_rng(0)
    number = metrics.label_codes(adata.obs["perturbation"].to_numpy())
    for channel in range(3):
        adata.obs[f"intensity_{channel}"] = rng.normal(size=13)[number] + 0.01 * rng.normal(size=48)
    del adata.obs["well"]
    scores = retrieval.evaluate(adata, reps=[])
    lost = one(scores[scores["rep"] == "baseline:position"])
    assert "no column 'well'" in lost["note"]
    assert score(scores[scores["rep"] == "baseline:intensity"], "replicate_map")["value"] > 0.9


def test_what_was_measured_of_fields_is_a_baseline_each_where_it_varies():
    adata = screen()
    rng = np.random.default_rng(0)
    number = metrics.label_codes(adata.obs["perturbation"].to_numpy())
    adata.obs["cell_count"] = 100 + 10 * number + rng.integers(0, 3, 48)
    adata.obs["focus_w1"] = -1.5 + 0.1 * number + 0.01 * rng.normal(size=48)
    adata.obs["focus_w2"] = rng.normal(size=48)
    adata.obs["saturation_w1"], adata.obs["empty"] = 0.0, False
    scores = retrieval.evaluate(adata, reps=[])
    assert list(dict.fromkeys(scores["rep"])) == ["baseline:position", "baseline:cell_count", "baseline:quality"]
    of_count = score(scores[scores["rep"] == "baseline:cell_count"], "replicate_map")
    assert of_count["value"] > 0.85  # one number a well, and yet near ones are told from far ones
    assert of_count["n_dropped"] == 0
    noise = score(scores[scores["rep"] == "baseline:quality"], "replicate_map")
    assert noise["chance"] < noise["value"] < 0.9


def test_rank_directions_order_wells_as_differences_do():
    values = pd.Series(np.random.default_rng(0).permutation(26).astype(float) ** 3)
    values[26] = np.nan
    directions = baselines._directions(values)
    assert metrics.usable_rows(directions.astype(np.float32)).tolist() == [True] * 26 + [False]
    ranks, units = values[:26].rank().to_numpy(), directions[:26]
    apart = np.abs(np.subtract.outer(ranks, ranks)).ravel()
    np.testing.assert_array_equal(
        np.argsort(apart, kind="stable"), np.argsort(-(units @ units.T).ravel().round(12), kind="stable")
    )


@pytest.mark.parametrize("column", ["intensity_w1", "cell_count"])
def test_text_among_measurements_is_named(column):
    adata = screen()
    adata.obs[column] = pd.Categorical(["bright" if i == 7 else "1.5" for i in range(48)])
    scores = retrieval.evaluate(adata, reps=[])
    lost = one(scores[scores["rep"].isin(["baseline:intensity", "baseline:cell_count"])])
    assert f"{column} (as 'bright' in 1 rows)" in lost["note"]
    assert "rename the columns" in lost["note"]


# ---------------------------------------------------------------------------------------------- compare


def test_compare_scores_each_method_and_changes_nothing():
    adata = screen(batch_effect=2.0, noise=0.3)
    before = adata.copy()
    table = retrieval.compare(adata, ["none", "center", "center+sphere"], class_key="moa")
    np.testing.assert_array_equal(adata.X, before.X)
    pd.testing.assert_frame_equal(adata.obs, before.obs)
    assert not adata.obsm
    assert not adata.uns
    assert list(dict.fromkeys(table["rep"])) == ["X_none", "X_center", "X_center+sphere", "baseline:position"]
    of_rep = dict(list(table.groupby("rep")))
    none, center = of_rep["X_none"], of_rep["X_center"]
    assert score(center, "batch_share")["value"] < score(none, "batch_share")["value"] / 2
    assert score(center, "replicate_map")["value"] > score(none, "replicate_map")["value"] + 0.1
    unseen = center["metric"].str.contains("held_out|accuracy")
    assert unseen.sum() == 6
    assert center.loc[~unseen, "note"].str.contains("transductive").all()
    assert not center.loc[unseen, "note"].str.contains("transductive").any()
    assert not none["note"].str.contains("transductive").any()


def test_compare_reports_what_cannot_run():
    adata = screen()
    adata.obs["control"] = ""
    table = retrieval.compare(adata, ["none", "sphere"])
    lost = one(table[table["rep"] == "X_sphere"])
    assert np.isnan(lost["value"])
    assert "negative control" in lost["note"]
    assert retrieval.summary(table).loc["X_sphere"].isna().all()
    with pytest.raises(InputError, match="method 'spehre' is not known"):
        retrieval.compare(adata, ["none", "spehre"])


def test_compare_corrects_the_representation_that_is_named():
    adata = screen()
    adata.obsm["X_noise"] = np.random.default_rng(0).normal(size=(48, 20)).astype(np.float32)
    table = retrieval.compare(adata, ["none"], use_rep="X_noise", baselines=False)
    row = score(table, "replicate_map")
    assert abs(row["value"] - row["chance"]) < 0.1


def test_summary_is_wide_and_keeps_the_order():
    adata = screen()
    adata.obsm["X_a"] = adata.X[:, :5]
    scores = retrieval.evaluate(adata)
    wide = retrieval.summary(scores)
    assert list(wide.index) == ["X", "X_a", "baseline:position"]
    assert list(wide.columns)[:4] == [
        "replicate_map",
        "replicate_map_other_well",
        "batch_share",
        "batch_share_weighted",
    ]
    assert list(wide.columns) == list(dict.fromkeys(scores["metric"]))
    assert wide.loc["X_a", "replicate_map"] == score(scores[scores["rep"] == "X_a"], "replicate_map")["value"]


def test_a_method_fitted_on_the_labels_that_are_scored_is_said_to_be_circular():
    adata = screen()
    table = retrieval.compare(adata, ["none", "wccn", "center+wccn"], baselines=False)
    said = [text for text in retrieval.cautions(table) if "circular" in text]
    assert [text.split(":")[0] for text in said] == ["X_wccn", "X_center+wccn"]
    treated = adata.obs["perturbation"][adata.obs["control"] == ""].nunique()
    assert f"{treated} of {treated} scored perturbations are anchors" in said[0]
    controls = adata.obs.loc[adata.obs["control"] == "negative", "perturbation"].unique()
    correct.run(adata, "wccn")
    alone = retrieval.evaluate(adata, ["X_wccn"], baselines=False)
    assert any("circular" in text for text in retrieval.cautions(alone))
    honest = retrieval.compare(adata, ["wccn"], anchors=list(controls), baselines=False)
    assert not any("circular" in text for text in retrieval.cautions(honest))


def test_positive_controls_are_neither_queries_nor_candidates():
    adata = screen()
    treated = adata.obs["control"] == ""
    name = adata.obs.loc[treated, "perturbation"].iloc[0]
    adata.obs.loc[adata.obs["perturbation"] == name, "control"] = "positive"
    before, after = (retrieval.replicate_retrieval(data)["n_queries"].iloc[0] for data in (screen(), adata))
    assert after == before - (adata.obs["perturbation"] == name).sum()


def test_why_a_score_is_missing_is_told_once():
    adata = screen()
    adata = adata[adata.obs["experiment"] == adata.obs["experiment"].iloc[0]].copy()
    said = retrieval.cautions(retrieval.compare(adata, ["none", "sphere", "combat"], baselines=False))
    missing = [text for text in said if text.startswith("replicate_map: not applicable")]
    assert missing == [
        "replicate_map: not applicable: no two treated wells share perturbation and differ in experiment"
    ]
    assert any(text.startswith("X_combat: combat compares batches") for text in said)


# ------------------------------------------------------------------------------------------------------ uncertainty


def test_intervals_are_over_units_and_hold_the_value():
    adata = screen()
    scores = retrieval.evaluate(adata, ["X"], class_key="moa", baselines=False)
    row = score(scores, "replicate_map")
    n_labels = adata.obs.loc[adata.obs["control"] == "", "perturbation"].nunique()
    assert row["n_units"] == n_labels
    for _, one in scores[scores["metric"].isin(["replicate_map", "class_map", "nsc"])].iterrows():
        assert one["low"] <= one["value"] <= one["high"]
        assert one["n_units"] > 1
    shares = scores[scores["metric"] == "batch_share"].iloc[0]
    assert shares["low"] < shares["value"] < shares["high"]
    assert shares["n_units"] == N_BATCHES


def test_gains_are_paired_differences_from_none():
    adata = screen()
    scores = retrieval.compare(adata, ["none", "sphere", "center"], baselines=False)
    scores = scores[scores["group"] == "all"].set_index(["rep", "metric"]).sort_index()
    value, gain = scores["value"], scores["gain"]
    for rep in ("X_sphere", "X_center"):
        assert gain[rep, "replicate_map"] == pytest.approx(
            value[rep, "replicate_map"] - value["X_none", "replicate_map"]
        )
        low, high = scores.loc[(rep, "replicate_map"), ["gain_low", "gain_high"]]
        assert low <= gain[rep, "replicate_map"] <= high
    assert np.isnan(gain["X_none", "replicate_map"])
    wide = retrieval.gains(scores.reset_index())
    assert sorted(wide.index) == ["X_center", "X_sphere"]
    alone = retrieval.compare(adata, ["sphere"], baselines=False)
    assert alone["gain"].isna().all()


def test_on_shuffled_labels_intervals_hold_chance():
    hits = 0
    for seed in range(10):
        adata = screen()
        rng = np.random.default_rng(seed)
        treated = (adata.obs["control"] == "").to_numpy()
        label = adata.obs["perturbation"].to_numpy(dtype=object).copy()
        label[treated] = rng.permutation(label[treated])
        adata.obs["perturbation"] = label
        row = one(retrieval.replicate_retrieval(adata))
        hits += row["low"] <= row["chance"] <= row["high"]
    assert hits >= 7


def test_methods_that_remove_biology_with_the_batch_are_called_over_corrected():
    adata = screen()
    scores = retrieval.compare(adata, ["none", "sphere"], scores=["retrieval", "batch"], baselines=False)
    worse = scores["rep"] == "X_sphere"
    scores[list(GAIN)] = np.nan
    scores.loc[worse & (scores["metric"] == "replicate_map"), list(GAIN)] = [-0.2, -0.3, -0.1]
    share = scores["metric"].isin(["batch_share", "batch_share_weighted"])

    def said(before, after):
        scores.loc[share & ~worse, "value"], scores.loc[share & worse, "value"] = before, after
        return [text for text in retrieval.cautions(scores) if "over-corrected" in text]

    (text,) = said(0.5, 0.1)
    assert text.startswith("X_sphere: over-corrected: the share of batch falls from 0.500 to 0.100")
    assert "replicate_map (-0.200, -0.300 to -0.100)" in text
    assert not said(0.1, 0.5)
    assert not said(0.11, 0.10)  # next to nothing was removed
    scores.loc[worse & (scores["metric"] == "replicate_map_held_out"), list(GAIN)] = [0.2, 0.1, 0.3]
    assert not said(0.5, 0.1)  # something else is found better


def test_batch_effects_that_a_share_misses_are_said():
    scores = retrieval.evaluate(screen(), ["X"], scores=["batch"], baselines=False)
    assert not [text for text in retrieval.cautions(scores) if "linear probe" in text]
    scores.loc[scores["metric"] == "batch_share", "value"] = 0.0
    probe = scores["metric"] == "batch_probe"
    scores.loc[probe, ["value", "low", "chance"]] = [0.99, 0.97, 0.25]
    (text,) = (text for text in retrieval.cautions(scores) if "linear probe" in text)
    assert text == (
        "X: next to no share of batch (0.000), but a linear probe still names the batch of 99% of controls (chance 25%)"
    )


def test_well_position_that_is_not_beaten_is_said():
    adata = screen(noise=8.0)
    found = retrieval.cautions(retrieval.evaluate(adata, ["X"], scores=["retrieval"]))
    assert "replicate_map: well position alone gives 1.000, and no more is in X" in found


def test_nothing_to_score_and_groups_without_classes_are_refused():
    with pytest.raises(InputError, match="there is nothing to score: relationships needs a file"):
        retrieval.evaluate(screen(), ["X"], scores=["relationships"])
    with pytest.raises(InputError, match="name the class too"):
        retrieval.evaluate(screen(), ["X"], group_key="plate")
    scores = retrieval.evaluate(screen(), ["X"], scores=["retrieval"], class_key="moa", baselines=False)
    assert any("doses of one compound find each other" in text for text in retrieval.cautions(scores))


# ------------------------------------------------------------------------------------------ activity and consistency


def test_activity_is_that_of_copairs(monkeypatch, tmp_path):
    copairs = pytest.importorskip("copairs.map")
    monkeypatch.setenv("HOME", str(tmp_path))
    logging.getLogger("copairs").setLevel(logging.ERROR)
    adata = screen(noise=1.5)
    obs = adata.obs.reset_index(drop=True).assign(is_control=lambda o: o["control"] == "negative")
    rule = {
        "pos_sameby": ["perturbation"],
        "pos_diffby": ["experiment"],
        "neg_sameby": [],
        "neg_diffby": ["is_control"],
    }
    ap = copairs.average_precision(obs, np.asarray(adata.X), **rule, progress_bar=False)
    ap = ap[~ap["is_control"]]
    expected = copairs.mean_average_precision(
        ap, ["perturbation"], null_size=10_000, threshold=0.05, seed=0, progress_bar=False, cache_dir=tmp_path
    ).set_index("perturbation")
    found = retrieval.activity(adata, neg_sameby=())
    expected = expected.loc[found.index]
    np.testing.assert_allclose(found["mean_average_precision"], expected["mean_average_precision"], atol=1e-6)
    np.testing.assert_allclose(found["p"], expected["p_value"], atol=0.02)
    clear = (expected["corrected_p_value"] < 0.03) | (expected["corrected_p_value"] > 0.08)
    assert (found["active"] == expected["below_corrected_p"])[clear].all()
    assert found["active"].any()


def test_on_noise_few_are_active_and_p_is_uniform():
    adata = screen()
    adata.X = np.random.default_rng(3).normal(size=adata.shape).astype(np.float32)
    found = retrieval.activity(adata)
    assert found["active"].mean() <= 0.1
    assert 0.25 < found["p"].mean() < 0.75
    assert found["p"].min() >= 1 / 10_001
    assert "none is active" in " ".join(found.attrs["notes"]) or found["active"].any()


def test_consistency_looks_at_active_perturbations_of_other_groups():
    adata = screen()
    active = retrieval.activity(adata, neg_sameby=())
    assert active["active"].any()
    found = retrieval.consistency(adata, class_key="moa", active=active)
    assert set(found.index) <= set(adata.obs["moa"].dropna())
    assert (found["mean_average_precision"] > found["chance"]).all()
    none_active = active.assign(active=False)
    with pytest.raises(InputError, match="of 0 wells or profiles none has a positive and a negative"):
        retrieval.consistency(adata, class_key="moa", active=none_active)
    assert "all perturbations, active or not" in retrieval.consistency(adata, class_key="moa").attrs["notes"]


def test_activity_needs_controls():
    adata = screen()
    adata.obs["control"] = ""
    with pytest.raises(InputError, match="there are none"):
        retrieval.activity(adata)


def test_activity_takes_copairs_four_lists(tmp_path):
    adata = screen(noise=1.0)
    adata.obs["half"] = np.where(np.arange(adata.n_obs) % 2, "a", "b")
    lists = {"pos_sameby": ["half"], "pos_diffby": ["experiment"], "neg_sameby": ["plate"], "neg_diffby": ["well"]}
    table = retrieval.activity(adata, **lists)
    found = retrieval.average_precision(
        adata,
        pos_sameby=["perturbation", "half"],
        pos_diffby=["experiment"],
        neg_sameby=["plate"],
        neg_diffby=["control", "well"],
    )
    treated = (adata.obs["control"] == "").to_numpy()
    expected = found[treated]["average_precision"].groupby(adata.obs["perturbation"].astype(str)[treated]).mean()
    pd.testing.assert_series_equal(
        table["mean_average_precision"], expected.reindex(table.index), check_names=False, check_index_type=False
    )
    scores = retrieval.evaluate(adata, ["X"], scores=["activity"], activity_pairs=lists, baselines=False)
    assert score(scores, "activity_map")["value"] == pytest.approx(table["mean_average_precision"].mean())
    with pytest.raises(InputError, match="activity_pairs has no 'pos_same'"):
        retrieval.evaluate(adata, ["X"], activity_pairs={"pos_same": ["half"]})
    classes = retrieval.consistency(adata, class_key="moa", neg_sameby=["plate"], pos_diffby=["plate"])
    assert len(classes) == 4
