"""The .npz files of this workflow, of which a wrong one is named."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

RUN = ("latents", "classes", "factors", "shape", "cross_entropy", "entropy", "weight_decay", "seed", "steps")


def read(file: Path, names: Sequence[str], what: str) -> dict[str, np.ndarray]:
    """Arrays of a file; a ValueError where it is not there, or not what it should be."""
    try:
        with np.load(file, allow_pickle=False) as found:
            if lacking := set(names) - set(found.files):
                raise ValueError(f"it has no {', '.join(sorted(lacking))}")
            return {name: found[name] for name in found.files}
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist: give {what}") from None
    except (ValueError, OSError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is not {what}: {error}") from error


def run(file: Path) -> dict[str, np.ndarray]:
    """What train.py kept of a run."""
    return read(file, RUN, "a run of train.py")
