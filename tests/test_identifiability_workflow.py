"""Two runs of one model: digits, masked autoencoders, any saved representations, and the whole workflow in small."""

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
import workflow_scripts
import yaml
from PIL import Image
from scipy.stats import ortho_group

FOLDER = Path(__file__).parents[1] / "workflows" / "identifiability"


NAMES = ("camae", "compare", "digits", "extract", "figures", "summary")
SCRIPTS = dict(zip(NAMES, workflow_scripts.load(FOLDER, *NAMES)))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script by its name; what it told."""

    def told(name, *words, code=0):
        workflow_scripts.run(SCRIPTS[name], monkeypatch, *words, code=code)
        said = capsys.readouterr()
        return said.out + said.err

    return told


def held_out(table, group, space="raw", a=None):
    rows = table[(table["group"] == group) & (table["space"] == space)]
    return (rows if a is None else rows[rows["a"] == a])["held_out"].to_numpy()


# ---------------------------------------------------------------------------------------------- any representations


def test_a_rotated_copy_has_no_rigid_error_in_either_direction_and_format(run, tmp_path):
    rows = np.random.default_rng(0).laplace(size=(400, 5)) * [3, 2, 1.5, 1, 0.5]
    names = [f"w{i}" for i in range(400)]
    np.save(tmp_path / "a.npy", rows)
    np.save(tmp_path / "b.npy", rows @ ortho_group.rvs(5, random_state=1))
    said = run("compare", tmp_path / "a.npy", tmp_path / "b.npy", "--out", tmp_path / "npy.csv")
    assert "rigid" in said
    turned = ad.AnnData(rows @ ortho_group.rvs(5, random_state=2), obs=pd.DataFrame(index=names))
    kept = ad.AnnData(rows, obs=pd.DataFrame(index=names))[7:].copy()
    kept.obsm["X_other"] = np.asarray(kept.X)
    order = np.random.default_rng(1).permutation(400)
    turned.obsm["X_other"] = np.asarray(turned.X)
    turned[order].write_h5ad(tmp_path / "turned.h5ad")
    kept.write_h5ad(tmp_path / "kept.h5ad")
    run("compare", tmp_path / "turned.h5ad", tmp_path / "kept.h5ad", "--rep", "X_other", "--out", tmp_path / "h5ad.csv")
    for name, n_rows, n_unmatched in (("npy", 400, 0), ("h5ad", 393, 7)):
        table = pd.read_csv(tmp_path / f"{name}.csv")
        assert len(table) == 2 * 2 * 4  # directions, spaces, classes
        assert held_out(table, "rigid").max() < 1e-6
        assert held_out(table, "permutation").min() > 0.05
        assert set(table["n_rows"]) == {n_rows}
        assert set(table["n_unmatched"]) == {n_unmatched}


def test_all_pairs_of_several_files_and_other_widths(run, tmp_path):
    rng = np.random.default_rng(0)
    for name, width in (("a", 3), ("b", 5), ("c", 4)):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=(120, width)))
    run("compare", *(tmp_path / f"{name}.npy" for name in "abc"), "--out", tmp_path / "t.csv", "--components", 2)
    table = pd.read_csv(tmp_path / "t.csv")
    assert len(table[["a", "b"]].drop_duplicates()) == 6
    assert set(table["width_a"]) == {3, 4, 5}
    assert set(table["n_components"]) == {2}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: np.save(folder / "b.npy", np.zeros((9, 2))), "b.npy has 9"),
        (lambda folder: np.save(folder / "b.npy", np.full((40, 2), np.nan)), "NaN"),
        (lambda folder: np.save(folder / "b.npy", np.zeros(40)), "has the shape"),
        (lambda folder: np.save(folder / "b.npy", np.array([{}] * 40)), "no array in .npy format"),
        (lambda folder: (folder / "b.npy").write_bytes(b"text"), "no array in .npy format"),
        (lambda folder: None, "b.npy"),
    ],
)
def test_what_cannot_be_compared_is_one_message(run, tmp_path, make, said):
    np.save(tmp_path / "a.npy", np.random.default_rng(0).normal(size=(40, 2)))
    make(tmp_path)
    told = run("compare", tmp_path / "a.npy", tmp_path / "b.npy", "--out", tmp_path / "t.csv", code=2)
    assert said in told
    assert told.count("error:") == 1
    assert not (tmp_path / "t.csv").exists()


def test_one_file_and_names_that_do_not_match_are_said(run, tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 2))
    for name, letter in (("a", "p"), ("b", "q")):
        ad.AnnData(x, obs=pd.DataFrame(index=[f"{letter}{i}" for i in range(40)])).write_h5ad(tmp_path / f"{name}.h5ad")
    files = (tmp_path / "a.h5ad", tmp_path / "b.h5ad")
    assert "no row name in common" in run("compare", *files, "--out", tmp_path / "t.csv", code=2)
    assert "nothing to be compared with" in run("compare", files[0], files[0], "--out", tmp_path / "t.csv", code=2)
    assert "no obsm['X_ica']" in run("compare", *files, "--rep", "X_ica", "--out", tmp_path / "t.csv", code=2)


# ---------------------------------------------------------------------------------------------- latents of others


def test_latents_of_a_timm_model_from_files_and_from_an_array(run, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, size=(3, 40, 40, 3), dtype=np.uint8)
    (tmp_path / "pictures").mkdir()
    for i, one in enumerate(pixels):
        Image.fromarray(one).save(tmp_path / "pictures" / f"{i}.png")
    np.save(tmp_path / "pictures.npy", pixels)
    options = ("--model", "resnet10t", "--weights", "none")
    for source, out in (("pictures", "a"), ("pictures.npy", "b")):
        assert "3 rows of 512" in run("extract", "timm", tmp_path / source, tmp_path / f"{out}.npy", *options)
    a, b = (np.load(tmp_path / f"{name}.npy") for name in "ab")
    np.testing.assert_allclose(a, b, rtol=1e-5)
    run("extract", "timm", tmp_path / "pictures.npy", tmp_path / "c.npy", *options, "--layer", "fc", "--seed", 1)
    assert np.load(tmp_path / "c.npy").shape == (3, 1000)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("timm", "nothing", "--model", "resnet10t", "--weights", "none"), "nothing"),
        (("timm", ".", "--model", "resnet10t", "--weights", "none"), "holds no .png"),
        (("timm", ".", "--model", "resnet10t"), "--weights none"),
        (("pythia", "text.txt", "--model", "no/such/folder"), "pythia needs the package|is not on this machine"),
    ],
)
def test_what_cannot_be_extracted_is_one_message(run, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text.txt").write_text("a line\n")
    kind, source, *options = words
    told = run("extract", kind, source, tmp_path / "o.npy", *options, code=2)
    assert any(one in told for one in said.split("|"))


# ---------------------------------------------------------------------------------------------- digits


def test_a_decoder_without_a_bend_is_an_isometry_and_a_leak_bounds_the_others():
    digits = SCRIPTS["digits"]
    rows = torch.from_numpy(digits.digits(None, 0)[:64]).float()
    torch.manual_seed(0)
    found = digits.kept(digits.Autoencoder(64, 4, 1.0).eval(), rows, 16)
    assert found["L"] < 1e-4
    found = digits.kept(digits.Autoencoder(64, 4, 0.5).eval(), rows, 16)
    assert 0.05 < found["L_90"] <= found["L"] <= 1 / 0.5**3 - 1


def test_mnist_is_read_and_another_file_is_named(run, tmp_path):
    read = SCRIPTS["digits"].digits
    pixels = np.random.default_rng(0).integers(0, 256, size=(30, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=pixels, y_train=np.zeros(30))
    assert read(tmp_path / "mnist.npz", 20).shape == (20, 784)
    np.savez(tmp_path / "other.npz", y_train=np.zeros(30))
    for name, said in (("other.npz", "holds no uint8 pictures"), ("none.npz", "none.npz")):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            read(tmp_path / name, 20)
    assert "is not allowed" in run("digits", tmp_path / "o.npz", "--leak", 1.5, code=2)


def pairs_with(order, n=20):
    """Errors of the classes in this order, from least to largest."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n):
        base = rng.uniform(0.01, 0.02)
        for place, group in enumerate(order):
            said = {"data": "d", "a": str(i), "b": "x", "space": "whitened", "group": group}
            rows.append(
                {
                    **said,
                    "held_out": base + 0.1 * place,
                    "chance": 0.5,
                    "efficiency": 1.0,
                    "n_converged": 2,
                    "n_components": 4,
                }
            )
    return pd.DataFrame(rows)


