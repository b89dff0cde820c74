import sys
import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_mutual_info_score, silhouette_samples
from sklearn.neighbors import NearestNeighbors

from cellica import integration, metrics
from cellica.integration import ON_BATCHES, SCORES
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


@pytest.fixture(scope="module")
def scib():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("scib_metrics")


def corrected(**how):
    adata = wells(**how)
    adata.obsm["X_half"] = (np.asarray(adata.X) - wells(**{**how, "effect": 0.0}).X * 0.3).astype(np.float32)
    return adata


def test_values_are_those_of_scib_metrics(scib):
    from scib_metrics.nearest_neighbors import NeighborsResults

    adata = corrected(n_each=3)
    table = integration.integration(adata, use_rep="X_half")
    treated = (adata.obs["control"] == "").to_numpy()
    x, before = adata.obsm["X_half"][treated], np.asarray(adata.X)[treated]
    label, batch = (adata.obs[key].to_numpy(dtype=str)[treated] for key in ("perturbation", "experiment"))
    distances, indices = NearestNeighbors(n_neighbors=90).fit(x).kneighbors(x)
    near = NeighborsResults(indices, distances)
    expected = {
        "bras": scib.bras(x, label, batch),
        "ilisi": scib.ilisi_knn(near, batch),
        "kbet": scib.kbet(near.subset_neighbors(50), batch)[0],
        "graph_connectivity": scib.graph_connectivity(near.subset_neighbors(15), label),
        "pcr_comparison": scib.pcr_comparison(before, x, batch, categorical=True),
    }
    assert table["metric"].tolist() == list(SCORES)
    for metric, value in expected.items():
        row = one(table, metric)
        assert row["value"] == pytest.approx(float(value), abs=1e-5), metric
        assert (row["n_queries"], row["n_dropped"]) == (120, 0)
    for metric in ("bras", "kbet", "graph_connectivity"):
        row = one(table, metric)
        assert row["low"] <= row["value"] <= row["high"]
        assert row["n_units"] == 10
    clusters = integration._Stratum(x, None, label, batch, 0).clusters
    assert one(table, "kmeans_ami")["value"] == pytest.approx(adjusted_mutual_info_score(label, clusters))


def test_bras_and_pcr_are_what_their_papers_say(scib):
    adata = corrected(n_each=3)
    table = integration.integration(adata, metrics=["pcr_comparison"], use_rep="X_half")
    treated = (adata.obs["control"] == "").to_numpy()
    batch = adata.obs["experiment"].to_numpy(dtype=str)[treated]

    def share(x):
        scores = PCA().fit_transform(x)
        known = np.eye(4)[metrics.label_codes(batch)]
        fitted = known @ np.linalg.lstsq(known, scores, rcond=None)[0]
        return fitted.var(axis=0).sum() / scores.var(axis=0).sum()

    before, after = (share(np.asarray(x, dtype=float)[treated]) for x in (adata.X, adata.obsm["X_half"]))
    assert one(table, "pcr_comparison")["value"] == pytest.approx((before - after) / before, abs=1e-4)
    two = adata[np.isin(adata.obs["experiment"], ["E0", "E1"]) & treated]
    values = []
    for name in two.obs["perturbation"].unique():
        at = two.obs["perturbation"] == name
        silhouette = silhouette_samples(two.obsm["X_half"][at], two.obs["experiment"][at], metric="cosine")
        values.append(np.mean(1 - np.abs(silhouette)))
    found = integration.integration(two.copy(), metrics=["bras"], use_rep="X_half")
    assert one(found, "bras")["value"] == pytest.approx(np.mean(values), abs=1e-4)


def test_integration_falls_with_the_batch_effect_and_rises_with_biology(scib):
    clean, mixed = (integration.integration(wells(effect, n_each=3)) for effect in (0.0, 1.5))
    for metric in ("bras", "ilisi", "kbet"):
        assert one(clean, metric)["value"] > one(mixed, metric)["value"] + 0.05
        assert one(clean, metric)["value"] == pytest.approx(one(clean, metric)["chance"], abs=0.08)
        assert one(mixed, metric)["value"] < one(mixed, metric)["chance"] - 0.05
    dull, clear = (integration.integration(wells(0.0, effect, n_each=3)) for effect in (0.0, 2.0))
    for metric in ("graph_connectivity", "kmeans_nmi", "kmeans_ami", "kmeans_ari"):
        assert one(clear, metric)["value"] > one(dull, metric)["value"] + 0.2
        assert one(dull, metric)["value"] == pytest.approx(one(dull, metric)["chance"], abs=0.1)
    assert one(dull, "kmeans_nmi")["chance"] > 0.15  # NMI of noise
    assert abs(one(dull, "kmeans_ami")["chance"]) < 0.08
    blind = integration.integration(shuffled(wells(1.5, n_each=3)))
    for metric in ("bras", "ilisi", "kbet"):
        assert one(blind, metric)["value"] == pytest.approx(one(blind, metric)["chance"], abs=0.08)


