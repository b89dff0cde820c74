"""Plates as OME-Zarr: one store a plate, written once from image files and read field by field.

The layout is OME-Zarr 0.5 (high-content screening, Zarr v3): ``row/column/field/0`` with the axes t, c, z, y, x and one
Zstandard chunk a field, so that a field is one file. Beside ``ome`` the plate's attributes hold ``cellica``: the site
table, the channels, the shape, what was set aside, and the provenance. The store is written as files: a field's metadata
depends on nothing but its shape and channels, and one template serves them all.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import imagecodecs
import numpy as np
import pandas as pd
from filelock import FileLock

from cellica import artifacts, images, progress, schema
from cellica.artifacts import PathLike
from cellica.schema import EXPERIMENT, PLATE, SITE, UNS, WELL, ImageError, InputError, PlateError, first_few
from cellica.screen import PATH, validate

SET_ASIDE = ("site_id", EXPERIMENT, PLATE, WELL, SITE, "channel", "path", "reason")
SET_ASIDE_FILE = "set_aside.csv"
CHUNK = Path("c/0/0/0/0/0")
COLORS = ("0000FF", "00FF00", "FF0000", "00FFFF", "FF00FF", "FFFF00", "FFFFFF")
ENOUGH_TO_JUDGE = 8  # sites after which a screen that lacks a rule for 16 bits is refused
_NAME = re.compile(r"[A-Za-z0-9][\w.+ -]*")

Attributes = dict[str, Any]


class Spec(NamedTuple):
    """What all images of a plate have in common."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape))} {self.dtype}"


@dataclass(frozen=True)
class IngestReport:
    """What `ingest` left behind.

    Attributes
    ----------
    plates
        Finished plates of the screen, in its order.
    skipped
        Those of them that were finished before and were not touched.
    outdated
        Those of the skipped that the screen table or the options would now make otherwise.
    n_sites
        Sites in ``plates``.
    set_aside
        One row an image that keeps its site out (``site_id, experiment, plate, well, site, channel, path, reason``),
        or one row a plate without any image.
    """

    plates: list[Path]
    skipped: list[Path]
    outdated: list[Path]
    n_sites: int
    set_aside: pd.DataFrame

    def summary(self) -> str:
        """Counts of plates and sites, and of what was set aside by reason."""
        lines = [f"{len(self.plates)} plates, {self.n_sites} sites"]
        if self.skipped:
            lines.append(f"{len(self.skipped)} plates were finished earlier and skipped (force writes them again)")
        if self.outdated:
            names = first_few(store.stem for store in self.outdated)
            lines.append(
                f"{len(self.outdated)} of these are not what the screen table and options now ask for: {names}"
            )
        for reason, rows in self.set_aside.groupby(self.set_aside["reason"].str.split(":").str[0]):
            sites = rows["site_id"]
            what = f"{len(rows)} images of {sites.nunique()} sites" if sites.all() else f"{len(rows)} plates"
            lines.append(f"set aside {what}: {reason}")
        return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- write


