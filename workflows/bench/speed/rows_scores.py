"""Scores: average precision against copairs, recall of known relationships against a table look-up per pair."""

from collections import Counter
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
from sklearn.metrics.pairwise import cosine_similarity

from cellica import metrics, retrieval
from speed.cases import Agreement, Case, Spec

WELLS = {"full": (2400, 4800), "quick": (600, 1200), "tiny": (120,)}
GENES = {"full": (5000, 150_000), "quick": (1000, 8000), "tiny": (120, 400)}  # and annotated pairs
N_FEATURES = 128
N_SOURCES = 5


def specs(scale: str, *, truth: Path | None = None) -> list[Spec]:
    def of_wells(n: int) -> dict[str, Any]:
        return {"n": n, "d": N_FEATURES}

    def of_genes(n_genes: int, n_pairs: int, truth: Path | None = None) -> dict[str, Any]:
        return {"n_genes": n_genes, "n_pairs": n_pairs, "d": N_FEATURES, "truth": truth}

    (small,) = WELLS["tiny"]
    return [
        *(Spec("average precision", precision_case, of_wells(n), small=of_wells(small)) for n in WELLS[scale]),
        Spec("relationship recall", recall_case, of_genes(*GENES[scale], truth), small=of_genes(*GENES["tiny"])),
    ]


def precision_case(folder: Path, seed: int, n: int, d: int) -> Case:
    from copairs.map import average_precision

    rng = np.random.default_rng(seed)
    obs = pd.DataFrame({"perturbation": [f"p{i // 4}" for i in range(n)], "batch": [f"b{i % 4}" for i in range(n)]})
    obs.index = obs.index.astype(str)
    x = rng.normal(size=(n, d)).astype(np.float32) + rng.normal(size=(n // 4, d)).repeat(4, axis=0).astype(np.float32)
    adata = ad.AnnData(x, obs=obs)
    pairs = {"pos_sameby": ["perturbation"], "pos_diffby": ["batch"], "neg_sameby": [], "neg_diffby": ["perturbation"]}

    def ours() -> np.ndarray:
        return retrieval.average_precision(adata, **pairs)["average_precision"].to_numpy()

    def peer() -> np.ndarray:
        return average_precision(obs, x, **pairs, progress_bar=False)["average_precision"].to_numpy()

    return Case(f"{n} x {d}", ours, peer, largest_difference)


def recall_case(folder: Path, seed: int, n_genes: int, n_pairs: int, d: int, truth: Path | None) -> Case:
    """Random profiles of the genes that most annotated pairs name. Reading the annotations is timed in neither."""
    rng = np.random.default_rng(seed)
    sources = read_sources(truth) if truth else random_sources(rng, n_genes, n_pairs)
    counts = Counter(name for source in sources for name in source.to_numpy().ravel())
    names = [name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:n_genes]]
    x = rng.normal(size=(len(names), d))
    profiles, arrays = pd.DataFrame(x, index=names), [source.to_numpy(dtype=object) for source in sources]

    def ours() -> np.ndarray:
        return np.array([one.value for one in metrics.relationship_recalls(x, names, arrays)])

    def peer() -> np.ndarray:
        return by_look_up(profiles, sources)

    what = "sources" if truth else "simulated sources"
    size = f"{len(names)} x {d}, {len(sources)} {what}, {n_on_map(sources, names)} pairs"
    return Case(size, ours, peer, largest_difference)


def largest_difference(mine: np.ndarray, theirs: np.ndarray) -> Agreement:
    error = float(np.abs(mine - theirs).max())
    return Agreement(f"largest difference {error:.1e}", error, 1e-12)


def read_sources(folder: Path) -> list[pd.DataFrame]:
    """Pairs of each file of annotations, CORUM.txt and the like."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise SystemExit(f"--truth {folder}: no .txt files with the columns entity1 and entity2 lie there")
    return [pd.read_csv(file, dtype=str)[["entity1", "entity2"]].dropna() for file in files]


def n_on_map(sources: list[pd.DataFrame], names: list[str]) -> int:
    """Pairs of different genes on the map, each once a source."""
    known = set(names)
    found = ({frozenset(pair) for pair in source.to_numpy() if known.issuperset(pair)} for source in sources)
    return sum(len(pair) == 2 for pairs in found for pair in pairs)


def random_sources(rng: np.random.Generator, n_genes: int, n_pairs: int) -> list[pd.DataFrame]:
    """Pairs at random in sources of unequal sizes; some are named twice, in either order, as in real files."""
    genes = np.array([f"gene{i:05d}" for i in range(n_genes)], dtype=object)
    shares = np.geomspace(1, 10, N_SOURCES)
    sizes = (n_pairs * shares / shares.sum()).astype(int)
    return [pd.DataFrame(genes[rng.integers(0, n_genes, (n, 2))], columns=["entity1", "entity2"]) for n in sizes]


def by_look_up(profiles: pd.DataFrame, sources: list[pd.DataFrame]) -> np.ndarray:
    """Recall (sources x thresholds) as public code takes it, in plain pandas.

    A table of all cosines; for each source its pairs filtered, ordered and made unique, one look-up a pair, the null
    sorted and ranks taken by searchsorted.
    """
    table = pd.DataFrame(cosine_similarity(profiles), index=profiles.index, columns=profiles.index)
    recall = []
    for source in sources:
        pairs = source[source["entity1"].isin(profiles.index) & source["entity2"].isin(profiles.index)]
        ordered = {tuple(sorted(pair)) for pair in pairs.itertuples(index=False)}
        query = np.array([table.loc[a, b] for a, b in ordered if a != b])
        null = np.sort(table.to_numpy()[np.triu_indices(len(table), k=1)])
        left = np.searchsorted(null, query, side="left") / len(null)
        right = np.searchsorted(null, query, side="right") / len(null)
        recall.append([np.mean((right <= low) | (left >= high)) for low, high in metrics.THRESHOLDS])
    return np.array(recall)
