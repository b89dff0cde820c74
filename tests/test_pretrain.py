import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, safe_open

from cellica import camae, encoder, mae, plates, pretrain, screen, simulate
from cellica.parts import claimed
from cellica.schema import InputError, OutputBusyError, OutputExistsError, WeightsError

GEOMETRY = camae.Geometry(img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2, max_in_chans=6)
DECODER = mae.DecoderGeometry(embed_dim=16, depth=1, num_heads=2)
SETTINGS = pretrain.Settings(steps=12, batch_size=8, learning_rate=1e-3, random_state=3)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrain")
    sizes = {"n_experiments": 2, "n_plates": 1, "n_treatments": 8, "n_controls": 2, "n_classes": 2, "image_size": 64}
    simulate.screen(folder / "screen", **sizes)
    return plates.ingest(screen.read_rxrx1(folder / "screen"), folder / "plates").plates


def run(stores, out, settings=SETTINGS, **options):
    return pretrain.run(stores, out, settings, **{"geometry": GEOMETRY, "decoder": DECODER, "device": "cpu"} | options)


@pytest.fixture(scope="module")
def whole(stores, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "model.safetensors"
    return out, run(stores, out)


def test_model_is_an_encoder_that_loads(whole):
    out, _ = whole
    model = encoder.load("camae", out, device="cpu")
    assert (model.n_features, model.img_size) == (16, 32)
    assert model.model.geometry == dataclasses.replace(GEOMETRY, bias_order="aligned")
    with safe_open(out, framework="pt") as archive:
        config = json.loads(archive.metadata()["config"])
    assert config["provenance"][0]["parameters"]["steps"] == 12
    assert len(config["provenance"][0]["inputs"]) == 2


def test_curve_and_picture_lie_beside_the_model(whole):
    out, curve = whole
    written = pd.read_csv(out.with_suffix(".csv"))
    pd.testing.assert_frame_equal(written, curve)
    assert list(curve["step"]) == list(range(1, 13))
    assert out.stat().st_mode == out.with_suffix(".csv").stat().st_mode
    with Image.open(out.with_suffix(".png")) as image:
        assert image.size == (6 * 32, 1 * 3 * 32)  # one of 20 sites is held out
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "model.csv",
        "model.png",
        "model.safetensors",
    ]


@pytest.mark.parametrize("died_at", [1, 7, 12])
def test_a_killed_run_goes_on_as_if_it_had_not_been(stores, whole, tmp_path, monkeypatch, died_at):
    out = tmp_path / "model.safetensors"
    train = pretrain._Training.train

    def dies(self, images, noise):
        if self.step == died_at:
            raise KeyboardInterrupt
        train(self, images, noise)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain._Training, "train", dies)
        with pytest.raises(KeyboardInterrupt):
            run(stores, out, checkpoint_minutes=0)
    assert not out.exists()

    seen = []
    monkeypatch.setattr(pretrain._Training, "train", lambda self, *batch: (seen.append(self.step), train(self, *batch)))
    curve = run(stores, out, checkpoint_minutes=0)
    assert seen == list(range(died_at, 13))
    pd.testing.assert_frame_equal(curve, whole[1])
    expected, got = load_file(whole[0]), load_file(out)
    assert all(torch.equal(got[key], expected[key]) for key in expected | got)


def test_loss_falls_on_what_was_held_out(stores, tmp_path):
    curve = run(stores, tmp_path / "m.safetensors", dataclasses.replace(SETTINGS, steps=150, batch_size=16))
    assert curve["held_out_mse"].iloc[-1] < 0.85 * curve["held_out_mse"].iloc[0]


def test_all_fields_are_seen_before_one_is_seen_again(stores):
    settings = dataclasses.replace(SETTINGS, batch_size=5)
    fields = pretrain._Fields([plates.Plate(store) for store in stores], GEOMETRY, settings)
    seen = []
    fields._crop = lambda site, rng: (seen.append(site), np.zeros((6, 32, 32), np.uint8))[1]
    for step in range(8):
        fields.batch(step)
    assert len(fields.train) == 19
    assert sorted(seen[:19]) == sorted(seen[19:38]) == sorted(fields.train)
    assert seen[:19] != seen[19:38]
    assert not set(fields.held_out) & set(seen)


@pytest.mark.parametrize("steps", [2, 20, 57, 1000])
def test_learning_rate_is_that_of_torch(steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.5, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    expected = []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    np.testing.assert_allclose([pretrain.one_cycle(i, steps, 0.5) for i in range(steps)], expected, rtol=1e-9)


def test_a_checkpoint_of_other_settings_is_refused(stores, tmp_path, monkeypatch):
    out = tmp_path / "model.safetensors"
    train = pretrain._Training.train
    with monkeypatch.context() as patch:
        patch.setattr(pretrain._Training, "train", lambda self, *batch: train(self, *batch) if self.step < 4 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(stores, out, checkpoint_minutes=0)
    with pytest.raises(WeightsError, match="other settings or plates"):
        run(stores, out, dataclasses.replace(SETTINGS, learning_rate=1e-2))
    with pytest.raises(WeightsError, match="other settings or plates"):
        run(stores[:1], out)
    (tmp_path / ".model.safetensors.parts" / "checkpoint.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(WeightsError, match="cannot be read"):
        run(stores, out)


def test_two_runs_on_one_output_do_not_overlap(stores, tmp_path):
    out = tmp_path / "model.safetensors"
    with (
        claimed(out),
        pytest.raises(OutputBusyError, match="another run is writing"),
    ):
        run(stores, out)
    for path in (out, out.with_suffix(".csv"), out.with_suffix(".png")):
        path.touch()
        with pytest.raises(OutputExistsError, match=f"{path.name} exists already"):
            run(stores, out)
        path.unlink()


def test_bad_input_is_named(stores, tmp_path):
    out = tmp_path / "model.safetensors"
    with pytest.raises(InputError, match=r"steps=0, mask_ratio=1.0, dtype='int8'"):
        run(stores, out, pretrain.Settings(steps=0, mask_ratio=1.0, dtype="int8"))
    with pytest.raises(InputError, match=r"ends in \.safetensors"):
        run(stores, tmp_path / "model.pt")
    with pytest.raises(InputError, match="geometry 'vit' is not known"):
        run(stores, out, geometry="vit")
    with pytest.raises(InputError, match="0 sites"):
        run([], out)
    with pytest.raises(InputError, match="smaller than images of 256 x 256"):
        run(stores, out, geometry="openphenom")
    with pytest.raises(InputError, match="5 at most"):
        run(stores, out, geometry=dataclasses.replace(GEOMETRY, max_in_chans=5))
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_no_number_stops_the_run(stores, tmp_path, monkeypatch):
    monkeypatch.setattr(mae, "losses", lambda *_: tuple(torch.tensor(float("nan"), requires_grad=True) for _ in "abc"))
    with pytest.raises(InputError, match="lower learning_rate"):
        run(stores, tmp_path / "model.safetensors")