def ingest(
    screen: pd.DataFrame,
    out_dir: PathLike,
    *,
    intensity_range: tuple[float, float] | None = None,
    threads: int = 2,
    force: bool = False,
) -> IngestReport:
    """Write ``out_dir/{experiment}_{plate}.zarr`` for each plate of a screen table.

    A site with an image that is missing or broken, listed twice, or of another shape or depth than most images of its
    plate is set aside with the reason, and the rest goes on. A plate appears under its name only when it is whole.

    Parameters
    ----------
    screen
        One row a site, index ``{experiment}_{plate}_{well}_{site}``, with the columns experiment, plate, well, site and
        one column ``path_{channel}`` a channel; further columns are kept with the plate.
    out_dir
        Folder of the plates; made if need be.
    intensity_range
        ``(low, high)`` of 16-bit images that become 0 and 255 (`cellica.images.to_uint8`). 8-bit images need none.
    threads
        Fields decoded and written at a time.
    force
        Write plates again that are finished; without it they are skipped.

    Returns
    -------
    Report; ``out_dir/set_aside.csv`` holds its table for all plates of the folder, earlier runs included.

    Raises
    ------
    InputError
        The table or an option is not usable, or images are 16-bit and ``intensity_range`` is not given.
    PlateError
        A store of that name is there, and is not a plate of ours.
    """
    out_dir = Path(out_dir)
    _validate(screen, out_dir, intensity_range, threads)
    paths = _paths(screen)
    known_faults = _listed_faults(paths)
    sites = _without_paths(screen)
    groups = {_store_name(*key): group for key, group in sites.groupby([EXPERIMENT, PLATE], sort=False, observed=True)}
    stores = {name: out_dir / f"{name}.zarr" for name in groups}
    finished = {name: Plate(store) for name, store in stores.items() if store.exists() and not force}

    out_dir.mkdir(parents=True, exist_ok=True)
    set_aside: dict[str, pd.DataFrame] = {name: plate.set_aside for name, plate in finished.items()}
    n_sites = {name: len(plate.sites) for name, plate in finished.items()}
    try:
        for name, group in groups.items():
            if name in finished:
                progress.say(f"{stores[name]} is finished already and was skipped (write it again with force)")
                continue
            rows = paths.loc[group.index]
            n_sites[name], set_aside[name] = _write_plate(
                stores[name], group, rows, known_faults, intensity_range=intensity_range, threads=threads, force=force
            )
    finally:
        _write_set_aside(out_dir, set_aside)
    return IngestReport(
        plates=[store for name, store in stores.items() if n_sites[name]],
        skipped=[stores[name] for name in finished],
        outdated=[
            stores[name]
            for name, plate in finished.items()
            if not _made_from(plate, groups[name], paths.loc[groups[name].index], intensity_range)
        ],
        n_sites=sum(n_sites.values()),
        set_aside=pd.concat([set_aside[name] for name in groups], ignore_index=True),
    )


def _write_plate(
    store: Path,
    sites: pd.DataFrame,
    paths: pd.DataFrame,
    known_faults: Mapping[tuple[str, str], str],
    *,
    intensity_range: tuple[float, float] | None,
    threads: int,
    force: bool,
) -> tuple[int, pd.DataFrame]:
    """Write the whole sites of one plate; return their number and the table of what was set aside."""
    with tempfile.TemporaryDirectory(prefix=f".{store.name}.", suffix=".part", dir=store.parent) as scratch:
        folder = Path(scratch) / store.name
        spec, faults = _write_fields(folder, sites, paths, known_faults, intensity_range, threads)
        set_aside = _set_aside_table(sites, paths, faults)
        kept = sites.loc[[site_id for site_id in sites.index if site_id not in faults]]
        if spec and len(kept):
            parameters = {"intensity_range": intensity_range and list(intensity_range)}
            inputs = {f"screen table of {store.stem}": _table_sha256(sites, paths)}
            counts = {"sites": len(kept), "set_aside": len(faults)}
            ours = {
                "sites": _sites_to_json(kept),
                "channels": list(paths.columns),
                "shape": [len(paths.columns), *spec.shape],
                "set_aside": set_aside.to_dict("records"),
                "provenance": [artifacts.step("ingest", parameters, inputs, plates={store.stem: counts})],
            }
            _write_groups(folder, kept, ours)
            with artifacts.atomic(store, force=force) as whole:
                os.replace(folder, whole)
    return len(kept), set_aside


def _table_sha256(sites: pd.DataFrame, paths: pd.DataFrame) -> str:
    return hashlib.sha256(sites.join(paths).to_csv().encode()).hexdigest()


def _made_from(
    plate: "Plate", sites: pd.DataFrame, paths: pd.DataFrame, intensity_range: tuple[float, float] | None
) -> bool:
    """Whether a finished plate is what these rows and options would make."""
    made = plate.provenance[-1]
    same_range = made["parameters"].get("intensity_range") == (intensity_range and list(intensity_range))
    return same_range and _table_sha256(sites, paths) in made["inputs"].values()