def test_one_batch_is_not_applicable(scib):
    table = integration.integration(wells(n_batches=1))
    for metric in ON_BATCHES:
        assert np.isnan(one(table, metric)["value"])
        assert one(table, metric)["note"].startswith("not applicable: one batch (obs['experiment'])")
    assert one(table, "graph_connectivity")["value"] > 0


def test_fewer_wells_than_neighbors_are_said(scib):
    table = integration.integration(wells(n_batches=2, n_labels=5, n_each=3))
    for metric, asked in (("ilisi", 90), ("kbet", 50)):
        row = one(table, metric)
        assert f"29 neighbours, of the {asked} of scIB" in row["note"]
        assert np.isfinite(row["value"])
    assert "neighbours" not in one(table, "graph_connectivity")["note"]
    tiny = integration.integration(wells(n_batches=2, n_labels=2))
    assert tiny["value"].isna().all()
    assert tiny["note"].str.startswith("not applicable: no stratum has 10 treated wells").all()
    assert (tiny["n_dropped"] == 8).all()


def test_one_replicate_a_batch_is_not_applicable_to_bras(scib):
    table = integration.integration(wells(n_each=1))
    row = one(table, "bras")
    assert np.isnan(row["value"])
    assert row["note"].startswith("not applicable: no perturbation lies in two batches with two wells in one of them")
    assert not table[~table["metric"].isin(["bras", "pcr_comparison"])]["value"].isna().any()


def test_without_replicates_the_columns_are_named(scib):
    adata = wells()
    adata.obs["perturbation"] = np.where(adata.obs["control"] == "negative", "DMSO", adata.obs_names)
    table = integration.integration(adata, metrics=["graph_connectivity", "kmeans_ami"])
    assert "no perturbation has two wells (obs['perturbation'])" in one(table, "graph_connectivity")["note"]
    assert "obs['perturbation'] has 80 values in 80 wells" in one(table, "kmeans_ami")["note"]
    confounded = wells()
    confounded.obs["experiment"] = confounded.obs["perturbation"]
    assert np.isnan(one(integration.integration(confounded, metrics=["bras"]), "bras")["value"])


def test_missing_labels_are_counted_and_form_no_group(scib):
    adata = wells()
    lost = adata.obs_names[(adata.obs["perturbation"] == "P0").to_numpy()]
    adata.obs.loc[lost, "perturbation"] = np.nan
    adata.obs.loc[adata.obs_names[-1], "experiment"] = None
    row = one(integration.integration(adata, metrics=["graph_connectivity"]), "graph_connectivity")
    assert (row["n_units"], row["n_queries"], row["n_dropped"]) == (9, 71, 9)
    assert "8 wells left out: without perturbation" in row["note"]
    assert "1 wells left out: without experiment" in row["note"]


def test_strata_are_scored_apart(scib):
    adata = wells(0.0)
    adata.obs["cell_type"] = np.where(adata.obs["experiment"].isin(["E0", "E1"]), "A", "B")
    adata.X[adata.obs["cell_type"] == "B"] += 20
    assert one(integration.integration(adata, metrics=["kbet"]), "kbet")["value"] > 0.8
    assert one(integration.integration(adata, metrics=["kbet"], strata_key=None), "kbet")["value"] < 0.2
    single = adata[adata.obs["experiment"] != "E3"].copy()
    row = one(integration.integration(single, metrics=["ilisi"]), "ilisi")
    assert row["n_queries"] == 40
    assert "not of all strata: one batch" in row["note"]


def test_reference_and_key_are_said(scib):
    adata = corrected()
    pcr = {"metrics": ["pcr_comparison"]}
    plain = one(integration.integration(adata, **pcr), "pcr_comparison")
    assert plain["note"].startswith("not applicable: X is itself the representation before correction")
    other = one(integration.integration(adata, use_rep="X_half", reference="X_half", **pcr), "pcr_comparison")
    assert other["note"].startswith("not applicable: X_half is itself")
    with pytest.raises(InputError, match="'X_none' is not in obsm"):
        integration.integration(adata, use_rep="X_none")
    with pytest.raises(InputError, match="'X_none' is not in obsm"):
        integration.integration(adata, reference="X_none")
    with pytest.raises(InputError, match="metric 'lisi' is not known: use 'bras', 'ilisi', 'kbet'"):
        integration.integration(adata, metrics=["lisi"])


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scib_metrics", None)
    table = integration.integration(wells())
    for metric in ("bras", "ilisi", "kbet"):
        assert one(table, metric)["note"].startswith("not applicable: install scib-metrics (pip install cellica[scib])")
    assert one(table, "graph_connectivity")["value"] > 0


def test_scores_repeat_whatever_the_order_and_type_of_batches(scib):
    adata = corrected()
    first = integration.integration(adata, random_state=1, use_rep="X_half")
    assert set(first["rep"]) == {"X_half"}
    mixed = adata[np.random.default_rng(0).permutation(adata.n_obs)].copy()
    mixed.obs["experiment"] = mixed.obs["experiment"].str[1:].astype(int)
    pd.testing.assert_frame_equal(integration.integration(mixed, random_state=1, use_rep="X_half"), first, atol=2e-6)
