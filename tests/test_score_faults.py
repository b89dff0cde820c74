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
