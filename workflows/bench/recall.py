"""Recall of known relationships: all sources against one pass over the null, and a table look-up per pair.

    python workflows/bench/recall.py FOLDER                   CORUM.txt, ...; results/recall.csv

The map is random profiles (5,000 x 128) named by the genes of most annotated pairs. The peer is plain pandas, as public code
does it: a table of all cosines, for each source its pairs filtered, ordered and made unique, one look-up a pair, the
null sorted and ranks taken by searchsorted. Reading the files is timed in neither.
"""

import argparse
import resource
from collections import Counter
from pathlib import Path
from time import perf_counter

import numpy as np
import pandas as pd
from sklearn.metrics.pairwise import cosine_similarity

from cellica import metrics

RESULTS = Path(__file__).parent / "results" / "recall.csv"


def by_look_up(profiles: pd.DataFrame, sources: list[pd.DataFrame]) -> np.ndarray:
    """Recall (sources x thresholds) by a look-up in a table of cosines for each pair."""
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


def recall_speed(folder: Path, n_genes: int = 5000, n_features: int = 128, rounds: int = 3) -> pd.DataFrame:
    """Median seconds of both, their ratio, the largest difference and the peak memory (GiB) before and after the peer."""
    sources = [pd.read_csv(file, dtype=str).dropna() for file in sorted(folder.glob("*.txt"))]
    counts = Counter(name for source in sources for name in source[["entity1", "entity2"]].to_numpy().ravel())
    names = [name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:n_genes]]
    x = np.random.default_rng(0).normal(size=(len(names), n_features))
    arrays = [source[["entity1", "entity2"]].to_numpy(dtype=object) for source in sources]
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    before = peak()
    metrics.relationship_recalls(x, names, arrays)
    after = peak()
    for _ in range(rounds):
        start = perf_counter()
        found = metrics.relationship_recalls(x, names, arrays)
        times["ours"].append(perf_counter() - start)
        start = perf_counter()
        expected = by_look_up(pd.DataFrame(x, index=names), sources)
        times["peer"].append(perf_counter() - start)
    ours, theirs = np.median(times["ours"]), np.median(times["peer"])
    row = {
        "row": "relationship recall",
        "size": f"{len(names)} x {n_features}, {len(sources)} sources, {sum(one.n_pairs for one in found)} pairs",
        "ours_s": round(ours, 3),
        "peer_s": round(theirs, 3),
        "speedup": round(theirs / ours, 1),
        "quality": f"difference {np.abs(np.array([one.value for one in found]) - expected).max():.1g}",
        "ours_peak_gib": round(after - before, 3),
        "peer_peak_gib": round(peak() - before, 3),
    }
    return pd.DataFrame([row])


def peak() -> float:
    """Most memory this process has held, in GiB (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    table = recall_speed(options.folder, rounds=options.rounds)
    print(table.to_string(index=False))
    table.to_csv(options.out, index=False)
