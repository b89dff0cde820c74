"""Plates on disk: the layout that we write, and `Plate`, which reads it and the plates of other tools.

The layout is OME-Zarr 0.5 (high-content screening, Zarr v3): ``row/column/field/0`` with the axes t, c, z, y, x and one chunk a field, so that a field is one file. The store is
written as files: a field's metadata depends on nothing but its shape, channels and pixel size, and one template serves
them all. Beside ``ome`` the plate's attributes hold ``cellica``: the site table, the channels, the shape, what was set
aside, and the provenance.
"""

import functools
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pandas as pd

from cellica import artifacts, foreign, images, schema, screen
from cellica.artifacts import PathLike
from cellica.schema import EXPERIMENT, PLATE, SITE, UNS, WELL, CellicaError, InputError, PlateError

CHUNK = Path("c/0/0/0/0/0")
COLORS = ("0000FF", "00FF00", "FF0000", "00FFFF", "FF00FF", "FFFF00", "FFFFFF")
# Bits of one weight lie together after the shuffle, which zstd packs in half the time and to the same size.
BLOSC = {"cname": "zstd", "clevel": 1, "shuffle": "bitshuffle", "typesize": 1, "blocksize": 2**18}
CODEC = {"name": "blosc", "configuration": BLOSC}
FIRST_CODEC = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}  # of plates written by cellica 0.1.0
SET_ASIDE = ("site_id", EXPERIMENT, PLATE, WELL, SITE, "channel", "path", "reason")

Attributes = dict[str, Any]
Shape = tuple[int, int, int]


def store_name(experiment: Hashable, plate: Hashable) -> str:
    """Name of a plate, and of its store without the suffix."""
    return f"{experiment}_{plate}"


def field_path(well: str, site: int | str) -> str:
    """Path of a field in its plate: ``B/02/1``."""
    row, column = schema.parse_well(well)
    return f"{schema.row_letters(row)}/{column + 1:02d}/{site}"


# ---------------------------------------------------------------------------------------------- fields


def write_field(field: Path, pixels: np.ndarray, channels: tuple[str, ...], pixel_size: float | None = None) -> None:
    """Write a field.

    Parameters
    ----------
    field
        Folder of the field; made with its parents.
    pixels
        uint8 (C, Y, X), contiguous.
    channels
        Names of C.
    pixel_size
        Side of a pixel in micrometres; None where it is not known, and then none is claimed.
    """
    array = field / "0"
    os.makedirs(field)
    for folder in (array, *(array / parent for parent in reversed(CHUNK.parents[:-1]))):
        os.mkdir(folder)
    packed = imagecodecs.blosc_encode(
        pixels,  # type: ignore[arg-type]
        level=BLOSC["clevel"],  # type: ignore[arg-type]
        compressor=BLOSC["cname"],  # type: ignore[arg-type]
        shuffle=BLOSC["shuffle"],  # type: ignore[arg-type]
        typesize=BLOSC["typesize"],  # type: ignore[arg-type]
        blocksize=BLOSC["blocksize"],  # type: ignore[arg-type]
        numthreads=1,
    )
    (array / CHUNK).write_bytes(packed)
    (array / "zarr.json").write_bytes(_array_json(pixels.shape, "blosc"))
    (field / "zarr.json").write_bytes(_field_json(channels, pixel_size))


def read_field(field: Path, out: np.ndarray) -> bool:
    """Read a field that `write_field` wrote, of this release or the first, into ``out`` (uint8, C, Y, X).

    Returns
    -------
    False where another tool rewrote it: other chunks, shards or codecs.

    Raises
    ------
    OSError, RuntimeError, ValueError
        The field is missing or damaged. (Zarr reads a missing chunk as fill value: a black picture.)
    """
    array = field / "0"
    metadata = (array / "zarr.json").read_bytes()
    for codec, decode in _DECODERS.items():
        if metadata == _array_json(out.shape, codec):
            decode((array / CHUNK).read_bytes(), out)
            return True
    return False


def remove_field(field: Path) -> None:
    """Remove a field that was written, and its well and row if they hold no other."""
    shutil.rmtree(field, ignore_errors=True)
    for parent in (field.parent, field.parent.parent):
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()


def _blosc_decode(packed: bytes, out: np.ndarray) -> None:
    if len(packed) < 16:
        raise ValueError(f"{len(packed)} bytes, less than a header")
    size, packed_size = struct.unpack_from("<I4xI", packed, 4)
    if (size, packed_size) != (out.size, len(packed)):
        raise ValueError(f"{len(packed)} bytes for {size} instead of {packed_size} for {out.size}")
    imagecodecs.blosc_decode(packed, out=out.data.cast("B"), numthreads=1)


