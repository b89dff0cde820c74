"""The masked autoencoder around a CA-MAE encoder: masking, decoder and loss, for pretraining.

The encoder sees a quarter of an image's tokens, over all channels together; a decoder with a stack of blocks for each
channel paints the rest (Kraus et al., arXiv 2404.10242, section 3; the Fourier loss: arXiv 2309.16064). Modules of
torch; no files. Parameter names as in the public checkpoints.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cellica.camae import CAMAE, Geometry, normalise, positions
from cellica.camae import initialise as initialise_encoder

EPS = 1e-5
LAYER_SCALE, CONTENT, HIDDEN, SHARPNESS = 0.3, 0.65, 1.5, 2.5  # of fresh weights, see `initialise`
CROSS_HEADS = 8  # heads of the cross-attention, whatever the blocks have


@dataclasses.dataclass(frozen=True)
class DecoderGeometry:
    """Shape of a decoder, in the words of a checkpoint's ``config.json``; it knows the channels it was made for."""

    embed_dim: int = 512
    depth: int = 8
    num_heads: int = 16
    num_modalities: int = 6


class Masked(NamedTuple):
    """One masked pass; T is the number of patches of all channels."""

    latent: Tensor
    """Class token and the tokens that were seen, in the order of their noise: (N, 1 + kept, D)."""
    reconstruction: Tensor
    """Pixels of each patch: (N, T, patch_size ** 2), in units of the normalised image."""
    target: Tensor
    """What they should be, of the same shape."""
    mask: Tensor
    """1 where a patch was hidden: (N, T), float32."""


class Attention(nn.Module):
    """Self-attention of the decoder's blocks: tokens (N, T, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(_attend(q, k, v, self.heads))


class CrossAttention(nn.Module):
    """Attention of a channel's tokens to keys and values of all channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend."""
        return self.proj(_attend(self.q(x), keys, values, CROSS_HEADS))


class MLP(nn.Module):
    """Two layers with GELU between, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, T, width) to the same."""
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=EPS), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width, eps=EPS), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, T, width) to the same."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Tokens of all channels to tokens of the decoder's width, each channel through a stack of its own.

    The class token takes no part: its position and its ``placeholder`` are stored with the weights, and not used.
    """

    def __init__(self, encoder: Geometry, decoder: DecoderGeometry) -> None:
        super().__init__()
        width, channels = decoder.embed_dim, decoder.num_modalities
        places = dataclasses.replace(encoder, embed_dim=width, max_in_chans=channels)
        self.patches = (encoder.img_size // encoder.patch_size) ** 2
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.placeholder = nn.Parameter(torch.zeros(1, 1, width), requires_grad=False)
        self.pos_embeddings = nn.Parameter(positions(places), requires_grad=False)
        self.modality_tokens = nn.ParameterList(nn.Parameter(torch.zeros(1, 1, width)) for _ in range(channels))
        self.query_norm, self.context_norm = nn.LayerNorm(width, eps=EPS), nn.LayerNorm(width, eps=EPS)
        self.out_norm = nn.LayerNorm(width, eps=EPS)
        self.cross_attention, self.mlp = CrossAttention(width), MLP(width)
        self.decoders = nn.ModuleList(
            nn.Sequential(*(Block(width, decoder.num_heads) for _ in range(decoder.depth))) for _ in range(channels)
        )

    def forward(self, seen: Tensor, order: Tensor) -> Tensor:
        """Tokens seen (N, kept, width) and each patch's rank in the noise (N, T) to tokens (N, T, width)."""
        hidden = self.mask_token.expand(len(seen), order.shape[1] - seen.shape[1], -1).to(seen.dtype)
        tokens = torch.cat([seen, hidden], dim=1).gather(1, order[:, :, None].expand(-1, -1, seen.shape[2]))
        channel = torch.cat([token.expand(-1, self.patches, -1) for token in self.modality_tokens], dim=1)
        x = tokens + self.pos_embeddings[:, 1:] + channel
        keys, values = self.cross_attention.kv(self.context_norm(x)).chunk(2, dim=-1)
        painted = []
        for own, blocks in zip(x.split(self.patches, dim=1), self.decoders, strict=True):
            z = self.cross_attention(self.query_norm(own), keys, values)
            painted.append(blocks(z + self.mlp(self.out_norm(z))))
        return torch.cat(painted, dim=1)


class _Backbone(nn.Module):
    def __init__(self, model: CAMAE) -> None:
        super().__init__()
        self.vit_backbone = model


