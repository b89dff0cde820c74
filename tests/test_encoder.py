import dataclasses
import functools
import json
import math
import os
import pickle
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cellica import artifacts, camae, checkpoints, embedding, encoder, progress, timm_models
from cellica.schema import InputError, MissingFileError, WeightsError

TINY = camae.Geometry(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, max_in_chans=6)


def random_images(n, channels, size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, channels, size, size), dtype=np.uint8)


def tiny_state(geometry=TINY):
    """State dict of a tiny checkpoint whose every tensor is random: biases, norms and LayerScale too."""
    generator = torch.Generator().manual_seed(0)
    model = camae.CAMAE(geometry)
    state = {
        checkpoints.PREFIX + k: torch.randn(v.shape, generator=generator) / 4 for k, v in model.state_dict().items()
    }
    state[checkpoints.PREFIX + "pos_embed"] = model.pos_embed.data
    return {**state, "decoder.mask_token": torch.zeros(1, 1, 16), "encoder_decoder_proj.bias": torch.zeros(16)}


def write_tiny(folder, state=None, **config):
    file = folder / "model.safetensors"
    save_file(tiny_state() if state is None else state, file)
    (folder / "config.json").write_text(json.dumps({"max_in_chans": 6, **config}))
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """An empty Hugging Face cache: what this machine has does not matter."""
    folder = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr(checkpoints.constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def said(monkeypatch):
    notes = []
    monkeypatch.setattr(progress, "say", notes.append)
    return notes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return encoder.load("camae", write_tiny(tmp_path_factory.mktemp("tiny")), device="cpu")


# ---------------------------------------------------------------------------------------------- parity


@pytest.fixture(scope="module")
def reference(shared):
    folder = shared / "reference" / "camae_tiny"
    with np.load(folder / "io.npz") as arrays:
        return folder, dict(arrays)


@pytest.fixture(scope="module")
def reference_encoder(reference):
    return encoder.load("camae", reference[0] / "model.safetensors", device="cpu")


@pytest.mark.parametrize("channels", [1, 4, 6, 11])
def test_embeddings_equal_the_public_ones(reference, reference_encoder, channels):
    _, expected = reference
    images = expected[f"images_{channels}"]
    for key, got in {
        "embedding": reference_encoder(images),
        "channelwise": reference_encoder.channelwise(torch.from_numpy(images)),
        "cls": reference_encoder.class_token(images),
    }.items():
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.numpy(), expected[f"{key}_{channels}"], rtol=0, atol=1e-5, err_msg=key)


def test_geometry_is_read_from_shapes_and_config(reference, reference_encoder):
    config = json.loads((reference[0] / "config.json").read_text())
    assert (
        dataclasses.asdict(reference_encoder.model.geometry).items()
        >= {
            key: config[key] for key in ("img_size", "patch_size", "embed_dim", "depth", "num_heads", "max_in_chans")
        }.items()
    )
    assert reference_encoder.model.geometry.bias_order == "shifted"
    assert reference_encoder.weights_sha256 == artifacts.sha256(reference[0] / "model.safetensors")
    assert (reference_encoder.n_features, reference_encoder.img_size, reference_encoder.max_channels) == (48, 64, 11)


def test_positions_equal_the_stored_ones(reference):
    stored = load_file(reference[0] / "model.safetensors")[checkpoints.PREFIX + "pos_embed"]
    made = camae.positions(camae.Geometry(64, 16, 48, 3, 3))
    torch.testing.assert_close(made, stored, rtol=0, atol=1e-6)


def test_bias_order_matters(reference, tmp_path):
    """Read in timm's order since 1.0.25 the same checkpoint gives far other embeddings: the parity test can fail."""
    folder, expected = reference
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"bias_order": "aligned"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    aligned = encoder.load("camae", tmp_path / "model.safetensors", device="cpu")
    difference = np.abs(aligned(expected["images_6"]).numpy() - expected["embedding_6"])
    assert difference.mean() > 0.1 * np.abs(expected["embedding_6"]).mean()


