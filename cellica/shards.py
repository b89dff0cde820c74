"""Plates from RxRx3-core's images: parquet shards in which the channels of a well lie anywhere, read once.

The shards are streamed into a spool, one file a plate, and each plate is then written from its file. A ledger says how much
of the spool the finished shards have filled: what a killed run wrote past that is cut off, and its shard is read again.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cellica import artifacts, hcs, images, ingestion, progress
from cellica.artifacts import PathLike
from cellica.hcs import set_aside_frame
from cellica.ingestion import ABSENT, Images, IngestReport, Range, Rules
from cellica.plates import by_plate, check_run, check_sites, table_sha256, without_paths
from cellica.schema import (
    EXPERIMENT,
    PLATE,
    DiskFullError,
    InputError,
    MissingFileError,
    first_few,
    format_well,
    parse_well,
)

KEY, IMAGE = "__key__", "jp2"
TEXTS, BYTES = (pa.string(), pa.large_string()), (pa.binary(), pa.large_binary())
CHANNELS = tuple(f"w{i}" for i in range(1, 7))
MOST_UNPACKED = 20  # times its size: compressed images become no smaller by being packed again
BATCH = 16  # rows decoded from parquet at a time
READ_AHEAD = 2**20  # bytes; without it a whole column of a row group is read at once
BUFFER = 2**28  # bytes of images held before they are appended to the spool
LEDGER = "ledger.json"
_KEY = re.compile(
    r"(?P<experiment>[^/]+)/Plate(?P<plate>[^/]+)/(?P<well>[A-Za-z]+\d+)_s(?P<site>\d+)_(?P<channel>[1-6])"
)
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.parquet$")
_RECORD = struct.Struct("<II")  # lengths of the name and of the image that follow it


class Key(NamedTuple):
    """What a row's key says."""

    experiment: str
    plate: str
    site_id: str
    channel: str


def ingest(
    screen: pd.DataFrame,
    source: PathLike,
    out_dir: PathLike,
    *,
    plates: Collection[str] | None = None,
    intensity_range: Range | None = None,
    pixel_size: float | None = None,
    threads: int = 2,
    keep_empty: bool = False,
    update: bool = False,
    force: bool = False,
) -> IngestReport:
    """Write ``out_dir/{experiment}_{plate}.zarr`` from parquet shards, in one pass over them.

    Parameters
    ----------
    screen
        Site table of the whole data set (`cellica.screen.read_rxrx3_core`).
    source
        Folder of the shards, or one with a folder ``data`` of shards. Columns ``__key__``
        (``gene-032/Plate7/D27_s1_3``) and ``jp2`` (bytes, or a struct that has ``bytes``).
    out_dir
        Folder of the plates. While the shards are read it also holds the spool, at most as large as the shards; a plate's
        part of it goes when the plate is finished.
    plates
        Names of the plates to write, ``{experiment}_{plate}``; all of the table by default.
    intensity_range, pixel_size, threads, keep_empty, update, force
        As for `cellica.plates.ingest`.

    Returns
    -------
    Report. An image that is broken, occurs in different versions, or has a key that the table does not name is set
    aside, and so is a site without an image. Equal copies of an image are used once.

    Raises
    ------
    MissingFileError, InputError
        There are no shards, or some are damaged or empty, or none of the first shard's keys is in the table.
    """
    out_dir, rules = Path(out_dir), Rules(intensity_range, pixel_size=pixel_size)
    check_run(out_dir, rules, threads)
    sites = without_paths(screen)
    groups = _groups(sites, plates)
    files = find_shards(source)
    listing = _listing(files)
    inputs = _inputs(groups, listing)
    again: ingestion.Again = "all" if force else "outdated" if update else "none"
    finished = ingestion.finished_plates(groups, out_dir, inputs, rules, again)
    unfinished = [name for name in groups if name not in finished]
    with artifacts.writing(out_dir):
        artifacts.make_folder(out_dir)
    folder = out_dir / f".shards-{hashlib.sha256(f'{listing} {sorted(groups)}'.encode()).hexdigest()[:12]}.spool"
    notes = [*_completeness(files), *_other_spools(folder)]
    with ingestion.owned(folder):
        spool = Spool(folder, unfinished)
        if unfinished:
            spool.fill(files, sites, all_plates=plates is None)
        report = ingestion.run(
            groups,
            out_dir,
            lambda name: spool.open_images(name, groups[name]),
            inputs,
            rules,
            again,
            finished,
            threads=threads,
            keep_empty=keep_empty,
            notes=notes,
            elsewhere=spool.elsewhere(),
        )
        shutil.rmtree(folder)
    return report


