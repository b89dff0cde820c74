"""Autoencoders, arms and tables of the disentanglement workflow, and the whole of it in small."""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import workflow_scripts
import yaml

FOLDER = Path(__file__).parents[1] / "workflows" / "disentanglement"
NAMES = ("choose", "components", "figures", "models", "pictures", "score", "summary", "train")
choose, components, figures, models, pictures, score, summary, train = workflow_scripts.load(FOLDER, *NAMES)
KINDS = list(models.KINDS)


def shape(kind="ae", architecture="small", image_size=32, n_latents=4):
    return models.Shape(kind, architecture, image_size, 3, n_latents)


def some(n=8, size=32):
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def drawn(n_train=40, n_scored=24):
    return pictures.draw("scenes", None, image_size=32, n_train=n_train, n_scored=n_scored)


def options(**more):
    said = {
        "seed": 0,
        "device": "cpu",
        "weight_decay": 0.01,
        "model": "ae",
        "steps": 6,
        "minutes": None,
        "minibatch": 128,
    }
    return argparse.Namespace(**{**said, **more})


# ---------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("architecture", "size"), [("small", 32), ("small", 64), ("published", 32), ("published", 64)])
def test_every_model_codes_and_paints_pictures(kind, architecture, size):
    model = models.Autoencoder(shape(kind, architecture, size))
    code = model.code(some(2, size))
    assert code.shape == (2, 4)
    assert model.decoder(code).shape == (2, 3, size, size)
    loss = model.loss(some(4, size), torch.Generator().manual_seed(0), 100)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_published_architecture_has_twelve_convolutions_with_every_third_of_stride_two():
    model = models.Autoencoder(shape(architecture="published", image_size=64))
    layers = [layer for layer in model.encoder if isinstance(layer, torch.nn.Conv2d)]
    assert [layer.out_channels for layer in layers] == [32] * 3 + [64] * 3 + [128] * 3 + [256] * 3
    assert [layer.stride[0] for layer in layers] == [1, 1, 2] * 4
    dense = [layer.out_features for layer in model.encoder if isinstance(layer, torch.nn.Linear)]
    assert dense == [256, 256, 4]


def test_divergences_are_those_of_their_definition():
    mean, deviation = torch.tensor([[0.3, -1.0]]), torch.tensor([[0.5, 2.0]])
    normal = torch.distributions.Normal
    own = torch.distributions.kl_divergence(normal(mean, deviation), normal(0.0, 1.0)).sum()
    torch.testing.assert_close(models._kl(mean, mean, deviation, 3.0, 10), 3 * own)
    rng = torch.Generator().manual_seed(0)
    means, deviations = torch.randn(6, 2, generator=rng), torch.rand(6, 2, generator=rng) + 0.5
    samples = means + deviations * torch.randn(6, 2, generator=rng)
    direct = normal(means, deviations).log_prob(samples).sum(1) - normal(0.0, 1.0).log_prob(samples).sum(1)
    torch.testing.assert_close(
        models._decomposed(samples, means, deviations, 1.0, 50), direct.mean()
    )  # at beta 1 it is the ELBO's


def test_more_weight_on_the_total_correlation_counts_that_alone():
    rng = torch.Generator().manual_seed(1)
    samples = torch.randn(200, 1, generator=rng).expand(200, 2) * torch.tensor(
        [1.0, 1.0]
    )  # two latents that say the same
    apart = torch.randn(200, 2, generator=rng)
    small = torch.full((200, 2), 0.1)

    def correlation(code):
        one, three = (models._decomposed(code, code, small, beta, 200) for beta in (1.0, 3.0))
        return (three - one) / 2

    assert correlation(samples) > correlation(apart) + 1


