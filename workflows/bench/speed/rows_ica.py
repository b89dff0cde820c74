"""ICA against scikit-learn's FastICA and against python-picard."""

from pathlib import Path

import numpy as np
from sklearn.decomposition import FastICA

from cellica import ica
from speed.cases import Agreement, Case, Spec

PEER_ITERATIONS = 25
SIZES = {  # rows x features
    "full": ((20_000, 64), (60_000, 192)),
    "quick": ((2000, 16), (4000, 32)),
    "tiny": ((1500, 8),),
}
PICARD_SIZES = {"full": (20_000, 64), "quick": (2000, 16), "tiny": (3000, 8)}
LARGE = (200_000, 384)
SEEDS = {"full": 5, "quick": 2, "tiny": 1}


def specs(scale: str, *, large: bool = False) -> list[Spec]:
    sizes = SIZES[scale] + (LARGE,) * large
    small = dict(zip("nk", PICARD_SIZES["tiny"]))
    each = {"rounds": 1, "seeds": SEEDS[scale], "small": small}
    fastica = [Spec("ica", fastica_case, {"n": n, "k": k}, **each) for n, k in sizes]
    n, k = PICARD_SIZES[scale]
    return [*fastica, Spec("ica, picard", picard_case, {"n": n, "k": k}, small=small)]


def fastica_case(folder: Path, seed: int, n: int, k: int) -> Case:
    """Both find the non-Gaussian sources that were mixed. The peer in float64: in float32 it breaks down on Gaussian ones."""
    rng = np.random.default_rng(seed)
    non_gaussian = k - k // 3
    sources = np.hstack([rng.laplace(size=(n, non_gaussian)), rng.normal(size=(n, k - non_gaussian))])
    x = sources @ rng.normal(size=(k, k))
    sources = sources[:, :non_gaussian].astype(np.float32)
    x32 = x.astype(np.float32)

    def ours() -> tuple[np.ndarray, int]:
        model = ica.ICA(random_state=seed)
        return model.fit_transform(x32), model.n_iter_

    def peer() -> tuple[np.ndarray, int]:
        model = FastICA(whiten="unit-variance", whiten_solver="eigh", max_iter=PEER_ITERATIONS, random_state=seed)
        return model.fit_transform(x), model.n_iter_

    def agreement(mine: tuple[np.ndarray, int], theirs: tuple[np.ndarray, int]) -> Agreement:
        ours_q, peer_q = (
            float(ica.matched_correlation(sources, found.astype(np.float32)).mean()) for found, _ in (mine, theirs)
        )
        text = f"correlation {ours_q:.4f}, peer {peer_q:.4f}; {mine[1]} iterations, peer {theirs[1]}"
        return Agreement(text, peer_q - ours_q, 0.002)

    return Case(f"{n} x {k}, a third Gaussian", ours, peer, agreement)


def picard_case(folder: Path, seed: int, n: int, k: int) -> Case:
    """The same unmixing by the same algorithm."""
    from picard import picard

    rng = np.random.default_rng(seed)
    x = rng.laplace(size=(n, k)) @ rng.normal(size=(k, k))
    x32 = x.astype(np.float32)

    def ours() -> np.ndarray:
        return ica.ICA(solver="picard", random_state=seed).fit(x32).mixing_

    def peer() -> np.ndarray:
        whitening, rotation, *_ = picard(x.T, random_state=seed, tol=1e-4)
        return rotation @ whitening

    def agreement(mixing: np.ndarray, unmixing: np.ndarray) -> Agreement:
        product = np.abs(unmixing @ mixing)
        product /= np.linalg.norm(product, axis=1, keepdims=True)
        least = float(product.max(axis=1).min())
        return Agreement(f"least cosine of the two unmixings {least:.5f}", 1 - least, 1e-3)

    return Case(f"{n} x {k}", ours, peer, agreement)