def plan(
    screen: pd.DataFrame, source: PathLike, out_dir: PathLike, *, plates: Collection[str] | None = None, **rules: Any
) -> pd.DataFrame:
    """What `ingest` would do, as `cellica.plates.plan` says it; ``rules`` are its intensity_range and pixel_size."""
    checked = Rules(**rules)
    check_run(Path(out_dir), checked, 1)
    groups = _groups(without_paths(screen), plates)
    return ingestion.plan(groups, Path(out_dir), _inputs(groups, _listing(find_shards(source))), checked)


def _groups(sites: pd.DataFrame, plates: Collection[str] | None) -> dict[str, pd.DataFrame]:
    """Site tables of the plates that are wanted, by name."""
    check_sites(sites)
    everything = by_plate(sites)
    if absent := sorted(set(plates or ()) - set(everything)):
        raise InputError(f"{len(absent)} plates are not in the screen table: {first_few(absent)}")
    return {name: group for name, group in everything.items() if plates is None or name in plates}


def _listing(files: list[Path]) -> str:
    return hashlib.sha256("\n".join(f"{file.name} {file.stat().st_size}" for file in files).encode()).hexdigest()


def _inputs(groups: Mapping[str, pd.DataFrame], listing: str) -> dict[str, dict[str, str]]:
    return {
        name: {f"screen table of {name}": table_sha256(group), "names and sizes of the shards": listing}
        for name, group in groups.items()
    }


# ---------------------------------------------------------------------------------------------- shards


def find_shards(source: PathLike) -> list[Path]:
    """Parquet shards of a folder, or of the folder ``data`` in it; errors name all that are damaged or empty."""
    root = artifacts.require_file(source, "folder of the shards")
    files = sorted((root / "data").glob("*.parquet")) or sorted(root.glob("*.parquet"))
    if not files:
        raise MissingFileError(f"no parquet shards in {str(root)!r}: looked for data/*.parquet and *.parquet")
    shards, others, bad = [], [], []
    for file in files:
        try:
            with pq.ParquetFile(file) as opened:
                schema, n_rows = opened.schema_arrow, opened.metadata.num_rows
                unpacked = sum(opened.metadata.row_group(i).total_byte_size for i in range(opened.num_row_groups))
        except (pa.ArrowException, OSError) as error:
            bad.append(f"{file.name} ({error})")
            continue
        if not {KEY, IMAGE} <= set(schema.names):
            others.append(f"{file.name} ({first_few(schema.names, 3)})")
        elif wrong := _wrong_types(schema):
            bad.append(f"{file.name} ({wrong})")
        elif n_rows == 0:
            bad.append(f"{file.name} (no rows)")
        elif unpacked > MOST_UNPACKED * file.stat().st_size + READ_AHEAD:
            bad.append(f"{file.name} (claims to unpack to {unpacked} bytes: images do not pack so well)")
        else:
            shards.append(file)
    if bad:
        raise InputError(
            f"{len(bad)} of {len(files)} shards are damaged, empty or of other types; fetch them again: {', '.join(bad[:5])}"
            + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        )
    if not shards:
        raise InputError(f"no shard in {root} has the columns {KEY} and {IMAGE}: {', '.join(others[:5])}")
    if others:
        progress.say(f"{len(others)} parquet files hold no images and are passed over: {', '.join(others[:5])}")
    return shards


def _wrong_types(schema: pa.Schema) -> str:
    key, image = schema.field(KEY).type, schema.field(IMAGE).type
    if pa.types.is_struct(image):
        image = image.field("bytes").type if image.get_field_index("bytes") >= 0 else image
    return "" if key in TEXTS and image in BYTES else f"{KEY} is {key} and {IMAGE} {image}, not text and bytes"


