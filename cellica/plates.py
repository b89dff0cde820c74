"""Plates from image files: each plate of a screen table becomes one OME-Zarr store, written once and read by field."""

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cellica import hcs, images, ingestion, schema
from cellica.artifacts import PathLike
from cellica.hcs import Plate
from cellica.ingestion import Faults, Images, IngestReport, Range, Rules
from cellica.schema import EXPERIMENT, PLATE, SITE, WELL, ImageError, InputError, MissingFileError, first_few
from cellica.screen import PATH, validate

__all__ = ["IngestReport", "Plate", "ingest"]

IMAGE_SUFFIXES = (".png", ".tif", ".tiff", ".jp2", ".j2k")
STAT_THREADS = 8  # asking a network file system about files is waiting, not work
_NAME = re.compile(r"[A-Za-z0-9][\w.+ -]*")


def ingest(
    screen: pd.DataFrame,
    out_dir: PathLike,
    *,
    intensity_range: Range | None = None,
    intensity_percentiles: Range | None = None,
    intensity_from: str = "all",
    z: images.Planes = None,
    t: int | None = None,
    pixel_size: float | None = None,
    count_unlisted: bool = False,
    threads: int = 2,
    keep_empty: bool = False,
    update: bool = False,
    force: bool = False,
) -> IngestReport:
    """Write ``out_dir/{experiment}_{plate}.zarr`` for each plate of a screen table.

    A site with an image that is missing or broken, that another image is too, or of another shape or depth than most
    images of its plate is set aside with the reason, and the rest goes on. A plate appears under its name only when it is
    whole.

    Parameters
    ----------
    screen
        One row a site, index ``{experiment}_{plate}_{well}_{site}``, with the columns experiment, plate, well, site and
        one column ``path_{channel}`` a channel (a path, or a tuple of the paths of a z-stack's planes); further columns are
        kept with the plate.
    out_dir
        Folder of the plates; made if need be.
    intensity_range
        ``(low, high)`` that become 0 and 255 (`cellica.images.to_uint8`). 8-bit images need no rule.
    intensity_percentiles
        Instead: percentiles ``(low, high)`` that become 0 and 255, of each channel and plate for itself. They come from the
        exact histogram of all fields, or of ``ingestion.SAMPLE`` evenly spaced ones where there are more; the plate's
        provenance names the fields and the ranges. Intensities of different plates are then not comparable.
    intensity_from
        Fields that give the percentiles: "all", or those of negative "controls".
    z
        What to take of z-stacks: "max", "mean", or the number of a plane, counted from 0.
    t
        What to take of time series: the number of a time point, counted from 0.
    pixel_size
        Side of a pixel in micrometres, for the metadata of the plates; None where it is not known.
    count_unlisted
        Also list the image files that lie in the folders of a plate's images and that the table does not name.
    threads
        Fields decoded and written at a time.
    keep_empty
        Where no image of a plate can be used, write a plate without sites, so that later stages can say so; it is tried
        again by the next ingest, and takes no plate's place. Without it nothing is written.
    update
        Write finished plates again that the screen table or the options would now make otherwise.
    force
        Write plates again that are finished; without it they are skipped.

    Returns
    -------
    Report; ``out_dir/set_aside.csv`` holds its table for all plates of the folder, earlier runs included.

    Raises
    ------
    InputError
        The table or an option is not usable, or images need a rule (16 bits, stacks) and there is none.
    MissingFileError
        Not one of the images is there, and ``keep_empty`` is False.
    PlateError
        A store of that name is there, and is not a plate of ours.
    """
    out_dir = Path(out_dir)
    rules = Rules(intensity_range, intensity_percentiles, intensity_from, z, t, pixel_size)
    _validate(screen, out_dir, rules, threads)
    paths, sites = _paths(screen), without_paths(screen)
    plates, inputs = by_plate(sites), _inputs(sites, paths)
    again: ingestion.Again = "all" if force else "outdated" if update else "none"
    finished = ingestion.finished_plates(plates, out_dir, inputs, rules, again)
    asked = sites.index[~_store_names(sites).isin(list(finished))]
    faults = _listed_faults(paths, asked[:0] if keep_empty else asked)

    @contextlib.contextmanager
    def open_images(name: str) -> Iterator[Images]:
        rows = paths.loc[plates[name].index]
        cells = {(str(site), channel): rows[channel].iloc[i] for channel in rows for i, site in enumerate(rows.index)}
        unlisted = _unlisted(rows, plates[name]) if count_unlisted else []
        names = rows.map(lambda path: path if isinstance(path, str) else first_few(path, 1))
        yield Images(names, faults, lambda site, channel: _decode(cells[site, channel], z, t), unlisted)

    return ingestion.run(
        plates, out_dir, open_images, inputs, rules, again, finished, threads=threads, keep_empty=keep_empty
    )


