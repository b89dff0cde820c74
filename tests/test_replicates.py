import time

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import retrieval
from cellica.schema import INTERVAL_COLUMNS, SCORE_COLUMNS, InputError


@pytest.fixture(scope="module")
def public(shared):
    folder = shared / "reference" / "efaar"
    obs = pd.read_csv(folder / "obs.csv")
    obs.index = [f"w{i:03d}" for i in range(len(obs))]
    obs["control"] = np.where(obs["perturbation"] == "EMPTY_control", "negative", "")
    with np.load(folder / "normalization.npz") as arrays:
        return ad.AnnData(arrays["tvn_coral"], obs=obs), folder


def screen(effect, n=30, replicates=6, n_controls=40, batch_effect=1.0, seed=0):
    """Perturbations, the first half without effect, one or two wells in each of four batches that hold controls."""
    rng = np.random.default_rng(seed)
    batches = np.arange(4)
    obs = [(f"P{i:02d}", f"E{b % 4}", "") for i in range(n) for b in range(replicates)]
    obs += [("DMSO", f"E{b}", "negative") for b in batches for _ in range(n_controls)]
    obs = pd.DataFrame(obs, columns=["perturbation", "experiment", "control"])
    obs.index = [f"w{i:04d}" for i in range(len(obs))]
    label, batch = (pd.factorize(obs[key])[0] for key in ("perturbation", "experiment"))
    shift = effect * rng.normal(size=(n + 1, 20)) * (np.arange(n + 1) >= n // 2)[:, None]
    shift[-1] = 0
    x = rng.normal(size=(len(obs), 20)) + shift[label] + batch_effect * rng.normal(size=(4, 20))[batch]
    return ad.AnnData(x, obs=obs)


def test_consistency_is_the_public_one(public):
    adata, folder = public
    expected = pd.read_csv(folder / "consistency.csv", index_col="pert")
    null = [f"GENE{i}" for i in range(20, 30)]
    found = retrieval.replicate_consistency(adata, null=null)
    of_null = found.loc[found["is_null"], "mean_cosine"].to_numpy()
    mine = found.loc[expected.index]
    np.testing.assert_allclose(mine["mean_cosine"], expected["avgcossim"], atol=1e-8)
    k = (of_null[None] >= mine["mean_cosine"].to_numpy()[:, None]).sum(axis=1)
    np.testing.assert_allclose(k / 10, expected["pval"], atol=1e-12)
    np.testing.assert_allclose(mine["p"], (1 + k) / 11)
    assert found.loc[null, "p"].isna().all()
    assert "0.091 can be reached" in found.attrs["notes"][-1]


def test_magnitude_is_the_public_one(public):
    adata, folder = public
    expected = pd.read_csv(folder / "energy_distance.csv", index_col="perturbation")["energy_distance"]
    found = retrieval.magnitude(adata, n_permutations=99)
    np.testing.assert_allclose(found["energy_distance"].loc[expected.index], expected, atol=1e-8)
    assert (found["energy_distance_unbiased"] < found["energy_distance"]).all()


@pytest.mark.parametrize("measure", [retrieval.replicate_consistency, retrieval.magnitude])
def test_what_acts_is_found_and_what_does_not_is_not(measure):
    found = measure(screen(1.0, batch_effect=0.2))
    verdict = found.columns[-1]
    assert found[verdict].to_numpy()[15:].all()
    assert found[verdict].to_numpy()[:15].mean() < 0.2
    p = np.concatenate([measure(screen(0.0, batch_effect=0.0, seed=s))["p"] for s in range(6)])
    assert 0.01 < np.mean(p <= 0.05) < 0.1
    assert 0.42 < p.mean() < 0.58


def test_controls_as_perturbations_lie_in_the_batches_of_the_wells():
    """A batch effect makes the wells of one batch alike; so are controls drawn in that batch."""
    adata = screen(0.0, batch_effect=3.0)
    hidden = np.flatnonzero(adata.obs["control"] == "negative").reshape(4, 40)[:, :12]
    for b in range(4):  # controls that pass for perturbations, three in each batch, and some in all
        for k in range(3):
            adata.obs.iloc[hidden[b, 3 * k : 3 * k + 3], [0, 2]] = [f"in-{b}-{k}", ""]
    adata.obs.iloc[hidden[:, 10:].ravel(), [0, 2]] = ["in-all", ""]
    found = retrieval.replicate_consistency(adata)
    alone = found[found.index.str.startswith("in-") & (found.index != "in-all")]
    assert alone["mean_cosine"].mean() > 0.7 > 0.3 > found.loc["in-all", "mean_cosine"]
    np.testing.assert_allclose(alone["chance"], alone["mean_cosine"], atol=0.2)
    assert not found["consistent"].any()


def test_rows_in_another_order_give_the_same(public):
    adata, _ = public
    order = np.random.default_rng(0).permutation(adata.n_obs)
    for measure in (retrieval.replicate_consistency, retrieval.magnitude):
        pd.testing.assert_frame_equal(measure(adata), measure(adata[order].copy()))


def test_scores_are_at_chance_without_effect_and_above_with():
    noise = retrieval.replicate_scores(screen(0.0, batch_effect=0.0)).set_index("metric")
    found = retrieval.replicate_scores(screen(1.0, batch_effect=0.2)).set_index("metric")
    assert list(noise.columns) == [c for c in [*SCORE_COLUMNS, *INTERVAL_COLUMNS] if c != "metric"]
    assert (noise["low"] <= noise["chance"]).all()
    measured = noise.loc[["replicate_cosine", "magnitude"]]
    assert (measured["high"] >= measured["chance"]).all()
    assert (found["low"] > found["chance"]).all()
    assert (found["n_units"] == 30).all()


def test_what_cannot_be_measured_is_explained():
    adata = screen(1.0, n=4)
    bare = adata[adata.obs["control"] == ""].copy()
    with pytest.raises(InputError, match="perturbations that do nothing"):
        retrieval.replicate_consistency(bare)
    with pytest.raises(InputError, match="2 negative controls and found 0"):
        retrieval.magnitude(bare)
    with pytest.raises(InputError, match="null perturbations 'P99' are not there"):
        retrieval.replicate_consistency(bare, null=["P99", "P00"])
    with pytest.raises(InputError, match="none of 4 perturbations has 50 wells"):
        retrieval.magnitude(adata, min_wells=50)
    scores = retrieval.replicate_scores(bare)
    assert scores["value"].isna().all()
    few = retrieval.replicate_consistency(adata[~adata.obs_names.isin([f"w{i:04d}" for i in range(5)])].copy())
    assert "P00" not in few.index
    assert "1 perturbations left out: a single well ('P00')" in few.attrs["notes"][-1]


def test_a_large_screen_takes_seconds():
    rng = np.random.default_rng(0)
    names = np.array([f"P{i:04d}" for i in range(2000)] * 9 + ["DMSO"] * 2000)
    obs = pd.DataFrame({"perturbation": names, "experiment": [f"E{i % 10}" for i in range(20_000)]})
    obs["control"] = np.where(names == "DMSO", "negative", "")
    obs.index = [f"w{i}" for i in range(20_000)]
    adata = ad.AnnData(rng.standard_normal((20_000, 384), dtype=np.float32), obs=obs)
    start = time.perf_counter()
    consistency = retrieval.replicate_consistency(adata, null_size=200)
    magnitude = retrieval.magnitude(adata, n_permutations=100)
    assert time.perf_counter() - start < 60  # some 8 s
    assert len(consistency) == len(magnitude) == 2000
    assert "1000 of 2000 controls sampled" in "; ".join(magnitude.attrs["notes"])