def parse_key(key: str) -> Key | None:
    """Read a key, ``gene-032/Plate7/D27_s1_3``; None where it is none.

    >>> parse_key("gene-032/Plate7/D27_s1_3")
    Key(experiment='gene-032', plate='7', site_id='gene-032_7_D27_1', channel='w3')
    """
    parts = _KEY.fullmatch(key)
    if not parts:
        return None
    try:
        well = format_well(*parse_well(parts["well"]))
    except InputError:
        return None
    experiment, plate = parts["experiment"], parts["plate"]
    return Key(experiment, plate, f"{experiment}_{plate}_{well}_{int(parts['site'])}", f"w{parts['channel']}")


def _rows(file: Path) -> Iterator[tuple[str, bytes]]:
    """Key and image of each row, "" and b"" where they are missing; a batch in memory at a time."""
    with pq.ParquetFile(file, buffer_size=READ_AHEAD, pre_buffer=False) as opened:
        for batch in opened.iter_batches(batch_size=BATCH, columns=[KEY, IMAGE], use_threads=False):
            column = batch.column(IMAGE)
            if pa.types.is_struct(column.type):
                column = pc.struct_field(column, "bytes")
            for key, image in zip(batch.column(KEY).to_pylist(), column):
                yield key or "", image.as_py() or b""


def _completeness(files: list[Path]) -> list[str]:
    numbers = [match.groups() for file in files if (match := _SHARD.search(file.name))]
    total = max((int(of) for _, of in numbers), default=0)
    there = len({number for number, _ in numbers})
    return (
        [f"{there} of {total} shards are here: wells whose images lie in the others are set aside"]
        if there < total
        else []
    )


# ---------------------------------------------------------------------------------------------- the spool


