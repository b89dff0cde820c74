"""Embeddings against published ones of the same wells: the only proof that weights, order and preprocessing are right."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd

from cellica import artifacts
from cellica.schema import EXPERIMENT, PLATE, SITE, UNS, InputError, first_few, obs_names
from cellica.screen import load_table, text

ENOUGH = 0.99  # cosine below which embeddings are not the same: rounding and a JPEG more change less
MOSTLY = 0.9  # share of embeddings that must be nearest to their own published one
MOST_COMPARED = 2000  # embeddings that are compared with each other
ID_COLUMNS = ("well_id", "site_id")


@dataclass(frozen=True, eq=False)
class Published:
    """Embeddings of others: one row a well or a site, the index their ids ``{experiment}_{plate}_{well}[_{site}]``."""

    file: Path
    sha256: str
    table: pd.DataFrame = field(repr=False)

    def ids_of(self, sites: pd.DataFrame) -> tuple[str, pd.Series]:
        """Which ids of a site (or well) table these embeddings have, and the id of each row.

        Raises
        ------
        InputError
            They have none of the wells and none of the sites.
        """
        kinds = {"wells": obs_names(sites.drop(columns=SITE, errors="ignore"))}
        if SITE in sites:
            kinds["sites"] = obs_names(sites)
        shared = {kind: ids.isin(self.table.index).sum() for kind, ids in kinds.items()}
        unit = max(shared, key=lambda kind: shared[kind])
        if not shared[unit]:
            raise InputError(
                f"{self.file} has none of the {kinds[unit].nunique()} {unit} ({first_few(kinds[unit], 2)}): "
                f"its {len(self.table)} rows are {first_few(self.table.index, 2)}"
            )
        return unit, pd.Series(kinds[unit], index=sites.index)

    def check(self, sites: pd.DataFrame, n_features: int) -> None:
        """Raise an InputError where embeddings of these sites, of so many features, could not be compared."""
        self.ids_of(sites)
        if self.table.shape[1] != n_features:
            raise InputError(f"{self.file} has embeddings of {self.table.shape[1]} features, not of {n_features}")


@dataclass(frozen=True, eq=False)
class Verification:
    """How embeddings agree with published ones.

    Attributes
    ----------
    file, unit
        The published embeddings, and what was compared: "wells" or "sites".
    cosine
        Cosine of each shared well or site to its published embedding, index = ids.
    unrelated
        Median cosine to the published embedding of another one: what no agreement looks like. NaN with one alone.
    own_nearest
        Share of embeddings that are nearest to their own published one, means removed: embeddings of all wells may be alike
        and yet each be another's. NaN with one alone.
    only_here, only_published
        Ids without a partner; of the published ones those of the same plates.
    """

    file: Path
    unit: str
    cosine: pd.Series
    unrelated: float
    own_nearest: float
    only_here: list[str]
    only_published: list[str]

    @property
    def median(self) -> float:
        """Median of the cosines."""
        return float(self.cosine.median())

    @property
    def worst(self) -> float:
        """Least cosine."""
        return float(self.cosine.min())

    @property
    def agrees(self) -> bool:
        """Whether no cosine is below 0.99, and 90 % or more are nearest to their own published embedding."""
        return self.worst >= ENOUGH and not self.own_nearest < MOSTLY

    def summary(self) -> str:
        """The comparison in words, with a warning where it fails."""
        lines = [
            f"{len(self.cosine)} {self.unit} shared with {self.file}: median cosine {self.median:.5f}, worst "
            f"{self.worst:.5f} ({self.cosine.idxmin()}); between different {self.unit} {self.unrelated:.5f}; "
            f"{self.own_nearest:.0%} nearest to their own"
        ]
        for ids, where in ((self.only_here, "only here"), (self.only_published, "only published, of these plates")):
            if ids:
                lines.append(f"{len(ids)} {self.unit} {where}: {first_few(ids)}")
        if self.own_nearest < MOSTLY:
            lines.append(
                f"WARNING: only {self.own_nearest:.0%} of the {self.unit} are nearest to their own published embedding: their "
                "ids may be shifted, or these embeddings hardly tell wells apart, and then no cosine proves anything"
            )
        if self.worst < ENOUGH:
            below = self.cosine[self.cosine < ENOUGH].sort_values()
            lines.append(
                f"WARNING: these are NOT the published embeddings: {len(below)} of {len(self.cosine)} {self.unit} have a "
                f"cosine below {ENOUGH} ({first_few(below.index)}). Check the weights, the order of channels, the bit "
                "depth and the size of the images"
            )
        return "\n".join(lines)


def read_published(path: artifacts.PathLike) -> Published:
    """Read published embeddings: parquet, CSV or TSV with ``well_id`` or ``site_id`` and ``feature_0`` ..., or AnnData.

    Raises
    ------
    MissingFileError, InputError
        The file is not there, is none of these, or has an id twice.
    """
    path = artifacts.require_file(path, "published embeddings")
    if path.suffix in artifacts.SUFFIXES:
        adata = artifacts.read_adata(path)
        ids, values = pd.Series(adata.obs_names.astype(str)), pd.DataFrame(np.asarray(adata.X))
    else:
        table = load_table(path)
        key = next((name for name in ID_COLUMNS if name in table), None)
        names = sorted((c for c in map(str, table.columns) if re.fullmatch(r"feature_\d+", c)), key=_number)
        if key is None or not names:
            raise InputError(
                f"{path} holds no embeddings: it needs a column {' or '.join(ID_COLUMNS)} and columns feature_0, "
                f"feature_1, ...; it has {first_few(table.columns)}"
            )
        ids, values = text(table[key]), table[names]
    if ids.duplicated().any():
        raise InputError(f"{path} has {ids.duplicated().sum()} ids twice: {first_few(ids[ids.duplicated()])}")
    finite = np.isfinite(values.to_numpy(dtype=np.float64)).all(axis=1)
    values = values.set_axis(pd.Index(ids, dtype=object))[finite]
    return Published(path, artifacts.sha256(path), values.astype(np.float32))


def verify(adata: ad.AnnData, published: Published | artifacts.PathLike) -> Verification:
    """Compare ``X`` with published embeddings of the same wells or sites.

    Parameters
    ----------
    adata
        Site embeddings, as `cellica.encoder.embed` gives, or wells. Sites are averaged where wells are published.
    published
        File of published embeddings (see `read_published`), or what was read of it.

    Returns
    -------
    The cosines and what has no partner. Written to ``uns["cellica"]["verify"]`` (``file``, ``unit``, ``n_shared``,
    ``median``, ``worst``, ``unrelated``, ``own_nearest``, ``agrees``, ``n_only_here``, ``n_only_published``) and as a step of the provenance.

    Raises
    ------
    MissingFileError, InputError
        As `read_published`; none of the wells is published, or the embeddings have another number of features.
    """
    if not isinstance(published, Published):
        published = read_published(published)
    published.check(adata.obs, adata.n_vars)
    unit, ids = published.ids_of(adata.obs)
    here = pd.DataFrame(np.asarray(adata.X, dtype=np.float64)).groupby(ids.to_numpy()).mean()
    shared = here.index.intersection(published.table.index)
    ours = _unit_length(here.loc[shared].to_numpy())
    theirs = _unit_length(published.table.loc[shared].to_numpy(dtype=np.float64))
    others = np.roll(theirs, 1, axis=0) if len(shared) > 1 else np.full_like(theirs, np.nan)
    result = Verification(
        file=published.file,
        unit=unit,
        cosine=pd.Series((ours * theirs).sum(axis=1), index=shared),
        unrelated=float(np.median((ours * others).sum(axis=1))),
        own_nearest=_own_nearest(ours, theirs),
        only_here=list(here.index.difference(shared)),
        only_published=_of_plates(published.table.index.difference(shared), adata.obs, unit),
    )
    _record(adata, published, result)
    return result


def _unit_length(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)


def _own_nearest(ours: np.ndarray, theirs: np.ndarray) -> float:
    if len(ours) < 2:
        return float("nan")
    rows = np.unique(np.linspace(0, len(ours) - 1, MOST_COMPARED).round().astype(int))
    centre = theirs.mean(axis=0)
    similarity = _unit_length(ours[rows] - centre) @ _unit_length(theirs[rows] - centre).T
    return float(np.mean(similarity.argmax(axis=1) == np.arange(len(rows))))


def _plates(obs: pd.DataFrame) -> list[str]:
    return sorted(set(obs[EXPERIMENT].astype(str) + "_" + obs[PLATE].astype(str)))


def _of_plates(ids: Iterable[str], obs: pd.DataFrame, unit: str) -> list[str]:
    plates = set(_plates(obs))
    return [one for one in ids if one.rsplit("_", 1 if unit == "wells" else 2)[0] in plates]


def _record(adata: ad.AnnData, published: Published, result: Verification) -> None:
    read = {"file": result.file.name, "unit": result.unit}
    found = {
        "n_shared": len(result.cosine),
        "median": result.median,
        "worst": result.worst,
        "unrelated": result.unrelated,
        "own_nearest": result.own_nearest,
        "agrees": result.agrees,
        "n_only_here": len(result.only_here),
        "n_only_published": len(result.only_published),
    }
    adata.uns.setdefault(UNS, {})["verify"] = {**read, **found}
    plates = {" ".join(_plates(adata.obs)): found}
    artifacts.add_step(adata, artifacts.step("verify", read, {result.file.name: published.sha256}, plates=plates))


def _number(name: str) -> int:
    return int(name.rsplit("_", 1)[1])
