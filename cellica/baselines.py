"""What needs no encoder: representations of wells from their position and from what was measured of their fields."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from cellica.schema import WELL, InputError, labels, numbers, parse_well, quality_columns


def _position(obs: pd.DataFrame) -> np.ndarray:
    """Row and column of the well, one-hot (n x rows + columns); zeros where the well is missing."""
    well = labels(obs, WELL)
    known = np.array([name is not None for name in well], dtype=bool)
    if not known.any():
        raise InputError(f"not applicable: obs[{WELL!r}] is missing in all wells")
    places = np.array([parse_well(name) for name in well[known]])
    baseline = np.zeros((len(obs), places.max(axis=0).sum() + 2), dtype=np.float32)
    at = np.flatnonzero(known)
    baseline[at, places[:, 0]] = 1
    baseline[at, places[:, 0].max() + 1 + places[:, 1]] = 1
    return baseline


def _measured(obs: pd.DataFrame, *kinds: str) -> np.ndarray | None:
    """Columns of what was measured of the fields, z-scored; None where there are none that vary."""
    values = numbers(obs, quality_columns(obs, kinds))
    values = values.loc[:, values.std() > 0]
    if values.shape[1] == 1:
        return _directions(values.iloc[:, 0])
    return ((values - values.mean()) / values.std()).to_numpy() if values.shape[1] else None


def _directions(values: pd.Series) -> np.ndarray:
    """Ranks of numbers as directions on a half circle (n x 2): their cosines fall with the difference, as one column's
    own, which are 1 or -1, do not."""
    angle = np.pi * (0.25 + (values.rank() - 0.5) / values.count())  # no row has two equal features
    return np.column_stack([np.cos(angle), np.sin(angle)])


BASELINES: dict[str, Callable[[pd.DataFrame], np.ndarray | None]] = {
    "baseline:position": _position,
    "baseline:intensity": lambda obs: _measured(obs, "intensity_"),
    "baseline:cell_count": lambda obs: _measured(obs, "cell_count"),
    "baseline:quality": lambda obs: _measured(obs, "focus_", "saturation_", "empty"),
}