class Spool:
    """Images of a data set, brought together by plate: one file a plate, and the ledger of what is complete.

    Parameters
    ----------
    folder
        Where the spool lies; taken up where it was left, if it holds what is needed.
    plates
        Names of the plates to write.
    """

    def __init__(self, folder: Path, plates: Collection[str]) -> None:
        self.folder, self.plates = folder, set(plates)
        folder.mkdir(exist_ok=True)
        try:
            self.ledger: dict[str, Any] = json.loads((folder / LEDGER).read_bytes())
            sizes = self.ledger["sizes"]
            taken = {name for name, size in sizes.items() if size and not self._file(name).exists()}
            if not self.plates <= set(self.ledger["plates"]) - taken:
                raise ValueError("it holds other plates, or these were written from it and are gone")
        except (OSError, ValueError, KeyError):
            shutil.rmtree(folder)
            folder.mkdir()
            self.ledger = {"plates": sorted(plates), "shards": [], "sizes": {}, "strays": {}, "unknown": {}}
        for file in folder.glob("*.images"):
            os.truncate(file, self.ledger["sizes"].get(file.stem, 0))

    def fill(self, files: list[Path], sites: pd.DataFrame, *, all_plates: bool) -> None:
        """Stream the shards that the ledger does not have into the spool.

        Parameters
        ----------
        sites
            Site table of the whole data set.
        all_plates
            Whether to account for keys that belong to no plate of the table.
        """
        plate_of = dict(zip(sites.index, map(hcs.store_name, sites[EXPERIMENT], sites[PLATE])))
        left = [file for file in files if file.name not in self.ledger["shards"]]
        for file in progress.track(left, "shards"):
            try:
                self._take(file, plate_of, all_plates)
            except DiskFullError:
                raise
            except (pa.ArrowException, OSError) as error:
                what = str(error).partition("\n")[0]
                raise InputError(
                    f"shard {file} is damaged ({what}): fetch it again; {len(self.ledger['shards'])} finished shards are kept"
                ) from error
            self.ledger["shards"].append(file.name)
            artifacts.write_text(json.dumps(self.ledger), self.folder / LEDGER, force=True)

    def _take(self, file: Path, plate_of: Mapping[str, str], all_plates: bool) -> None:
        """Append the images of one shard; the ledger knows of them when the whole shard is done."""
        known = set(plate_of.values())
        strays: dict[str, list[str]] = {}
        unknown: dict[str, list[Any]] = {}
        buffers: dict[str, bytearray] = {}
        n_matched = held = 0
        for text, image in _rows(file):
            key, record = parse_key(text), f"{file.name}:{text}"
            plate = hcs.store_name(key.experiment, key.plate) if key else ""
            if key and key.site_id in plate_of:
                n_matched += 1
                if plate in self.plates:
                    name = record.encode()
                    buffers.setdefault(plate, bytearray()).extend(_RECORD.pack(len(name), len(image)) + name + image)
                    held += len(image)
            elif key and plate not in known:
                unknown.setdefault(plate, [key.experiment, key.plate, 0])[2] += 1
            else:
                strays.setdefault(plate, []).append(record)
            if held > BUFFER:
                held = self._append(buffers)
        if not n_matched and not self.ledger["shards"]:
            shutil.rmtree(self.folder)
            raise InputError(
                f"none of the keys in {file} is in the screen table, as {first_few([*strays.values(), *unknown], 1)}: "
                f"is it the table of this data set? It has {first_few(plate_of)}"
            )
        self._append(buffers)
        for plate, records in strays.items():
            if plate in self.plates or (all_plates and not plate):
                self.ledger["strays"].setdefault(plate, []).extend(records)
        for plate, (experiment, number, count) in unknown.items() if all_plates else ():
            self.ledger["unknown"].setdefault(plate, [experiment, number, 0])[2] += count

    def _append(self, buffers: dict[str, bytearray]) -> int:
        """Empty the buffers into the plates' files."""
        for plate, records in buffers.items():
            with artifacts.writing(self._file(plate)), open(self._file(plate), "ab") as stream:
                stream.write(records)
            self.ledger["sizes"][plate] = self.ledger["sizes"].get(plate, 0) + len(records)
        buffers.clear()
        return 0

    @contextlib.contextmanager
    def open_images(self, plate: str, sites: pd.DataFrame) -> Iterator[Images]:
        """Images of a plate, as `cellica.ingestion.run` asks for them; its part of the spool goes when it is written."""
        file = self._file(plate)
        spooled = file.read_bytes() if file.exists() else b""
        versions: dict[tuple[str, str], dict[bytes, str]] = {}
        for record, image in _records(spooled):
            key = parse_key(record.partition(":")[2])
            assert key
            versions.setdefault((key.site_id, key.channel), {}).setdefault(image, record)
        names = pd.DataFrame("", index=sites.index, columns=list(CHANNELS), dtype=object)
        faults = {(site_id, channel): ABSENT for site_id in sites.index for channel in CHANNELS}
        for (site_id, channel), found in versions.items():
            names.loc[site_id, channel] = first_few(found.values()) if len(found) > 1 else next(iter(found.values()))
            faults[site_id, channel] = (
                f"in different versions: {len(found)} images of one key" if len(found) > 1 else ""
            )

        def decode(site_id: str, channel: str) -> np.ndarray:
            return images.decode_bytes(next(iter(versions[site_id, channel])))

        experiment, number = (str(sites[column].iloc[0]) for column in (EXPERIMENT, PLATE))
        strays = [
            ("", experiment, number, "", "", "", record, "not in the table: no such well or site")
            for record in self.ledger["strays"].get(plate, [])
        ]
        yield Images(names, faults, decode, strays)
        file.unlink(missing_ok=True)

    def elsewhere(self) -> dict[str, pd.DataFrame]:
        """What belongs to no plate of the table, as rows of the table of what was set aside."""
        rows = {
            name: [("", experiment, plate, "", "", "", "", f"plate not in the table: {count} images in the shards")]
            for name, (experiment, plate, count) in self.ledger["unknown"].items()
        }
        rows[""] = [
            ("", "", "", "", "", "", record, "key not understood") for record in self.ledger["strays"].get("", [])
        ]
        return {name: set_aside_frame(found) for name, found in rows.items() if found}

    def _file(self, plate: str) -> Path:
        return self.folder / f"{plate}.images"


def _records(spooled: bytes) -> Iterator[tuple[str, bytes]]:
    at = 0
    while at < len(spooled):
        n_name, n_image = _RECORD.unpack_from(spooled, at)
        at += _RECORD.size
        yield spooled[at : at + n_name].decode(), spooled[at + n_name : at + n_name + n_image]
        at += n_name + n_image


def _other_spools(folder: Path) -> list[str]:
    others = [other for other in folder.parent.glob(".shards-*.spool") if other != folder]
    return [
        f"{other} is what an unfinished run with other plates left: start that run again to finish it, or delete the folder"
        for other in others
    ]
