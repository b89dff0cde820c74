"""Names that every stage shares: obs columns, roles of wells, ids, well names, errors.

A *role* (batch, control, anchor, stratum) is a question asked of ``obs``, never a column of its own.
"""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from cellica.errors import (  # noqa: F401 - every stage takes them from here
    CellicaError,
    DiskFullError,
    FetchError,
    ImageError,
    InputError,
    MissingFileError,
    NotWritableError,
    OutputBusyError,
    OutputExistsError,
    PlateError,
    WeightsError,
    first_few,
)

EXPERIMENT, PLATE, WELL, SITE = "experiment", "plate", "well", "site"
CELL_TYPE, CONTROL = "cell_type", "control"
PERTURBATION, PERTURBATION_TYPE, CONCENTRATION = "perturbation", "perturbation_type", "concentration"
OBS_COLUMNS = (
    EXPERIMENT,
    PLATE,
    WELL,
    SITE,
    CELL_TYPE,
    PERTURBATION,
    PERTURBATION_TYPE,
    CONCENTRATION,
    CONTROL,
)
CONTROL_VALUES = ("negative", "positive", "")
QUALITY = (
    "intensity_",
    "focus_",
    "saturation_",
    "cell_count",
    "empty",
)  # columns that measure fields, or their beginnings
UNS = "cellica"
SCORE_COLUMNS = ("rep", "metric", "group", "value", "chance", "n_queries", "n_dropped", "note")
INTERVAL_COLUMNS = ("low", "high", "n_units")  # beside these: of the value, by bootstrap over independent units


# ---------------------------------------------------------------------------------------------- wells and ids


class Well(NamedTuple):
    """Position of a well, counted from 0."""

    row: int
    column: int


PLATE_FORMATS = {96: (8, 12), 384: (16, 24), 1536: (32, 48)}
_WELL = re.compile(r"([A-Z]{1,2})0*([1-9][0-9]?)")


def row_letters(row: int) -> str:
    """Letters of a row counted from 0.

    >>> row_letters(0), row_letters(25), row_letters(26), row_letters(31)
    ('A', 'Z', 'AA', 'AF')
    """
    return chr(ord("A") + row) if row < 26 else "A" + chr(ord("A") + row - 26)


@functools.lru_cache(maxsize=8192)  # few names, many wells
def parse_well(name: str) -> Well:
    """Read a well name: ``A1``, ``A01``, ``a01`` or, on 1536-well plates, ``AF48``.

    Raises
    ------
    InputError
        The name is not a row of A to AF followed by a column of 1 to 48.

    >>> parse_well("A1"), parse_well("AF48")
    (Well(row=0, column=0), Well(row=31, column=47))
    """
    match = _WELL.fullmatch(str(name).strip().upper())
    if match:
        letters, column = match[1], int(match[2]) - 1
        row = ord(letters[-1]) - ord("A") + 26 * (len(letters) - 1)
        rows, columns = PLATE_FORMATS[1536]
        if row < rows and column < columns and letters[0] <= ("A" if len(letters) == 2 else "Z"):
            return Well(row, column)
    raise InputError(
        f"well name {name!r} is not understood: write the row (A to Z, AA to AF) and the column (1 to 48), "
        "as in 'A1', 'B02' or 'AF48'"
    )


def format_well(row: int, column: int) -> str:
    """Name of a well counted from 0: row letters and a column of two digits.

    >>> format_well(*parse_well("A1")), format_well(31, 47)
    ('A01', 'AF48')
    """
    return f"{row_letters(row)}{column + 1:02d}"


def plate_format(wells: Sequence[str]) -> tuple[int, int]:
    """Rows and columns of the smallest standard plate, of 96 wells or more, that holds the wells."""
    positions = [parse_well(well) for well in wells]
    rows = max((p.row for p in positions), default=0) + 1
    columns = max((p.column for p in positions), default=0) + 1
    return next(shape for shape in PLATE_FORMATS.values() if shape[0] >= rows and shape[1] >= columns)


def obs_names(obs: pd.DataFrame) -> pd.Index:
    """Ids ``{experiment}_{plate}_{well}``, plus ``_{site}`` where there is a site column."""
    keys = [EXPERIMENT, PLATE, WELL] + ([SITE] if SITE in obs else [])
    require_columns(obs, keys, "the table")
    names = obs[keys[0]].astype(str)
    for key in keys[1:]:
        names = names + "_" + obs[key].astype(str)
    return pd.Index(names.to_numpy(dtype=object), name=None)


# ---------------------------------------------------------------------------------------------- roles of wells


def require_columns(table: pd.DataFrame, columns: Sequence[str], what: str) -> None:
    """Raise an InputError that names the missing columns and those that are there."""
    missing = [column for column in columns if column not in table.columns]
    if missing:
        raise InputError(
            f"{what} has no column {', '.join(map(repr, missing))}; it has {', '.join(map(str, table.columns))}"
        )