class MaskedAutoencoder(nn.Module):
    """Encoder, decoder and the layers between, under the names of the public checkpoints."""

    def __init__(self, encoder: CAMAE, decoder: DecoderGeometry) -> None:
        super().__init__()
        geometry = encoder.geometry
        self.encoder = _Backbone(encoder)
        self.encoder_decoder_proj = nn.Linear(geometry.embed_dim, decoder.embed_dim)
        self.decoder = Decoder(geometry, decoder)
        self.decoder_pred = nn.Linear(decoder.embed_dim, geometry.patch_size**2)

    @property
    def n_patches(self) -> int:
        """Patches of all channels together: T."""
        return self.decoder.patches * len(self.decoder.decoders)

    def forward(self, images: Tensor, noise: Tensor, mask_ratio: float = 0.75) -> Masked:
        """One masked pass: uint8 images (N, C, Y, X) and noise (N, T), of which the smallest are seen."""
        backbone = self.encoder.vit_backbone
        kept = int(noise.shape[1] * (1 - mask_ratio))
        shuffle = noise.argsort(dim=1)
        order = shuffle.argsort(dim=1)
        seen = shuffle[:, :kept]
        tokens = backbone.tokens(images)
        tokens = tokens.gather(1, seen[:, :, None].expand(-1, -1, tokens.shape[2]))
        latent = torch.cat([(backbone.cls_token + backbone.pos_embed[:, :1]).expand(len(images), -1, -1), tokens], 1)
        for block in backbone.blocks:
            latent = block(latent)
        painted = self.decoder_pred(self.decoder(self.encoder_decoder_proj(latent[:, 1:]), order))
        target = patches(normalise(images), backbone.geometry.patch_size)
        return Masked(latent, painted.float(), target, (order >= kept).float())


def initialise(model: MaskedAutoencoder) -> None:
    """Draw fresh weights, such that the decoder looks at once to what was seen near a hidden patch.

    A channel's queries reach the image through the cross-attention alone, without a residual. Where that starts out
    uniform, as under the usual weights, a small model learns nothing for long: the mean of an image says nothing of
    its parts. So queries and keys start as one orthogonal map, which compares positions (mimetic initialisation,
    Trockman and Kolter, arXiv 2305.09828), and which does not see the token of hidden patches.
    """
    backbone, decoder = model.encoder.vit_backbone, model.decoder
    initialise_encoder(backbone)
    for name, parameter in backbone.named_parameters():
        if name.endswith("ls.gamma"):
            nn.init.constant_(parameter, LAYER_SCALE)
    nn.init.trunc_normal_(model.encoder_decoder_proj.weight, std=CONTENT * backbone.n_features**-0.5)
    nn.init.zeros_(model.encoder_decoder_proj.bias)
    width = decoder.mask_token.shape[-1]
    hidden = F.normalize(torch.randn(width), dim=0)
    with torch.no_grad():
        decoder.mask_token.copy_(HIDDEN * width**0.5 * hidden)
        compare = nn.init.orthogonal_(torch.empty(width, width)) @ (torch.eye(width) - torch.outer(hidden, hidden))
        decoder.cross_attention.q.weight.copy_(SHARPNESS * compare)
        decoder.cross_attention.kv.weight[:width].copy_(SHARPNESS * compare)


def losses(masked: Masked, fourier_weight: float = 0.01) -> tuple[Tensor, Tensor, Tensor]:
    """Loss to minimise, its mean squared error, and its Fourier part; each over the hidden patches.

    The Fourier part is the mean absolute difference of the magnitudes of the patches' two-dimensional Fourier
    transforms. The loss is ``(1 - fourier_weight) * mse + fourier_weight * fourier``.
    """
    hidden = masked.mask.bool()
    painted, target = masked.reconstruction[hidden], masked.target[hidden]
    mse = F.mse_loss(painted, target)
    side = round(target.shape[1] ** 0.5)
    found, expected = (torch.fft.fft2(x.unflatten(1, (side, side))).abs() for x in (painted, target))
    fourier = F.l1_loss(found, expected)
    return (1 - fourier_weight) * mse + fourier_weight * fourier, mse, fourier


def patches(images: Tensor, size: int) -> Tensor:
    """Cut images (N, C, Y, X) into patches (N, C * L * L, size * size), channel by channel and row by row."""
    return images.unflatten(3, (-1, size)).unflatten(2, (-1, size)).transpose(3, 4).flatten(4).flatten(1, 3)


def pictures(pixels: Tensor, n_channels: int) -> Tensor:
    """Put patches together again: the inverse of `patches`, to (N, C, Y, X)."""
    n, total, area = pixels.shape
    side, length = round(area**0.5), round((total / n_channels) ** 0.5)
    grid = pixels.view(n, n_channels, length, length, side, side).transpose(3, 4)
    return grid.reshape(n, n_channels, length * side, length * side)


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
