"""Errors of the best map between saved representations of the same inputs, of every class and in both directions.

    python workflows/identifiability/compare.py A.npy B.npy [C.h5ad ...] --out TABLE.csv [--rep X_pca]

Rows of .npy files are matched by their place, those of .h5ad by their names; what only one side has is left out and counted.
Of an .h5ad, --rep names the representation, by default X. With more than two files, every pair is compared.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from cellica import artifacts, identifiability, progress
from cellica.errors import CellicaError

sys.path.insert(0, str(Path(__file__).parents[1]))
import validation

SPACES = ("raw", "whitened")


def read(file: Path, rep: str | None) -> pd.DataFrame:
    """Rows of a representation, by name."""
    artifacts.require_file(file, "representation")
    if file.suffix == ".npy":
        try:
            rows = np.load(file, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{file} is no array in .npy format: {error}") from error
        if rows.ndim != 2:
            raise ValueError(f"{file} has the shape {rows.shape}: a row an input and a column a feature is needed")
        return pd.DataFrame(rows)
    adata = artifacts.read_adata(file)
    if rep is not None and rep not in adata.obsm:
        raise ValueError(f"{file} has no obsm[{rep!r}], only {', '.join(adata.obsm) or 'X'}")
    found = pd.DataFrame(np.asarray(adata.X if rep is None else adata.obsm[rep]), index=adata.obs_names)
    if not found.index.is_unique:
        raise ValueError(
            f"{file} has the name {found.index[found.index.duplicated()][0]!r} twice: rows cannot be matched"
        )
    return found


def matched(names: tuple[str, str], a: pd.DataFrame, b: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows of both sides in one order, and how many have no partner."""
    if isinstance(a.index, pd.RangeIndex) or isinstance(b.index, pd.RangeIndex):
        if len(a) != len(b):
            raise ValueError(
                f"{names[0]} has {len(a)} rows and {names[1]} has {len(b)}: .npy files need the same inputs, row by row"
            )
        return a.to_numpy(), b.to_numpy(), 0
    both = a.index.intersection(b.index)
    if not len(both):
        raise ValueError(
            f"{names[0]} and {names[1]} have no row name in common, such as {a.index[0]!r}, {b.index[0]!r}"
        )
    return a.loc[both].to_numpy(), b.loc[both].to_numpy(), len(a) + len(b) - 2 * len(both)


def errors(a: np.ndarray, b: np.ndarray, n_components: int | None, seed: int) -> Iterator[dict]:
    """A row a space and class of maps, from a to b."""
    found = identifiability.align(a, b, n_components=n_components, random_state=seed)
    for space in SPACES:
        for group, error in getattr(found, space).items():
            yield {
                "space": space,
                "group": group,
                **error._asdict(),
                "efficiency": found.efficiency if space == "whitened" else np.nan,
                "diameter": found.diameter[space],
                "n_components": found.n_components,
                "n_converged": min(found.n_converged),
                "width_a": a.shape[1],
                "width_b": b.shape[1],
                "n_rows": len(a),
            }


def compared(sides: dict[str, pd.DataFrame], n_components: int | None = None, seed: int = 0) -> pd.DataFrame:
    """Every pair, from either side to the other."""
    rows = []
    for a, b in progress.track(list(combinations(sides, 2)), "pairs"):
        x, y, alone = matched((a, b), sides[a], sides[b])
        for names, pair in (((a, b), (x, y)), ((b, a), (y, x))):
            said = {"a": names[0], "b": names[1], "n_unmatched": alone}
            rows += [{**said, **row} for row in errors(*pair, n_components, seed)]
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rep", help="of .h5ad files: a key of obsm")
    parser.add_argument("--components", type=int, help="of the whitened space, by default the smaller rank")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    progress.show()
    if len(set(options.files)) < 2:
        parser.exit(2, "error: one representation has nothing to be compared with: give two files or more\n")
    try:
        sides = {str(file): read(file, options.rep) for file in options.files}
        table = compared(sides, options.components, options.seed)
    except (ValueError, CellicaError) as error:
        parser.exit(2, f"error: {error}\n")
    validation.write(table, options.out)
    wide = table.pivot_table(index=["a", "b"], columns=["space", "group"], values="held_out", sort=False)
    print(wide.round(3).to_string())


if __name__ == "__main__":
    main()
