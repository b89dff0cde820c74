"""Designs that cannot tell batch or position from perturbation are refused, warned of, or passed; never in silence."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellica import confounding, correct
from cellica.schema import InputError


def wells(rows: list[tuple[str, str, str]], **columns: object) -> ad.AnnData:
    """Wells of (batch, well, perturbation); perturbations that begin with "c" are controls."""
    obs = pd.DataFrame(rows, columns=["experiment", "well", "perturbation"]).assign(plate="1", **columns)
    obs["control"] = np.where(obs["perturbation"].str.startswith("c"), "negative", "")
    obs.index = pd.Index([f"{i}" for i in range(len(obs))], dtype=object)
    x = np.random.default_rng(0).laplace(size=(len(obs), 6)) + pd.factorize(obs["experiment"])[0][:, None]
    return ad.AnnData(x.astype(np.float32), obs=obs)


def crossed(n_batches: int = 3, fixed: bool = False) -> ad.AnnData:
    """Every perturbation and four controls in every batch, in one well or in another each time."""
    return wells(
        [
            (f"b{b}", f"A{(i if fixed else (i + b) % 12) + 1}", "c" if i < 4 else f"p{i}")
            for b in range(n_batches)
            for i in range(12)
        ]
    )


def nested(with_controls: bool = True) -> ad.AnnData:
    """Every perturbation in one batch only."""
    return wells(
        [
            (f"b{b}", f"A{i + 1}", "c" if i < 4 and with_controls else f"p{b}_{i // 2}")
            for b in range(3)
            for i in range(12)
        ]
    )


def single() -> ad.AnnData:
    """Batches that are their perturbations."""
    return wells([(f"b{b}", f"A{i + 1}", f"p{b}") for b in range(3) for i in range(12)])


def test_a_crossed_design_proceeds():
    found = correct.confounding(crossed())
    assert found.verdict == "proceed"
    assert found.sentences == ("confounding: 8 perturbations in 3 batches, each in several",)
    assert found.table.set_index("factor").loc["batch", ["n_fixed", "n_perturbations"]].tolist() == [0, 8]
    assert found.table.set_index("factor")["share"].loc["batch"] == pytest.approx(0, abs=0.15)
    assert found.table["linked"].all()


def test_fixed_positions_are_named():
    found = correct.confounding(crossed(fixed=True))
    assert found.verdict == "warn"
    assert len(found.fixed_well) == 8
    assert (
        "8 of 8 perturbations with replicates have one well position ('p10', 'p11', 'p4' and 5 more)"
        in found.sentences[0]
    )
    shares = found.table.set_index("factor")["share"]
    assert shares["well"] == pytest.approx(1)
    some = crossed(fixed=True)
    some.obs["well"] = np.where(some.obs["perturbation"] == "p5", some.obs["well"], crossed().obs["well"])
    assert "score replicates in other positions" in correct.confounding(some).sentences[0]


def test_one_layout_on_all_plates_is_said_where_perturbations_have_several_positions():
    adata = wells([(f"b{b}", f"A{i + 1}", "c" if i < 4 else f"p{(i - 4) // 2}") for b in range(3) for i in range(12)])
    found = correct.confounding(adata)
    assert found.verdict == "warn"
    assert any("8 of 8 well positions hold one perturbation on all plates" in one for one in found.sentences)


def test_one_batch_is_not_said_to_be_several():
    adata = crossed()
    assert correct.confounding(adata[adata.obs["experiment"] == "b0"].copy()).sentences == ()


def test_perturbations_of_one_batch_are_named_and_joined_by_controls():
    found = correct.confounding(nested())
    assert found.verdict == "warn"
    assert len(found.single_batch) == 12
    assert found.unlinked_batches == ("b0", "b1", "b2")
    assert "12 of 12 perturbations lie in one batch only ('p0_2', 'p0_3', 'p0_4' and 9 more)" in found.sentences[0]
    assert "controls and anchors join them" in found.sentences[1]
    assert found.table.set_index("factor").loc["batch", ["share", "linked"]].tolist() == [1.0, True]
    apart = correct.confounding(nested(with_controls=False))
    assert "nor do controls or anchors join all of them" in apart.sentences[1]
    assert not apart.table.set_index("factor").loc["batch", "linked"]


@pytest.mark.parametrize("method", ["combat", "harmony", "harmony_full"])
def test_batches_that_are_perturbations_are_refused_where_no_control_is_looked_at(method):
    found = correct.confounding(single())
    assert found.verdict == "refuse"
    with pytest.raises(InputError, match=rf"{method} cannot tell batch from perturbation: each of the 3 batches"):
        correct.run(single(), method)
    with pytest.raises(InputError, match="leace cannot tell"):
        correct.run(single(), "leace", on="all")
    correct.run(nested(), method)
    correct.run(single(), "none")


@pytest.mark.parametrize("method", ["none", "center+sphere", "ica", "combat"])
def test_every_correction_says_it(method):
    adata = nested()
    correct.run(adata, method)
    said = "\n".join(adata.uns["cellica"][method]["notes"])
    assert "12 of 12 perturbations lie in one batch only" in said
    adata = crossed()
    correct.run(adata, method)
    assert "8 perturbations in 3 batches, each in several" in "\n".join(adata.uns["cellica"][method]["notes"])


def test_strata_of_one_batch_each_are_no_confounding():
    adata = crossed(n_batches=4)
    adata.obs["cell_type"] = np.where(adata.obs["experiment"].isin(["b0", "b1"]), "x", "y")
    found = correct.confounding(adata)
    assert found.verdict == "proceed"
    assert found.table.set_index("factor").loc["batch", "linked"]


def test_missing_labels_and_unreadable_wells_are_left_out_by_name():
    adata = crossed()
    adata.obs["perturbation"] = adata.obs["perturbation"].astype(object)
    adata.obs.loc[["5", "20"], "perturbation"] = None
    adata.obs["well"] = "?"
    found = correct.confounding(adata)
    assert "well" not in set(found.table["factor"])
    correct.run(adata, "ica", check_stability=False)
    notes = adata.uns["cellica"]["ica"]["notes"]
    assert any("2 wells have no perturbation ('5', '20')" in note for note in notes)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=2, max_size=60))
def test_shared_information_is_symmetric_and_at_most_1(pairs):
    a, b = np.array(pairs).T
    share = confounding.shared_information(a, b)
    assert np.isnan(share) or share <= 1 + 1e-9
    assert np.isnan(confounding.shared_information(a, np.zeros_like(a)))
    determined = confounding.shared_information(a, a * 3 + 1)
    assert np.isnan(determined) or determined == pytest.approx(1)


def test_shared_information_of_independent_factors_is_near_zero_with_many_levels():
    rng = np.random.default_rng(0)
    share = confounding.shared_information(rng.integers(0, 50, 2000), rng.integers(0, 400, 2000))
    assert abs(share) < 0.03