def _write_fields(
    folder: Path,
    sites: pd.DataFrame,
    paths: pd.DataFrame,
    known_faults: Mapping[tuple[str, str], str],
    intensity_range: tuple[float, float] | None,
    threads: int,
) -> tuple[Spec | None, dict[str, dict[str, str]]]:
    """Write fields and judge them by what most images of the plate are; return that, and faults by site and channel."""

    def write(site_id: str) -> dict[str, Spec | str]:
        files = zip(map(str, paths.columns), map(str, paths.loc[site_id]), strict=True)
        found = {channel: known_faults.get((site_id, channel)) or _image_or_reason(file) for channel, file in files}
        return _write_field(fields[site_id], found, intensity_range)

    fields = {
        site_id: folder / _field_path(well, site)
        for site_id, well, site in zip(sites.index, sites[WELL], sites[SITE], strict=True)
    }
    found: dict[str, dict[str, Spec | str]] = {}
    with ThreadPoolExecutor(threads) as pool:
        try:
            results = progress.track(pool.map(write, fields), folder.stem, total=len(fields))
            for site_id, result in zip(fields, results, strict=True):
                found[site_id] = result
                if len(found) == ENOUGH_TO_JUDGE:
                    _common_spec(found, intensity_range, folder.stem)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

    spec = _common_spec(found, intensity_range, folder.stem)
    faults: dict[str, dict[str, str]] = {}
    for site_id, result in found.items():
        wrong = {
            channel: value if isinstance(value, str) else f"differs from its plate: {value}, most images are {spec}"
            for channel, value in result.items()
            if value != spec
        }
        if wrong:
            faults[site_id] = wrong
            _remove_field(fields[site_id])
    return spec, faults


def _image_or_reason(file: str) -> np.ndarray | str:
    try:
        return images.decode(file)
    except ImageError as error:
        return str(error).removeprefix(f"{file}: ")


def _write_field(
    field: Path, found: Mapping[str, np.ndarray | str], intensity_range: tuple[float, float] | None
) -> dict[str, Spec | str]:
    """Write one field if its images are there and alike; return each image's spec, or the reason why there is none."""
    specs = {
        channel: value if isinstance(value, str) else Spec(value.shape, str(value.dtype))
        for channel, value in found.items()
    }
    pixels = [value for value in found.values() if not isinstance(value, str)]
    whole = len(pixels) == len(found) and len(set(specs.values())) == 1
    if whole and (intensity_range or pixels[0].dtype == np.uint8):
        data = np.stack([images.to_uint8(image, intensity_range) for image in pixels])
        array = field / "0"
        os.makedirs((array / CHUNK).parent)
        (array / CHUNK).write_bytes(imagecodecs.zstd_encode(data, 1))  # type: ignore[arg-type]
        (array / "zarr.json").write_bytes(_array_json(data.shape))
        (field / "zarr.json").write_bytes(_field_json(tuple(found)))
    return specs


def _common_spec(
    found: Mapping[str, Mapping[str, Spec | str]], intensity_range: tuple[float, float] | None, plate: str
) -> Spec | None:
    """What most decoded images are; refuse 16 bits without a rule."""
    specs = Counter(value for result in found.values() for value in result.values() if isinstance(value, Spec))
    if not specs:
        return None
    spec = specs.most_common(1)[0][0]
    try:
        images.to_uint8(np.zeros(0, spec.dtype), intensity_range)
    except InputError as error:
        raise InputError(f"plate {plate}: {error}") from None
    return spec


def _remove_field(field: Path) -> None:
    """Remove a field that was written, and its well and row if they hold no other."""
    shutil.rmtree(field, ignore_errors=True)
    for parent in (field.parent, field.parent.parent):
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()


# ---------------------------------------------------------------------------------------------- what is set aside


