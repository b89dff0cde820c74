"""The inference form against the module it is folded from, and against the plain model of the benchmark."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from cellica import camae, fused

GEOMETRY = camae.Geometry(img_size=64, patch_size=16, embed_dim=48, depth=3, num_heads=3, max_in_chans=6)
CLOSE = 1e-5  # of the largest value


def model_of(geometry=GEOMETRY, seed=0, spread=0.3):
    """A model whose every tensor is random: biases, norms and LayerScale too."""
    generator = torch.Generator().manual_seed(seed)
    model = camae.CAMAE(geometry)
    camae.initialise(model)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1 or "bias" in name:
                tensor += spread * torch.randn(tensor.shape, generator=generator)
    return model.eval().requires_grad_(False)


def pictures(n, n_channels, size=64, seed=0):
    """Spots of different brightness on a noisy ground."""
    rng = np.random.default_rng(seed)
    spots = rng.random((n, n_channels, size, size)) < 0.01
    return torch.from_numpy(np.where(spots, 250, rng.poisson(20, spots.shape)).astype(np.uint8))


def difference(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


def cosine(got, expected):
    return float(torch.nn.functional.cosine_similarity(got.double().flatten(1), expected.double().flatten(1)).min())


@pytest.mark.parametrize("bias_order", camae.BIAS_ORDERS)
@pytest.mark.parametrize(("n", "n_channels"), [(1, 1), (3, 4), (2, 6)])
def test_float32_equals_the_module(bias_order, n, n_channels):
    model = model_of(dataclasses.replace(GEOMETRY, bias_order=bias_order), seed=n)
    images = pictures(n, n_channels)
    token, channels = fused.FusedCAMAE(model)(images)
    expected_token, expected = model(images)
    assert difference(token, expected_token) < CLOSE
    assert difference(channels, expected) < CLOSE
    assert difference(channels.mean(dim=1), expected.mean(dim=1)) < CLOSE


def test_bias_orders_differ():
    """Else the parity of both would say nothing."""
    shifted = model_of()
    aligned = camae.CAMAE(dataclasses.replace(GEOMETRY, bias_order="aligned")).requires_grad_(False)
    aligned.load_state_dict(shifted.state_dict())
    images = pictures(1, 3)
    assert difference(fused.FusedCAMAE(aligned)(images)[1], fused.FusedCAMAE(shifted)(images)[1]) > 0.01


def test_one_block_is_both_first_and_last():
    model = model_of(dataclasses.replace(GEOMETRY, depth=1))
    images = pictures(2, 2)
    for got, expected in zip(fused.FusedCAMAE(model)(images), model(images)):
        assert difference(got, expected) < CLOSE


def test_small_projections_are_normalised_with_the_same_epsilon():
    """Where q and k vary by less than a hundredth, the epsilon of their norms decides."""
    model = model_of()
    with torch.no_grad():
        for block in model.blocks:
            block.in_proj.weight *= 1e-3
            block.mlp_bias *= 1e-3
            block.in_norm.bias *= 0
    images = pictures(1, 3)
    for got, expected in zip(fused.FusedCAMAE(model)(images), model(images)):
        assert difference(got, expected) < CLOSE


def test_no_images():
    token, channels = fused.FusedCAMAE(model_of())(pictures(0, 2))
    assert (token.shape, channels.shape) == ((0, 48), (0, 2, 48))


def test_constant_channels_are_finite():
    model, images = model_of(), torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    images[:, 1] = 255
    for got, expected in zip(fused.FusedCAMAE(model)(images), model(images)):
        assert difference(got, expected) < CLOSE


@pytest.mark.parametrize("by_products", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_has_a_cosine_of_four_nines(monkeypatch, dtype, by_products):
    monkeypatch.setattr(fused, "BFLOAT16_BY_PRODUCTS", by_products)
    monkeypatch.setattr(fused, "QUERIES_AT_ONCE", 40)  # not a divisor of the number of tokens
    model, images = model_of(), pictures(2, 5)
    low, exact = fused.FusedCAMAE(model, dtype)(images), fused.FusedCAMAE(model)(images)
    for got, expected in zip(low, exact):
        assert got.dtype == torch.float32
        assert 0 < difference(got, expected) < 0.05
        assert cosine(got, expected) >= 0.9999


def score_limit(block):
    """Largest score that a block of the module gives to any normalised q and k, by trying many."""
    size = len(block.q_norm.weight)
    q, k = torch.randn(2, 4096, size, generator=torch.Generator().manual_seed(0)) * 10
    return float((block.q_norm(q) @ block.k_norm(k).T).abs().max() / size**0.5)


@pytest.mark.parametrize(("times", "bounded"), [(1, True), (20, False), (60, False)])
def test_scores_are_exponentiated_without_their_maximum_only_where_they_are_bounded(monkeypatch, times, bounded):
    """Scores beyond 88 have no exponential in bfloat16: softmax must take over before."""
    monkeypatch.setattr(fused, "BFLOAT16_BY_PRODUCTS", True)
    model = model_of()
    with torch.no_grad():
        for block in model.blocks:
            block.q_norm.weight *= times
    folded = fused.FusedCAMAE(model, torch.bfloat16)
    for block, made in zip(model.blocks, folded.blocks):
        assert made.bounded == bounded
        assert not bounded or score_limit(block) < fused.LARGEST_SCORE
    images = pictures(1, 3)
    channels = folded(images)[1]
    assert torch.isfinite(channels).all()
    assert cosine(channels, model(images)[1]) > 0.99
    if times == 60:
        folded.blocks = [dataclasses.replace(block, bounded=True) for block in folded.blocks]
        assert not torch.isfinite(folded(images)[1]).all()


def test_products_of_attention_do_not_depend_on_their_blocks(monkeypatch):
    model, images = model_of(), pictures(2, 5)
    monkeypatch.setattr(fused, "BFLOAT16_BY_PRODUCTS", True)
    results = []
    for rows in (16, 81, 1000):
        monkeypatch.setattr(fused, "QUERIES_AT_ONCE", rows)
        results.append(fused.FusedCAMAE(model, torch.bfloat16)(images)[1])
    assert difference(results[0], results[2]) < 0.01
    assert difference(results[1], results[2]) < 0.01


def test_folding_leaves_the_model_as_it_was_and_trainable():
    model = model_of().train().requires_grad_(True)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    folded = fused.FusedCAMAE(model)
    images = pictures(1, 2)
    first = folded(images)[1]
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    model(images)[1].sum().backward()
    assert model.blocks[0].in_proj.weight.grad.abs().sum() > 0
    with torch.no_grad():
        model.blocks[0].ls["gamma"] *= 2
    torch.testing.assert_close(folded(images)[1], first, rtol=0, atol=0)
    assert difference(fused.FusedCAMAE(model)(images)[1], first) > 0.01


def test_the_plain_model_of_the_benchmark_computes_the_same():
    file = Path(__file__).parents[1] / "workflows" / "bench" / "plain_camae.py"
    spec = importlib.util.spec_from_file_location("plain_camae", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, images = model_of(), pictures(2, 4)
    plain = module.PlainCAMAE(48, 3, 3, 64, 16, 6)
    plain.load_state_dict(model.state_dict())
    with torch.inference_mode():
        assert difference(fused.FusedCAMAE(model)(images)[1].mean(dim=1), plain(images)) < CLOSE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu(dtype):
    model, images = model_of(), pictures(5, 6)
    expected = model(images)[1]
    got = fused.FusedCAMAE(model.to("cuda"), dtype)(images.to("cuda"))[1].cpu()
    assert cosine(got, expected) >= 0.9999
    if dtype == torch.float32:
        assert difference(got, expected) < 1e-4