def labels(obs: pd.DataFrame, key: str) -> np.ndarray:
    """Values of a label column as an object array of str, missing ones as None."""
    require_columns(obs, [key], "obs")
    column = obs[key]
    values = np.array([str(value) for value in column.to_numpy(dtype=object)], dtype=object)
    values[column.isna().to_numpy()] = None
    return values


def quality_columns(obs: pd.DataFrame, kinds: Sequence[str] = QUALITY) -> list[str]:
    """Columns of obs that measure the quality of fields, see `cellica.quality.measure`.

    >>> quality_columns(pd.DataFrame(columns=["plate", "intensity_w1", "cell_count", "emptying"]))
    ['intensity_w1', 'cell_count']
    """
    starts = tuple(kind for kind in kinds if kind.endswith("_"))
    return [name for name in map(str, obs.columns) if name in kinds or name.startswith(starts)]


def numbers(obs: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Columns as float64, missing values NaN; an InputError that names what is text."""
    values, wrong = pd.DataFrame(index=obs.index), []
    for name in columns:
        column = obs[name].astype(object)
        values[name] = pd.to_numeric(column, errors="coerce").astype(float)
        text = column[values[name].isna() & column.notna()]
        wrong += [f"{name} (as {text.iloc[0]!r} in {len(text)} rows)"] if len(text) else []
    if wrong:
        raise InputError(
            f"{len(wrong)} columns of obs hold text where numbers are measured: {', '.join(wrong[:5])}; make them numbers, "
            "or rename the columns"
        )
    return values


def control_mask(obs: pd.DataFrame, controls: Sequence[str] | None = None, label_key: str = PERTURBATION) -> np.ndarray:
    """Which wells are controls: ``control == "negative"``, or a label that ``controls`` names."""
    if controls is not None:
        return _named(obs, controls, label_key, "controls")
    if CONTROL not in obs:
        return np.zeros(len(obs), dtype=bool)
    return labels(obs, CONTROL) == "negative"


def treated_mask(obs: pd.DataFrame, controls: Sequence[str] | None = None, label_key: str = PERTURBATION) -> np.ndarray:
    """Which wells are treated: neither negative controls (see ``control_mask``) nor positive ones."""
    treated = ~control_mask(obs, controls, label_key)
    return treated & (labels(obs, CONTROL) != "positive") if CONTROL in obs else treated


def anchor_mask(
    obs: pd.DataFrame,
    anchors: Sequence[str] | None = None,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
) -> np.ndarray:
    """Which wells are anchors: wells of perturbations present in most batches and on most plates, controls included.

    Most is more than half. The plates matter where each holds perturbations of its own, as in RxRx1: what all plates
    share are the controls, negative and positive. ``anchors`` names perturbations instead. Without batches that share
    anything, the controls are the anchors.
    """
    negative = control_mask(obs, controls, label_key)
    if anchors is not None:
        return _named(obs, anchors, label_key, "anchors")
    label, batch = labels(obs, label_key), labels(obs, batch_key)
    known = np.array([a is not None and b is not None for a, b in zip(label, batch)], dtype=bool)
    common = _in_most(label[known], batch[known])
    if PLATE in obs and batch_key != PLATE:
        plate = np.array([f"{b}\x1f{p}" for b, p in zip(batch, labels(obs, PLATE))], dtype=object)
        common &= _in_most(label[known], plate[known])
    return negative | np.isin(label, list(common)) & known


def _in_most(label: np.ndarray, group: np.ndarray) -> set[str]:
    """Labels that occur in more than half of the groups, where there are several."""
    pairs = pd.DataFrame({"label": label, "group": group}).drop_duplicates()
    counts, n_groups = pairs["label"].value_counts(), pairs["group"].nunique()
    return set(counts.index[counts > n_groups / 2]) if n_groups > 1 else set()


def strata_labels(obs: pd.DataFrame, strata_key: str | None = "auto") -> np.ndarray:
    """Stratum of each well: ``strata_key``, by default ``cell_type`` where present, else one stratum for all.

    ``None`` or ``""`` asks for no strata. Wells without a stratum form one named ``"unknown"``.
    """
    if strata_key == "auto":
        strata_key = CELL_TYPE if CELL_TYPE in obs else None
    if not strata_key:
        return np.full(len(obs), "all", dtype=object)
    values = labels(obs, strata_key)
    values[[value is None for value in values]] = "unknown"
    return values


def _named(obs: pd.DataFrame, names: Sequence[str], label_key: str, role: str) -> np.ndarray:
    label = labels(obs, label_key)
    absent = sorted(set(map(str, names)) - {value for value in label if value is not None})
    if absent:
        known = sorted({value for value in label if value is not None})
        raise InputError(f"{role} {first_few(absent)} not found in obs[{label_key!r}]; it holds {first_few(known, 10)}")
    return np.isin(label, list(map(str, names)))
