"""The inference form of a CA-MAE: what `camae.CAMAE` computes, in fewer operations and less memory.

What the model applies to every token and could apply once to its weights is applied to the weights, in float64: the
affine part of the LayerNorms, the attention's scale, the biases (in either order) and LayerScale. No files.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cellica.camae import CAMAE, EPS, ParallelBlock

QUERIES_AT_ONCE = 128  # scores of so many queries, all heads, stay in a CPU's cache
# torch's own attention is slower in bfloat16 than its products where a CPU has instructions for these, else faster
BFLOAT16_BY_PRODUCTS = torch.backends.cpu.get_cpu_capability() == "AVX512"
LARGEST_SCORE = 60.0  # exp of it and of its negative, summed over any number of tokens, are far from bfloat16's limits


@dataclasses.dataclass(frozen=True)
class FusedBlock:
    """Folded weights of one block: x + mlp_out @ GELU(mlp_in @ LN(x)) + attention_out @ attention(qk @ LN(x), v @ LN(x)) + bias.

    Attributes
    ----------
    mlp_in, qk, v
        Weight and bias of the input projections; q and k together, as both are normalised.
    q_scale, q_shift
        Affine part of q's norm. It carries k's scale and the attention's too; k's shift is left out, as it adds the
        same to a query's scores for all keys, and softmax does not see it.
    mlp_out, attention_out, out_bias
        Output projections, LayerScale included.
    bounded
        Whether no score can exceed ``LARGEST_SCORE``: q and k are normalised, so their norms bound it.
    """

    heads: int
    mlp_in: tuple[Tensor, Tensor]
    qk: tuple[Tensor, Tensor]
    v: tuple[Tensor, Tensor]
    q_scale: Tensor
    q_shift: Tensor
    mlp_out: Tensor
    attention_out: Tensor
    out_bias: Tensor
    bounded: bool

    def hidden(self, x: Tensor, mlp: Tensor, qk: Tensor, v: Tensor) -> Tensor:
        """Write GELU of the MLP into ``mlp`` (N, T, 4D), return attention (N, T, D); ``qk``, ``v`` are scratch."""
        n, n_tokens, width = x.shape
        size = width // self.heads
        normed = F.layer_norm(x, (width,), eps=EPS).to(mlp.dtype).flatten(0, 1)
        for (weight, bias), out in ((self.mlp_in, mlp), (self.qk, qk), (self.v, v)):
            torch.addmm(bias, normed, weight.T, out=out.flatten(0, 1))
        torch.ops.aten.gelu_(mlp)

        q, k = F.layer_norm(qk.view(n, n_tokens, 2, self.heads, size), (size,), eps=EPS).unbind(2)
        q = torch.addcmul(self.q_shift, q, self.q_scale)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v.view(n, n_tokens, self.heads, size)))
        if x.device.type == "cpu" and mlp.dtype == torch.bfloat16 and BFLOAT16_BY_PRODUCTS:
            attention = self._attend(*(part.flatten(0, 1) for part in (q, k, v))).unflatten(0, (n, self.heads))
        else:
            attention = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return attention.transpose(1, 2).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention by plain matrix products, (N * heads, T, size)."""
        attention = torch.empty_like(q)
        keys = k.transpose(1, 2).contiguous()
        values = F.pad(v, (0, 1), value=1.0)  # the last column gives the sums of the weights
        for first in range(0, q.shape[1], QUERIES_AT_ONCE):
            rows = slice(first, first + QUERIES_AT_ONCE)
            scores = torch.bmm(q[:, rows], keys)
            weights = scores.exp_() if self.bounded else scores.softmax(dim=-1)
            weighted = torch.bmm(weights, values)
            torch.div(weighted[..., :-1], weighted[..., -1:], out=attention[:, rows])
        return attention


class FusedCAMAE:
    """A CA-MAE for inference: called like the model that it is made of, whose later changes do not reach it.

    The blocks' matrix products are done in ``dtype``; patches, the sum over blocks and the last projections in float32.
    """

    def __init__(self, model: CAMAE, dtype: torch.dtype = torch.float32) -> None:
        """Fold the weights, on the model's device."""
        self.model = model
        self.dtype = dtype
        self.blocks = [_fold(block, dtype) for block in model.blocks]  # type: ignore[arg-type]

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Class token (N, D) and mean token of each channel (N, C, D), float32, of uint8 (N, C, Y, X)."""
        n, n_channels = images.shape[:2]
        first = (self.model.cls_token + self.model.pos_embed[:, :1]).expand(n, -1, -1)
        x = torch.cat([first, self.model.tokens(images)], dim=1)
        mlp, qk, v = (x.new_empty(*x.shape[:2], times * x.shape[2], dtype=self.dtype) for times in (4, 2, 1))
        for block in self.blocks[:-1]:
            attention = block.hidden(x, mlp, qk, v)
            x += block.out_bias
            for hidden, weight in ((mlp, block.mlp_out), (attention, block.attention_out)):
                if self.dtype == torch.float32:
                    x.flatten(0, 1).addmm_(hidden.flatten(0, 1), weight.T)
                else:
                    x += F.linear(hidden, weight)
        last = self.blocks[-1]
        # projections of means are means of projections: the last ones see one row a channel
        x, mlp, attention = (_means(part, n_channels) for part in (x, mlp, last.hidden(x, mlp, qk, v)))
        x += F.linear(mlp, last.mlp_out.float()) + F.linear(attention, last.attention_out.float(), last.out_bias)
        return x[:, 0], x[:, 1:]


def _means(tokens: Tensor, n_channels: int) -> Tensor:
    """Class token and mean token of each channel: (N, T, D) to float32 (N, 1 + C, D)."""
    channels = tokens[:, 1:].unflatten(1, (n_channels, -1)).mean(dim=2, dtype=torch.float32)
    return torch.cat([tokens[:, :1].float(), channels], dim=1)


@torch.no_grad()
def _fold(block: ParallelBlock, dtype: torch.dtype) -> FusedBlock:
    part = {name: value.double() for name, value in block.state_dict().items()}
    bias = part["in_proj.weight"] @ part["in_norm.bias"] + block.joint_bias().double()
    weight = part["in_proj.weight"] * part["in_norm.weight"]
    width = weight.shape[1]
    mlp, qk, v = (
        (weight[rows].to(dtype), bias[rows].to(dtype))
        for rows in (slice(None, -3 * width), slice(-3 * width, -width), slice(-width, None))
    )

    size = len(part["q_norm.weight"])
    scale = part["k_norm.weight"] / math.sqrt(size)
    q_scale, q_shift = part["q_norm.weight"] * scale, part["q_norm.bias"] * scale
    largest_q = q_scale.abs().max() * math.sqrt(size) + q_shift.norm()

    gamma = part["ls.gamma"]
    out_bias = gamma * (part["mlp_out_proj.bias"] + part["attn_out_proj.bias"])
    return FusedBlock(
        heads=block.heads,
        mlp_in=mlp,
        qk=qk,
        v=v,
        q_scale=q_scale.to(dtype),
        q_shift=q_shift.to(dtype),
        mlp_out=(gamma[:, None] * part["mlp_out_proj.weight"]).to(dtype),
        attention_out=(gamma[:, None] * part["attn_out_proj.weight"]).to(dtype),
        out_bias=out_bias.float(),
        bounded=bool(largest_q * math.sqrt(size) <= LARGEST_SCORE),
    )
