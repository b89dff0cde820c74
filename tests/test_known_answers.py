"""Planted effects move every score as they must; labels shuffled within batches put all of them at chance."""

import itertools

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import retrieval, simulate

FOUND = [
    "replicate_map",
    "replicate_map_other_well",
    "class_map",
    "nsc",
    "nscb",
    "activity_map",
    "active_share",
    "consistency_map",
    "replicate_cosine",
    "magnitude",
    "knn_accuracy",
    "probe_accuracy",
    "holdout_auroc",
    "recall_0.05_0.95",
    "recall_0.1_0.9",
]  # higher is better
BATCH = ["batch_share", "batch_share_weighted", "batch_probe"]  # lower is better
KINDS = ["retrieval", "batch", "activity", "accuracy", "relationships", "probes"]


@pytest.fixture(scope="module")
def wells() -> ad.AnnData:
    """Four batches, 48 treatments of which pairs of a class are alike, 8 controls; representations of known content."""
    made = simulate.profiles("small", n_features=32, n_treatments=48, random_state=1)
    roles = np.array(made.uns["cellica"]["simulation"]["roles"])
    factors = np.asarray(made.obsm["factors"])
    noise = np.random.default_rng(0).normal(size=(made.n_obs, 32)).astype(np.float32)
    made.obsm["X_biology"] = factors[:, roles == "biology"]
    made.obsm["X_mixed"] = factors
    made.obsm["X_noise"] = noise
    return made


@pytest.fixture(scope="module")
def truth(wells, tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth")
    classes = wells.obs.dropna(subset="moa").groupby("moa")["perturbation"].unique()
    pairs = [pair for names in classes for pair in itertools.combinations(sorted(names), 2)]
    pd.DataFrame(pairs, columns=["entity1", "entity2"]).to_csv(folder / "classes.txt", index=False)
    return folder


def values(table: pd.DataFrame, column: str = "value") -> pd.DataFrame:
    table = table[table["group"].isin(["all", "classes"])]
    return table.pivot_table(column, "metric", "rep", dropna=False)


def scored(wells, reps, truth):
    keys = {"class_key": "moa", "truth": truth, "scores": KINDS, "baselines": False}
    return retrieval.evaluate(wells, reps, **keys)


@pytest.fixture(scope="module")
def table(wells, truth):
    return scored(wells, ["X_biology", "X_mixed", "X_noise"], truth)


@pytest.mark.parametrize("metric", FOUND)
def test_more_is_found_without_the_batch_effect_and_nothing_in_noise(table, metric):
    value, chance = values(table).loc[metric], values(table, "chance").loc[metric]
    beyond = value - chance
    if metric not in ("nsc", "consistency_map"):  # of means over batches, and of those that are active
        assert beyond["X_biology"] >= beyond["X_mixed"]
    chance = chance["X_noise"]
    if np.isnan(value["X_noise"]):
        assert metric == "consistency_map"  # no perturbation is active, so no class can be
        return
    reach = {"magnitude": 0.5, "active_share": 0.05, "nsc": 0.13}.get(
        metric, 0.06
    )  # nsc: three standard errors of 48 queries
    assert value["X_noise"] == pytest.approx(chance, abs=reach)
    assert value["X_biology"] > chance + reach


@pytest.mark.parametrize("metric", BATCH)
def test_less_batch_is_left_where_it_was_taken_out(table, metric):
    value, chance = values(table).loc[metric], values(table, "chance").loc[metric]
    assert value["X_mixed"] > value["X_biology"] + 0.03
    assert value["X_noise"] == pytest.approx(chance["X_noise"], abs=0.13 if metric == "batch_probe" else 0.03)


def test_every_score_has_chance_and_an_interval_that_holds_it(table):
    known = table[table["value"].notna()]
    assert known["chance"].notna().all()
    assert (known["low"] <= known["value"] + 1e-9).all()
    assert (known["high"] >= known["value"] - 1e-9).all()
    assert (known["n_units"] > 1).all()
    assert (known["n_queries"] > 0).all()


def test_labels_shuffled_within_batches_are_at_chance(wells, truth):
    """Mean over seeds, as perturbations of one shuffle are not independent."""
    names = ["perturbation", "moa"]
    found = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        mixed = wells.copy()
        treated = np.flatnonzero(mixed.obs["control"] == "")
        order = np.arange(mixed.n_obs)
        for batch in mixed.obs["experiment"].unique():
            rows = treated[(mixed.obs["experiment"] == batch).to_numpy()[treated]]
            order[rows] = rng.permutation(rows)
        for name in names:
            mixed.obs[name] = wells.obs[name].to_numpy(dtype=object)[order]
        one = scored(mixed, ["X_biology"], truth)
        one = one[one["group"].isin(["all", "classes"]) & one["metric"].isin(FOUND)].set_index("metric")
        found.append(one["value"] - one["chance"])
    excess = pd.concat(found, axis=1).drop(
        ["magnitude", "activity_map", "active_share", "replicate_cosine", "holdout_auroc"]
    )
    # treated wells differ from controls whatever their labels say: these compare with controls
    spread = excess.std(axis=1) / np.sqrt(excess.notna().sum(axis=1))
    for metric, mean in excess.mean(axis=1).dropna().items():
        assert abs(mean) < 4 * spread[metric] + 0.02, metric
