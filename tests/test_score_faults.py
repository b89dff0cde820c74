"""Faults that users of such tools reported, one test each: what the scores do instead."""

import tracemalloc

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import metrics, profiles, retrieval
from cellica.schema import InputError


def screen(n_labels=12, n_batches=3, n_controls=6, n_features=10, effect=2.0, seed=0):
    rng = np.random.default_rng(seed)
    names = [f"P{i}" for i in range(n_labels)] + ["DMSO"] * n_controls
    obs = pd.concat([pd.DataFrame({"perturbation": names, "experiment": f"E{b}"}) for b in range(n_batches)])
    obs["control"] = np.where(obs["perturbation"] == "DMSO", "negative", "")
    obs["plate"] = obs["experiment"]
    obs["well"] = [f"{'ABCDEFGH'[i // 12]}{i % 12 + 1:02d}" for i in range(len(names))] * n_batches
    obs.index = pd.Index([f"{e}_{w}" for e, w in zip(obs["experiment"], obs["well"])], dtype=object)
    number = metrics.label_codes(obs["perturbation"].to_numpy(dtype=object))
    x = effect * rng.normal(size=(n_labels + 1, n_features))[number] + rng.normal(size=(len(obs), n_features))
    return ad.AnnData(x.astype(np.float32), obs=obs)


def test_wells_without_a_group_key_are_counted_and_named():
    """Pycytominer 133 and 687: they vanish in silence."""
    adata = screen()
    adata.obs.loc[adata.obs_names[[0, 1]], "perturbation"] = None
    row = retrieval.replicate_retrieval(adata).iloc[0]
    assert row["n_dropped"] == 2
    assert "2 wells left out: without perturbation" in row["note"]
    assert "2 wells left out: without perturbation" in "; ".join(retrieval.activity(adata).attrs["notes"])


def test_a_row_with_one_missing_feature_is_named(tmp_path):
    """CytoTable 56: one NaN of 100 features drops the row, and nothing says so."""
    table = pd.DataFrame(np.random.default_rng(0).normal(size=(8, 100))).add_prefix("f")
    table.iloc[3, 7] = np.nan
    obs = pd.DataFrame({"plate": "1", "well": [f"A{i:02d}" for i in range(1, 9)], "perturbation": list("aabbccdd")})
    pd.concat([obs, table], axis=1).to_csv(tmp_path / "table.csv", index=False)
    adata = profiles.read_table(tmp_path / "table.csv", columns={"experiment": "plate"})
    account = adata.uns["cellica"]["import"]
    assert adata.shape == (8, 99)  # the feature goes, the well stays
    assert account["features_not_finite"].tolist() == ["f7"]
    assert len(account["rows_not_finite"]) == 0


def test_ten_thousand_profiles_take_little_memory():
    """Copairs 90: killed at 9,216 profiles, 14 GB."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10_000, 384)).astype(np.float32)
    label, batch = np.arange(10_000) % 2500, np.arange(10_000) // 2500
    tracemalloc.start()
    try:
        found = metrics.average_precision(x, metrics.Pairs([label], [batch]), metrics.Pairs([], [label, batch]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3e8
    assert found.value.mean() == pytest.approx(metrics.chance_average_precision(3, 7497), rel=0.2)


@pytest.mark.parametrize("fault", ["zeros", "identical", "constant", "overflow", "not finite"])
def test_rows_without_a_direction_score_nothing(fault):
    """Copairs 0.5.5: mean average precision of 1 for rows that are all zero, identical or overflown."""
    adata = screen(effect=0.0)
    x = adata.X.copy()
    some = np.arange(len(x)) % 3 == 0
    if fault == "zeros":
        x[some] = 0
    elif fault == "constant":
        x[some] = 5
    elif fault == "overflow":
        x[some] = np.inf
    elif fault == "not finite":
        x[some, 0] = np.nan
    else:
        x[:] = x[0]
    adata.X = x
    row = retrieval.replicate_retrieval(adata).iloc[0]
    if fault == "identical":  # tied with all: worth what chance is
        assert row["value"] == pytest.approx(row["chance"])
    else:
        treated = (adata.obs["control"] == "").to_numpy()
        assert row["n_dropped"] == (some & treated).sum()
        assert row["value"] < 0.6


def test_p_values_are_the_same_when_asked_twice(tmp_path, monkeypatch):
    """Copairs 0.5.5: other p-values after a warm cache in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    adata = screen()
    first, second = retrieval.activity(adata), retrieval.activity(adata)
    pd.testing.assert_frame_equal(first, second)
    other = retrieval.activity(adata, random_state=1)
    assert (other["p"] != first["p"]).any()
    assert not list(tmp_path.iterdir())


