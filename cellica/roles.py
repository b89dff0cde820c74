"""What each well is to a correction, and what all methods share: transforms, means of groups, scales."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pandas as pd

from cellica.components import cross
from cellica.metrics import group_means
from cellica.schema import (
    CONTROL,
    CONTROL_VALUES,
    EXPERIMENT,
    PERTURBATION,
    PLATE,
    WELL,
    InputError,
    anchor_mask,
    control_mask,
    first_few,
    format_well,
    labels,
    numbers,
    parse_well,
    quality_columns,
    strata_labels,
)

SMALL_SCALE = 1e-3  # a spread this small beside the typical one of its feature is no basis for dividing by it
COVARIATES = ("cell_count", "intensity_")  # what components are compared with, where obs has it


@dataclass
class Roles:
    """What each well is, for one correction: arrays (n,) of labels (None where missing) and masks, and notes taken."""

    batch: np.ndarray
    plate: np.ndarray
    label: np.ndarray
    strata: np.ndarray
    control: np.ndarray
    anchor: np.ndarray
    batch_key: str = "experiment"
    well: np.ndarray | None = None
    names: np.ndarray | None = None
    covariates: dict[str, np.ndarray] = field(default_factory=dict)
    odd_controls: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def treated(self) -> np.ndarray:
        """Wells with a known perturbation that are no controls."""
        return ~self.control & self.labelled

    @property
    def labelled(self) -> np.ndarray:
        """Wells with a known perturbation."""
        return np.array([value is not None for value in self.label], dtype=bool)

    @property
    def cells(self) -> np.ndarray:
        """Stratum and perturbation of each well: anchors that share them differ only by batch and noise."""
        return cross(self.strata, self.label)

    @property
    def positions(self) -> dict[str, np.ndarray]:
        """Row, column and edge (outermost rows and columns in use) of each well, None where it has no position."""
        if self.well is None:
            return {}
        places = [None if name is None else parse_well(name) for name in self.well]
        known = [place for place in places if place is not None]
        if not known:
            return {}
        rows, columns = zip(*known)
        ends = {min(rows), max(rows)}, {min(columns), max(columns)}
        edge = [None if p is None else str(p.row in ends[0] or p.column in ends[1]) for p in places]
        return {
            "row": np.array([None if p is None else str(p.row) for p in places], dtype=object),
            "column": np.array([None if p is None else str(p.column) for p in places], dtype=object),
            "edge": np.array(edge, dtype=object),
        }

    def take(self, rows: np.ndarray) -> "Roles":
        """Roles of some wells, with notes of their own."""
        arrays = ("batch", "plate", "label", "strata", "control", "anchor", "well", "names")
        taken = {name: value[rows] for name in arrays if (value := getattr(self, name)) is not None}
        covariates = {name: values[rows] for name, values in self.covariates.items()}
        return dataclasses.replace(self, **taken, covariates=covariates, notes=[])

    def require(self, mask: np.ndarray, what: str, method: str, least: int = 2) -> None:
        """Raise an InputError where fewer than ``least`` wells have a role."""
        if mask.sum() < least:
            by = (
                "controls= (--control)" if what == "negative control" else "controls= or anchors= (--control, --anchor)"
            )
            raise InputError(
                f"{method} needs at least {least} {what}s and found {int(mask.sum())} in {len(mask)} wells: mark negative "
                f"controls by 'negative' in obs['control']{self.odd_controls}, or name perturbations by {by}"
            )

    def require_shared_anchors(self, method: str) -> None:
        """Raise an InputError where no anchor lies in two batches of its stratum: nothing tells batch from anything else."""
        pairs = {(cell, str(batch)) for cell, batch in zip(self.cells[self.anchor], self.batch[self.anchor])}
        if len({cell for cell, _ in pairs}) == len(pairs):
            raise InputError(
                f"{method} reads the batch effect from anchors that lie in several batches, and none of these {int(self.anchor.sum())} "
                "does, within its stratum: name such perturbations (anchors=, --anchor), or use another batch or strata key, or "
                "'sphere'"
            )

    def require_batches(self, method: str) -> None:
        """Raise an InputError where there is one batch, or a batch of one well."""
        names, counts = np.unique(self.batch.astype(str), return_counts=True)
        if len(names) < 2:
            raise InputError(
                f"{method} compares batches, but obs[{self.batch_key!r}] holds one, {first_few(names)}: name another batch key "
                "(--batch-key), such as 'plate', or use a method that needs none, such as 'sphere'"
            )
        if counts.min() < 2:
            raise InputError(
                f"{method} needs 2 wells in each batch; of obs[{self.batch_key!r}], {first_few(names[counts < 2])} has one: "
                "leave it out, or name another batch key"
            )


def roles_of(
    obs: pd.DataFrame,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    anchors: Sequence[str] | None = None,
    strata_key: str | None = "auto",
) -> Roles:
    """Roles of wells, read from obs.

    Raises
    ------
    InputError
        A column or a name is not there, or a well has no batch.
    """
    batch = labels(obs, batch_key)
    missing = np.array([value is None for value in batch], dtype=bool)
    if missing.any():
        raise InputError(
            f"obs[{batch_key!r}] is missing in {missing.sum()} wells ({first_few(obs.index[missing])}): fill it in, or leave "
            "these wells out"
        )
    plate = batch
    if PLATE in obs and batch_key != PLATE:
        pairs = list(zip(batch, labels(obs, PLATE)))
        plate = np.array([f"{b}_{p}" for b, p in pairs], dtype=object)
        if len(set(plate)) < len(set(pairs)):  # as 1_2 of A and 2 of A_1
            plate = np.array([f"{b} / {p}" for b, p in pairs], dtype=object)
    roles = Roles(
        batch=batch,
        plate=plate,
        label=labels(obs, label_key),
        strata=strata_labels(obs, strata_key),
        control=control_mask(obs, controls, label_key),
        anchor=anchor_mask(obs, anchors, batch_key=batch_key, label_key=label_key, controls=controls),
        batch_key=batch_key,
        well=np.array([_position(name) for name in labels(obs, WELL)], dtype=object) if WELL in obs else None,
        names=obs.index.to_numpy(dtype=object),
        odd_controls=_odd_controls(obs),
    )
    unnamed = ~roles.labelled & ~roles.control
    if unnamed.any():
        roles.notes.append(
            f"{unnamed.sum()} wells have no {label_key} ({first_few(obs.index[unnamed])}): they are corrected, but count as "
            "neither treated wells nor anchors"
        )
    try:
        columns = quality_columns(obs, COVARIATES)
        roles.covariates = dict(zip(columns, numbers(obs, columns).to_numpy().T))
    except InputError as error:
        roles.notes.append(f"components are not compared with cell count and intensity: {error}")
    return roles


def _odd_controls(obs: pd.DataFrame) -> str:
    """What the column of controls holds that is no word of its vocabulary, in parentheses; "" without."""
    if CONTROL not in obs:
        return ""
    odd = sorted({str(value) for value in labels(obs, CONTROL) if value is not None} - set(CONTROL_VALUES))
    return f" (it holds {first_few(odd, 3)})" if odd else ""


def _position(name: object) -> str | None:
    """Well name as A01, None where it is missing or no position."""
    try:
        return None if name is None else format_well(*parse_well(str(name)))
    except InputError:
        return None


# ------------------------------------------------------------------------------------------------ fitted methods


class Transform(Protocol):
    """A fitted method: maps rows (n, d), with the roles of their wells, to rows (n, d)."""

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray: ...  # noqa: D102


Account = dict[str, Any]  # what a fit used and found, see ``FOUND``
Fit = Callable[..., tuple[Transform, Account]]
FOUND = ("components", "sources", "mixing", "path", "top_wells")  # what methods that remove components found


@dataclass
class Scale:
    """(x - offset) / scale."""

    offset: np.ndarray
    scale: np.ndarray

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Scale rows."""
        return (x - self.offset) / self.scale