def _listed_faults(paths: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Faults that the table itself shows: no path, or one file for two images; by site and channel."""
    listed = [(site_id, channel) for site_id in paths.index for channel in paths.columns]
    files = pd.Series(paths.to_numpy(dtype=object).ravel())
    missing = files == ""
    repeated = files.duplicated(keep=False) & ~missing
    faults = {listed[i]: "no path in the table" for i in np.flatnonzero(missing)}
    for positions in files[repeated].groupby(files[repeated]).groups.values():
        for i in positions:
            others = first_few((" ".join(listed[k]) for k in positions if k != i), 2)
            faults[listed[i]] = f"file listed more than once: also for {others}"
    return faults


def _set_aside_table(sites: pd.DataFrame, paths: pd.DataFrame, faults: Mapping[str, Mapping[str, str]]) -> pd.DataFrame:
    """One row a faulty image; one row for the whole plate where not a single image is there."""
    absent = ("file absent", "no path in the table")
    reasons = [reason for channels in faults.values() for reason in channels.values()]
    experiment, plate = (str(sites[column].iloc[0]) for column in (EXPERIMENT, PLATE))
    if len(reasons) == paths.size and all(reason in absent for reason in reasons):
        whole = ("", experiment, plate, "", "", "", "", f"no image of the plate: {len(sites)} sites are absent")
        return _set_aside_frame([whole])
    keys = {site_id: key for site_id, *key in sites[[EXPERIMENT, PLATE, WELL, SITE]].itertuples()}
    rows = [
        (site_id, *keys[site_id], channel, paths.loc[site_id, channel], reason)
        for site_id, channels in faults.items()
        for channel, reason in channels.items()
    ]
    return _set_aside_frame(rows)


def _set_aside_frame(rows: Sequence[Any] = ()) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(SET_ASIDE), dtype=str)


def _write_set_aside(out_dir: Path, judged: Mapping[str, pd.DataFrame]) -> None:
    """Bring ``set_aside.csv`` up to date: this run's plates, other finished plates, and earlier ones without a store."""
    file = out_dir / SET_ASIDE_FILE
    with FileLock(out_dir / f".{SET_ASIDE_FILE}.lock"):
        tables = dict(judged)
        for store in out_dir.glob("*.zarr"):
            if store.stem not in tables:
                with contextlib.suppress(PlateError):  # another tool's store
                    tables[store.stem] = Plate(store).set_aside
        if file.exists():
            earlier = pd.read_csv(file, dtype=str, keep_default_na=False)
            for key, rows in earlier.groupby([EXPERIMENT, PLATE], sort=False):
                tables.setdefault(_store_name(*key), rows)
        everything = pd.concat([tables[name] for name in sorted(tables)] or [_set_aside_frame()], ignore_index=True)
        artifacts.write_table(everything, file, force=True)


# ---------------------------------------------------------------------------------------------- read


class Plate:
    """A plate that `ingest` wrote.

    Attributes
    ----------
    path, name, experiment, plate
        The store; ``{experiment}_{plate}``; its two parts as str.
    channels
        Channel names, in the order of the pixels' axis C.
    sites
        Site table, index = site ids, in the order of `fields`.
    shape
        (C, Y, X) of each field; pixels are uint8.
    provenance
        Steps that made the plate, oldest first.
    set_aside
        What kept sites out, one row an image.

    Raises
    ------
    MissingFileError
        Nothing is there.
    PlateError
        It is no plate, or none that `ingest` wrote.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = artifacts.require_file(path, "plate")
        ours = _attributes(self.path).get(UNS)
        if not ours:
            raise PlateError(
                f"{self.path} is not a plate that cellica wrote: plates come from `cellica ingest`; list the images "
                "of another tool's plate in a table and ingest them with `cellica ingest table`"
            )
        try:
            self.sites = _sites_from_json(ours["sites"])
            self.channels: list[str] = list(ours["channels"])
            self.shape: tuple[int, int, int] = tuple(ours["shape"])
            self.provenance: list[dict[str, Any]] = list(ours["provenance"])
            self.set_aside = _set_aside_frame(ours["set_aside"])
            self.experiment, self.plate = (str(self.sites[column].iloc[0]) for column in (EXPERIMENT, PLATE))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PlateError(f"{self.path} has damaged attributes ({error!r}): ingest it again with --force") from error
        self.name = _store_name(self.experiment, self.plate)

    def __repr__(self) -> str:
        return f"Plate({self.name}: {len(self.sites)} sites, {' x '.join(map(str, self.shape))})"

    @property
    def listed(self) -> set[str]:
        """Ids of all sites that the screen listed: those kept and those set aside."""
        return {*self.sites.index, *self.set_aside["site_id"]}

    def fields(self, chunk_size: int = 8) -> Iterator[tuple[pd.DataFrame, np.ndarray]]:
        """Iterate over the fields in the order of `sites`.

        Parameters
        ----------
        chunk_size
            Fields at a time.

        Yields
        ------
        A slice of `sites` and its pixels (n, C, Y, X), uint8, n <= ``chunk_size``; each array is the caller's own.

        Raises
        ------
        PlateError
            A field's file is missing or damaged. (Zarr reads a missing chunk as fill value: a black picture.)
        """
        if chunk_size < 1:
            raise InputError(f"chunk_size is {chunk_size}: it must be 1 or more")
        for start in range(0, len(self.sites), chunk_size):
            part = self.sites.iloc[start : start + chunk_size]
            pixels = np.empty((len(part), *self.shape), np.uint8)
            for out, well, site in zip(pixels, part[WELL], part[SITE], strict=True):
                self._read(_field_path(well, site), out)
            yield part, pixels

    def _read(self, field: str, out: np.ndarray) -> None:
        array = self.path / field / "0"
        try:
            if (array / "zarr.json").read_bytes() == _array_json(self.shape):
                pixels = imagecodecs.zstd_decode((array / CHUNK).read_bytes(), out=out.data.cast("B"))
                if len(pixels) != out.size:
                    raise ValueError(f"{len(pixels)} bytes instead of {out.size}")
            else:
                out[:] = _read_with_zarr(array, self.shape)
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise PlateError(
                f"field {field} of {self.path} is missing or damaged ({error}): ingest the plate again with --force"
            ) from error


def _read_with_zarr(array: Path, shape: tuple[int, int, int]) -> np.ndarray:
    """Read a field that another tool rewrote: other chunks, shards or codecs."""
    import zarr

    stored = zarr.open_array(store=array, mode="r")
    n_channels, *size = shape
    if stored.shape != (1, n_channels, 1, *size) or stored.dtype != np.uint8:
        raise ValueError(f"{stored.dtype} {stored.shape} instead of uint8 {(1, n_channels, 1, *size)}")
    if stored.nchunks_initialized != stored.nchunks:
        raise FileNotFoundError(f"{stored.nchunks - stored.nchunks_initialized} of {stored.nchunks} chunks are missing")
    return np.asarray(stored[:]).reshape(shape)


def _attributes(store: Path) -> Attributes:
    try:
        return json.loads((store / "zarr.json").read_bytes())["attributes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlateError(
            f"{store} is not a plate: it has no readable zarr.json of a Zarr v3 group ({error}); "
            "name a {experiment}_{plate}.zarr folder that `cellica ingest` wrote"
        ) from error


# ---------------------------------------------------------------------------------------------- names and metadata


def _store_name(experiment: Hashable, plate: Hashable) -> str:
    return f"{experiment}_{plate}"


def _field_path(well: str, site: int | str) -> str:
    row, column = schema.parse_well(well)
    return f"{schema.row_letters(row)}/{column + 1:02d}/{site}"


def _write_groups(folder: Path, sites: pd.DataFrame, ours: Attributes) -> None:
    """Metadata of plate, rows and wells: only those that exist. Not consolidated: that makes readers slower."""
    fields: dict[str, list[str]] = {}
    for well, site in zip(sites[WELL], sites[SITE], strict=True):
        well_path, field = _field_path(well, site).rsplit("/", 1)
        fields.setdefault(well_path, []).append(field)
    rows = sorted({path.split("/")[0] for path in fields}, key=lambda row: (len(row), row))
    columns = sorted({path.split("/")[1] for path in fields})
    most = max(len(names) for names in fields.values())
    wells = [
        {"path": path, "rowIndex": rows.index(path.split("/")[0]), "columnIndex": columns.index(path.split("/")[1])}
        for path in sorted(fields, key=lambda path: (len(path), path))
    ]
    plate = {
        "version": "0.5",
        "name": folder.stem,
        "field_count": most,
        "rows": [{"name": row} for row in rows],
        "columns": [{"name": column} for column in columns],
        "acquisitions": [{"id": 0, "name": "0", "maximumfieldcount": most}],
        "wells": wells,
    }
    (folder / "zarr.json").write_bytes(_group_json({"ome": {"version": "0.5", "plate": plate}, UNS: ours}))
    for row in rows:
        (folder / row / "zarr.json").write_bytes(_group_json({}))
    for path, names in fields.items():
        well_images = [{"path": name, "acquisition": 0} for name in names]
        well = {"version": "0.5", "well": {"version": "0.5", "images": well_images}}
        (folder / path / "zarr.json").write_bytes(_group_json({"ome": well}))


def _group_json(attributes: Attributes) -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}).encode()


@functools.lru_cache(maxsize=64)
def _field_json(channels: tuple[str, ...]) -> bytes:
    space = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"]
    multiscale = {
        "name": "0",
        "axes": [{"name": "t", "type": "time"}, {"name": "c", "type": "channel"}, *space],
        "datasets": [{"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1.0] * 5}]}],
    }
    window = {"min": 0, "max": 255, "start": 0, "end": 255}
    omero = [
        {"label": channel, "active": True, "color": COLORS[i % len(COLORS)], "window": window}
        for i, channel in enumerate(channels)
    ]
    return _group_json({"ome": {"version": "0.5", "multiscales": [multiscale], "omero": {"channels": omero}}})


@functools.lru_cache(maxsize=64)
def _array_json(shape: tuple[int, int, int]) -> bytes:
    """Metadata of a field's array (C, Y, X) uint8: one chunk, Zstandard level 1."""
    n_channels, *size = shape
    full = [1, n_channels, 1, *size]
    spec = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": full,
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": full}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}],
        "attributes": {},
        "dimension_names": ["t", "c", "z", "y", "x"],
        "storage_transformers": [],
    }
    return json.dumps(spec).encode()


