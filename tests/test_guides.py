import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import guides, metrics, retrieval
from cellica.schema import InputError, MissingFileError


def screen(effect=1.0, n_genes=40, n_guides=4, seed=0, n_features=20, arm_effect=0.0, guide_effect=0.5):
    """Guides of genes on five arms, wells 1 to 4 a guide; guides share the gene's effect, and genes their arm's."""
    rng = np.random.default_rng(seed)
    of_gene = (
        effect * rng.normal(size=(n_genes, n_features))
        + arm_effect * rng.normal(size=(5, n_features))[np.arange(n_genes) % 5]
    )
    rows, x = [], []
    for gene in range(n_genes):
        for guide in range(n_guides):
            shift = of_gene[gene] + guide_effect * rng.normal(size=n_features)
            for _ in range(1 + guide):
                rows.append((f"G{gene:02d}", f"G{gene:02d}_guide_{guide + 1}", ""))
                x.append(shift + 0.5 * rng.normal(size=n_features))
    rows += [("EMPTY_control", "EMPTY_control", "negative")] * 10
    x += list(rng.normal(size=(10, n_features)))
    obs = pd.DataFrame(rows, columns=["perturbation", "treatment", "control"]).assign(experiment="E")
    obs.index = [f"w{i}" for i in range(len(obs))]
    return ad.AnnData(np.array(x), obs=obs)


POSITIONS = pd.DataFrame({"gene": [f"G{i:02d}" for i in range(39)], "arm": [f"{i % 5 + 1}p" for i in range(39)]})


def test_each_guide_counts_alike_unless_wells_are_to():
    adata = screen()
    genes = retrieval.genes_of_guides(adata)
    mine = adata[adata.obs["perturbation"] == "G03"]
    frame = pd.DataFrame(mine.X).groupby(mine.obs["treatment"].to_numpy()).mean()
    np.testing.assert_allclose(genes["G03"].X[0], frame.mean(), rtol=1e-5)
    np.testing.assert_allclose(
        retrieval.genes_of_guides(adata, how="wells")["G03"].X[0], mine.X.mean(axis=0), rtol=1e-5
    )
    assert genes.obs.loc["G03", ["n_guides", "n_wells"]].tolist() == [4, 10]
    units = metrics.unit_rows(frame.to_numpy())
    assert genes.obs.loc["G03", "guide_cosine"] == pytest.approx((units @ units.T)[np.triu_indices(4, 1)].mean())
    assert genes.n_obs == 40


def test_guides_agree_where_genes_act_and_not_otherwise():
    found = retrieval.guide_agreement(screen(1.0)).set_index("metric")
    assert (found["value"] > 0.9).all()
    assert (found["low"] > found["chance"]).all()
    assert (found["n_units"] == 40).all()
    noise = (
        pd.concat([retrieval.guide_agreement(screen(0.0, seed=s)) for s in range(5)])
        .groupby("metric")[["value", "chance"]]
        .mean()
    )
    np.testing.assert_allclose(noise["value"], noise["chance"], atol=0.03)


def test_one_guide_a_gene_says_nothing_of_agreement():
    found = retrieval.guide_agreement(screen(n_guides=1))
    assert found["value"].isna().all()
    assert found["note"].str.startswith("not applicable: no gene has two guides").all()
    assert retrieval.genes_of_guides(screen(n_guides=1)).obs["guide_cosine"].isna().all()


def test_wells_that_are_no_guides_are_counted_and_bad_input_is_explained():
    adata = screen()
    adata.obs.loc["w0", ["perturbation", "treatment"]] = ["drug", "drug"]
    genes = retrieval.genes_of_guides(adata)
    assert "1 treated wells are of no guide" in genes.uns["cellica"]["genes"]["notes"].tolist()
    with pytest.raises(InputError, match="names no guide"):
        retrieval.genes_of_guides(adata, guide_key="perturbation")
    with pytest.raises(InputError, match="how='median' is not allowed"):
        retrieval.genes_of_guides(adata, how="median")