def test_claims_are_judged_by_counting_pairs():
    claims_of = SCRIPTS["summary"].claims_of
    right = claims_of(pairs_with(["linear", "rigid", "ica", "permutation"]), pd.DataFrame()).set_index("claim")
    assert set(right["verdict"]) == {"holds"}
    wrong = claims_of(pairs_with(["rigid", "linear", "permutation", "ica"]), pd.DataFrame()).set_index("claim")
    assert wrong.loc["linear <= rigid", "verdict"] == "refuted"
    assert wrong.loc["ica <= permutation", "verdict"] == "refuted"
    assert wrong.loc["rigid <= ica", "n_true"] == 20
    assert (right["ica_settled"].dropna() == 0.5).all()


def test_what_is_equal_up_to_rounding_is_no_gain():
    pairs = pairs_with(["linear", "rigid", "ica", "permutation"])
    same = pairs["group"].isin(["ica", "permutation"])
    pairs.loc[same, "held_out"] = 0.3 + 1e-14 * np.arange(same.sum())
    pairs["efficiency"] = 1e-14
    found = SCRIPTS["summary"].claims_of(pairs, pd.DataFrame()).set_index("claim")
    assert found.loc["ica <= permutation", ["n_true", "n_equal"]].tolist() == [0, 20]
    assert found.loc["efficiency > 0", ["n_true", "n_equal", "verdict"]].tolist() == [0, 20, "refuted"]