def _sites_to_json(sites: pd.DataFrame) -> Attributes:
    """Site table as lists: missing values are null, and numbers remember their dtype."""

    def plain(value: Any) -> Any:
        if pd.isna(value):
            return None
        value = value.item() if isinstance(value, np.generic) else value
        return value if isinstance(value, bool | int | float | str) else str(value)

    dtypes = {name: str(sites[name].dtype) for name in sites if pd.api.types.is_numeric_dtype(sites[name].dtype)}
    columns = {name: [plain(value) for value in sites[name].astype(object)] for name in sites}
    return {"index": list(sites.index), "columns": columns, "dtypes": dtypes}


def _sites_from_json(table: Attributes) -> pd.DataFrame:
    dtypes = table["dtypes"]
    index = pd.Index(table["index"], dtype=object)
    columns = {name: pd.Series(values, index, dtype=dtypes.get(name)) for name, values in table["columns"].items()}
    return pd.DataFrame(columns, index=index)


# ---------------------------------------------------------------------------------------------- validation


def _validate(table: pd.DataFrame, out_dir: Path, intensity_range: tuple[float, float] | None, threads: int) -> None:
    """Everything that can be known before an image is opened."""
    if out_dir.exists() and not out_dir.is_dir():
        raise InputError(f"{out_dir} is a file: name a folder for the plates")
    if threads < 1:
        raise InputError(f"threads is {threads}: it must be 1 or more")
    images.to_uint8(np.zeros(0, np.uint8), intensity_range)
    if table.empty:
        raise InputError("the screen table is empty: there is nothing to ingest")
    if not any(str(column).startswith(PATH) for column in table.columns):
        raise InputError(
            f"the screen table names no images: it needs a column {PATH}CHANNEL for each channel, "
            f"and has {', '.join(map(str, table.columns))}"
        )
    sites = _without_paths(table)
    validate(sites)

    plates = sites[[EXPERIMENT, PLATE]].astype(str).drop_duplicates()
    names = [*plates[EXPERIMENT].unique(), *plates[PLATE].unique()]
    stores = plates[EXPERIMENT] + "_" + plates[PLATE]
    fields = [*zip(sites[EXPERIMENT], sites[PLATE], map(_field_path, sites[WELL], sites[SITE]))]
    faults = {
        "site ids (the index) that are not {experiment}_{plate}_{well}_{site}": [
            site_id for site_id, right in zip(sites.index, schema.obs_names(sites)) if site_id != right
        ],
        "experiments or plates that cannot name a file: use letters, digits and inside also . _ + - and spaces": [
            name for name in names if not _NAME.fullmatch(name)
        ],
        "sites that are neither numbers nor letters and digits": [
            site for site in sites[SITE].unique() if not re.fullmatch("[A-Za-z0-9]+", str(site))
        ],
        "different plates that would share a store": list(stores[stores.duplicated()]),
        "sites listed under two spellings of their well": list(sites.index[pd.Series(fields).duplicated()]),
    }
    found = [f"{len(values)} {what}: {first_few(values)}" for what, values in faults.items() if len(values)]
    if found:
        raise InputError("the screen table cannot be ingested; correct these rows:\n  " + "\n  ".join(found))


def _without_paths(table: pd.DataFrame) -> pd.DataFrame:
    return table[[column for column in table.columns if not str(column).startswith(PATH)]]


def _paths(table: pd.DataFrame) -> pd.DataFrame:
    """Paths as str, one column a channel, "" where there is none."""
    paths = table[[column for column in table.columns if str(column).startswith(PATH)]].astype(object)
    paths = paths.where(paths.notna(), "").map(str)
    return paths.rename(columns=lambda column: column.removeprefix(PATH))
