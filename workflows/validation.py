"""What the three validation workflows share: their configuration, intervals over seeds, tables and figures of one look."""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from jsonschema import Draft202012Validator
from scipy.stats import t as student_t

from cellica import artifacts

DPI = 120


def checked(config: Mapping[str, Any], schema: Path) -> Mapping[str, Any]:
    """The configuration, or a ValueError with a line for each fault."""
    rules = yaml.safe_load(schema.read_text(encoding="utf-8"))
    errors = sorted(Draft202012Validator(rules).iter_errors(config), key=lambda error: list(map(str, error.path)))
    if errors:
        lines = [f"  {'.'.join(map(str, error.path)) or 'the configuration'}: {error.message}" for error in errors]
        raise ValueError("\n".join(["the configuration has to be mended:", *lines]))
    return config


def script(file: Path, *positional: Any, **options: Any) -> str:
    """A command line that runs a script with this Python; options of None are left out, lists are given as words.

    >>> script(Path("train.py"), "out.npz", seed=3, n_steps=None, leak=[0.1, 0.2]).partition("train.py")[2]
    ' out.npz --seed 3 --leak 0.1 0.2'
    """
    words = [sys.executable, str(file), *map(str, positional)]
    for name, value in options.items():
        if value is not None:
            each = value if isinstance(value, list | tuple) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, each)]
    return shlex.join(words)


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Mean of runs that differ in their seed, and Student's interval of the mean (NaN for one run).

    >>> [round(value, 3) for value in interval([0.5, 0.6, 0.7])]
    [0.6, 0.352, 0.848]
    """
    found = np.asarray(values, dtype=float)
    found = found[np.isfinite(found)]
    if len(found) < 2:
        return (float(found.mean()) if len(found) else float("nan")), float("nan"), float("nan")
    half = student_t.ppf((1 + level) / 2, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found))
    return float(found.mean()), float(found.mean() - half), float(found.mean() + half)


def over_seeds(runs: pd.DataFrame, by: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """One row a group and score: ``mean, low, high, n_seeds`` over its runs, groups in the order they come in."""
    rows = []
    for names, group in runs.groupby(list(by), sort=False, dropna=False):
        for score in values:
            mean, low, high = interval(group[score])
            n = int(group[score].notna().sum())
            rows.append([*names, score, mean, low, high, n])
    return pd.DataFrame(rows, columns=[*by, "score", "mean", "low", "high", "n_seeds"])


def main_of_figures(doc: str | None, draw: Callable[[Path, Path], None]) -> None:
    """The command line of a script that draws figures from a folder of tables into another."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="folder of the tables that a run of the workflow wrote")
    parser.add_argument("out", type=Path, help="folder of the figures")
    options = parser.parse_args()
    try:
        draw(options.tables, options.out)
    except FileNotFoundError as error:
        parser.exit(2, f"error: {error.filename or error} does not exist: name a folder with all tables\n")


def save(figure: Any, file: Path) -> None:
    """Write a figure under a temporary name, then rename it."""
    with artifacts.atomic(file, force=True) as part:
        figure.savefig(part, dpi=DPI, bbox_inches="tight", format=file.suffix[1:])


def write(table: pd.DataFrame, file: Path) -> None:
    """Write a table, numbers to six digits."""
    with artifacts.atomic(file, force=True) as part:
        table.to_csv(part, index=False, float_format="%.6g")