def test_block_equals_timms(tiny):
    """timm's own block, in the order of the timm installed; the other order differs."""
    from timm.models.vision_transformer import ParallelScalingBlock

    block = tiny.model.blocks[0]
    theirs = ParallelScalingBlock(
        16, 2, qkv_bias=False, qk_norm=True, init_values=1.0, norm_layer=functools.partial(torch.nn.LayerNorm, eps=1e-6)
    )
    theirs.load_state_dict(block.state_dict())
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    order = "aligned" if tuple(map(int, version("timm").split(".")[:3])) >= (1, 0, 25) else "shifted"
    outputs = {}
    for name in camae.BIAS_ORDERS:
        ours = camae.ParallelBlock(dataclasses.replace(TINY, bias_order=name))
        ours.load_state_dict(block.state_dict())
        outputs[name] = ours(x)
    torch.testing.assert_close(outputs[order], theirs(x), rtol=1e-5, atol=1e-5)
    assert (outputs["aligned"] - outputs["shifted"]).abs().mean() > 0.01


# ---------------------------------------------------------------------------------------------- properties


@settings(deadline=None, max_examples=15)
@given(n=st.integers(1, 4), channels=st.integers(1, 6), seed=st.integers(0, 99), at_once=st.sampled_from([1, 10**6]))
def test_images_are_embedded_one_by_one_and_channels_in_any_order(tiny, n, channels, seed, at_once):
    rng = np.random.default_rng(seed)
    images = random_images(n, channels, 32, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(embedding.TOKENS_AT_ONCE, "cpu", at_once)
        whole, by_channel = tiny(images), tiny.channelwise(images).unflatten(1, (channels, -1))
        images_order, channel_order = rng.permutation(n), rng.permutation(channels)
        shuffled = images[images_order][:, channel_order]
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(torch.cat([tiny(image[None]) for image in images]), whole, **close)
        torch.testing.assert_close(tiny(shuffled), whole[images_order], **close)
        expected = by_channel[images_order][:, channel_order].flatten(1)
        torch.testing.assert_close(tiny.channelwise(shuffled), expected, **close)
    torch.testing.assert_close(by_channel.mean(dim=1), whole, **close)


def test_normalise_equals_instance_norm():
    images = torch.from_numpy(random_images(2, 3, 17))
    expected = torch.nn.functional.instance_norm(images.float() / 255, eps=1e-5)
    torch.testing.assert_close(camae.normalise(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [0, 1, 200, 255])
def test_constant_channel_gives_zeros(tiny, value):
    images = random_images(1, 3, 32)
    images[:, 1] = value
    assert not camae.normalise(torch.from_numpy(images))[:, 1].any()
    embedding = tiny.channelwise(images)
    images[:, 1] = 7
    assert torch.isfinite(embedding).all()
    torch.testing.assert_close(tiny.channelwise(images), embedding, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_gives_float32_near_the_exact(tiny, dtype):
    images = random_images(2, 4, 32)
    low, exact = dataclasses.replace(tiny, dtype=dtype)(images), tiny(images)
    assert low.dtype == torch.float32
    assert 0 < (low - exact).abs().max() < 0.05 * exact.abs().max()
    assert torch.nn.functional.cosine_similarity(low, exact).min() >= 0.9999


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("dtype", list(encoder.DTYPES))
def test_gpu_gives_what_the_cpu_gives(tiny, tmp_path, dtype):
    images = random_images(5, 4, 32)
    on_gpu = encoder.load("camae", write_tiny(tmp_path), device="cuda", dtype=dtype)(images)
    tolerance = 1e-4 if dtype == "float32" else 0.1
    torch.testing.assert_close(on_gpu.cpu(), tiny(images), rtol=tolerance, atol=tolerance)


def test_images_may_be_read_only_strided_or_none_at_all(tiny):
    images = random_images(3, 2, 32)
    images.flags.writeable = False
    torch.testing.assert_close(tiny(images[::-1]), tiny(images).flip(0), rtol=1e-5, atol=1e-5)
    assert tiny(images[:0]).shape == (0, 16)


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (np.zeros((1, 2, 32, 32), np.uint16), "uint16"),
        (np.zeros((1, 2, 32, 32), np.float32), "float32"),
        (torch.zeros(1, 2, 32, 32), "float32"),
        ([[1]], "list"),
        (np.zeros((2, 32, 32), np.uint8), "(2, 32, 32)"),
        (np.zeros((1, 2, 32, 40), np.uint8), "(1, 2, 32, 40)"),
        (np.zeros((1, 0, 32, 32), np.uint8), "(1, 0, 32, 32)"),
        (np.zeros((1, 7, 32, 32), np.uint8), "7 channels, camae takes at most 6"),
    ],
)
def test_bad_images(tiny, images, told):
    with pytest.raises(InputError) as error:
        tiny(images)
    assert told in str(error.value)


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("wrap", [True, False], ids=["state_dict", "plain"])
def test_pickles_under_the_name_of_safetensors(tiny, tmp_path, modern, wrap):
    state = tiny_state()
    file = tmp_path / "model.safetensors"
    torch.save({"state_dict": state, "epoch": 3} if wrap else state, file, _use_new_zipfile_serialization=modern)
    (tmp_path / "config.json").write_text('{"max_in_chans": 6}')
    images = random_images(2, 3, 32)
    torch.testing.assert_close(encoder.load("camae", file, device="cpu")(images), tiny(images), rtol=0, atol=0)


class Trap:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "legacy"])
def test_pickles_run_nothing(tmp_path, modern):
    file, trap = tmp_path / "model.safetensors", tmp_path / "sprung"
    torch.save({"state_dict": tiny_state(), "x": Trap(trap)}, file, _use_new_zipfile_serialization=modern)
    with pytest.raises(WeightsError, match="cannot be read as weights"):
        encoder.load("camae", file)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Trap(trap)))
    assert trap.exists()  # the trap works


