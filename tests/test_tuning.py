"""Ridges and methods chosen by replicates in batches that were left out, and not at all without them."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import artifacts, correct, heldout, tuning
from cellica.schema import InputError


def screen(noise: float = 4.0, n_batches: int = 4, n_perturbations: int = 30, d: int = 24, seed: int = 0) -> ad.AnnData:
    """Perturbations in weak directions under strong shared noise, which controls hold too: whitening is what helps."""
    rng = np.random.default_rng(seed)
    names = ["DMSO"] * 20 + [f"p{i:02d}" for i in range(n_perturbations)]
    rows = []
    for b in range(n_batches):
        places = rng.permutation(len(names))
        rows += [(f"b{b}", f"{chr(65 + p // 12)}{p % 12 + 1}", name) for p, name in zip(places, names)]
    obs = pd.DataFrame(rows, columns=["experiment", "well", "perturbation"]).assign(plate="1")
    obs["control"] = np.where(obs["perturbation"] == "DMSO", "negative", "")
    obs.index = pd.Index([f"w{i}" for i in range(len(obs))], dtype=object)
    effect = np.vstack([np.zeros(d), rng.normal(size=(n_perturbations, d)) * (np.arange(d) >= 4)])
    label = np.where(obs["perturbation"] == "DMSO", 0, pd.factorize(obs["perturbation"], sort=True)[0])
    spread = np.where(np.arange(d) < 4, noise, 0.6)
    x = effect[label] + spread * rng.normal(size=(len(obs), d))
    return ad.AnnData((x @ np.linalg.qr(rng.normal(size=(d, d)))[0]).astype(np.float32), obs=obs)


def test_the_ridge_is_chosen_by_left_out_batches_and_kept_in_the_record(tmp_path):
    adata = screen()
    correct.run(adata, "sphere", ridge=30.0, key_added="given")
    correct.run(adata, "sphere", tune=True)
    record = adata.uns["cellica"]["sphere"]
    trials = record["trials"]
    assert trials["ridge"].tolist() == [0.001, 0.01, 0.1, 1.0]
    assert trials["chosen"].sum() == 1
    chosen = float(trials.loc[trials["chosen"], "ridge"].iloc[0])
    assert record["steps"]["1_sphere"]["ridge"] == chosen
    assert any(
        note.startswith("tune:") and "30 perturbations, 4 batches left out in turn" in note for note in record["notes"]
    )
    artifacts.write_adata(adata, tmp_path / "a.h5ad")
    read = artifacts.read_adata(tmp_path / "a.h5ad").uns["cellica"]["sphere"]["trials"]
    assert list(read.columns) == ["ridge", "value", "n_perturbations", "low", "high", "chosen"]
    np.testing.assert_allclose(read["value"], trials["value"])


def test_a_better_ridge_than_the_default_is_found():
    adata = screen(noise=1.0, seed=1)
    few = adata[(adata.obs["control"] == "") | (adata.obs["experiment"] == "b0")].copy()
    choice = tuning.choose_ridge(*arrays(few), "sphere", {}, 0)
    table = choice.trials.set_index("ridge")
    assert choice.ridge is not None
    assert table["value"].idxmax() == choice.ridge
    assert table.loc[choice.ridge, "low"] > 0
    correct.run(few, "sphere", tune=True)
    assert few.uns["cellica"]["sphere"]["steps"]["1_sphere"]["ridge"] == choice.ridge


def arrays(adata: ad.AnnData):
    from cellica.corrector import representation
    from cellica.roles import roles_of

    return representation(adata)[0], roles_of(adata.obs)


@pytest.mark.parametrize("change", ["one batch each", "controls only"])
def test_without_replicates_in_several_batches_the_default_is_kept_and_said(change):
    adata = screen()
    if change == "controls only":
        adata = adata[adata.obs["control"] == "negative"].copy()
    else:
        adata.obs["perturbation"] = np.where(
            adata.obs["control"] == "", adata.obs["perturbation"] + adata.obs["experiment"], "DMSO"
        )
    correct.run(adata, "sphere", tune=True)
    record = adata.uns["cellica"]["sphere"]
    assert record["steps"]["1_sphere"]["ridge"] == 0.01
    assert "trials" not in record
    assert any(
        "the default ridge of 0.01 is kept: no perturbation has treated wells in several" in n for n in record["notes"]
    )


def test_what_cannot_be_tuned_is_refused():
    for method, keywords, message in (
        ("center", {}, "nothing to tune: center has no ridge"),
        ("sphere", {"ridge": 0.1}, "leave ridge out"),
    ):
        with pytest.raises(InputError, match=message):
            correct.run(screen(), method, tune=True, **keywords)


def test_labels_of_scored_perturbations_are_hidden_from_fits_on_anchors():
    """On noise, wccn is circular where it has seen the labels that are scored, and must look no better here."""
    adata = screen(d=60, n_perturbations=40)
    adata.X = np.random.default_rng(0).normal(size=adata.shape).astype(np.float32)
    trials = tuning.leave_one_batch_out(*arrays(adata), "wccn", [0.001], {}, 0)
    correct.run(adata, "wccn", ridge=0.001)
    from cellica import retrieval

    circular = retrieval.replicate_retrieval(adata, use_rep="X_wccn").iloc[0]
    assert circular["value"] > circular["chance"] + 0.1
    assert trials["value"].mean() == pytest.approx(circular["chance"], abs=0.04)


def test_fits_never_see_the_batch_or_the_labels_that_are_scored(monkeypatch):
    seen, fit_chain = [], heldout.fit_chain

    def watched(x, wells, *arguments):
        seen.append(wells)
        return fit_chain(x, wells, *arguments)

    monkeypatch.setattr(heldout, "fit_chain", watched)
    trials = tuning.leave_one_batch_out(*arrays(screen()), "ica_drop+sphere", [0.01], {"check_stability": False}, 0)
    assert len(seen) == 4 * 2 * 2  # batches, halves of the perturbations, before and after the first ridge
    for wells in seen:
        assert len(set(wells.batch)) == 3
        assert len(set(wells.label[wells.treated])) == 15
        assert set(wells.label[wells.anchor]) <= {"DMSO", *wells.label[wells.treated]}
    assert trials["perturbation"].nunique() == 30


def test_the_paired_interval_covers_and_narrows():
    rng = np.random.default_rng(0)
    intervals = [tuning.paired_interval(rng.normal(0.5, 1, 40), i) for i in range(60)]
    hits = [low <= 0.5 <= high for low, high in intervals]
    assert np.mean(hits) > 0.8
    wide, narrow = (np.diff(tuning.paired_interval(rng.normal(size=n)))[0] for n in (20, 2000))
    assert narrow < wide / 3


def test_a_plain_chain_is_recommended_where_the_advantage_of_ica_is_not_established():
    adata = screen()
    found = correct.recommend(adata)
    assert found.method in ("center+sphere", "sphere", "wccn")
    assert any("ica's advantage over" in s and "is not established" in s for s in found.sentences)
    assert set(found.table["method"]) == {"ica", "wccn+ica_drop", "center+sphere", "sphere", "wccn"}
    assert (found.table["n_batches"] == 4).all()
    assert "cellica" not in adata.uns


def test_ica_is_recommended_where_its_advantage_is_established():
    """A batch effect in one sparse factor, on treated wells and controls, and few controls to whiten on."""
    rng = np.random.default_rng(0)
    adata = screen(noise=0.6, n_batches=6, d=10, n_perturbations=60)
    factors = rng.laplace(size=(len(adata), 10)) * 0.5
    label = pd.factorize(adata.obs["perturbation"])[0]
    factors[:, 1:6] += (2 * rng.laplace(size=(61, 5)))[label] * (adata.obs["control"] == "").to_numpy()[:, None]
    factors[:, 0] += np.array([0, 6, -6, 12, 0, -12.0])[pd.factorize(adata.obs["experiment"])[0]]
    adata.X = (factors @ rng.normal(size=(10, 10))).astype(np.float32)
    found = correct.recommend(adata, ("ica_drop", "none"))
    assert found.method == "ica_drop"
    assert any("is established" in s for s in found.sentences)


def test_without_replicates_a_plain_chain_is_named_and_no_advantage_claimed():
    adata = screen()
    adata.obs["perturbation"] = np.where(adata.obs["control"] == "", adata.obs_names, "DMSO")
    found = correct.recommend(adata)
    assert found.method == "center+sphere"
    assert "an advantage of ICA is not established" in found.sentences[0]
    adata.obs["control"] = ""
    assert correct.recommend(adata).method in ("wccn", "none")


def test_two_batches_leave_one_to_fit_on_and_methods_that_compare_batches_are_left_out():
    found = correct.recommend(screen(n_batches=2), ("ica", "sphere"))
    assert found.method == "sphere"
    assert "compares batches" in found.table.set_index("method").loc["ica", "note"]


def test_too_few_perturbations_decide_nothing():
    for seed in range(6):
        adata = screen(n_perturbations=3, seed=seed)
        adata.X = np.random.default_rng(seed).normal(size=adata.shape).astype(np.float32)
        notes = correct.fit(adata, "sphere", tune=True).notes
        assert any("the default ridge of 0.01 is" in note for note in notes)
        found = correct.recommend(adata, ("ica_shrink", "sphere"), n_components=4)
        assert found.method == "sphere"


def test_a_chain_of_different_defaults_is_compared_with_these():
    fitted = correct.fit(screen(), "tvn+sphere", tune=True)
    trials = fitted.trials
    assert trials["ridge"].isna().sum() == 1
    assert any("each method's own default ridge" in note for note in fitted.notes)
    alone = tuning.leave_one_batch_out(*arrays(screen()), "tvn+sphere", [tuning.OWN], {}, 0)
    own = trials.loc[trials["ridge"].isna(), "value"].iloc[0]
    assert own == pytest.approx(tuning.per_ridge(alone)["value"].iloc[0])


@pytest.mark.parametrize(
    ("methods", "options", "told"),
    [
        (("sphere",), {"n_componentz": 3}, "no option 'n_componentz'"),
        (("sphere",), {"ridge": 7}, "ridges of its own"),
        ((), {}, "name several"),
        ("sphere", {}, "name several"),
    ],
)
def test_recommend_refuses_what_it_would_ignore(methods, options, told):
    with pytest.raises(InputError, match=told):
        correct.recommend(screen(), methods, **options)
