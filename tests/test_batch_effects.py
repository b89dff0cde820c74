import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import batch_effects, correct, metrics, shares
from cellica.schema import INTERVAL_COLUMNS, SCORE_COLUMNS, InputError


def wells(batch_effect=1.0, effect=1.0, n_batches=4, n_labels=10, n_each=2, n_controls=8, n_features=12, seed=0):
    """Batches of eight controls and two wells of each of ten perturbations."""
    rng = np.random.default_rng(seed)
    names = ["DMSO"] * n_controls + [f"P{i}" for i in range(n_labels)] * n_each
    obs = pd.DataFrame(
        {"perturbation": names * n_batches, "experiment": np.repeat([f"E{b}" for b in range(n_batches)], len(names))}
    )
    obs["control"] = np.where(obs["perturbation"] == "DMSO", "negative", "")
    obs.index = [f"{name}_{i:04d}" for i, name in enumerate(obs["experiment"])]
    code = metrics.label_codes(obs["perturbation"].to_numpy(dtype=object))
    x = effect * rng.normal(size=(code.max() + 1, n_features))[code] + rng.normal(size=(len(obs), n_features))
    x += batch_effect * rng.normal(size=(n_batches, n_features))[np.repeat(np.arange(n_batches), len(names))]
    return ad.AnnData(x.astype(np.float32), obs=obs)


def shuffled(adata, seed=0):
    """Wells that keep their perturbation and get another's batch."""
    obs, rng = adata.obs.copy(), np.random.default_rng(seed)
    for rows in obs.groupby("perturbation").indices.values():
        obs.iloc[rows, 1] = rng.permutation(obs["experiment"].to_numpy()[rows])
    return ad.AnnData(adata.X, obs=obs)


def one(table, metric):
    assert list(table.columns) == [*SCORE_COLUMNS, *INTERVAL_COLUMNS]
    found = table[table["metric"] == metric]
    assert len(found) == 1
    return found.iloc[0]


# ---------------------------------------------------------------------------------------------- share of the variance


def test_sums_give_the_shares_of_batches_drawn_again():
    rng = np.random.default_rng(0)
    group, stratum = rng.integers(6, size=150), rng.integers(7, size=150)
    x = rng.normal(size=(150, 5)) + rng.normal(size=(6, 5))[group] + 3 * rng.normal(size=(7, 5))[stratum]
    sums = shares._Sums(x, group, stratum)
    for times in ([1, 1, 1, 1, 1, 1], [2, 0, 1, 0, 3, 0], [0, 0, 1, 5, 0, 0]):
        rows = np.concatenate([np.flatnonzero(group == g) for g, n in enumerate(times) for _ in range(n)])
        copy = np.concatenate([np.full(sum(group == g), f"{g}_{i}") for g, n in enumerate(times) for i in range(n)])
        expected = metrics.adjusted_eta2(x[rows], copy, stratum[rows])
        residual = x[rows] - pd.DataFrame(x[rows]).groupby(stratum[rows]).transform("mean").to_numpy()
        weighted = np.average(expected, weights=residual.var(axis=0))
        np.testing.assert_allclose(sums.shares(np.array(times)), (expected.mean(), weighted), atol=1e-10)


@pytest.mark.parametrize(("n_batches", "spread"), [(6, 0.0), (6, 0.7), (20, 0.4)])
def test_intervals_of_the_share_hold_its_mean(n_batches, spread):
    tables = [
        batch_effects.batch_effect(wells(spread, n_batches=n_batches, n_labels=5, n_each=1, n_controls=2, seed=seed))
        for seed in range(30)
    ]
    rows = pd.DataFrame([one(table, "batch_share") for table in tables])
    held = (rows["low"] <= rows["value"].mean()) & (rows["value"].mean() <= rows["high"])
    assert held.mean() >= 0.85
    assert (rows["n_units"] == n_batches).all()