@pytest.mark.parametrize("level", ["wells", "genes"])
def test_the_bias_of_arms_goes_on_wells_and_on_genes(level):
    adata = screen(arm_effect=1.5)
    data = adata if level == "wells" else retrieval.genes_of_guides(adata)
    kept = data.X.copy()
    retrieval.correct_arms(data, POSITIONS)
    account = data.uns["cellica"]["arms"]
    before = retrieval.arm_bias(data, POSITIONS).iloc[0]
    after = retrieval.arm_bias(data, POSITIONS, use_rep="X_arms").iloc[0]
    np.testing.assert_array_equal(data.X, kept)
    assert before["value"] == pytest.approx(account["auroc_before"], abs=1e-6)
    assert before["low"] > 0.85
    assert after["value"] == pytest.approx(account["auroc_after"], abs=1e-4)
    assert after["value"] < 0.6
    assert before["n_units"] == 5
    assert account["n_changed"] == 39
    assert "1 of 40 genes have no position and stay as they are ('G39')" in account["notes"].tolist()
    same = (data.obs["perturbation"].isin(["G39", "EMPTY_control"])).to_numpy()
    np.testing.assert_allclose(data.obsm["X_arms"][same], kept[same], rtol=1e-6)


def test_correction_leaves_what_guides_share_by_their_gene():
    adata, unbiased = screen(0.5, arm_effect=1.5), screen(0.5)
    retrieval.correct_arms(adata, POSITIONS)
    tables = [
        retrieval.guide_agreement(adata),
        retrieval.guide_agreement(adata, use_rep="X_arms"),
        retrieval.guide_agreement(unbiased),
    ]
    before, after, without = (table.set_index("metric").loc["guide_map", "value"] for table in tables)
    assert before > without + 0.1  # guides of a gene also share its arm
    assert after == pytest.approx(without, abs=0.08)  # an arm of 8 genes loses an eighth of its biology
    assert after > 3 * tables[1]["chance"].iloc[0]


def test_without_bias_there_is_none_to_find():
    values = [retrieval.arm_bias(screen(seed=s), POSITIONS)["value"].iloc[0] for s in range(8)]
    assert np.mean(values) == pytest.approx(0.5, abs=0.03)


def test_unexpressed_genes_decide_where_there_are_enough():
    adata = retrieval.genes_of_guides(screen(arm_effect=1.0))
    names = POSITIONS.loc[POSITIONS["arm"].isin(["1p", "2p", "3p", "4p"]), "gene"].tolist()[:24]
    retrieval.correct_arms(adata, POSITIONS, unexpressed=names)
    basis = [name for name in names if int(name[1:]) % 5 == 0]
    expected = adata["G00"].X[0] - adata[basis].X.mean(axis=0)
    np.testing.assert_allclose(adata["G00"].obsm["X_arms"][0], expected, atol=1e-5)
    assert (
        "mean of all genes on 1 arms with few unexpressed ones ('5p')" in adata.uns["cellica"]["arms"]["notes"].tolist()
    )
    retrieval.correct_arms(adata, POSITIONS, min_genes=8, key_added="few")
    assert "1 arms have fewer than 8 genes and stay as they are ('5p')" in adata.uns["cellica"]["few"]["notes"].tolist()


def test_positions_are_read_and_checked(tmp_path):
    table = pd.DataFrame(
        {"gene": ["A", "B", "C"], "chromosome": [1, 1, 2], "start": [5, 50, 5], "centromere": [20, 20, 20]}
    )
    table.to_csv(tmp_path / "p.csv", index=False)
    assert guides.read_positions(tmp_path / "p.csv") == {"A": "1p", "B": "1q", "C": "2p"}
    assert guides.read_positions(table[["gene", "chromosome"]].assign(arm=["p", "q", None])) == {"A": "1p", "B": "1q"}
    with pytest.raises(InputError, match="on several arms: 'A'"):
        guides.read_positions(pd.DataFrame({"gene": ["A", "A"], "arm": ["1p", "2p"]}))
    with pytest.raises(InputError, match="no column 'start', 'centromere'"):
        guides.read_positions(table[["gene", "chromosome"]])
    with pytest.raises(MissingFileError):
        guides.read_positions(tmp_path / "none.csv")
    with pytest.raises(
        InputError, match=r"none of the 40 perturbations .* has a position; the table holds 'A', 'B', 'C'"
    ):
        retrieval.arm_bias(screen(), table)
