"""Plates that other tools wrote: OME-Zarr 0.4 (Zarr v2) and 0.5 (Zarr v3), described from their metadata, read by field.

Only what is there is described: a well or field that the plate lists and does not hold, or that is unlike the others, is
set aside with the reason.
"""

import itertools
import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellica import images
from cellica.schema import (
    EXPERIMENT,
    PLATE,
    SITE,
    WELL,
    ImageError,
    InputError,
    PlateError,
    format_well,
    obs_names,
    parse_well,
)

AXES = "tczyx"
DTYPES = ("uint8", "uint16")
MAX_VALUES = 2**34  # of a field: more than any stack, less than metadata may claim
MAX_CHUNK = 2**28  # values of a chunk or shard, which is decoded whole
MAX_CHUNKS = 2**20  # of a field
WIDEST = 8  # times its pixels: what filters may make of a chunk before it is packed
LEAVES = "outside of the plate: a path or a link that leads out of it"
ZSTD = b"\x28\xb5\x2f\xfd"


class Field(NamedTuple):
    """A field's array: where it lies, its axes in order, its length along each of t, c, z, y, x, dtype, channels."""

    array: Path
    axes: str
    lengths: tuple[int, int, int, int, int]
    dtype: str
    channels: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, Y, X)."""
        return self.lengths[1], self.lengths[3], self.lengths[4]

    def read(self, z: images.Planes, t: int | None) -> np.ndarray:
        """Pixels (C, Y, X) as they are stored."""
        import zarr

        stored = zarr.open_array(store=self.array, mode="r")
        refuse_damaged(stored, self.array)
        n_t, n_channels, n_z, *size = self.lengths
        chosen: dict[str, int | slice] = {}
        if n_t > 1:
            chosen["t"] = t or 0
        if n_z > 1 and isinstance(z, int):
            chosen["z"], z = slice(z, z + 1), 0
        taken = np.asarray(stored[tuple(chosen.get(axis, slice(None)) for axis in self.axes)])
        left = [axis for axis in self.axes if not isinstance(chosen.get(axis), int)]
        planes = taken.transpose([left.index(axis) for axis in AXES if axis in left]).reshape(n_channels, -1, *size)
        return images.project((planes[:, i] for i in range(planes.shape[1])), z if planes.shape[1] > 1 else 0)

    def __str__(self) -> str:
        lengths = " x ".join(f"{n} {axis}" for axis, n in zip(AXES, self.lengths))
        return f"{lengths} {self.dtype}, channels {', '.join(self.channels)}"


class Description(NamedTuple):
    """What a plate of another tool holds: its sites with their fields, and rows of what was set aside."""

    sites: pd.DataFrame
    fields: list[Field]
    set_aside: Sequence[tuple[str, ...]]


def metadata(folder: Path) -> dict[str, Any]:
    """OME metadata of a group, whichever version; an OSError or ValueError where there is none."""
    v3 = folder / "zarr.json"
    attributes = json.loads(v3.read_bytes())["attributes"] if v3.exists() else json.loads(_v2(folder / ".zattrs"))
    return attributes.get("ome", attributes)


def describe(path: Path, plate: dict[str, Any], z: images.Planes = None, t: int | None = None) -> Description:
    """Describe a plate from its metadata.

    Parameters
    ----------
    path
        The store. ``{experiment}_{plate}.zarr`` names experiment and plate, apart at the last underscore; a store
        without one is an experiment of its own, of one plate.
    plate
        Its OME metadata ``plate``.
    z, t
        The planes and the time point that will be read: their pixels must be there.

    Raises
    ------
    PlateError
        Nothing of it can be read.
    """
    stem = path.name.removesuffix(".zarr").removesuffix(".ome")
    experiment, _, number = stem.rpartition("_")
    experiment, number = (experiment, number) if experiment and number else (stem, stem)
    rows: list[dict[str, Any]] = []
    fields: list[Field] = []
    faults: list[tuple[str, str, str, str]] = []
    for well, site, found in _fields(path, plate, z, t):
        if isinstance(found, Field):
            rows.append(
                {EXPERIMENT: experiment, PLATE: number, WELL: well, SITE: int(site) if site.isdigit() else site}
            )
            fields.append(found)
        else:
            faults.append((well, site, *found))
    if not fields:
        reasons = f"; the first: {faults[0][-1]}" if faults else ""
        raise PlateError(f"{path} holds no readable field: {len(faults)} are listed and set aside{reasons}")
    most = Counter(field._replace(array=Path()) for field in fields).most_common(1)[0][0]
    like = [field._replace(array=Path()) == most for field in fields]
    for row, field, alike in zip(rows, fields, like):
        if not alike:
            reason = f"differs from its plate: {field}, most fields are {most}"
            faults.append((row[WELL], str(row[SITE]), str(field.array), reason))
    sites = pd.DataFrame(itertools.compress(rows, like))
    if sites.duplicated([WELL, SITE]).any():
        raise PlateError(
            f"{path} lists a well and field twice: {sites[sites.duplicated([WELL, SITE])].iloc[0].to_dict()}"
        )
    sites.index = obs_names(sites)
    set_aside = [
        (f"{experiment}_{number}_{well}_{site}" if site else "", experiment, number, well, site, "", where, reason)
        for well, site, where, reason in faults
    ]
    return Description(sites, list(itertools.compress(fields, like)), set_aside)


def _fields(
    path: Path, plate: dict[str, Any], z: images.Planes, t: int | None
) -> Iterator[tuple[str, str, Field | tuple[str, str]]]:
    """Well, site, and the field, or (path, reason) where there is none."""
    for listed in plate["wells"]:
        folder = path / listed["path"]
        name = listed["path"].replace("/", "")
        try:
            well = format_well(*parse_well(name))
            if not is_within(folder, path):
                yield well, "", (str(folder), LEAVES)
                continue
            if not folder.is_dir():
                yield well, "", (str(folder), "well listed and absent")
                continue
            fields = [str(image["path"]) for image in metadata(folder)["well"]["images"]]
        except InputError:
            yield name, "", (str(folder), "well name not understood")
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            yield well, "", (str(folder), f"well without readable metadata: {error!r}")
            continue
        for site in fields:
            yield well, site, _field_or_reason(folder / site, path, z, t)


def is_within(inner: Path, folder: Path) -> bool:
    """Whether a path lies in a folder, wherever links lead."""
    try:
        return inner.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # links in a circle; a NUL
        return False


def _field_or_reason(folder: Path, plate: Path, z: images.Planes, t: int | None) -> Field | tuple[str, str]:
    if not is_within(folder, plate):
        return str(folder), LEAVES
    if not folder.is_dir():
        return str(folder), "field listed and absent"
    try:
        ome = metadata(folder)
        (multiscale, *_) = ome["multiscales"]
        array = folder / multiscale["datasets"][0]["path"]
        if not is_within(array, plate):
            return str(array), LEAVES
        shape, dtype = _shape_and_dtype(array)
        names = [axis["name"] if isinstance(axis, dict) else axis for axis in multiscale.get("axes", AXES)]
        axes = "".join(map(str.lower, names))
        if len(axes) != len(shape) or len(set(axes)) < len(axes) or not set("yx") <= set(axes) <= set(AXES):
            return str(array), f"axes not understood: {', '.join(names)} for {len(shape)} dimensions"
        if dtype not in DTYPES:
            return str(array), f"not a picture of 8 or 16 bits: {dtype}"
        lengths = dict(zip(axes, shape))
        if not (1 <= lengths["y"] * lengths["x"] <= images.MAX_PIXELS and math.prod(shape) <= MAX_VALUES):
            return str(array), f"too large, or empty: {' x '.join(map(str, shape))} values"
        n_channels = lengths.get("c", 1)
        labels = [str(channel.get("label", "")) for channel in ome.get("omero", {}).get("channels", [])]
        if len(labels) != n_channels or len(set(labels)) < n_channels or "" in labels:
            labels = [str(i) for i in range(n_channels)]
        all_lengths = tuple(lengths.get(axis, 1) for axis in AXES)
        field = Field(array, axes, all_lengths, dtype, tuple(labels))  # type: ignore[arg-type]
        missing = _channels_without_chunks(field, z, t)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
        return str(folder), f"field without readable metadata: {error!r}"
    return (str(array), f"no chunk of channel {', '.join(missing)}") if missing else field


def _shape_and_dtype(array: Path) -> tuple[tuple[int, ...], str]:
    v3 = array / "zarr.json"
    if v3.exists():
        spec = json.loads(v3.read_bytes())
        return tuple(spec["shape"]), str(spec["data_type"])
    spec = json.loads(_v2(array / ".zarray"))
    return tuple(spec["shape"]), np.dtype(spec["dtype"]).newbyteorder("=").name


def _v2(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"neither zarr.json nor {file.name} in {file.parent}") from error


def _channels_without_chunks(field: Field, z: images.Planes, t: int | None) -> list[str]:
    """Channels of which no chunk is there, of the planes and the time point that are asked for: zarr would read black."""
    import zarr

    stored = zarr.open_array(store=field.array, mode="r")
    sizes = dict(zip(field.axes, stored.shards or stored.chunks))
    n_chunks = math.prod(math.ceil(n / size) for n, size in zip(stored.shape, sizes.values()))
    if math.prod(sizes.values()) > MAX_CHUNK or n_chunks > MAX_CHUNKS:
        raise ValueError(
            f"{n_chunks} chunks of {math.prod(sizes.values())} values: at most {MAX_CHUNKS} of {MAX_CHUNK}"
        )
    lengths = dict(zip(field.axes, stored.shape))
    asked = {
        axis: i // sizes[axis] for axis, i in (("z", z), ("t", t)) if isinstance(i, int) and i < lengths.get(axis, 0)
    }
    there = set()
    for position, file in _chunks(stored, field.array):
        block = dict(zip(field.axes, position))
        if all(block[axis] == i for axis, i in asked.items()) and block.get("c", 0) not in there and file.exists():
            there.add(block.get("c", 0))
    return [name for i, name in enumerate(field.channels) if i // sizes.get("c", 1) not in there]


def refuse_damaged(stored: Any, folder: Path) -> None:
    """Raise a ValueError where a chunk is not what its header says, before it is decoded.

    One that Blosc packed may be shorter, and decoders then read on past its end; one of Blosc or Zstandard may claim to
    unpack to far more than its pixels, and decoders make room for that.
    """
    packers = [type(codec).__name__.lower() for codec in stored.compressors]
    blosc, zstd = (any(name in packer for packer in packers) for name in ("blosc", "zstd"))
    if stored.shards or not (blosc or zstd):
        return
    most = WIDEST * math.prod(stored.chunks) * stored.dtype.itemsize
    for _, file in _chunks(stored, folder):
        if file.exists():
            with open(file, "rb") as stream:
                head = stream.read(18)
            size = file.stat().st_size
            if blosc and (len(head) < 16 or struct.unpack_from("<I", head, 12)[0] != size):
                raise ValueError(f"chunk {file.relative_to(folder)} of {size} bytes is cut short")
            claimed = struct.unpack_from("<I", head, 4)[0] if blosc else _zstd_size(head)
            if claimed > most:
                raise ValueError(f"chunk {file.relative_to(folder)} claims to unpack to {claimed} bytes")


def _zstd_size(head: bytes) -> int:
    """Bytes that a frame of Zstandard claims to unpack to; 0 where it does not say (RFC 8878, 3.1.1.1)."""
    if not head.startswith(ZSTD) or len(head) < 5:
        return 0
    flag, single = head[4] >> 6, head[4] >> 5 & 1
    n_bytes = (single, 2, 4, 8)[flag]
    start = 5 + (0 if single else 1) + (0, 1, 2, 4)[head[4] & 3]
    return int.from_bytes(head[start : start + n_bytes], "little") + (256 if n_bytes == 2 else 0)


def _chunks(stored: Any, folder: Path) -> Iterator[tuple[tuple[int, ...], Path]]:
    """Position and file of each chunk (or shard) of an array."""
    counts = [math.ceil(n / size) for n, size in zip(stored.shape, stored.shards or stored.chunks)]
    for position in itertools.product(*map(range, counts)):
        yield position, folder / stored.metadata.encode_chunk_key(position)


def check_choice(fields: list[Field], z: images.Planes, t: int | None, path: Path) -> None:
    """Raise a PlateError that says what is there where planes or time points need a choice."""
    n_t, _, n_z, _, _ = fields[0].lengths
    try:
        images.choose({"z": n_z, "t": n_t}, z, t)
    except ImageError as error:
        raise PlateError(f"{path}: its fields hold {error}") from None
