"""`evaluate` at RxRx3-core's size: time of each kind of score and peak memory, on simulated wells.

    python workflows/bench/large.py                  222,601 wells x 384; results/large.csv

735 genes of 6 guides in four of 176 experiments of 9 plates, 1,674 compounds at 8 concentrations in four experiments of 48, controls on each
plate. Perturbations and experiments have planted effects.
"""

import argparse
import itertools
import platform
import resource
import time
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd

from cellica import artifacts, progress, retrieval
from cellica.evaluation import DEFAULT
from cellica.metrics import N_THREADS

N_FEATURES = 384


def wells(n: int, n_features: int, seed: int = 0) -> ad.AnnData:
    rng = np.random.default_rng(seed)
    rows: list[tuple[str, str, str, str, float, str]] = []
    genes = [f"GENE{i}" for i in range(735)]
    places = itertools.cycle(rng.permutation(176))
    for gene in genes:
        for e in sorted(int(next(places)) for _ in range(4)):
            rows += [
                (f"gene-{e + 1:03d}", str(p), gene, f"{gene}_guide_{g}", np.nan, "")
                for p in range(1, 10)
                for g in range(1, 5)
            ]
    for e, p in itertools.product(range(176), range(1, 10)):
        rows += [(f"gene-{e + 1:03d}", str(p), "EMPTY_control", "EMPTY_control", np.nan, "negative")] * 25
    doses = (0.0025, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0)
    for i, dose in itertools.product(range(1674), doses):
        rows += [
            (f"compound-{i % 4 + 1:03d}", str(p), f"C{i}", f"C{i}", dose, "") for p in range(i % 44 + 1, i % 44 + 6)
        ]
    for e, p in itertools.product(range(4), range(1, 49)):
        rows += [(f"compound-{e + 1:03d}", str(p), "EMPTY_control", "EMPTY_control", np.nan, "negative")] * 60
    columns = ["experiment", "plate", "perturbation", "treatment", "concentration", "control"]
    obs = pd.DataFrame(rows, columns=columns)
    obs = obs.iloc[np.sort(rng.choice(len(obs), min(n, len(obs)), replace=False))].reset_index(drop=True)
    obs["cell_type"], obs["moa"] = "HUVEC", None
    obs.index = pd.Index([f"w{i}" for i in range(len(obs))], dtype=object)
    x = rng.standard_normal((len(obs), n_features), dtype=np.float32)
    for key, strength in (("perturbation", 0.3), ("experiment", 0.5)):
        code = pd.factorize(obs[key])[0]
        effect = strength * rng.standard_normal((code.max() + 1, n_features), dtype=np.float32)
        for start in range(0, len(x), 20_000):
            x[start : start + 20_000] += effect[code[start : start + 20_000]]
    return ad.AnnData(x, obs=obs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wells", type=int, default=222_601)
    parser.add_argument("--features", type=int, default=N_FEATURES)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "large.csv")
    arguments = parser.parse_args()
    progress.show()
    adata = wells(arguments.wells, arguments.features)
    rows, tables = [], []
    for kind in DEFAULT:
        start = time.perf_counter()
        guides = {"guide_key": "treatment"} if kind == "relationships" else {}
        tables.append(
            retrieval.evaluate(adata, ["X"], scores=[kind], baselines=False, key_added=None, design=False, **guides)
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append({"scores": kind, "seconds": time.perf_counter() - start, "peak_gib_so_far": peak})
        print(pd.DataFrame(rows).round(2).to_string(index=False), flush=True)
    table = pd.DataFrame(rows)
    table["size"] = f"{adata.n_obs} x {adata.n_vars}"
    table["machine"] = f"{platform.machine()}, {N_THREADS} threads"
    artifacts.write_table(table.round(2), arguments.out, force=True)
    print(pd.concat(tables)[["metric", "group", "value", "chance", "low", "high", "n_queries", "note"]].to_string())


if __name__ == "__main__":
    main()