@dataclass
class Affine:
    """(x - offset) @ matrix.T, filled up with zeros to the width of x."""

    offset: np.ndarray
    matrix: np.ndarray

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Map rows."""
        y = (x - self.offset) @ self.matrix.T
        return np.pad(y, ((0, 0), (0, x.shape[1] - y.shape[1])))


@dataclass
class Chain:
    """Transforms one after the other."""

    parts: list[Transform]

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Map rows by each part in turn."""
        for part in self.parts:
            x = part.apply(x, roles)
        return x


# ------------------------------------------------------------------------------------------------ groups of wells


@dataclass
class Means:
    """Mean (k, d) of each named group, remembered so that later rows meet the same means."""

    names: list[str]
    values: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, groups: np.ndarray) -> "Means":
        """Mean of each group."""
        names, index = np.unique(groups.astype(str), return_inverse=True)
        return cls([str(name) for name in names], group_means(x, index))

    def at(self, groups: np.ndarray) -> np.ndarray:
        """Mean of each row's group (n, d); the mean of means for a group that was not seen."""
        row = {name: i for i, name in enumerate(self.names)}
        table = np.vstack([self.values, self.values.mean(axis=0)])
        return table[[row.get(str(group), len(self.names)) for group in groups]]


@dataclass
class Rebuild:
    """Map residuals within strata by a matrix (d, d), and put the means of strata back."""

    strata_means: Means
    projection: np.ndarray

    def apply(self, x: np.ndarray, roles: Roles) -> np.ndarray:
        """Map rows; a stratum that was not seen uses its own mean."""
        means = strata_at(self.strata_means, x, roles.strata)
        return (x - means) @ self.projection.T + means


def strata_at(means: Means, x: np.ndarray, strata: np.ndarray) -> np.ndarray:
    """Mean of each row's stratum (n, d), that of the rows themselves for a stratum that was not seen."""
    at = means.at(strata)
    unseen = ~np.isin(strata.astype(str), means.names)
    if unseen.any():
        at[unseen] = Means.of(x[unseen], strata[unseen]).at(strata[unseen])
    return at


def only(labels: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Labels (n,) of some rows, None elsewhere."""
    kept = labels.copy()
    kept[~rows] = None
    return kept


def within(x: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Residuals (n, d) from the means of groups."""
    return x - Means.of(x, groups).at(groups)


def safe_scale(scale: np.ndarray, typical: np.ndarray | float = 1.0, least: float = SMALL_SCALE) -> np.ndarray:
    """Scales (d,) with those that vanish beside the typical size of their feature replaced by 1."""
    return np.where(scale > least * np.maximum(np.abs(typical), 1e-30), scale, 1.0)