def test_a_trend_that_only_follows_the_outputs_is_told():
    rng = np.random.default_rng(0)
    leak = np.repeat([1.0, 0.8, 0.6, 0.4, 0.2], 10)
    apart = (1 - leak) / 8 + 0.01 * rng.normal(size=50)
    decoders = pd.DataFrame({"leak": leak, "painted_apart": apart})
    for kind in ("L", "L_90", "L_scaled"):
        decoders[f"bound_{kind}"] = 1 / leak
    for space, error in (("raw", apart), ("whitened", apart + 0.05 / leak)):
        decoders[f"rigid_{space}"] = error + 0.001 * rng.normal(size=50)
    found = SCRIPTS["summary"].trends_of(decoders).set_index(["claim", "space"])["verdict"]
    assert found["rigid error rises with the bound by L", "raw"] == "holds"
    assert found["... with the distance of outputs held fixed, by L", "raw"] == "open"
    assert found["... with the distance of outputs held fixed, by L", "whitened"] == "holds"


# ---------------------------------------------------------------------------------------------- the whole


def test_smoke_of_the_identifiability_workflow(tmp_path):
    workflow_scripts.snakemake(FOLDER, tmp_path, FOLDER / "smoke.yaml")
    results = tmp_path / "out" / "results"
    pairs = pd.read_csv(results / "pairs.csv")
    assert set(pairs["group"]) == {"permutation", "rigid", "linear", "ica"}
    assert set(pairs["space"]) == {"raw", "whitened"}
    assert {"digits, leak 1", "CA-MAE on a simulated screen"} <= set(pairs["data"])
    assert (pairs["held_out"] > 0).all()
    straight = pd.read_csv(results / "decoders.csv").query("leak == 1")
    assert (straight["L"] < 1e-4).all()
    for name in ("bound.png", "classes.png"):
        assert (results / name).stat().st_size > 5000
    assert "Nothing to be done" in workflow_scripts.snakemake(FOLDER, tmp_path, FOLDER / "smoke.yaml")
    changed = yaml.safe_load((FOLDER / "smoke.yaml").read_text())
    changed["digits"]["steps"] = 110
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed, sort_keys=False))
    jobs = workflow_scripts.snakemake(FOLDER, tmp_path, "changed.yaml", "--dry-run")
    assert "rule digits:" in jobs
    assert "rule camae:" not in jobs


@pytest.mark.parametrize(("change", "said"), [({"leaks": [2.0]}, "leaks"), ({"sedes": [1]}, "sedes")])
def test_a_fault_of_the_configuration_is_one_message(tmp_path, change, said):
    config = yaml.safe_load((FOLDER / "smoke.yaml").read_text())
    config["digits"] |= change
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))
    told = workflow_scripts.snakemake(FOLDER, tmp_path, "wrong.yaml", "--dry-run", code=None)
    assert "the configuration has to be mended" in told
    assert said in told


def test_folders_of_something_else_are_left_alone(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    assert "holds something else" in run("camae", tmp_path / "mine", code=2)
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize("size", ["smoke", "small", "full"])
def test_every_configuration_is_as_the_schema_says(size):
    config = yaml.safe_load((FOLDER / f"{size}.yaml").read_text())
    SCRIPTS["summary"].validation.checked(config, FOLDER / "config.schema.yaml")


def test_figures_are_drawn_from_the_committed_tables(tmp_path):
    SCRIPTS["figures"].draw(FOLDER / "results" / "small", tmp_path)
    assert {file.name for file in tmp_path.glob("*.png")} == {"bound.png", "classes.png"}
