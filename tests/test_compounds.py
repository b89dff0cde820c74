import anndata as ad
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from cellica import metrics, retrieval
from cellica.compounds import read_truth
from cellica.schema import INTERVAL_COLUMNS, SCORE_COLUMNS, InputError, MissingFileError

DOSES = (0.1, 1.0, 10.0)
N_GENES, N_COMPOUNDS = 60, 20


def screen(effect=1.0, seed=0, n_features=24):
    """Compounds that look like the knock-outs of their two targets, the more so the higher the dose, or opposed to them."""
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=(N_GENES, n_features))
    rows = [(f"G{i:02d}", "CRISPR", np.nan, direction[i]) for i in range(N_GENES) for _ in range(3)]
    for i in range(N_COMPOUNDS):
        shared = direction[i] + direction[(i + 25) % N_GENES]
        for k, dose in enumerate(DOSES):
            shift = (-1) ** i * effect * k / 2 * shared
            rows += [(f"drug {i:02d}", "COMPOUND", dose, shift)] * 3
    names, kinds, doses, shifts = zip(*rows)
    obs = pd.DataFrame({"perturbation": names, "perturbation_type": kinds, "concentration": doses, "experiment": "E"})
    obs.index = [f"w{i}" for i in range(len(obs))]
    return ad.AnnData(np.array(shifts) + 0.7 * rng.normal(size=(len(obs), n_features)), obs=obs)


@pytest.fixture
def truth(tmp_path):
    rows = []
    for i in range(N_COMPOUNDS):
        rows += [(f"G{i:02d}", 10.0 + i), (f"G{(i + 25) % N_GENES:02d}", 1000.0)]
        rows += [(f"G{(i + 7) % N_GENES:02d}", 5000.0), (f"G{(i + 9) % N_GENES:02d}", 50_000.0)]
    names = np.repeat([f"drug {i:02d}" for i in range(N_COMPOUNDS)], 4)
    table = pd.DataFrame(rows, columns=["gene_symbol", "nM_value"]).assign(treatment=names)
    extra = [("G01", 3.0, "unseen"), ("XYZ1", 3.0, "unseen"), ("g40", 7.0, "drug 00"), ("G00", 9e9, "drug 00")]
    table = pd.concat([table, pd.DataFrame(extra, columns=["gene_symbol", "nM_value", "treatment"])])
    return write(tmp_path / "compound_gene_interactions.csv", table)


def write(file, table):
    table.assign(measurement_type="ic50", database="none").to_csv(file, index=False)
    return file


def wide(scores):
    return scores.pivot_table("value", "group", "metric")


def test_targets_are_found_the_better_the_higher_the_dose(truth):
    scores = retrieval.compound_gene(screen(), truth)
    assert list(scores.columns) == [*SCORE_COLUMNS, *INTERVAL_COLUMNS]
    assert list(dict.fromkeys(scores["group"])) == ["0.1", "1.0", "10.0", "max"]
    value = wide(scores)
    assert value.loc["10.0", "compound_gene_ap"] > 0.9
    assert value.loc["10.0", "compound_gene_auroc"] > 0.95
    assert value["compound_gene_ap"].loc[["0.1", "1.0", "10.0"]].is_monotonic_increasing
    assert value.loc["max", "compound_gene_ap"] > 0.85
    assert (scores["n_queries"] == N_COMPOUNDS).all()
    row = scores[(scores["group"] == "10.0") & (scores["metric"] == "compound_gene_ap")].iloc[0]
    assert row["chance"] == pytest.approx(metrics.chance_average_precision(2, 20))
    assert row["chance"] < row["low"] < row["value"] <= row["high"]


def test_random_similarities_are_at_chance(truth):
    tables = [retrieval.compound_gene(screen(0.0, seed=s), truth) for s in range(8)]
    mean = pd.concat(tables).groupby(["group", "metric"])[["value", "chance"]].mean()
    np.testing.assert_allclose(mean["value"], mean["chance"], atol=0.06)