def plan(screen: pd.DataFrame, out_dir: PathLike, **rules: Any) -> pd.DataFrame:
    """What `ingest` would do: its checks of everything that can be known before an image is opened, and a table.

    Parameters
    ----------
    screen, out_dir
        As for `ingest`.
    rules
        Its options on intensities, planes and pixels.

    Returns
    -------
    One row a plate: ``name``, ``experiment``, ``plate``, numbers of ``wells`` and ``sites``, ``state`` ("to do", "finished", "outdated": finished, of
    another table or other options, "without sites") and ``sha256`` of what is known of its sites and paths, which
    changes whenever the plate has to be written again.

    Raises
    ------
    InputError, MissingFileError, PlateError
        As `ingest`.
    """
    checked = Rules(**rules)
    _validate(screen, Path(out_dir), checked, 1)
    paths, sites = _paths(screen), without_paths(screen)
    table = ingestion.plan(by_plate(sites), Path(out_dir), _inputs(sites, paths), checked)
    finished = table["name"][table["state"] == "finished"]
    _listed_faults(paths, sites.index[~_store_names(sites).isin(finished)])
    return table


def _inputs(sites: pd.DataFrame, paths: pd.DataFrame) -> dict[str, dict[str, str]]:
    """Names and SHA-256 of what each plate is made from."""
    return {
        name: {f"screen table of {name}": table_sha256(group.join(paths.loc[group.index]))}
        for name, group in by_plate(sites).items()
    }


def _decode(path: str | tuple[str, ...], z: images.Planes, t: int | None) -> np.ndarray:
    """Decode an image, or the planes of a stack; the ImageError names a file only where there are several."""
    if isinstance(path, str):
        try:
            return images.decode(path, z, t)
        except ImageError as error:
            raise ImageError(str(error).removeprefix(f"{path}: ")) from error.__cause__
    images.choose({"z": len(path), "t": 1}, z, None)
    try:
        return images.project((images.decode(plane, None, t) for plane in path), z)
    except ImageError as error:
        raise ImageError(f"a plane of the stack: {error}") from error