def test_safetensors_that_start_like_a_pickle(tiny, tmp_path):
    """The length of the header comes first, and may end in the byte that opens a pickle."""
    for n in range(0, 300, 4):
        save_file(tiny_state(), tmp_path / "model.safetensors", metadata={"note": "x" * n})
        if (tmp_path / "model.safetensors").read_bytes()[0] == 0x80:
            break
    else:
        pytest.fail("no header of such a length")
    (tmp_path / "config.json").write_text('{"max_in_chans": 6}')
    assert encoder.load("camae", tmp_path / "model.safetensors", device="cpu").n_features == 16


def test_config_in_the_file_comes_before_the_one_beside(tmp_path):
    file = write_tiny(tmp_path, max_in_chans=1)
    save_file(tiny_state(), file, metadata={"config": json.dumps(dataclasses.asdict(TINY) | {"bias_order": "aligned"})})
    assert encoder.load("camae", file, device="cpu").model.geometry == dataclasses.replace(TINY, bias_order="aligned")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "neither safetensors nor"),
        (b"version https://git-lfs.github.com/spec/v1\n", "starts with b'version h'"),
        ((64).to_bytes(8, "little") + b"{not json", "cannot be read as weights"),
        (b"PK\x03\x04 and no archive", "cannot be read as weights"),
    ],
)
def test_files_that_are_no_weights(tmp_path, content, told):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError) as error:
        encoder.load("camae", tmp_path / "model.safetensors")
    assert told in str(error.value)


def test_truncated_weights(tmp_path):
    file = write_tiny(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="cannot be read as weights"):
        encoder.load("camae", file)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    state = tiny_state()
    del state["encoder.vit_backbone.blocks.1.mlp_bias"]
    state["encoder.vit_backbone.norm.weight"] = torch.zeros(16)
    state["encoder.extra"] = torch.zeros(1)
    state["encoder.vit_backbone.blocks.0.in_proj.weight"] = torch.zeros(3, 16)
    with pytest.raises(WeightsError) as error:
        encoder.load("camae", write_tiny(tmp_path, state))
    for told in (
        "1 missing: 'encoder.vit_backbone.blocks.1.mlp_bias'",
        "2 unexpected: 'encoder.extra', 'encoder.vit_backbone.norm.weight'",
        "1 of another shape: 'encoder.vit_backbone.blocks.0.in_proj.weight'",
    ):
        assert told in str(error.value)