def test_designs_that_cannot_reach_a_threshold_say_so():
    """Copairs 49 and 105: 2 replicates against 16 controls."""
    adata = screen(n_batches=2, n_controls=8, effect=20.0)
    adata = adata[adata.obs["experiment"].isin(["E0", "E1"])].copy()
    table = retrieval.activity(adata, neg_sameby=[])
    assert table["mean_average_precision"].min() == 1
    np.testing.assert_allclose(table["least_p"], 1 / 17)
    assert not table["active"].any()
    assert any(
        "too few positives and negatives for any p below 0.05: the smallest" in note for note in table.attrs["notes"]
    )
    more = retrieval.activity(screen(n_batches=4, n_controls=8, effect=20.0), neg_sameby=[])
    assert (more["least_p"] < 0.001).all()
    assert more["active"].all()


def test_without_replicates_the_columns_are_named():
    """Copairs 30: an obscure error."""
    adata = screen()
    adata.obs["perturbation"] = [f"Q{i}" for i in range(adata.n_obs)]
    note = retrieval.replicate_retrieval(adata).iloc[0]["note"]
    assert "no two treated wells share perturbation and differ in experiment" in note
    with pytest.raises(InputError, match=r"no two usable wells share \['perturbation'\]"):
        retrieval.average_precision(adata, pos_sameby=["perturbation"], neg_diffby=["perturbation"])


def test_the_representation_that_was_scored_is_named():
    """Scib 429: scores of another key than was named."""
    adata = screen()
    adata.obsm["X_a"], adata.obsm["X_b"] = adata.X.copy(), np.random.default_rng(1).normal(size=adata.shape)
    table = retrieval.evaluate(adata, ["X_b", "X_a"], baselines=False)
    assert list(dict.fromkeys(table["rep"])) == ["X_b", "X_a"]
    value = table[table["metric"] == "replicate_map"].set_index("rep")["value"]
    assert value["X_a"] > 2 * value["X_b"]
    with pytest.raises(InputError, match="'X_c' is not in obsm: use X, X_a, X_b"):
        retrieval.evaluate(adata, ["X_c"])


# ------------------------------------------------------------------------- what was found by trying to break the scores


def wider(**keywords):
    adata = screen(**keywords)
    adata.obs["moa"] = [None if p == "DMSO" else f"M{int(p[1:]) % 3}" for p in adata.obs["perturbation"]]
    return adata


def test_gains_are_of_the_rows_own_queries():
    adata = wider(n_labels=20, n_batches=4, effect=1.0)
    adata.obs["cell_type"] = adata.obs["experiment"].map({"E0": "A", "E1": "A", "E2": "B", "E3": "B"}).astype(object)
    table = retrieval.compare(adata, ["none", "center"], n_jobs=1, scores=["accuracy"], baselines=False)
    assert table.loc[table["group"] != "all", "gain"].isna().all()
    assert table.loc[(table["group"] == "all") & (table["rep"] == "X_center"), "gain"].notna().all()


def test_groups_that_no_fit_could_leave_out_are_said():
    adata = wider(n_batches=4)
    adata = adata[(adata.obs["perturbation"] != "DMSO") | (adata.obs["experiment"] == "E0")].copy()
    row = retrieval.held_out_retrieval(adata, "sphere").iloc[0]
    assert "1 fits failed, and their wells are not scored: without E0: sphere needs" in row["note"]
    assert "12 queries without a positive or negative are not scored" in row["note"]


def test_sampled_queries_are_the_same_for_every_method_and_row_order():
    adata = wider(n_labels=20, n_batches=4, effect=1.0)
    keys = {"scores": ["retrieval"], "baselines": False, "max_queries": 12, "n_jobs": 1}
    table = retrieval.compare(adata, ["none", "wccn"], **keys)
    held = table[table["metric"] == "replicate_map_held_out"]
    assert held["n_queries"].tolist() == [12, 12]
    order = np.random.default_rng(0).permutation(adata.n_obs)
    other = retrieval.compare(adata[order].copy(), ["none", "wccn"], **keys)
    np.testing.assert_allclose(other["value"], table["value"], atol=1e-9)


def test_parts_of_other_columns_are_not_taken_for_these(tmp_path):
    adata = wider()
    adata.obs["moa2"] = np.random.default_rng(0).permutation(adata.obs["moa"].to_numpy(dtype=object))
    keys = {"scores": ["retrieval"], "class_key": "moa", "group_key": "perturbation", "n_jobs": 1, "baselines": False}
    parts = tmp_path / "parts"
    first = retrieval.compare(adata, ["none"], parts=parts, **keys)
    swapped = adata.copy()
    swapped.obs = adata.obs.rename(columns={"moa": "moa2", "moa2": "moa"})
    found = retrieval.compare(swapped, ["none"], parts=parts, **keys)
    expected = retrieval.compare(swapped, ["none"], **keys)
    pd.testing.assert_frame_equal(found, expected)
    assert not found["value"].equals(first["value"])


