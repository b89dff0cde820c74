import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import retrieval
from cellica.schema import INTERVAL_COLUMNS, SCORE_COLUMNS, InputError, MissingFileError


def wells(names, x):
    obs = pd.DataFrame({"perturbation": names, "experiment": "E"}, index=[str(i) for i in range(len(names))])
    return ad.AnnData(np.asarray(x, dtype=np.float64), obs=obs)


@pytest.fixture(scope="module")
def public_map(shared):
    table = pd.read_csv(shared / "reference/efaar/relationship_map.csv.gz")
    return wells(table["gene"].to_numpy(), table.iloc[:, 1:].to_numpy())


def planted(n=120, size=12, n_features=30, seed=0, effect=1.0):
    """A map of clusters of ``size`` whose members share a direction."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, n_features)) + effect * rng.normal(size=(n // size, n_features))[np.arange(n) // size]
    names = np.array([f"G{i:03d}" for i in range(n)], dtype=object)
    return wells(names, x), {f"C{i}": names[size * i : size * (i + 1)].tolist() for i in range(n // size)}


def write_pairs(file, clusters):
    pairs = [f"{a},{b}" for one in clusters.values() for a in one for b in one if a < b]
    file.write_text("entity1,entity2\n" + "\n".join(pairs) + "\n")


# ---------------------------------------------------------------------------------------------- recall


def test_recall_has_intervals_over_genes(public_map, shared):
    recall = retrieval.relationship_recall(public_map, shared / "data/efaar_truth")
    assert list(recall.columns) == [*SCORE_COLUMNS, *INTERVAL_COLUMNS]
    assert ((recall["low"] < recall["value"]) & (recall["value"] < recall["high"])).all()
    assert (recall["n_units"] > 100).all()
    assert (recall.loc[recall["group"] == "CORUM", "low"] > recall.loc[recall["group"] == "CORUM", "chance"]).all()
    pd.testing.assert_frame_equal(recall, retrieval.relationship_recall(public_map, shared / "data/efaar_truth"))


def test_recall_finds_what_is_planted_and_chance_among_permuted_names(tmp_path):
    adata, clusters = planted(size=4)
    write_pairs(tmp_path / "planted.txt", clusters)
    found = retrieval.relationship_recall(adata, tmp_path)
    assert (found["value"] > 0.8).all()
    values = []
    for seed in range(5):
        shuffled = adata.copy()
        shuffled.obs["perturbation"] = np.random.default_rng(seed).permutation(adata.obs["perturbation"].to_numpy())
        values.append(retrieval.relationship_recall(shuffled, tmp_path)["value"])
    np.testing.assert_allclose(np.mean(values, axis=0), found["chance"], atol=0.03)


def test_recall_counts_what_does_not_match_on_both_sides(tmp_path):
    adata, _ = planted(24)
    adata.obs["perturbation"] = adata.obs["perturbation"].replace({"G003": "g 003"})
    (tmp_path / "S.txt").write_text("entity1,entity2\nG000,G001\nG001,G000\nG002,G003\nG003,X9\nX8,X9\nG004,G004\n")
    note = retrieval.relationship_recall(adata, tmp_path)["note"].iloc[0]
    assert "queries are annotated pairs of 24 perturbations" in note
    assert "20 of them in no annotated pair ('G005', 'G006', 'G007' and 17 more)" in note
    assert "of 6 annotated pairs 1 lost one member and 2 both, which are not on the map ('G003', 'X8', 'X9')" in note
    assert "1 names differ in case or spaces alone ('g 003 and G003'): write them alike" in note


def test_recall_says_which_profiles_have_no_direction(tmp_path):
    adata, clusters = planted(36)
    write_pairs(tmp_path / "S.txt", clusters)
    doubled = ad.concat([adata, adata], index_unique="-")
    doubled.X[36] = -doubled.X[0]
    note = retrieval.relationship_recall(doubled, tmp_path)["note"].iloc[0]
    assert "1 mean profiles left out as they are all-zero or constant: 'G000'" in note


@pytest.mark.parametrize("thresholds", [[(0.5, 0.1)], [(-0.1, 0.9)], [(0.1, 1.1)]])
def test_thresholds_are_ranks(tmp_path, thresholds):
    with pytest.raises(InputError, match="0 <= low < high <= 1"):
        retrieval.relationship_recall(planted()[0], tmp_path, thresholds=thresholds)


# ---------------------------------------------------------------------------------------------- clusters


def test_clusters_are_the_public_ones(public_map, shared):
    expected = pd.read_csv(shared / "reference/efaar/corum_clusters.csv", index_col="cluster")
    found = retrieval.cluster_test(public_map, shared / "data/efaar_truth/CORUM_clusters.tsv")
    assert set(found.index) == set(expected.index)
    columns = {"within": "within_cossim_mean", "between": "between_cossim_mean", "n_within": "cluster_size"}
    columns |= {"n_between": "not_cluster_size", "statistic": "ks_stat", "p": "ks_pval"}
    for mine, theirs in columns.items():
        np.testing.assert_allclose(found[mine], expected[theirs].reindex(found.index), rtol=1e-8, atol=1e-8)
    assert found["similar"].all()
    assert "2686 of 2696 clusters have fewer than 10 members" in found.attrs["notes"][0]


def test_cluster_scores_find_what_is_planted_against_permuted_names():
    adata, clusters = planted()
    scores = retrieval.cluster_scores(adata, clusters).set_index("metric")
    assert scores.loc["cluster_share", "value"] == 1
    assert scores.loc["cluster_share", "chance"] < 0.4
    statistic = scores.loc["cluster_statistic"]
    assert statistic["chance"] < 0.25 < statistic["low"] < statistic["value"] < statistic["high"]
    assert statistic["n_units"] == statistic["n_queries"] == 10
    noise, clusters = planted(effect=0)
    scores = retrieval.cluster_scores(noise, clusters, n_permutations=20).set_index("metric")
    assert scores.loc["cluster_statistic", "value"] == pytest.approx(
        scores.loc["cluster_statistic", "chance"], abs=0.04
    )


def test_clusters_of_the_same_members_are_one_unit():
    adata, clusters = planted()
    scores = retrieval.cluster_scores(adata, {**clusters, "again": clusters["C0"][::-1]}, n_permutations=1)
    assert scores["n_queries"].tolist() == [11, 11]
    assert scores["n_units"].tolist() == [10, 10]


def test_clusters_that_cannot_be_tested_are_explained(tmp_path):
    adata, _ = planted()
    with pytest.raises(InputError, match=r"none of the 1 clusters has 10 members .* differ in case .*'G000 and g000'"):
        retrieval.cluster_test(adata, {"C": ["g000"]})
    with pytest.raises(MissingFileError):
        retrieval.cluster_test(adata, tmp_path / "none.tsv")
    (tmp_path / "bad.tsv").write_text("no tab here\n")
    with pytest.raises(InputError, match="no file of clusters"):
        retrieval.cluster_test(adata, tmp_path / "bad.tsv")
    (tmp_path / "twice.tsv").write_text("A\tG001 G002\nA\tG003\n")
    with pytest.raises(InputError, match="names clusters twice: 'A'"):
        retrieval.cluster_test(adata, tmp_path / "twice.tsv")
