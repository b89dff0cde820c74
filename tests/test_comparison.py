"""`compare`: wells that no fit has seen, one method at a time or several, from where it was stopped."""

import json
import subprocess
import sys
import time

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import comparison, correct, metrics, retrieval, simulate
from cellica.schema import InputError
from cellica.scores import PerQuery

METHODS = ["none", "sphere", "wccn", "ica"]


@pytest.fixture(scope="module")
def adata():
    made = simulate.profiles("small", n_features=24, random_state=0)
    return made


def value(table, rep, metric):
    (row,) = table[(table["rep"] == rep) & (table["metric"] == metric)].itertuples()
    return row


def same(a, b):
    pd.testing.assert_frame_equal(a, b, check_exact=False, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def table(adata):
    return retrieval.compare(adata, METHODS, n_jobs=1)


def test_held_out_scores_are_those_of_fits_to_the_other_batches(adata, table):
    found, chance = [], []
    for name in adata.obs["experiment"].unique():
        out = (adata.obs["experiment"] == name).to_numpy()
        corrector = correct.fit(adata[~out].copy(), "sphere")
        work = ad.AnnData(adata.X.copy(), obs=adata.obs.copy(), var=adata.var.copy())
        corrector.transform(work)
        treated = (work.obs["control"] == "").to_numpy()
        keys = {
            "pos_sameby": ["perturbation"],
            "pos_diffby": ["experiment"],
            "neg_diffby": ["perturbation", "experiment"],
        }
        if len(set(work.obs["cell_type"])) > 1:
            keys |= {"pos_sameby": ["perturbation", "cell_type"], "neg_sameby": ["cell_type"]}
        one = retrieval.average_precision(
            work, use_rep="X_sphere", queries=out & treated, candidates=treated & ~out, **keys
        )
        one = one[(one["n_pos"] > 0) & (one["n_neg"] > 0)]
        found.append(one["average_precision"])
        chance.append(one["chance"])
    row = value(table, "X_sphere", "replicate_map_held_out")
    assert row.value == pytest.approx(pd.concat(found).mean(), abs=1e-4)
    assert row.chance == pytest.approx(pd.concat(chance).mean(), abs=1e-9)
    assert row.n_queries == len(pd.concat(found))
    assert row.low < row.value < row.high


def test_notes_tell_transductive_from_held_out(table):
    of_sphere = table[table["rep"] == "X_sphere"]
    seen, learned = of_sphere["metric"].str.endswith("held_out"), of_sphere["metric"].str.contains("accuracy")
    assert of_sphere.loc[~seen & ~learned, "note"].str.contains("transductive").all()
    assert of_sphere.loc[seen, "note"].str.contains("fitted without the batches that are scored").all()
    assert of_sphere.loc[learned, "note"].str.contains("fitted on the training batches only").all()
    labels = table[(table["rep"] == "X_wccn") & (table["metric"] == "replicate_map_held_out")]["note"]
    assert labels.str.contains("without the labels of the perturbations").all()


def test_a_circular_method_earns_nothing_where_it_has_not_seen_the_labels(adata):
    noise = ad.AnnData(
        np.random.default_rng(0).normal(size=(adata.n_obs, 150)).astype(np.float32), obs=adata.obs.copy()
    )
    found = retrieval.compare(noise, ["none", "wccn"], baselines=False)
    seen, unseen = (value(found, "X_wccn", f"replicate_map{how}") for how in ("", "_held_out"))
    assert seen.value > seen.chance + 0.03
    assert "circular:" in seen.note
    assert unseen.low <= unseen.chance <= unseen.high


def test_what_corrects_only_its_own_rows_has_no_held_out_score(adata):
    found = retrieval.compare(adata, ["combat"], baselines=False)
    row = value(found, "X_combat", "replicate_map_held_out")
    assert np.isnan(row.value)
    assert row.note == "not applicable: combat corrects only the wells it was fitted on"
    with pytest.raises(InputError, match="all wells are of one batch"):
        retrieval.held_out_retrieval(adata[adata.obs["experiment"] == adata.obs["experiment"].iloc[0]].copy(), "sphere")


def test_without_held_out_there_is_none(adata):
    found = retrieval.compare(adata, ["sphere"], held_out=False)
    assert not found["metric"].str.endswith("held_out").any()


def test_queries_are_sampled_and_said(adata):
    found = retrieval.compare(adata, ["sphere"], baselines=False, max_queries=40)
    row = value(found, "X_sphere", "replicate_map_held_out")
    assert row.n_queries == 40
    assert "at most 10 queries sampled of each group" in row.note


def test_more_than_twelve_batches_are_left_out_in_ten_groups():
    many = simulate.profiles("small", n_experiments=14, n_plates=1, n_treatments=12, n_features=8, random_state=0)
    row = retrieval.held_out_retrieval(many, "center").iloc[0]
    assert "(10 groups left out in turn)" in row["note"]
    assert row["n_queries"] == 14 * 12


def test_methods_in_parallel_give_the_same(adata, table):
    same(retrieval.compare(adata, METHODS, n_jobs=2), table)


def test_a_stopped_comparison_goes_on(adata, table, tmp_path, monkeypatch, caplog):
    done, one = [], comparison._one

    def stopping(lean, name, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(name)
        return one(lean, name, *rest)

    monkeypatch.setattr(comparison, "_one", stopping)
    keys = {"parts": tmp_path / "parts", "n_jobs": 1}
    with pytest.raises(KeyboardInterrupt):
        retrieval.compare(adata, METHODS, **keys)
    assert done == METHODS[:2]
    monkeypatch.setattr(comparison, "_one", lambda lean, name, *rest: done.append(name) or one(lean, name, *rest))
    same(retrieval.compare(adata, METHODS, **keys), table)
    assert done == METHODS
    same(retrieval.compare(adata, METHODS, **keys), table)
    assert done == METHODS
    retrieval.compare(adata, METHODS[:1], **keys, max_queries=30)  # other options: from the start
    assert done == [*METHODS, "none"]
    changed = adata.copy()
    changed.X[0, 0] += 1
    retrieval.compare(changed, METHODS[:1], **keys, max_queries=30)
    assert done == [*METHODS, "none", "none"]


def test_damaged_parts_are_done_again(adata, table, tmp_path):
    keys = {"parts": tmp_path / "parts", "n_jobs": 1}
    retrieval.compare(adata, METHODS, **keys)
    (tmp_path / "parts" / "sphere.json").write_text("{")
    (tmp_path / "parts" / "none.json").write_text(json.dumps({"scores": 1}))
    same(retrieval.compare(adata, METHODS, **keys), table)


def test_a_gain_that_rests_on_one_class_is_said(monkeypatch):
    rng = np.random.default_rng(0)
    classes = np.repeat(["a", "b", "c"], 40)
    units = np.array([f"{c}{i % 8}" for i, c in enumerate(classes)])
    names = [f"w{i}" for i in range(120)]
    before = rng.normal(0.3, 0.05, 120)
    for steps, n in (({"a": 0.4}, 1), ({"a": 0.2, "b": 0.2, "c": 0.2}, 0), ({}, 0)):
        after = before + [steps.get(c, 0.0) for c in classes] + rng.normal(0, 0.03, 120)
        per_query = {
            (rep, "class_map"): PerQuery(pd.Series(values, names), units, classes)
            for rep, values in (("X_none", before), ("X_ica", after))
        }
        text = comparison._one_class(per_query, "X_ica", "class_map")
        assert bool(text) == n
        assert not n or text.startswith("one class: the gain in class_map rests on a: without it ")


def test_confounding_is_said_once(adata):
    design = adata.copy()
    design.obs["perturbation"] = np.where(
        design.obs["control"] == "negative",
        design.obs["perturbation"].astype(str),
        design.obs["experiment"].astype(str) + design.obs["perturbation"].astype(str),
    )
    found = retrieval.compare(design, ["none", "sphere"], baselines=False)
    said = [text for text in retrieval.cautions(found) if text.startswith("confounding:")]
    assert said == list(correct.confounding(design).sentences)
    assert found["note"].str.contains("confounding:").sum() == 1


def test_metrics_know_nothing_of_row_order(adata, table):
    order = np.random.default_rng(0).permutation(adata.n_obs)
    found = retrieval.compare(adata[order].copy(), ["none", "sphere"], n_jobs=1)
    for rep in ("X_none", "X_sphere"):
        for metric in ("replicate_map", "replicate_map_held_out", "batch_share"):
            assert value(found, rep, metric).value == pytest.approx(value(table, rep, metric).value, abs=1e-4)
    assert metrics.N_THREADS >= 1


def test_processes_end_with_a_run_that_is_killed(adata, tmp_path):
    """Otherwise they would go on working for nobody."""
    from cellica import artifacts

    big = ad.concat([adata] * 12, index_unique="_")
    big.obsm["X_wide"] = np.random.default_rng(0).normal(size=(big.n_obs, 300)).astype(np.float32)
    artifacts.write_adata(big, tmp_path / "wells.h5ad")
    script = (
        "from cellica import artifacts, retrieval\n"
        f"wells = artifacts.read_adata({str(tmp_path / 'wells.h5ad')!r})\n"
        "retrieval.compare(wells, ['ica', 'ica_shrink', 'wccn+ica_drop'], use_rep='X_wide', n_jobs=2, "
        "scores=['batch'], held_out=False, baselines=False)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)

    def alive(selection):
        found = subprocess.run(["ps", "-ww", "-o", "pid=,args=", *selection], capture_output=True, text=True).stdout
        return {line.split()[0] for line in found.splitlines() if "LokyProcess" in line}

    deadline = time.monotonic() + 120
    while len(own := alive(["--ppid", str(run.pid)])) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(own) == 2
    time.sleep(2)
    run.kill()
    run.wait()
    deadline = time.monotonic() + 60
    while (left := alive(["-p", ",".join(own)])) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left