def test_arms_without_a_chromosome_are_refused():
    adata = wider(n_labels=24)
    genes = [f"P{i}" for i in range(24)]
    table = pd.DataFrame({"gene": genes, "arm": ["p", "q"] * 12})
    with pytest.raises(InputError, match="names arms 'p', 'q': write chromosome and arm as 1p"):
        retrieval.arm_bias(adata, table)
    table["chromosome"] = [str(1 + i // 12) for i in range(24)]
    assert "24 genes on 4 arms" in retrieval.arm_bias(adata, table).iloc[0]["note"].replace(
        "queries are genes", "24 genes"
    )
    table.loc[0, "arm"] = "cen"
    with pytest.raises(InputError, match="names arms"):
        retrieval.arm_bias(adata, table)
    table.loc[0, ["arm", "chromosome"]] = [None, None]
    assert (
        "1 of 24 genes have no position and stay as they are ('P0')" in retrieval.arm_bias(adata, table).iloc[0]["note"]
    )


def test_over_correction_is_judged_by_what_has_a_direction():
    table = retrieval.compare(wider(), ["none", "sphere"], n_jobs=1, scores=["batch", "probes"], baselines=False)
    table[["gain", "gain_low", "gain_high"]] = np.nan
    share = table["metric"].str.startswith("batch_share")
    sphere = table["rep"] == "X_sphere"
    table.loc[share & ~sphere, "value"], table.loc[share & sphere, "value"] = 0.5, 0.1
    hoyer = sphere & (table["metric"] == "probe_hoyer") & (table["group"] == "all")
    table.loc[hoyer, ["gain", "gain_low", "gain_high"]] = [-0.2, -0.3, -0.1]
    assert not [text for text in retrieval.cautions(table) if "over-corrected" in text]
    auroc = sphere & (table["metric"] == "holdout_auroc") & (table["group"] == "all")
    table.loc[auroc, ["gain", "gain_low", "gain_high"]] = [-0.2, -0.3, -0.1]
    table.loc[hoyer, ["gain", "gain_low", "gain_high"]] = [0.2, 0.1, 0.3]
    assert [text for text in retrieval.cautions(table) if "over-corrected" in text]


def test_gains_may_be_over_another_method():
    keys = {"scores": ["retrieval"], "baselines": False, "n_jobs": 1}
    table = retrieval.compare(wider(), ["none", "center", "sphere"], reference="center", **keys).set_index(
        ["rep", "metric"]
    )
    value = table["value"]
    for rep in ("X_none", "X_sphere"):
        expected = value[rep, "replicate_map"] - value["X_center", "replicate_map"]
        assert table.loc[(rep, "replicate_map"), "gain"] == pytest.approx(expected)
    assert np.isnan(table.loc[("X_center", "replicate_map"), "gain"])
    with pytest.raises(InputError, match="reference 'sphere' is not among the methods 'none'"):
        retrieval.compare(wider(), ["none"], reference="sphere", **keys)


def test_options_without_effect_are_refused(tmp_path):
    adata = wider()
    with pytest.raises(InputError, match="name these too"):
        retrieval.evaluate(adata, ["X"], gene_positions=tmp_path / "none.csv")
    with pytest.raises(InputError, match="'truth' is for 'relationships'"):
        retrieval.evaluate(adata, ["X"], truth=tmp_path, scores=["batch"])
    with pytest.raises(InputError, match="'bogus' is for a method"):
        retrieval.knn_accuracy(adata, bogus=1)
    with pytest.raises(InputError, match="boolean mask"):
        retrieval.average_precision(
            adata, pos_sameby=["perturbation"], neg_diffby=["perturbation"], queries=np.array([5, 9])
        )


@pytest.mark.parametrize("content", [b"", "entity1,entity2\na\u00e9,b\n".encode("utf-16"), b'entity1,entity2\n"a,b\n'])
def test_files_that_cannot_be_read_are_named(tmp_path, content):
    (tmp_path / "CORUM.txt").write_bytes(content)
    with pytest.raises(InputError, match=r"CORUM\.txt"):
        retrieval.evaluate(wider(), ["X"], truth=tmp_path)


def test_views_keep_their_scores_and_twice_named_wells_are_refused():
    adata = wider()
    view = adata[::2]
    retrieval.evaluate(view, ["X"], scores=["batch"], baselines=False)
    assert "scores" in view.uns["cellica"]
    adata.obs_names = [f"w{i // 2}" for i in range(adata.n_obs)]
    with pytest.raises(InputError, match="obs names occur twice"):
        retrieval.compare(adata, ["none"])


@pytest.mark.parametrize("n", [1, 3])
def test_few_queries_are_enough(n):
    table = retrieval.evaluate(wider(), ["X"], max_queries=n, baselines=False)
    assert (table.loc[table["metric"] == "knn_accuracy", "n_queries"] == n).all()


def test_learned_scores_may_be_compared_alone():
    table = retrieval.compare(wider(), ["none"], n_jobs=1, scores=["accuracy"], baselines=False)
    assert set(table["metric"]) == {"knn_accuracy", "probe_accuracy"}
