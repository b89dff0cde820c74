"""The encoder against the plain model and the machine's rate of products; `embed` against the encoder alone."""

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from plain_camae import PlainCAMAE

from cellica import encoder, images
from cellica.camae import Geometry
from speed.cases import Agreement, Case, Limit, Spec
from speed.measure import gemm
from speed.rows_plates import simulated_plate

DATA = {  # model, fields, and their size in pixels
    "full": ("openphenom", 2, 512),
    "quick": ("openphenom", 1, 256),
    "tiny": ("camae-mini", 2, 64),
}
ROUNDS = {"full": 7, "quick": 1, "tiny": 1}


def specs(scale: str) -> list[Spec]:
    data, small = (dict(zip(("name", "n", "size"), DATA[one])) for one in (scale, "tiny"))
    dtypes = ["float32"]
    if scale == "tiny" or multiplies_faster(torch.bfloat16):
        dtypes.append("bfloat16")
    else:
        print("bfloat16 is left out: this CPU multiplies it more slowly than float32", file=sys.stderr)
    rounds = ROUNDS[scale]
    of_dtype = [
        Spec(f"encoder {dtype}", encoder_case, data | {"dtype": dtype}, rounds, small=small | {"dtype": dtype})
        for dtype in dtypes
    ]
    return [*of_dtype, Spec("embed", embed_case, data, rounds, small=small)]


def encoder_case(folder: Path, seed: int, name: str, n: int, size: int, dtype: str) -> Case:
    """Random weights, on the crops of a few fields."""
    exact = encoder.load(name, "random", device="cpu")
    g = exact.model.geometry
    plain = PlainCAMAE(g.embed_dim, g.depth, g.num_heads, g.img_size, g.patch_size, g.max_in_chans).eval()
    plain.load_state_dict(exact.model.state_dict())
    model = dataclasses.replace(exact, dtype=dtype)
    crops = images.crops(next(simulated_plate(folder, n, size).fields(n))[1], exact.img_size)

    def ours() -> np.ndarray:
        return model(crops).numpy()

    @torch.inference_mode()
    def peer() -> np.ndarray:
        return plain(torch.from_numpy(crops)).numpy()

    n_channels, width = crops.shape[1], g.embed_dim
    limit, needed = "sgemm rate" if dtype == "float32" else f"{dtype} rate", len(crops) * operations(g, n_channels)
    rate = gemm(limit, n_tokens(g, n_channels), width, 7 * width, needed, dtype, repeats=len(crops))
    shape = " x ".join(map(str, crops.shape[1:]))
    return Case(f"{len(crops)} crops of {shape}", ours, peer, least_cosine(dtype), (rate,))


def embed_case(folder: Path, seed: int, name: str, n: int, size: int) -> Case:
    """From a plate, measures of its fields included; the peer and limit is the encoder on crops that are there."""
    model = encoder.load(name, "random", device="cpu")
    plate = simulated_plate(folder, n, size)
    crops = images.crops(next(plate.fields(n))[1], model.img_size)

    def ours() -> np.ndarray:
        return np.asarray(encoder.embed(plate, model).X)

    def peer() -> np.ndarray:
        return model(crops).numpy().reshape(n, -1, model.n_features).mean(axis=1)

    return Case(
        f"{n} fields of {crops.shape[1]} x {size} x {size}",
        ours,
        peer,
        least_cosine("float32"),
        (Limit("the encoder alone"),),
    )


def least_cosine(dtype: str) -> Callable[[np.ndarray, np.ndarray], Agreement]:
    tolerance = 1e-5 if dtype == "float32" else 1e-4

    def agreement(mine: np.ndarray, theirs: np.ndarray) -> Agreement:
        a, b = mine.astype(np.float64), theirs.astype(np.float64)
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosine = float(((a * b).sum(axis=1) / norms).min())
        return Agreement(f"least cosine {cosine:.7f}", 1 - cosine, tolerance)

    return agreement


def n_tokens(geometry: Geometry, n_channels: int) -> int:
    return 1 + n_channels * (geometry.img_size // geometry.patch_size) ** 2


def operations(geometry: Geometry, n_channels: int) -> float:
    """Floating-point operations of a crop: patches, and in each block the projections (12 w^2) and both products of attention."""
    n, width = n_tokens(geometry, n_channels), geometry.embed_dim
    patches = 2.0 * geometry.patch_size**2 * width * (n - 1)
    return patches + geometry.depth * (2.0 * 12 * width**2 * n + 2.0 * 2 * width * n**2)


def multiplies_faster(dtype: torch.dtype) -> bool:
    """Than float32."""

    def seconds(x: torch.Tensor) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            x @ x
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    x = torch.ones(512, 512)
    return seconds(x.to(dtype)) < seconds(x)
