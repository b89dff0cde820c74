"""The CA-MAE's encoder as one would write it down: the peer that `run.py` times, in plain modules of torch.

A batch of crops goes through patch convolution, positions and blocks of attention and MLP side by side (the structure of
timm's ParallelScalingBlock with the biases in the order of timm before 1.0.25); the embedding is the mean patch token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.in_norm = nn.LayerNorm(width, eps=1e-6)
        self.in_proj = nn.Linear(width, 7 * width, bias=False)
        self.mlp_bias = nn.Parameter(torch.zeros(4 * width))
        self.q_norm = nn.LayerNorm(width // heads, eps=1e-6)
        self.k_norm = nn.LayerNorm(width // heads, eps=1e-6)
        self.attn_out_proj = nn.Linear(width, width)
        self.mlp_out_proj = nn.Linear(4 * width, width)
        self.ls = nn.ParameterDict({"gamma": torch.ones(width)})

    def forward(self, x: Tensor) -> Tensor:
        n, n_tokens, width = x.shape
        bias = torch.cat([self.mlp_bias.new_zeros(3 * width), self.mlp_bias])
        y = F.linear(self.in_norm(x), self.in_proj.weight, bias)
        mlp, q, k, v = torch.split(y, [4 * width, width, width, width], dim=-1)
        q = self.q_norm(q.view(n, n_tokens, self.heads, -1)).transpose(1, 2)
        k = self.k_norm(k.view(n, n_tokens, self.heads, -1)).transpose(1, 2)
        v = v.view(n, n_tokens, self.heads, -1).transpose(1, 2)
        attention = F.scaled_dot_product_attention(q, k, v)
        attention = self.attn_out_proj(attention.transpose(1, 2).reshape(n, n_tokens, width))
        return x + self.ls["gamma"] * (attention + self.mlp_out_proj(F.gelu(mlp)))


class PlainCAMAE(nn.Module):
    """Parameter names of `cellica.camae.CAMAE`, so that it takes the same state dict."""

    def __init__(self, width: int, depth: int, heads: int, img_size: int, patch_size: int, max_in_chans: int) -> None:
        super().__init__()
        n_positions = 1 + max_in_chans * (img_size // patch_size) ** 2
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, n_positions, width), requires_grad=False)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(1, width, patch_size, stride=patch_size)})
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.fc_norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        """Embedding (N, D) of uint8 (N, C, Y, X)."""
        n = len(images)
        x = F.instance_norm(images.float() / 255, eps=1e-5)
        x = self.patch_embed["proj"](x.flatten(0, 1)[:, None]).flatten(2).transpose(1, 2)
        x = x.reshape(n, -1, x.shape[-1])
        x = torch.cat([self.cls_token.expand(n, -1, -1), x], dim=1)
        x = x + self.pos_embed[:, : x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x[:, 1:].mean(dim=1)
