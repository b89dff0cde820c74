"""Correction: whitening against scikit-learn's PCA; Harmony and ComBat, which are called, against the calls alone."""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
from sklearn.decomposition import PCA

from cellica import correct
from cellica.whitening import Whitening
from speed.cases import Agreement, Case, Spec
from speed.measure import gemm

WHITENED = {"full": (50_000, 384), "quick": (10_000, 128), "tiny": (400, 16)}  # rows x features
CORRECTED = {"full": (4000, 128), "quick": (600, 32), "tiny": (160, 8)}
N_BATCHES = 4
N_COMPONENTS = 50  # of harmony
CALLED = "ours calls the peer: 1 is what there is to reach, below it is what ours adds"


def specs(scale: str) -> list[Spec]:
    def of(sizes: dict[str, tuple[int, int]], **more: str) -> dict[str, dict[str, Any]]:
        return {key: dict(zip("nd", sizes[at])) | more for key, at in (("arguments", scale), ("small", "tiny"))}

    return [
        Spec("sphere", sphere_case, rounds=5, **of(WHITENED, dtype="float32")),
        Spec("sphere, float64", sphere_case, rounds=5, **of(WHITENED, dtype="float64")),
        Spec("harmony", harmony_case, remark=CALLED, **of(CORRECTED)),
        Spec("combat", combat_case, rounds=5, remark=CALLED, **of(CORRECTED)),
    ]


def sphere_case(folder: Path, seed: int, n: int, d: int, dtype: str) -> Case:
    """Fit and transform of rows of one type; ours takes covariance and eigenvalues in float64, the peer in that type."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(n, d)) @ rng.normal(size=(d, d))).astype(dtype)

    def ours() -> np.ndarray:
        return Whitening().fit_transform(x)

    def peer() -> np.ndarray:
        return PCA(whiten=True, svd_solver="covariance_eigh").fit_transform(x)

    def agreement(mine: np.ndarray, theirs: np.ndarray) -> Agreement:
        errors = [float(np.abs(np.cov(y.astype(np.float64), rowvar=False) - np.eye(d)).max()) for y in (mine, theirs)]
        text = "covariance off the identity by {:.1e}, peer {:.1e}".format(*errors)
        return Agreement(text, errors[0], 1e-3)

    operations = float(n) * d * (d + 1) + 2.0 * n * d * d  # half of a symmetric covariance, and the map
    name = "sgemm rate" if dtype == "float32" else "dgemm rate"
    return Case(f"{n} x {d}", ours, peer, agreement, (gemm(name, n, d, d, operations, dtype),))


def harmony_case(folder: Path, seed: int, n: int, d: int) -> Case:
    """`correct.run` against z-scores, principal components, harmonypy and the way back, written down."""
    import harmonypy

    adata = wells(n, d, seed)

    def ours() -> np.ndarray:
        correct.run(adata, "harmony", key_added="of_ours", random_state=0)
        return adata.obsm["X_of_ours"]

    def peer() -> np.ndarray:
        z = z_scores(adata)
        basis = PCA(min(N_COMPONENTS, d), svd_solver="covariance_eigh").fit(z)
        scores = basis.transform(z)
        found = harmonypy.run_harmony(scores, adata.obs, "experiment", verbose=False, random_state=0)
        return np.asarray(found.Z_corr) @ basis.components_

    # the k-means inside starts from components of either sign, so that clusters may differ a little
    return Case(f"{n} x {d}, {N_BATCHES} batches", ours, peer, lambda mine, theirs: relative(mine, theirs, 0.2))


def combat_case(folder: Path, seed: int, n: int, d: int) -> Case:
    """`correct.run` against z-scores and scanpy's ComBat, written down."""
    import scanpy as sc

    adata = wells(n, d, seed)

    def ours() -> np.ndarray:
        correct.run(adata, "combat", key_added="of_ours", random_state=0)
        return adata.obsm["X_of_ours"]

    def peer() -> np.ndarray:
        batches = ad.AnnData(z_scores(adata), obs=adata.obs)
        return sc.pp.combat(batches, key="experiment", inplace=False)

    return Case(f"{n} x {d}, {N_BATCHES} batches", ours, peer, lambda mine, theirs: relative(mine, theirs, 1e-5))


def relative(mine: np.ndarray, theirs: np.ndarray, tolerance: float) -> Agreement:
    error = float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))
    return Agreement(f"relative difference {error:.1e}", error, tolerance)


def z_scores(adata: ad.AnnData) -> np.ndarray:
    x = np.asarray(adata.X, dtype=np.float64)
    return (x - x.mean(axis=0)) / x.std(axis=0)


def wells(n: int, d: int, seed: int) -> ad.AnnData:
    """Every perturbation once a batch, an eighth of the wells controls; a shift for each batch."""
    rng = np.random.default_rng(seed)
    each = n // N_BATCHES
    i, batch = np.tile(np.arange(each), N_BATCHES), np.arange(N_BATCHES).repeat(each)
    is_control = i % 8 == 0
    obs = pd.DataFrame(
        {
            "experiment": pd.Categorical([f"b{b}" for b in batch]),
            "plate": (i // 384 + 1).astype(str),
            "well": [f"{chr(65 + w // 24)}{w % 24 + 1:02d}" for w in i % 384],
            "perturbation": np.where(is_control, "DMSO", [f"p{w:04d}" for w in i]),
            "control": np.where(is_control, "negative", ""),
        }
    )
    obs.index = pd.Index(obs["experiment"].astype(str) + "_" + obs["plate"] + "_" + obs["well"], dtype=object)
    effect = rng.laplace(size=(each, d))[i] * ~is_control[:, None]
    x = rng.laplace(size=(len(obs), d)) + effect + 2 * rng.normal(size=(N_BATCHES, d))[batch]
    return ad.AnnData((x @ rng.normal(size=(d, d))).astype(np.float32), obs=obs)
