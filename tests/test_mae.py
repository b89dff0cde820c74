import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cellica import camae, mae

GEOMETRY = camae.Geometry(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, max_in_chans=6)
SMALL = mae.DecoderGeometry(embed_dim=16, depth=1, num_heads=2, num_modalities=3)


def tiny(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = mae.MaskedAutoencoder(camae.CAMAE(GEOMETRY), SMALL)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="module")
def reference(shared):
    folder = shared / "reference" / "camae_tiny"
    geometry = camae.Geometry(img_size=64, patch_size=16, embed_dim=48, depth=3, num_heads=3)
    model = mae.MaskedAutoencoder(camae.CAMAE(geometry), mae.DecoderGeometry(32, 2, 4, 6))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval(), {key: torch.from_numpy(value) for key, value in np.load(folder / "io.npz").items()}


def test_masked_pass_equals_the_public_model(reference):
    model, io = reference
    with torch.inference_mode():
        got = model(io["images_6"], io["mask_noise"])
        _, mse, _ = mae.losses(got)
    torch.testing.assert_close(got.mask, io["mask"], rtol=0, atol=0)
    torch.testing.assert_close(got.latent, io["masked_latent"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.target, io["target"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.reconstruction, io["reconstruction"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mse, io["masked_mse"], rtol=1e-5, atol=1e-4)


def test_hidden_pixels_do_not_reach_the_reconstruction():
    model = tiny()
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8, generator=generator)
    noise = torch.rand(1, model.n_patches, generator=generator)
    with torch.inference_mode():
        before = model(images, noise)
        hidden = int(before.mask.argmax())
        channel, row, column = np.unravel_index(hidden, (3, 4, 4))
        block = images[0, channel, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        block[:] = block.flip(0)  # the channel's mean and variance stay as they are
        after = model(images, noise)
    torch.testing.assert_close(after.reconstruction, before.reconstruction, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after.target[0, hidden], before.target[0, hidden], atol=1e-2)


def test_loss_is_of_hidden_patches_alone():
    target = torch.randn(2, 8, 16)
    mask = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0]).expand(2, -1)
    painted = torch.where(mask[:, :, None] > 0, target, 100.0)
    total, mse, fourier = mae.losses(mae.Masked(target, painted, target, mask))
    assert total.item() == mse.item() == fourier.item() == 0

    shifted = mae.Masked(target, target.roll(1, dims=2).reshape(target.shape), target, mask)
    total, mse, fourier = mae.losses(shifted, fourier_weight=0.25)
    torch.testing.assert_close(total, 0.75 * mse + 0.25 * fourier)


def test_fourier_loss_ignores_cyclic_shifts_within_a_patch():
    target = torch.randn(1, 4, 16)
    rolled = target.view(1, 4, 4, 4).roll((1, 2), dims=(2, 3)).reshape(1, 4, 16)
    _, mse, fourier = mae.losses(mae.Masked(target, rolled, target, torch.ones(1, 4)))
    assert mse > 0.1
    assert fourier < 1e-5


def test_patches_and_pictures_are_inverse():
    images = torch.randn(2, 3, 32, 32)
    cut = mae.patches(images, 8)
    assert cut.shape == (2, 48, 64)
    torch.testing.assert_close(cut[1, 16 + 4 + 2].view(8, 8), images[1, 1, 8:16, 16:24])
    torch.testing.assert_close(mae.pictures(cut, 3), images)


def test_every_trainable_parameter_is_trained():
    model = tiny()
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=generator)
    mae.losses(model(images, torch.rand(2, model.n_patches, generator=generator)))[0].backward()
    idle = {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any())
    }
    assert idle == {"encoder.vit_backbone.fc_norm.weight", "encoder.vit_backbone.fc_norm.bias"}


def test_fresh_weights_look_at_what_was_seen_nearby(monkeypatch):
    geometry = camae.Geometry(img_size=64, patch_size=8, embed_dim=48, depth=1, num_heads=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mae.MaskedAutoencoder(camae.CAMAE(geometry), mae.DecoderGeometry(64, 1, 4, 3))
        mae.initialise(model)
        images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
        noise = torch.rand(2, model.n_patches)
    looked = {}
    attend = mae._attend

    def spy(q, k, v, heads):
        if q.shape[1] != k.shape[1]:  # the cross-attention; the last channel's stays
            apart = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k))
            q_, k_ = apart
            looked["at"] = (q_ @ k_.mT / q_.shape[-1] ** 0.5).softmax(-1).mean(1)
        return attend(q, k, v, heads)

    monkeypatch.setattr(mae, "_attend", spy)
    with torch.inference_mode():
        seen = 1 - model(images, noise).mask[:, None]
    row, column = np.divmod(np.arange(64), 8)
    near = (abs(row[:, None] - row) <= 1) & (abs(column[:, None] - column) <= 1)
    near = torch.from_numpy(np.tile(near, 3)).float()
    hidden = ~seen[:, 0, 128:].bool()
    share = (looked["at"] * near * seen).sum(-1)[hidden]
    uniform = (near * seen).sum(-1)[hidden] / 192
    assert share.mean() > 4 * uniform.mean()