def test_scores_of_a_compound_are_scikit_learns(truth):
    adata = screen()
    detail = retrieval.compound_gene_detail(adata, truth, n_seeds=3)
    row = detail[(detail["compound"] == "drug 03") & (detail["concentration"] == "1.0")].iloc[0]
    assert (row["n_targets"], row["n_negatives"]) == (2, 20)
    is_one = (adata.obs["perturbation"] == "drug 03") & (adata.obs["concentration"] == 1.0)
    genes = [f"G{i:02d}" for i in range(N_GENES)]
    means = np.array([adata.X[(adata.obs["perturbation"] == gene).to_numpy()].mean(axis=0) for gene in genes])
    cosine = np.abs(metrics.unit_rows(means) @ metrics.unit_rows(adata.X[is_one.to_numpy()].mean(axis=0)[None])[0])
    pool = sorted(
        {f"G{(i + k) % N_GENES:02d}" for i in range(N_COMPOUNDS) for k in (0, 25, 7, 9)} - {"G03", "G28", "G10"}
    )
    scores, expected = dict(zip(genes, cosine)), []
    rng = np.random.default_rng(5)
    for _ in range(300):
        drawn = rng.choice(pool, 20, replace=False)
        y, s = [1, 1] + [0] * 20, [scores["G03"], scores["G28"], *(scores[gene] for gene in drawn)]
        expected.append((average_precision_score(y, s), roc_auc_score(y, s)))
    many = retrieval.compound_gene_detail(adata, truth, n_seeds=2000)
    many = many[(many["compound"] == "drug 03") & (many["concentration"] == "1.0")].iloc[0]
    np.testing.assert_allclose(many[["average_precision", "auroc"]].astype(float), np.mean(expected, axis=0), atol=0.01)


def test_order_of_rows_and_of_the_truth_does_not_matter(truth, tmp_path):
    adata = screen()
    order = np.random.default_rng(0).permutation(adata.n_obs)
    shuffled = write(tmp_path / "shuffled.csv", pd.read_csv(truth).sample(frac=1, random_state=0))
    pd.testing.assert_frame_equal(
        retrieval.compound_gene(adata, truth), retrieval.compound_gene(adata[order].copy(), shuffled)
    )


def test_what_does_not_match_is_counted_on_both_sides(truth):
    adata = screen()
    adata.obs["perturbation"] = adata.obs["perturbation"].replace({"drug 19": "Drug 19"})
    adata.obs.loc[adata.obs["perturbation"] == "drug 18", "concentration"] = np.nan
    note = retrieval.compound_gene(adata, truth)["note"].iloc[0]
    assert "of 21 compounds of the truth 3 are not on the screen ('drug 18', 'drug 19', 'unseen')" in note
    assert "of 19 compounds of the screen 1 are not in the truth ('Drug 19')" in note
    assert "genes of the truth 2 are not on the map ('XYZ1', 'g40')" in note
    assert "1 names differ in case or spaces alone ('Drug 19 and drug 19')" in note
    assert "9 wells left out: without concentration" in note
    assert "standard deviation 0" in note


def test_concentrations_of_few_compounds_have_no_rows(truth):
    adata = screen()
    adata.obs.loc[(adata.obs["perturbation"] == "drug 04") & (adata.obs["concentration"] == 1.0), "concentration"] = 0.7
    scores = retrieval.compound_gene(adata, truth)
    assert "0.7" not in set(scores["group"])
    assert "1 concentrations have fewer than 5 compounds ('0.7')" in scores["note"].iloc[0]
    assert scores.loc[scores["group"] == "1.0", "n_queries"].unique().tolist() == [19]


def test_what_cannot_be_scored_is_explained(truth, tmp_path):
    adata = screen()
    with pytest.raises(MissingFileError):
        retrieval.compound_gene(adata, tmp_path / "none.csv")
    with pytest.raises(InputError, match="no treated well has perturbation_type 'COMPOUND'; there are 'CRISPR'"):
        retrieval.compound_gene(adata[adata.obs["perturbation_type"] == "CRISPR"].copy(), truth)
    with pytest.raises(InputError, match="no compound has a target"):
        retrieval.compound_gene(
            adata,
            write(
                tmp_path / "o.csv", pd.DataFrame([("A", 1.0, "b")], columns=["gene_symbol", "nM_value", "treatment"])
            ),
        )
    with pytest.raises(InputError, match="nM_value holds what is no number"):
        retrieval.compound_gene(
            adata,
            write(
                tmp_path / "t.csv", pd.DataFrame([("A", ">10", "b")], columns=["gene_symbol", "nM_value", "treatment"])
            ),
        )


def test_the_public_columns_are_read(shared):
    table = read_truth(shared / "data/efaar_truth/compound_gene_interactions.head.csv")
    assert len(table) == 40
    assert table.loc[(table["treatment"] == "ABT-199") & (table["gene_symbol"] == "BCL2"), "nM_value"].tolist() == [4.4]