def test_a_quantized_code_takes_ten_values_and_passes_gradients():
    model = models.Autoencoder(shape("qlae"))
    code = model.code(some())
    assert torch.isin(code, torch.linspace(-0.5, 0.5, 10)).all()
    model.loss(some(), torch.Generator(), 100).backward()
    assert model.encoder[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize("wrong", [{"kind": "gan"}, {"architecture": "large"}, {"image_size": 40}, {"image_size": 16}])
def test_a_shape_that_is_not_known_is_named(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        shape(**wrong)


# ---------------------------------------------------------------------------------------------- pictures and training


def test_pictures_to_score_are_never_trained_on_and_a_file_gives_the_same(tmp_path):
    found = drawn()
    trained = found.train(np.arange(40))
    both = np.concatenate([found.scored, trained]).reshape(64, -1)
    assert len(np.unique(both, axis=0)) == 64
    pictures.write(found, tmp_path / "p.npz")
    again = pictures.read(tmp_path / "p.npz")
    np.testing.assert_array_equal(again.scored, found.scored)
    np.testing.assert_array_equal(again.train(np.array([3, 1])), trained[[3, 1]])
    np.testing.assert_array_equal(again.classes, found.classes)
    assert again.factors == found.factors


@pytest.mark.parametrize(("asked", "said"), [({"n_train": 10**7}, "do not fit"), ({"n_scored": 0}, "do not fit")])
def test_more_pictures_than_there_are_is_said(asked, said):
    with pytest.raises(ValueError, match=said):
        drawn(**asked)


def test_a_public_set_without_a_file_is_said():
    with pytest.raises(ValueError, match="give its path"):
        pictures.draw("shapes3d", None, image_size=32, n_train=1, n_scored=1)


def trained(tmp_path, name="run.npz", data=None, **more):
    asked = options(**more)
    run = train.Training(shape(asked.model), data or drawn(), asked)
    train.train(run, tmp_path / name)
    return np.load(tmp_path / name, allow_pickle=False)


def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(tmp_path, monkeypatch):
    whole = trained(tmp_path, model="beta-vae")
    part = train.Training(shape("beta-vae"), drawn(), options(model="beta-vae"))
    for _ in range(3):
        part.advance()
    part.save(tmp_path / "killed.checkpoint")
    seen = []
    advance = train.Training.advance
    monkeypatch.setattr(train.Training, "advance", lambda self: (seen.append(self.step), advance(self))[1])
    again = trained(tmp_path, "killed.npz", model="beta-vae")
    assert seen == [3, 4, 5]
    np.testing.assert_allclose(again["latents"], whole["latents"], rtol=1e-4, atol=1e-5)
    assert not (tmp_path / "killed.checkpoint").exists()


def test_a_checkpoint_of_other_settings_is_not_taken(tmp_path):
    part = train.Training(shape(), drawn(), options(seed=1))
    part.advance()
    part.save(tmp_path / "run.checkpoint")
    assert trained(tmp_path)["steps"] == 6


def test_training_sees_every_picture_before_one_again():
    run = train.Training(shape(), drawn(n_train=300), options())
    rows = []
    for step in range(4):
        run.step = step
        rows.append(run.rows())
    assert len(set(np.concatenate(rows[:2]))) == 256
    assert len(set(np.concatenate(rows[2:]))) == 256


def test_seeds_differ_and_repeat(tmp_path):
    data = drawn()
    one, same, other = (trained(tmp_path, f"{i}.npz", data, seed=i // 2)["latents"] for i in (0, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 1e-3


def test_training_paints_better(tmp_path):
    short, long = (trained(tmp_path, f"{steps}.npz", steps=steps)["cross_entropy"] for steps in (1, 60))
    assert long < short - 0.02


# ---------------------------------------------------------------------------------------------- arms and tables


def factors(n=3000, k=3, seed=0):
    """Classes, and noisy codes of one each: without noise, the least leak would tell a factor."""
    classes = np.random.default_rng(seed).integers(0, 6, size=(n, k))
    return classes, classes - classes.mean(axis=0) + 0.3 * np.random.default_rng(seed + 1).normal(size=(n, k))


def scored(latents, classes):
    asked = argparse.Namespace(rotations=2, shuffles=0, trees=5, seed=0)
    return {
        arm: score.scores(classes, code, False, asked)
        for arm, code, _ in score.arms(latents, asked.rotations, asked.seed)
    }


def test_ica_names_independent_factors_that_were_mixed_and_no_other_arm_does():
    classes, sources = factors()
    mixed = sources @ np.array([[1.0, 0.6, 0.3], [-0.5, 1.0, 0.2], [0.1, -0.7, 1.0]])
    found = scored(mixed, classes)
    assert found["ica"]["infom"] > 0.9
    assert max(found[arm]["infom"] for arm in ("raw", "whitened", "rotated")) < found["ica"]["infom"] - 0.3
    explicit = [found[arm]["infoe_converged"] for arm in found]
    assert np.ptp(explicit) < 0.01  # which no linear map can change


def test_of_gaussian_codes_no_component_is_claimed():
    rng = np.random.default_rng(0)
    found = {name: more for name, _, more in score.arms(rng.normal(size=(3000, 3)), 1, 0)}
    assert found["ica"] == {"n_converged": 0}
    found = {name: more for name, _, more in score.arms(rng.uniform(size=(3000, 3)), 1, 0)}
    assert found["ica"] == {"n_converged": 3}


def test_silent_directions_are_left_out():
    latents = np.random.default_rng(0).normal(size=(500, 4)) * [1, 0.5, 0.04, 0]
    assert score.whitening(latents).rank_ == 2


def test_a_condition_number_is_what_was_asked_for():
    white = score.whitening(factors()[1]).transform(factors()[1])
    values = np.linalg.svd(score.conditioned(white, 100.0), compute_uv=False)
    assert values[0] / values[-1] == pytest.approx(100, rel=0.05)


def test_the_largest_weight_decay_that_paints_as_well_is_chosen():
    rows = [("ae", 0.01, 0.2), ("ae", 0.1, 0.205), ("ae", 1.0, 0.3), ("qlae", 0.01, 0.3), ("qlae", 1.0, 0.1)]
    table = choose.chosen(pd.DataFrame(rows, columns=["model", "weight_decay", "excess"]), 0.05)
    assert table.loc[table["chosen"], "weight_decay"].tolist() == [0.1, 1.0]


def runs_with(gain):
    rng = np.random.default_rng(0)
    rows = []
    for seed in range(4):
        base = rng.uniform(0.3, 0.5)
        for arm in ("raw", "whitened", "rotated", "ica"):
            value = base + (gain if arm == "ica" else 0) + 0.01 * rng.normal()
            rows.append(
                {"data": "scenes", "model": "ae", "run_seed": seed, "arm": arm, **dict.fromkeys(summary.SCORES, value)}
            )
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("gain", "verdict"), [(0.2, "holds"), (-0.2, "refuted"), (0.0, "open")])
def test_a_claim_is_judged_by_its_own_numbers(gain, verdict):
    claims = summary.claims_of(runs_with(gain)).set_index(["score", "than_arm"])
    row = claims.loc[("infom", "raw")]
    assert row["verdict"] == verdict
    assert row["mean"] == pytest.approx(gain, abs=0.02)
    assert row["n_seeds"] == 4


def test_one_seed_decides_nothing():
    runs = runs_with(0.3)
    assert set(summary.claims_of(runs[runs["run_seed"] == 0])["verdict"]) == {"open"}


# ---------------------------------------------------------------------------------------------- the whole


def test_smoke_of_the_disentanglement_workflow(tmp_path):
    workflow_scripts.snakemake(FOLDER, tmp_path, FOLDER / "smoke.yaml")
    results = tmp_path / "out" / "results"
    runs = pd.read_csv(results / "runs.csv")
    assert set(runs["arm"]) == {"raw", "whitened", "rotated", "ica"}
    assert set(runs["model"]) == {"ae", "beta-vae"}
    assert runs[["infom", "infoc", "infoe", "dci_d", "mig", "mcc"]].notna().all(axis=None)
    assert pd.read_csv(results / "weight_decays.csv")["chosen"].all()
    for name in ("infomec.png", "conditions.png", "gains.png", "scenes_components.png"):
        assert (results / name).stat().st_size > 5000
    assert "Nothing to be done" in workflow_scripts.snakemake(FOLDER, tmp_path, FOLDER / "smoke.yaml")
    jobs = workflow_scripts.snakemake(FOLDER, tmp_path, FOLDER / "smoke.yaml", "trees=6", "--dry-run")
    assert "rule score:" in jobs
    assert "rule train:" not in jobs


@pytest.mark.parametrize(
    ("change", "said"), [({"models": ["gan"]}, "gan"), ({"image_size": 20}, "image_size"), ({"stepps": 3}, "stepps")]
)
def test_a_fault_of_the_configuration_is_one_message(tmp_path, change, said):
    config = {**yaml.safe_load((FOLDER / "smoke.yaml").read_text()), **change}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))
    told = workflow_scripts.snakemake(FOLDER, tmp_path, "wrong.yaml", "--dry-run", code=None)
    assert "the configuration has to be mended" in told
    assert said in told


@pytest.mark.parametrize("size", ["smoke", "small", "full", "gpu"])
def test_every_configuration_is_as_the_schema_says(size):
    config = yaml.safe_load((FOLDER / f"{size}.yaml").read_text())
    summary.validation.checked(config, FOLDER / "config.schema.yaml")


def test_figures_are_drawn_from_the_committed_tables(tmp_path):
    figures.draw(FOLDER / "results" / "small", tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"infomec.png", "conditions.png", "gains.png"}


def test_a_run_of_another_shape_is_told_by_its_weights(tmp_path):
    found = trained(tmp_path, model="bio-ae")
    assert json.loads(str(found["shape"])) == vars(shape("bio-ae"))


@pytest.mark.parametrize("script", ["score", "choose", "components", "train"])
@pytest.mark.parametrize("kind", ["absent", "text", "other"])
def test_a_file_that_is_no_run_is_one_message(tmp_path, monkeypatch, capsys, script, kind):
    file = tmp_path / "wrong.npz"
    if kind == "text":
        file.write_text("no archive")
    elif kind == "other":
        np.savez(file, other=np.zeros(3))
    outs = {"components": [tmp_path / "o.png"], "train": [tmp_path / "o.npz"]}
    module = {"score": score, "choose": choose, "components": components, "train": train}[script]
    workflow_scripts.run(module, monkeypatch, file, *outs.get(script, ["--out", tmp_path / "o.csv"]), code=2)
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "wrong.npz" in told
    assert told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ([] if kind == "absent" else ["wrong.npz"])