def test_checkpoints_that_tell_no_geometry(tmp_path):
    with pytest.raises(WeightsError, match=r"it has no encoder\.vit_backbone\.cls_token, .*q_norm\.weight"):
        encoder.load("camae", write_tiny(tmp_path, {"decoder.mask_token": torch.zeros(1)}))
    with pytest.raises(WeightsError, match="96 positions are not 11 channels of a square"):
        encoder.load("camae", write_tiny(tmp_path, max_in_chans=11))
    with pytest.raises(WeightsError, match="depth 2 where 4 is expected, num_heads 2 where 8 is expected"):
        encoder.load("camae", write_tiny(tmp_path, depth=4, num_heads=8))
    with pytest.raises(WeightsError, match="bias_order 'new' is not one of shifted, aligned"):
        encoder.load("camae", write_tiny(tmp_path, bias_order="new"))
    with pytest.raises(WeightsError, match="is not openphenom: img_size 32 where 256 is expected"):
        encoder.load("openphenom", write_tiny(tmp_path))


# ---------------------------------------------------------------------------------------------- names and options


def test_openphenom_geometry():
    model = encoder.load("openphenom", weights="random", device="cpu")
    assert sum(tensor.numel() for tensor in model.model.state_dict().values()) == 22_459_776
    assert model.model.geometry.bias_order == "shifted"
    embedding = model(random_images(1, 1, 256))
    assert embedding.shape == (1, 384)
    assert torch.isfinite(embedding).all()


def test_bundled_weights_are_small_and_trained():
    model = encoder.load("camae-mini", device="cpu")
    assert encoder.BUNDLED["camae-mini"].stat().st_size < 6e6
    assert (model.n_features, model.img_size, model.weights) == (128, 64, "camae-mini.safetensors")
    _, config = checkpoints.read_checkpoint(encoder.BUNDLED["camae-mini"])
    assert config["provenance"][0]["verb"] == "pretrain"
    assert model(random_images(2, 6, 64)).shape == (2, 128)


def test_random_weights_come_from_the_seed():
    state = torch.get_rng_state()
    first, again, other = (
        encoder.load("camae-mini", weights="random", device="cpu", random_state=seed) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    images = random_images(1, 2, 64)
    torch.testing.assert_close(first(images), again(images), rtol=0, atol=0)
    assert first.weights_sha256 == again.weights_sha256 != other.weights_sha256
    assert (first(images) - other(images)).abs().mean() > 0.01
    assert "random" in first.weights
    assert "seed 3" in first.weights


@pytest.mark.parametrize("layer_scale", [1.0, 1e-4])
def test_random_weights_tell_spots_from_noise(layer_scale):
    """Instance-normalised, both have the same mean patch: blocks tell them apart, unless LayerScale mutes them."""
    rng = np.random.default_rng(0)
    spots = np.where(rng.random((12, 1, 64, 64)) < 0.002, 255, 10).astype(np.uint8)
    images = np.concatenate([random_images(12, 1, 64), spots])
    untrained = encoder.load("camae-mini", weights="random", device="cpu")
    for block in untrained.model.blocks:
        block.ls["gamma"].mul_(layer_scale)
    features = untrained(images)
    distance = torch.cdist(features, features).fill_diagonal_(math.inf).numpy()
    share_right = np.mean((distance.argmin(axis=1) < 12) == (np.arange(24) < 12))
    assert share_right == 1 if layer_scale == 1 else share_right < 0.8


@pytest.mark.parametrize(
    ("name", "weights", "told"),
    [
        ("openphenom", None, ["recursionpharma/OpenPhenom", "Hugging Face", "Non-Commercial", 'weights="random"']),
        ("openphenom", None, ["cellica fetch openphenom DIR", "weights=DIR"]),
        ("camae", None, ["weights=FILE"]),
        ("camae", "random", ["no geometry"]),
        ("timm/resnet18", None, ["weights=FILE", 'weights="random"', "timm/resnet18.a1_in1k on Hugging Face"]),
    ],
)
def test_without_weights_the_error_says_how_to_get_them(name, weights, told):
    with pytest.raises(WeightsError) as error:
        encoder.load(name, weights)
    assert all(text in str(error.value) for text in told), str(error.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"name": "vit"}, "openphenom, camae-mini, camae or timm/NAME"),
        ({"name": "timm/no_such_model"}, "timm has no model 'no_such_model'"),
        ({"name": "timm/hf-hub:timm/resnet18"}, "timm has no model"),
        ({"name": "timm/resnet18.no_such_tag"}, "no_such_tag"),
        ({"device": "tpu"}, "auto, cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "choose auto or cpu"),
        ({"device": "mps"}, "auto, cpu, cuda or cuda:N"),
        ({"dtype": "float64"}, "float32, bfloat16, float16"),
        ({"channels": "sum"}, "choose one of mean, concat"),
    ],
)
def test_unknown_options(arguments, told):
    with pytest.raises(InputError) as error:
        encoder.load(**({"name": "camae-mini", "weights": "random"} | arguments))
    assert told in str(error.value)