def by_plate(sites: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Site table of each plate, by its name."""
    groups = sites.groupby([EXPERIMENT, PLATE], sort=False, observed=True)
    return {hcs.store_name(*key): group for key, group in groups}  # type: ignore[misc]


def table_sha256(table: pd.DataFrame) -> str:
    """SHA-256 of a table as CSV."""
    return hashlib.sha256(table.to_csv().encode(errors="surrogateescape")).hexdigest()


# ---------------------------------------------------------------------------------------------- files


def _listed_faults(paths: pd.DataFrame, asked: pd.Index) -> Faults:
    """Faults that show before an image is opened: no path, or one file for two images; by site and channel.

    Files are told apart by what they are, not by how their paths are spelled. Where none of the sites ``asked`` for has
    a file, that is an error.
    """
    listed = [(site_id, channel) for site_id in paths.index for channel in paths.columns]
    cells = paths.to_numpy(dtype=object).ravel()
    identity = _identities(sorted({file for cell in cells for file in _files(cell)}))
    wanted = [file for cell in paths.loc[asked].to_numpy(dtype=object).ravel() for file in _files(cell)]
    if len(asked) and not any(identity[file] for file in wanted):
        first = f", the first is {wanted[0]}" if wanted else ""
        raise MissingFileError(
            f"none of the {len(wanted)} image files of the screen table is there{first}: check the folder"
        )
    users: dict[object, list[int]] = {}
    for i, cell in enumerate(cells):
        for file in _files(cell):
            users.setdefault(identity[file] or file, []).append(i)
    faults = {listed[i]: "no path in the table" for i, cell in enumerate(cells) if not _files(cell)}
    for positions in users.values():
        for i in positions if len(positions) > 1 else ():
            others = first_few((" ".join(listed[k]) for k in positions if k != i), 2)
            faults[listed[i]] = f"file listed more than once: also for {others}"
    return faults


def _files(cell: str | tuple[str, ...]) -> tuple[str, ...]:
    return cell if isinstance(cell, tuple) else (cell,) if cell else ()


def _identities(files: list[str]) -> dict[str, object]:
    """What each path leads to, the same however it is spelled; None where nothing is there."""

    def identity(file: str) -> object:
        try:
            found = os.stat(file)
        except (OSError, ValueError):
            return None
        return (found.st_dev, found.st_ino) if found.st_ino else os.path.realpath(file)

    parts = [files[i : i + 1000] for i in range(0, len(files), 1000)]
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        found = itertools.chain.from_iterable(pool.map(lambda part: [identity(file) for file in part], parts))
        return dict(zip(files, found))


def _unlisted(paths: pd.DataFrame, sites: pd.DataFrame) -> list[tuple[str, ...]]:
    """Rows of the set-aside table: image files beside the plate's own that the table does not name."""
    listed = {os.path.realpath(file) for cell in paths.to_numpy(dtype=object).ravel() for file in _files(cell)}
    found: set[str] = set()
    for folder in {os.path.dirname(file) for file in listed}:
        with contextlib.suppress(OSError):
            found |= {entry.path for entry in os.scandir(folder) if entry.name.lower().endswith(IMAGE_SUFFIXES)}
    experiment, plate = (str(sites[column].iloc[0]) for column in (EXPERIMENT, PLATE))
    return [("", experiment, plate, "", "", "", file, "file not in the table") for file in sorted(found - listed)]


# ---------------------------------------------------------------------------------------------- validation


def _validate(table: pd.DataFrame, out_dir: Path, rules: Rules, threads: int) -> None:
    """Everything that can be known before an image is opened."""
    check_run(out_dir, rules, threads)
    if table.empty:
        raise InputError("the screen table is empty: there is nothing to ingest")
    if not any(str(column).startswith(PATH) for column in table.columns):
        raise InputError(
            f"the screen table names no images: it needs a column {PATH}CHANNEL for each channel, "
            f"and has {', '.join(map(str, table.columns))}"
        )
    if PATH in table.columns:
        raise InputError(f"a column of images is named {PATH!r}, without a channel: name it {PATH}CHANNEL")
    check_sites(without_paths(table))


def check_run(out_dir: Path, rules: Rules, threads: int) -> None:
    """Raise an InputError where the folder or an option cannot be used."""
    if out_dir.exists() and not out_dir.is_dir():
        raise InputError(f"{out_dir} is a file: name a folder for the plates")
    if threads < 1:
        raise InputError(f"threads is {threads}: it must be 1 or more")
    rules.check()
    ingestion.read_set_aside(out_dir)


def check_sites(sites: pd.DataFrame) -> None:
    """Raise an InputError with all rows of a site table that cannot become fields of plates."""
    validate(sites)
    stores = sites[[EXPERIMENT, PLATE]].astype(str).drop_duplicates()
    names = [*stores[EXPERIMENT].unique(), *stores[PLATE].unique()]
    shared = _store_names(stores)
    fields = [*zip(sites[EXPERIMENT], sites[PLATE], map(hcs.field_path, sites[WELL], sites[SITE]))]
    faults: Mapping[str, Sequence[Any]] = {
        "site ids (the index) that are not {experiment}_{plate}_{well}_{site}": [
            site_id for site_id, right in zip(sites.index, schema.obs_names(sites)) if site_id != right
        ],
        "experiments or plates that cannot name a file: use letters, digits and inside also . _ + - and spaces": [
            name for name in names if not _NAME.fullmatch(name)
        ],
        "sites that are neither numbers nor letters and digits": [
            site for site in sites[SITE].unique() if not re.fullmatch("[A-Za-z0-9]+", str(site))
        ],
        "different plates that would share a store": list(shared[shared.duplicated()]),
        "sites listed under two spellings of their well": list(sites.index[pd.Series(fields).duplicated()]),
    }
    found = [f"{len(values)} {what}: {first_few(values)}" for what, values in faults.items() if len(values)]
    if found:
        raise InputError("the screen table cannot be ingested; correct these rows:\n  " + "\n  ".join(found))


def _store_names(sites: pd.DataFrame) -> pd.Series:
    return sites[EXPERIMENT].astype(str) + "_" + sites[PLATE].astype(str)


def without_paths(table: pd.DataFrame) -> pd.DataFrame:
    """A screen table without the columns of image files."""
    return table[[column for column in table.columns if not str(column).startswith(PATH)]]


def _paths(table: pd.DataFrame) -> pd.DataFrame:
    """Paths as str (or tuples of str), one column a channel, "" where there is none."""
    paths = table[[column for column in table.columns if str(column).startswith(PATH)]].astype(object)
    paths = paths.where(paths.notna(), "").map(
        lambda cell: tuple(map(str, cell)) if isinstance(cell, tuple) else str(cell)
    )
    return paths.rename(columns=lambda column: column.removeprefix(PATH))
