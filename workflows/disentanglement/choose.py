"""Choose the weight decay of each model by a rule that knows no factors.

    python workflows/disentanglement/choose.py RUN.npz... --out CHOSEN.csv [--tolerance 0.05]

The largest weight decay whose cross-entropy of unseen pictures is within a tolerance of the lowest one: the simplest weights that
paint as well. What a cross-entropy is above that of a perfect painter (the entropy of the pixels) is what is compared.
"""

import argparse
import json
import sys
from pathlib import Path

import archives
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))
import validation


def of_run(file: Path) -> dict:
    run = archives.run(file)
    return {
        "model": json.loads(str(run["shape"]))["kind"],
        "weight_decay": float(run["weight_decay"]),
        "excess": float(run["cross_entropy"] - run["entropy"]),
    }


def chosen(runs: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """The table, with a column that marks one run a model.

    >>> runs = pd.DataFrame({"model": "ae", "weight_decay": [0.0, 0.1, 1.0], "excess": [0.100, 0.101, 0.2]})
    >>> chosen(runs, tolerance=0.02)["chosen"].tolist()
    [False, True, False]
    """
    runs = runs.sort_values(["model", "weight_decay"], ignore_index=True)
    near = runs["excess"] <= (1 + tolerance) * runs.groupby("model")["excess"].transform("min")
    largest = runs["weight_decay"].where(near).groupby(runs["model"]).transform("max")
    return runs.assign(chosen=runs["weight_decay"] == largest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tolerance", type=float, default=0.05)
    options = parser.parse_args()
    try:
        runs = pd.DataFrame([of_run(file) for file in options.runs])
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    table = chosen(runs, options.tolerance)
    validation.write(table, options.out)


if __name__ == "__main__":
    main()