def test_gpu_asked_for_and_absent(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch sees 0 GPUs"):
        encoder.load("camae-mini", "random", device="cuda")
    assert encoder.load("camae-mini", "random").device.type == "cpu"


def test_file_that_is_not_there(tmp_path):
    with pytest.raises(MissingFileError, match="absent"):
        encoder.load("camae", tmp_path / "absent.safetensors")
    with pytest.raises(MissingFileError, match=r"model\.safetensors"):
        encoder.load("camae", tmp_path)


def test_channels_may_be_concatenated(tiny):
    images = random_images(2, 3, 32)
    concat = dataclasses.replace(tiny, channels="concat")
    torch.testing.assert_close(concat(images), tiny.channelwise(images), rtol=0, atol=0)
    assert encoder.load("camae-mini", "random", device="cpu", channels="concat").channels == "concat"


def test_a_cpu_that_is_slow_in_a_dtype_is_said_to_be(said, monkeypatch):
    seconds = iter([0.0, 9.0, 10.0, 12.0] * 2)
    monkeypatch.setattr(encoder.time, "perf_counter", lambda: next(seconds))
    encoder.load("camae-mini", "random", device="cpu", dtype="bfloat16")
    assert said == ["this CPU multiplies bfloat16 4.5 times slower than float32: float32 is the better choice"]
    encoder.load("camae-mini", "random", device="cpu")
    assert len(said) == 1


# ---------------------------------------------------------------------------------------------- where weights are found


def put(cache, repository, revision, file, state, main=False):
    """A file as huggingface_hub leaves it in its cache."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    target = folder / "snapshots" / revision / file
    target.parent.mkdir(parents=True)
    save_file(state, target)
    if main:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(revision)
    return target


def small(name, seed):
    """timm's model with another seed, and its weights: head included."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = timm.create_model(name, pretrained=False).eval()
    return model, model.state_dict()


def test_a_folder_that_holds_the_weights(tiny, tmp_path):
    write_tiny(tmp_path)
    images = random_images(1, 2, 32)
    torch.testing.assert_close(encoder.load("camae", tmp_path, device="cpu")(images), tiny(images), rtol=0, atol=0)


@pytest.mark.parametrize("main", [True, False])
def test_openphenom_comes_from_the_cache_and_names_its_licence(cache, said, main):
    model = camae.CAMAE(encoder.NAMED["openphenom"])
    state = {checkpoints.PREFIX + key: tensor for key, tensor in model.state_dict().items()}
    file = put(cache, "recursionpharma/OpenPhenom", "a" * 40, "model.safetensors", state, main)
    loaded = encoder.load("openphenom", device="cpu")
    assert loaded.weights == "model.safetensors (not a release of OpenPhenom that cellica knows)"
    assert loaded.weights_sha256 == artifacts.sha256(file)
    assert said == [f"weights of openphenom from the Hugging Face cache: {file}", encoder.LICENCE]


def test_timm_weights_come_from_the_cache(cache):
    _, state = small("test_vit.r160_in1k", 5)
    put(cache, "timm/test_vit.r160_in1k", "b" * 40, "model.safetensors", small("test_vit.r160_in1k", 6)[1])
    file = put(cache, "timm/test_vit.r160_in1k", "a" * 40, "model.safetensors", state, main=True)
    found = encoder.load("timm/test_vit.r160_in1k", device="cpu")
    given = encoder.load("timm/test_vit.r160_in1k", file, device="cpu")
    assert found.weights_sha256 == given.weights_sha256 == artifacts.sha256(file)
    images = random_images(1, 2, 160)
    torch.testing.assert_close(found(images), given(images), rtol=0, atol=0)


def test_without_main_the_newest_revision_is_taken(cache):
    for age, revision in ((1, "a"), (3, "c"), (2, "b")):
        file = put(cache, "x/y", revision * 40, "model.safetensors", {"t": torch.zeros(1)})
        os.utime(file, (age, age))
    assert checkpoints.cached("x/y").parent.name == "c" * 40
    assert checkpoints.cached("x/z") is None


def test_the_cache_is_where_hf_home_says(tmp_path):
    file = put(tmp_path / "hub", "x/y", "a" * 40, "pytorch_model.bin", {"t": torch.zeros(1)}, main=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE"))}
    source = "from cellica import checkpoints; print(checkpoints.cached('x/y'))"
    told = subprocess.run(
        [sys.executable, "-c", source],
        env=environment | {"HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == str(file)


def test_pickles_from_the_cache_run_nothing(cache, tmp_path):
    file = put(cache, "timm/test_vit.r160_in1k", "a" * 40, "pytorch_model.bin", {"t": torch.zeros(1)}, main=True)
    trap = tmp_path / "sprung"
    torch.save({"state_dict": {}, "x": Trap(trap)}, file)
    with pytest.raises(WeightsError, match="cannot be read as weights"):
        encoder.load("timm/test_vit.r160_in1k")
    assert not trap.exists()


# ---------------------------------------------------------------------------------------------- timm


def test_timm_model_reads_channels_one_by_one(tmp_path):
    theirs, state = small("test_vit.r160_in1k", 5)
    save_file(state, tmp_path / "vit.safetensors")
    ours = encoder.load("timm/test_vit.r160_in1k", tmp_path / "vit.safetensors", device="cpu")
    assert (ours.img_size, ours.max_channels, ours.n_features) == (160, None, 64)
    images = random_images(2, 13, 160)
    config = theirs.pretrained_cfg
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    with torch.inference_mode():
        grey = torch.from_numpy(images).float().div(255)
        channels = [((grey[:, [c] * 3] - mean) / std) for c in range(13)]
        expected = torch.stack([theirs.forward_head(theirs.forward_features(x), pre_logits=True) for x in channels], 1)
    torch.testing.assert_close(ours.channelwise(images), expected.flatten(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(images), expected.mean(1), rtol=1e-4, atol=1e-4)
    concat = encoder.load("timm/test_vit.r160_in1k", tmp_path / "vit.safetensors", device="cpu", channels="concat")
    torch.testing.assert_close(concat(images), expected.flatten(1), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="no class token"):
        ours.class_token(images)


@pytest.mark.parametrize("name", ["test_resnet.r160_in1k", "test_convnext.r160_in1k", "test_efficientnet.r160_in1k"])
def test_timm_models_of_other_kinds(name):
    """Convolutional ones, and one with a head of several layers: features come before the classifier."""
    model = encoder.load(f"timm/{name}", "random", device="cpu")
    images = random_images(2, 3, model.img_size)
    assert model(images).shape == (2, model.n_features)
    alone = torch.stack([model(images[:, [c]]) for c in range(3)], dim=1)
    torch.testing.assert_close(model(images), alone.mean(dim=1), rtol=1e-4, atol=1e-5)


def test_names_of_timms_weights():
    assert timm_models.repository("resnet18") == "timm/resnet18.a1_in1k"
    assert timm_models.repository("resnet18.no_such_tag") is None
    assert timm_models.repository("no_such_model") is None


def test_timm_weights_that_do_not_fit(tmp_path):
    save_file({"conv.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(WeightsError, match=r"90 missing: 'bn1.bias', .* and 85 more; 1 unexpected: 'conv\.weight'"):
        encoder.load("timm/test_resnet.r160_in1k", tmp_path / "x.safetensors")


def test_timm_random_weights_come_from_the_seed():
    first, again, other = (
        encoder.load("timm/test_resnet.r160_in1k", "random", device="cpu", random_state=seed) for seed in (0, 0, 1)
    )
    images = random_images(2, 2, 160)
    torch.testing.assert_close(first(images), again(images), rtol=0, atol=0)
    assert first.weights_sha256 == again.weights_sha256 != other.weights_sha256