def _zstd_decode(packed: bytes, out: np.ndarray) -> None:
    pixels = imagecodecs.zstd_decode(packed, out=out.data.cast("B"))
    if len(pixels) != out.size:
        raise ValueError(f"{len(pixels)} bytes instead of {out.size}")


_DECODERS: dict[str, Callable[[bytes, np.ndarray], None]] = {"blosc": _blosc_decode, "zstd": _zstd_decode}


# ---------------------------------------------------------------------------------------------- groups


def write_groups(folder: Path, sites: pd.DataFrame, ours: Attributes) -> None:
    """Write the metadata of plate, rows and wells, those that exist and no other.

    Parameters
    ----------
    folder
        A plate whose fields are written.
    sites
        Their site table; without rows, the store has no wells, which OME-Zarr does not know.
    ours
        What the plate's attributes hold under ``cellica``, beside ``ome``.

    Notes
    -----
    Not consolidated: that makes readers slower.
    """
    fields: dict[str, list[str]] = {}
    for well, site in zip(sites[WELL], sites[SITE], strict=True):
        well_path, field = field_path(well, site).rsplit("/", 1)
        fields.setdefault(well_path, []).append(field)
    rows = sorted({path.split("/")[0] for path in fields}, key=lambda row: (len(row), row))
    columns = sorted({path.split("/")[1] for path in fields})
    most = max(map(len, fields.values()), default=0)
    folder.mkdir(parents=True, exist_ok=True)
    wells = [
        {"path": path, "rowIndex": rows.index(path.split("/")[0]), "columnIndex": columns.index(path.split("/")[1])}
        for path in sorted(fields, key=lambda path: (len(path), path))
    ]
    plate = {
        "version": "0.5",
        "name": folder.stem,
        **({"field_count": most} if most else {}),
        "rows": [{"name": row} for row in rows],
        "columns": [{"name": column} for column in columns],
        "acquisitions": [{"id": 0, "name": "0", "maximumfieldcount": most}] if most else [],
        "wells": wells,
    }
    (folder / "zarr.json").write_bytes(_group_json({"ome": {"version": "0.5", "plate": plate}, UNS: ours}))
    for row in rows:
        (folder / row / "zarr.json").write_bytes(_group_json({}))
    for path, names in fields.items():
        well_images = [{"path": name, "acquisition": 0} for name in names]
        well = {"version": "0.5", "well": {"version": "0.5", "images": well_images}}
        (folder / path / "zarr.json").write_bytes(_group_json({"ome": well}))


def sites_to_json(sites: pd.DataFrame) -> Attributes:
    """Site table as lists: missing values are null, and numbers remember their dtype."""

    def plain(value: Any) -> Any:
        if pd.isna(value):
            return None
        value = value.item() if isinstance(value, np.generic) else value
        return value if isinstance(value, bool | int | float | str) else str(value)

    dtypes = {name: str(sites[name].dtype) for name in sites if pd.api.types.is_numeric_dtype(sites[name].dtype)}
    columns = {name: [plain(value) for value in sites[name].astype(object)] for name in sites}
    return {"index": list(sites.index), "columns": columns, "dtypes": dtypes}


def sites_from_json(table: Attributes) -> pd.DataFrame:
    """Site table that `sites_to_json` took apart."""
    dtypes = table["dtypes"]
    index = pd.Index(table["index"], dtype=object)
    columns = {name: pd.Series(values, index, dtype=dtypes.get(name)) for name, values in table["columns"].items()}
    return pd.DataFrame(columns, index=index)


# ---------------------------------------------------------------------------------------------- templates


def _group_json(attributes: Attributes) -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}).encode()


@functools.lru_cache(maxsize=64)
def _field_json(channels: tuple[str, ...], pixel_size: float | None) -> bytes:
    unit = {"unit": "micrometer"} if pixel_size else {}
    axes = [
        {"name": "t", "type": "time"},
        {"name": "c", "type": "channel"},
        {"name": "z", "type": "space"},
        {"name": "y", "type": "space", **unit},
        {"name": "x", "type": "space", **unit},
    ]
    scale = [1.0, 1.0, 1.0, pixel_size or 1.0, pixel_size or 1.0]
    multiscale = {
        "name": "0",
        "axes": axes,
        "datasets": [{"path": "0", "coordinateTransformations": [{"type": "scale", "scale": scale}]}],
    }
    window = {"min": 0, "max": 255, "start": 0, "end": 255}
    omero = [
        {"label": channel, "active": True, "color": COLORS[i % len(COLORS)], "window": window}
        for i, channel in enumerate(channels)
    ]
    return _group_json({"ome": {"version": "0.5", "multiscales": [multiscale], "omero": {"channels": omero}}})