def test_batch_share_is_zero_without_an_effect_and_rises_with_it():
    rows = [one(batch_effects.batch_effect(wells(effect)), "batch_share") for effect in (0.0, 0.5, 2.0)]
    assert rows[0]["low"] < 0 < rows[0]["high"]
    assert rows[1]["low"] > 0
    assert rows[0]["value"] < rows[1]["value"] < rows[2]["value"] < 1
    blind = one(batch_effects.batch_effect(shuffled(wells(2.0))), "batch_share")
    assert blind["low"] < 0 < blind["high"]
    assert "interval over batches" in blind["note"]


def test_batch_share_of_two_batches_has_no_interval():
    row = one(batch_effects.batch_effect(wells(n_batches=2)), "batch_share")
    assert np.isnan(row[["low", "high"]].astype(float)).all()
    assert "no interval: over batches, of which there are two" in row["note"]
    single = one(batch_effects.batch_effect(wells(n_batches=1)), "batch_share")
    assert np.isnan(single["value"])
    assert single["note"].startswith("not applicable")


# ---------------------------------------------------------------------------------------------- batch probe


def test_batch_probe_reads_batches_and_is_at_chance_without_them():
    strong, weak, none = (one(batch_effects.batch_probe(wells(effect)), "batch_probe") for effect in (3.0, 0.7, 0.0))
    assert strong["value"] > 0.95
    assert strong["value"] > weak["value"] > weak["chance"] + 0.1
    assert weak["low"] > weak["chance"]
    assert (strong["n_queries"], strong["n_units"]) == (32, 4)
    values = [one(batch_effects.batch_probe(shuffled(wells(3.0, seed=s), s)), "batch_probe") for s in range(12)]
    assert np.mean([row["value"] for row in values]) == pytest.approx(0.25, abs=0.06)
    assert np.mean([row["chance"] for row in values]) == pytest.approx(0.25, abs=0.06)
    assert none["value"] < 0.5


def test_batch_probe_asks_within_strata_and_counts_what_it_leaves_out():
    adata = wells(3.0, n_batches=5)
    adata.obs["cell_type"] = adata.obs["experiment"].map({"E0": "A", "E1": "A", "E2": "B", "E3": "B", "E4": "C"})
    first = adata.obs_names[(adata.obs["experiment"] == "E0") & (adata.obs["control"] == "negative")]
    adata.obs.loc[first[0], "experiment"] = None
    row = one(batch_effects.batch_probe(adata), "batch_probe")
    assert row["n_queries"] == 31
    assert row["n_dropped"] == 9
    assert row["chance"] == pytest.approx(0.5, abs=0.15)
    assert "8 controls left out: of a batch with one, or the only such batch of a stratum" in row["note"]
    assert "1 wells left out: without experiment" in row["note"]


def test_batch_probe_is_not_applicable_to_one_batch_or_no_controls():
    for adata in (wells(n_batches=1), wells(n_controls=1), wells(n_controls=0)):
        row = one(batch_effects.batch_probe(adata), "batch_probe")
        assert np.isnan(row["value"])
        assert row["note"].startswith("not applicable: no stratum has two batches (obs['experiment'])")
    with pytest.raises(InputError, match="no column 'week'"):
        batch_effects.batch_probe(wells(), batch_key="week")


def test_controls_that_were_centred_are_said():
    adata = wells(2.0)
    correct.run(adata, "center")
    row = one(batch_effects.batch_probe(adata, use_rep="X_center"), "batch_probe")
    assert row["rep"] == "X_center"
    assert row["value"] < row["chance"]
    assert "center took batch means from these very wells: the value says nothing of others" in row["note"]


@pytest.mark.parametrize("score", [batch_effects.batch_effect, batch_effects.batch_probe])
def test_scores_repeat_whatever_the_order_and_type_of_batches(score):
    adata = wells()
    adata.obsm["X_other"] = adata.X[:, ::-1].copy()
    first = score(adata, random_state=1, use_rep="X_other")
    assert set(first["rep"]) == {"X_other"}
    pd.testing.assert_frame_equal(score(adata, random_state=1, use_rep="X_other"), first)
    mixed = adata[np.random.default_rng(0).permutation(adata.n_obs)].copy()
    mixed.obs["experiment"] = mixed.obs["experiment"].str[1:].astype(int)
    again = score(mixed, random_state=1, use_rep="X_other")
    pd.testing.assert_frame_equal(again, first, atol=2e-6)
