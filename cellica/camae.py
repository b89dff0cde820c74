"""The channel-agnostic masked autoencoder (CA-MAE): its geometry, its encoder, fresh weights.

Each channel is read as tokens of its own with one shared patch embedding, so an image may have any channels, in any
order, up to a limit (Kraus et al., arXiv 2404.10242). Array functions and modules of torch; no files.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BIAS_ORDERS = ("shifted", "aligned")
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Shape of a CA-MAE encoder, in the words of its ``config.json``.

    ``bias_order`` says where a block adds ``mlp_bias`` (4D) to the joint projection [mlp 4D, q D, k D, v D]: "aligned"
    to the MLP part; "shifted" to the last 4D entries (the last D MLP units, then q, k and v), as timm did before
    1.0.25, with which OpenPhenom and its published embeddings were made. A checkpoint that records none is "shifted".
    """

    img_size: int
    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int
    max_in_chans: int = 11
    bias_order: str = "shifted"


class ParallelBlock(nn.Module):
    """Attention and MLP side by side on one joint projection (Dehghani et al., arXiv 2302.05442, section 2.1)."""

    def __init__(self, geometry: Geometry) -> None:
        """Weights as torch draws them, LayerScale 1."""
        super().__init__()
        width, self.heads = geometry.embed_dim, geometry.num_heads
        self.widths = (4 * width, width, width, width)
        self.shifted = geometry.bias_order == "shifted"
        self.in_norm = nn.LayerNorm(width, eps=EPS)
        self.in_proj = nn.Linear(width, 7 * width, bias=False)
        self.mlp_bias = nn.Parameter(torch.zeros(4 * width))
        self.q_norm = nn.LayerNorm(width // self.heads, eps=EPS)
        self.k_norm = nn.LayerNorm(width // self.heads, eps=EPS)
        self.attn_out_proj = nn.Linear(width, width)
        self.mlp_out_proj = nn.Linear(4 * width, width)
        self.ls = nn.ParameterDict({"gamma": torch.ones(width)})

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, T, D) to tokens (N, T, D)."""
        mlp, q, k, v = F.linear(self.in_norm(x), self.in_proj.weight, self.joint_bias()).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        attention = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v).transpose(1, 2).flatten(2)
        return x + self.ls["gamma"] * (self.attn_out_proj(attention) + self.mlp_out_proj(F.gelu(mlp)))

    def joint_bias(self) -> Tensor:
        """``mlp_bias`` and zeros (7D), in the order that the geometry names: what the joint projection adds."""
        nothing = self.mlp_bias.new_zeros(sum(self.widths) - len(self.mlp_bias))
        return torch.cat([nothing, self.mlp_bias] if self.shifted else [self.mlp_bias, nothing])


class PatchEmbedding(nn.Module):
    """One projection of patches, shared by all channels; a convolution by name, computed as a matrix product."""

    def __init__(self, geometry: Geometry) -> None:
        """Weights as torch draws them."""
        super().__init__()
        size = geometry.patch_size
        self.proj = nn.Conv2d(1, geometry.embed_dim, kernel_size=size, stride=size)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, Y, X) to tokens (N, C * L * L, D), channel by channel and row by row."""
        size = self.proj.kernel_size[0]
        patches = x.unflatten(3, (-1, size)).unflatten(2, (-1, size)).transpose(3, 4).flatten(4)
        return F.linear(patches.flatten(1, 3), self.proj.weight.flatten(1), self.proj.bias)


class CAMAE(nn.Module):
    """Encoder of a channel-agnostic masked autoencoder; parameter names as in its checkpoints.

    ``fc_norm`` is stored with the weights but takes no part in an embedding.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Weights as torch draws them; see `initialise`."""
        super().__init__()
        self.geometry = geometry
        self.n_features, self.img_size = geometry.embed_dim, geometry.img_size
        self.max_channels: int | None = geometry.max_in_chans
        self.cls_token = nn.Parameter(torch.zeros(1, 1, geometry.embed_dim))
        self.pos_embed = nn.Parameter(positions(geometry), requires_grad=False)
        self.patch_embed = PatchEmbedding(geometry)
        self.blocks = nn.ModuleList(ParallelBlock(geometry) for _ in range(geometry.depth))
        self.fc_norm = nn.LayerNorm(geometry.embed_dim, eps=EPS)

    def tokens(self, images: Tensor) -> Tensor:
        """Patch tokens with their positions: uint8 (N, C, Y, X) to (N, C * L * L, D)."""
        tokens = self.patch_embed(normalise(images))
        return tokens + self.pos_embed[:, 1 : 1 + tokens.shape[1]]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Class token (N, D) and the mean token of each channel (N, C, D)."""
        tokens = self.tokens(images)
        first = (self.cls_token + self.pos_embed[:, :1]).expand(len(images), -1, -1)
        x = torch.cat([first, tokens], dim=1)
        for block in self.blocks:
            x = block(x)
        return x[:, 0], x[:, 1:].unflatten(1, (images.shape[1], -1)).mean(dim=2)


def normalise(images: Tensor) -> Tensor:
    """Instance normalisation of uint8 images, per image and channel, to float32; a constant channel gives zeros."""
    x = images.float()
    x = (x - x.mean(dim=(2, 3), keepdim=True, dtype=torch.float64).float()) / 255
    return x * torch.rsqrt(x.square().mean(dim=(2, 3), keepdim=True) + 1e-5)


def positions(geometry: Geometry) -> Tensor:
    """Sine-cosine position of each patch, the same for every channel, zeros for the class token: (1, 1 + C L L, D)."""
    length = geometry.img_size // geometry.patch_size
    quarter = geometry.embed_dim // 4
    frequency = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    wave = torch.cat([angle.sin(), angle.cos()], dim=1)
    grid = torch.cat([wave.repeat_interleave(length, dim=0), wave.repeat(length, 1)], dim=1)
    rows = torch.cat([torch.zeros(1, grid.shape[1], dtype=grid.dtype), grid.repeat(geometry.max_in_chans, 1)])
    return rows[None].float()


def initialise(model: CAMAE) -> None:
    """Draw fresh weights: truncated normal of standard deviation 1/sqrt(fan in), no biases, LayerScale 1.

    LayerScale starts at 1, not near 0 as is usual for training, so that the blocks of an untrained encoder do
    something: the mean of instance-normalised patches alone says little.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            std = module.weight[0].numel() ** -0.5
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(model.cls_token, std=0.02)