@functools.lru_cache(maxsize=64)
def _array_json(shape: Shape, codec: str) -> bytes:
    """Metadata of a field's array (C, Y, X) uint8 in one chunk."""
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
        "codecs": [{"name": "bytes"}, {"blosc": CODEC, "zstd": FIRST_CODEC}[codec]],
        "attributes": {},
        "dimension_names": ["t", "c", "z", "y", "x"],
        "storage_transformers": [],
    }
    return json.dumps(spec).encode()


# ---------------------------------------------------------------------------------------------- the plate


def set_aside_frame(rows: Sequence[Any] = ()) -> pd.DataFrame:
    """Table of what was set aside, all columns str."""
    return pd.DataFrame(list(rows), columns=list(SET_ASIDE), dtype=str)


class Plate:
    """A plate that an ingest wrote, or an OME-Zarr plate of another tool (0.4 on Zarr v2, 0.5 on Zarr v3).

    Parameters
    ----------
    path
        The store, a folder.
    layout
        Plate map that adds columns to the sites (perturbation, control, ...): a table as `cellica.screen.read_layout`
        gives, or the path of one. It holds wells, and where it has the columns experiment, plate or site, those too.
    intensity_range
        ``(low, high)`` that become 0 and 255 (`cellica.images.to_uint8`); needed where pixels are stored in 16 bits.
    z, t
        What to take of z-stacks ("max", "mean" or a plane) and of time series, counted from 0; needed where there are any.

    Attributes
    ----------
    path, name, experiment, plate
        The store; its name without the suffix; the two parts of it, ``{experiment}_{plate}``, as str. A store of another
        tool whose name has no underscore is an experiment of its own.
    ours
        Whether an ingest of cellica wrote it.
    channels
        Channel names, in the order of the pixels' axis C: of another tool's plate the labels of ``omero``, else 0, 1, ...
    sites
        Site table, index = site ids, in the order of `fields`. It has no rows where an ingest could use no image of the
        plate and was told to keep it.
    shape
        (C, Y, X) of each field; pixels are uint8. (C, 0, 0) where there are no sites.
    provenance
        Steps that made the plate, oldest first.
    set_aside
        What kept sites out: one row an image, or, of another tool's plate, one row a well or field.

    Raises
    ------
    MissingFileError
        Nothing is there.
    PlateError
        It is no plate, or needs a choice that is not given.
    InputError
        The layout does not fit, or a plate of ours is given ``intensity_range``, ``z`` or ``t``.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        layout: pd.DataFrame | PathLike | None = None,
        intensity_range: tuple[float, float] | None = None,
        z: images.Planes = None,
        t: int | None = None,
    ) -> None:
        self.path = artifacts.require_file(path, "plate")
        self.sites: pd.DataFrame
        self.name = self.path.absolute().name.removesuffix(".zarr")
        self._rules = intensity_range, z, t
        images.check_planes(z, t)
        attributes = _attributes(self.path)
        self.ours = UNS in attributes
        try:
            if self.ours:
                if self._rules != (None, None, None):
                    raise InputError(
                        f"{self.path} was made by an ingest, single planes of 8 bits: leave out intensity_range, z and t"
                    )
                self._open_ours(attributes[UNS])
            else:
                self._open_foreign(attributes)
            known = self.sites if len(self.sites) else self.set_aside
            self.experiment, self.plate = (str(known[column].iloc[0]) for column in (EXPERIMENT, PLATE))
        except CellicaError:
            raise
        except Exception as error:  # whatever damaged attributes lead to, it means this
            remedy = "ingest it again with --force" if self.ours else "have the tool that wrote it write it again"
            raise PlateError(f"{self.path} has damaged attributes ({error!r}): {remedy}") from error
        if layout is not None and len(self.sites):
            self.sites = screen.annotate(
                self.sites, layout if isinstance(layout, pd.DataFrame) else screen.read_layout(layout)
            )

    def _open_ours(self, ours: Attributes) -> None:
        self.sites = sites_from_json(ours["sites"])
        self.channels: list[str] = list(ours["channels"])
        channels, height, width = map(int, ours["shape"])
        if channels != len(self.channels) or height * width > images.MAX_PIXELS or not ours["provenance"]:
            raise ValueError("channels, shape or provenance are not those of a plate")
        names = [*self.sites[EXPERIMENT].unique(), *self.sites[PLATE].unique(), *self.sites[SITE].unique()]
        bad = [name for name in names if re.search(r"[/\\\0]|^\.", str(name))]
        if bad:
            raise ValueError(f"names that would lead out of a folder: {schema.first_few(bad)}")
        self.shape: Shape = (channels, height, width)
        self.provenance: list[dict[str, Any]] = list(ours["provenance"])
        self.set_aside = set_aside_frame(ours["set_aside"])
        self.name = store_name(*(self.sites if len(self.sites) else self.set_aside)[[EXPERIMENT, PLATE]].iloc[0])

    def _open_foreign(self, attributes: Attributes) -> None:
        intensity_range, z, t = self._rules
        found = foreign.describe(self.path, attributes.get("ome", attributes)["plate"], z, t)
        self._foreign = dict(zip(found.sites.index, found.fields))
        first = found.fields[0]
        foreign.check_choice(found.fields, z, t, self.path)
        try:
            images.to_uint8(np.zeros(0, first.dtype), intensity_range)
        except InputError as error:
            raise PlateError(f"{self.path}: {error}") from None
        self.sites = screen.conventions(found.sites)
        self.channels, self.shape = list(first.channels), first.shape
        self.set_aside = set_aside_frame(found.set_aside)
        rules = {"intensity_range": intensity_range and list(intensity_range), "z": z, "t": t}
        counts = {"sites": len(found.fields), "set_aside": len(found.set_aside)}
        self.provenance = [artifacts.step("open", rules, plates={self.name: counts})]

    def __repr__(self) -> str:
        return f"Plate({self.name}: {len(self.sites)} sites, {' x '.join(map(str, self.shape))})"

    def fields(self, chunk_size: int = 8, start: int = 0) -> Iterator[tuple[pd.DataFrame, np.ndarray]]:
        """Iterate over the fields in the order of `sites`.

        Parameters
        ----------
        chunk_size
            Fields at a time.
        start
            Position in `sites` of the first field: where work that was cut off goes on.

        Yields
        ------
        A slice of `sites` and its pixels (n, C, Y, X), uint8, n <= ``chunk_size``; each array is the caller's own.

        Raises
        ------
        PlateError
            A field is missing or damaged.
        """
        if chunk_size < 1:
            raise InputError(f"chunk_size is {chunk_size}: it must be 1 or more")
        if start < 0:
            raise InputError(f"start is {start}: it must be 0 or more")
        for first in range(start, len(self.sites), chunk_size):
            part = self.sites.iloc[first : first + chunk_size]
            pixels = np.empty((len(part), *self.shape), np.uint8)
            for out, site_id, well, site in zip(pixels, part.index, part[WELL], part[SITE], strict=True):
                self._read(site_id, field_path(well, site), out)
            yield part, pixels

    def _read(self, site_id: str, field: str, out: np.ndarray) -> None:
        intensity_range, z, t = self._rules
        remedy = "ingest the plate again with --force" if self.ours else "write the plate again"
        try:
            if not self.ours:
                field = str(self._foreign[site_id].array.relative_to(self.path))
                out[:] = images.to_uint8(self._foreign[site_id].read(z, t), intensity_range)
            elif not foreign.is_within(self.path / field / "0" / CHUNK, self.path):
                raise ValueError(foreign.LEAVES)
            elif not read_field(self.path / field, out):
                out[:] = _read_with_zarr(self.path / field / "0", self.shape)
        except Exception as error:  # whatever a codec raises, it means this
            raise PlateError(f"field {field} of {self.path} is missing or damaged ({error}): {remedy}") from error


def _read_with_zarr(array: Path, shape: Shape) -> np.ndarray:
    """Read a field of ours that another tool rewrote: other chunks, shards or codecs."""
    import zarr

    stored = zarr.open_array(store=array, mode="r")
    n_channels, *size = shape
    if stored.shape != (1, n_channels, 1, *size) or stored.dtype != np.uint8:
        raise ValueError(f"{stored.dtype} {stored.shape} instead of uint8 {(1, n_channels, 1, *size)}")
    foreign.refuse_damaged(stored, array)
    if stored.nchunks_initialized != stored.nchunks:
        raise FileNotFoundError(f"{stored.nchunks - stored.nchunks_initialized} of {stored.nchunks} chunks are missing")
    return np.asarray(stored[:]).reshape(shape)


def is_foreign(store: Path) -> bool:
    """Whether a store is another tool's plate, as far as its attributes can be read."""
    try:
        return UNS not in _attributes(store)
    except CellicaError:
        return False


def _attributes(store: Path) -> Attributes:
    """Attributes of a plate, ours or another tool's."""
    try:
        v3 = store / "zarr.json"
        attributes = json.loads(v3.read_bytes())["attributes"] if v3.exists() else foreign.metadata(store)
        if UNS in attributes or "wells" in attributes.get("ome", attributes)["plate"]:
            return attributes
        raise KeyError("wells")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlateError(
            f"{store} is not a plate: it has no readable OME-Zarr metadata of one ({error}); name a "
            "{experiment}_{plate}.zarr folder that `cellica ingest` wrote, or an OME-Zarr plate of another tool"
        ) from error
