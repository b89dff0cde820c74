"""From images to finished plates, wherever the images come from: decode, judge, write, list what was set aside.

A plate appears under its name only when it is whole. One process writes a plate; others wait for it.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from filelock import FileLock, Timeout

from cellica import artifacts, hcs, images, progress
from cellica.hcs import SET_ASIDE, Plate, set_aside_frame
from cellica.schema import (
    CONTROL,
    EXPERIMENT,
    PLATE,
    SITE,
    WELL,
    ImageError,
    InputError,
    PlateError,
    first_few,
)

SET_ASIDE_FILE = "set_aside.csv"
LOCKS = ".locks"
PLAN = ("name", EXPERIMENT, PLATE, "wells", "sites", "state", "sha256")
CLOCKS_DIFFER = 60.0  # seconds, of what a file system says when things were written
ABSENT = "no image in the shards"
ENOUGH_TO_JUDGE = 8  # sites after which a screen that lacks a rule for 16 bits or for stacks is refused
SAMPLE = 96  # fields of a plate, evenly spaced, whose histogram gives percentiles
INTENSITY_FROM = ("all", "controls")

Range = tuple[float, float]
Again = Literal["none", "outdated", "all"]  # finished plates that are written again
Faults = Mapping[tuple[str, str], str]


class Spec(NamedTuple):
    """What all images of a plate have in common."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape))} {self.dtype}"


class Images(NamedTuple):
    """Where the images of one plate are found.

    Attributes
    ----------
    names
        What each image is called, sites x channels, "" where there is none.
    faults
        Faults known before an image is opened, by site and channel.
    decode
        Gives the pixels (Y, X) of a site and channel, or raises an ImageError.
    unlisted
        Further rows of the table of what was set aside: images that belong to no site.
    """

    names: pd.DataFrame
    faults: Faults
    decode: Callable[[str, str], np.ndarray]
    unlisted: Sequence[tuple[str, ...]] = ()


@dataclasses.dataclass(frozen=True)
class Rules:
    """How images become the pixels of a plate; parameters as in `cellica.plates.ingest`."""

    intensity_range: Range | None = None
    intensity_percentiles: Range | None = None
    intensity_from: str = "all"
    z: images.Planes = None
    t: int | None = None
    pixel_size: float | None = None

    def check(self) -> None:
        """Raise an InputError where a rule cannot be followed."""
        images.check_planes(self.z, self.t)
        images.to_uint8(np.zeros(0, np.uint8), self.intensity_range)
        if self.intensity_from not in INTENSITY_FROM:
            raise InputError(f"intensity_from is {self.intensity_from!r}: choose one of {', '.join(INTENSITY_FROM)}")
        if self.intensity_percentiles is not None:
            low, high = self.intensity_percentiles
            if not 0 <= low < high <= 100:
                raise InputError(f"intensity_percentiles are ({low}, {high}): 0 <= low < high <= 100 is needed")
            if self.intensity_range is not None:
                raise InputError("both intensity_range and intensity_percentiles are given: choose one rule")
        elif self.intensity_from != "all":
            raise InputError("intensity_from says where percentiles come from: give intensity_percentiles with it")
        if self.pixel_size is not None and not (math.isfinite(self.pixel_size) and self.pixel_size > 0):
            raise InputError(f"pixel_size is {self.pixel_size}: give the side of a pixel in micrometres, above 0")

    def parameters(self) -> dict[str, Any]:
        """Rules that were given, as provenance keeps them."""
        given = {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}
        if self.intensity_percentiles is None:
            del given["intensity_from"]
        return {key: value for key, value in given.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class IngestReport:
    """What an ingest left behind.

    Attributes
    ----------
    plates
        Finished plates of the screen, in its order.
    skipped
        Those of them that were finished before and were not touched.
    outdated
        Those of the skipped that the screen table or the options would now make otherwise, and plates of before that
        stayed because no image of theirs can be used now.
    n_sites
        Sites in ``plates``.
    set_aside
        One row an image that keeps its site out or belongs to no site (``site_id, experiment, plate, well, site,
        channel, path, reason``), or one row a plate without any image.
    notes
        What else should be known.
    """

    plates: list[Path]
    skipped: list[Path]
    outdated: list[Path]
    n_sites: int
    set_aside: pd.DataFrame
    notes: list[str] = dataclasses.field(default_factory=list)

    def summary(self) -> str:
        """Counts of plates and sites, and of what was set aside by reason, with the first paths."""
        lines = [f"{len(self.plates)} plates, {self.n_sites} sites"]
        if self.skipped:
            lines.append(
                f"{len(self.skipped)} plates were finished earlier and skipped (--force, force=True writes them again)"
            )
        if self.outdated:
            names = first_few(store.stem for store in self.outdated)
            lines.append(
                f"{len(self.outdated)} of these are not what the screen table and options now ask for: {names}"
            )
        for reason, rows in self.set_aside.groupby(self.set_aside["reason"].str.split(":").str[0]):
            sites, paths = rows["site_id"], rows["path"][rows["path"] != ""]
            images_of = f" of {sites.nunique()} sites" if sites.all() else ""
            what = f"{len(rows)} images{images_of}" if sites.all() or len(paths) else f"{len(rows)} plates"
            lines.append(f"set aside {what}: {reason}" + (f" ({first_few(paths, 2)})" if len(paths) else ""))
        return "\n".join([*lines, *self.notes])


# ---------------------------------------------------------------------------------------------- all plates


def run(
    plates: Mapping[str, pd.DataFrame],
    out_dir: Path,
    open_images: Callable[[str], contextlib.AbstractContextManager[Images]],
    inputs: Mapping[str, Mapping[str, str]],
    rules: Rules,
    again: Again,
    finished: dict[str, Plate],
    *,
    threads: int,
    keep_empty: bool = False,
    notes: Sequence[str] = (),
    elsewhere: Mapping[str, pd.DataFrame] | None = None,
) -> IngestReport:
    """Write the plates that are not finished, and bring ``set_aside.csv`` up to date.

    Parameters
    ----------
    plates
        Site table of each plate, by name.
    open_images
        Gives the images of a plate by its name.
    inputs
        Names and SHA-256 of what each plate is made from.
    again, finished
        Which finished plates to write again, and those that need not be, as `finished_plates` gives them.
    keep_empty
        Write a store without sites where a plate has none that can be used.
    elsewhere
        What was set aside that belongs to none of the plates.
    """
    stores = {name: out_dir / f"{name}.zarr" for name in plates}
    _refuse_without_controls({name: sites for name, sites in plates.items() if name not in finished}, rules)
    with artifacts.writing(out_dir):
        artifacts.make_folder(out_dir)
    set_aside = {name: plate.set_aside for name, plate in finished.items()}
    n_sites = {name: len(plate.sites) for name, plate in finished.items()}
    kept: list[Path] = []
    try:
        for name, sites in plates.items():
            if name in finished:
                _sweep(stores[name])
                progress.say(
                    f"{stores[name]} is finished already and was skipped (--force, force=True writes it again)"
                )
                continue
            with owned(stores[name]):
                if meanwhile := finished_plates({name: sites}, out_dir, inputs, rules, again).get(name):
                    finished[name] = meanwhile
                    n_sites[name], set_aside[name] = len(meanwhile.sites), meanwhile.set_aside
                    continue
                with open_images(name) as found:
                    n_sites[name], set_aside[name] = _write_plate(
                        stores[name], sites, found, inputs[name], rules, threads=threads, keep_empty=keep_empty
                    )
                if not n_sites[name] and _has_sites(stores[name]):
                    kept.append(stores[name])
    finally:
        _write_set_aside(out_dir, {**(elsewhere or {}), **set_aside})
    return IngestReport(
        plates=[store for name, store in stores.items() if n_sites[name]],
        skipped=[stores[name] for name in finished],
        outdated=[
            *(stores[name] for name, plate in finished.items() if not _made_from(plate, inputs[name], rules)),
            *kept,
        ],
        n_sites=sum(n_sites.values()),
        set_aside=pd.concat([*(set_aside[name] for name in plates), *(elsewhere or {}).values()], ignore_index=True),
        notes=[
            *notes,
            *(f"{store}: no image of it can be used now, and the plate of before stays as it was" for store in kept),
        ],
    )


def plan(
    plates: Mapping[str, pd.DataFrame], out_dir: Path, inputs: Mapping[str, Mapping[str, str]], rules: Rules
) -> pd.DataFrame:
    """What an ingest would find, one row a plate; parameters as of `run`."""
    rows = []
    for name, sites in plates.items():
        state, store = "to do", out_dir / f"{name}.zarr"
        if store.exists():
            plate = finished_plate(store)
            right = "finished" if _made_from(plate, inputs[name], rules) else "outdated"
            state = right if len(plate.sites) else "without sites"
        digest = hashlib.sha256(json.dumps(inputs[name], sort_keys=True).encode()).hexdigest()
        key = sites[EXPERIMENT].iloc[0], sites[PLATE].iloc[0]
        rows.append((name, *key, sites[WELL].nunique(), len(sites), state, digest))
    return pd.DataFrame(rows, columns=list(PLAN))


def _has_sites(store: Path) -> bool:
    return store.exists() and len(finished_plate(store).sites) > 0


@contextlib.contextmanager
def owned(store: Path) -> Iterator[None]:
    """Be the one process that writes a store; wait for another, and remove what killed ones left.

    The lock falls with the process that holds it.
    """
    lock = FileLock(store.parent / LOCKS / f"{store.name}.lock")
    with artifacts.writing(store):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress.say(f"another process is writing {store}: waiting for it")
            lock.acquire()
        try:
            _remove_left(store)
            yield
        finally:
            lock.release()


def _sweep(store: Path) -> None:
    """Remove what a run left that was killed when its plate had the name already; not while another writes it again."""
    if any(store.parent.glob(f".{store.name}.*.part")):
        with contextlib.suppress(Timeout), FileLock(store.parent / LOCKS / f"{store.name}.lock", timeout=0):
            _remove_left(store)


def _remove_left(store: Path) -> None:
    for left in store.parent.glob(f".{store.name}.*.part"):
        shutil.rmtree(left, ignore_errors=True)


def finished_plates(
    plates: Mapping[str, pd.DataFrame],
    out_dir: Path,
    inputs: Mapping[str, Mapping[str, str]],
    rules: Rules,
    again: Again,
) -> dict[str, Plate]:
    """Plates that need not be written: they are there, with sites (others are tried again), and not to be written again.

    Raises
    ------
    PlateError
        A store of that name is another tool's, or of another experiment and plate; or it is damaged, and not to be written
        again.
    """
    found = {}
    for name, sites in plates.items():
        store = out_dir / f"{name}.zarr"
        if store.exists():
            try:
                found[name] = finished_plate(store)
            except PlateError:
                if again != "all" or hcs.is_foreign(store):
                    raise
            else:
                _refuse_other(found[name], sites)
    if again == "all":
        return {}
    return {
        name: plate
        for name, plate in found.items()
        if len(plate.sites) and (again == "none" or _made_from(plate, inputs[name], rules))
    }


def _refuse_other(plate: Plate, sites: pd.DataFrame) -> None:
    key = tuple(str(sites[column].iloc[0]) for column in (EXPERIMENT, PLATE))
    if key != (plate.experiment, plate.plate):
        raise PlateError(
            f"{plate.path} holds plate {plate.plate!r} of experiment {plate.experiment!r}, and is asked to hold plate {key[1]!r} of "
            f"{key[0]!r}: choose another folder for one of the two"
        )


def finished_plate(store: Path) -> Plate:
    """Open a plate that an ingest wrote; a PlateError where the store is another tool's."""
    plate = Plate(store)
    if not plate.ours:
        raise PlateError(f"{store} is a plate of another tool: choose another folder for the plates")
    return plate


def _made_from(plate: Plate, inputs: Mapping[str, str], rules: Rules) -> bool:
    """Whether a finished plate is what these inputs and rules would make."""
    made = plate.provenance[-1]
    return made["inputs"] == inputs and made["parameters"] == rules.parameters()


def _refuse_without_controls(plates: Mapping[str, pd.DataFrame], rules: Rules) -> None:
    if rules.intensity_from == "controls":
        without = [name for name, sites in plates.items() if not (sites[CONTROL] == "negative").any()]
        if without:
            raise InputError(
                f"{len(without)} plates have no negative control to take percentiles from ({first_few(without)}): mark "
                "controls in the table (control = negative), or take all wells: leave out --intensity-from (intensity_from)"
            )


# ---------------------------------------------------------------------------------------------- one plate


def _write_plate(
    store: Path,
    sites: pd.DataFrame,
    found: Images,
    inputs: Mapping[str, str],
    rules: Rules,
    *,
    threads: int,
    keep_empty: bool,
) -> tuple[int, pd.DataFrame]:
    """Write the whole sites of one plate; return their number and the table of what was set aside.

    Without a whole site nothing is written, or, to be kept, a store without sites; never in place of one that has some.
    """
    with tempfile.TemporaryDirectory(prefix=f".{store.name}.", suffix=".part", dir=store.parent) as scratch:
        folder = Path(scratch) / store.name
        ranges, sample = _intensity_ranges(store.stem, sites, found, rules, threads)
        if ranges:
            spec, faults = _write_fields(folder, sites, found, ranges, rules, threads)
            set_aside = _set_aside_table(sites, found, faults)
            kept = sites.loc[[site_id for site_id in sites.index if site_id not in faults]]
        else:
            reason = f"no image to take percentiles from: {len(sample)} sites tried"
            spec, kept = None, sites.iloc[:0]
            set_aside = set_aside_frame([_whole_plate(sites, reason), *found.unlisted])
        if (spec and len(kept)) or (keep_empty and not _has_sites(store)):
            counts: dict[str, Any] = {"sites": len(kept), "set_aside": len(sites) - len(kept)}
            if len(set_aside):
                counts["reasons"] = _by_reason(set_aside)
            used = {}
            if ranges and rules.intensity_percentiles:
                used = {"intensity_ranges": ranges, "intensity_sample": sample}
                progress.say(
                    f"{store.stem}: 0 and 255 are "
                    + ", ".join(f"{c} {r[0]} and {r[1]}" for c, r in ranges.items() if r)
                )
            step = artifacts.step("ingest", rules.parameters(), inputs, plates={store.stem: counts}, **used)
            ours = {
                "sites": hcs.sites_to_json(kept),
                "channels": list(found.names.columns),
                "shape": [len(found.names.columns), *(spec.shape if spec and len(kept) else (0, 0))],
                "set_aside": set_aside.to_dict("records"),
                "provenance": [step],
            }
            hcs.write_groups(folder, kept, ours)
            with artifacts.atomic(store, force=True) as whole:
                os.replace(folder, whole)
    return len(kept), set_aside


def _intensity_ranges(
    plate: str, sites: pd.DataFrame, found: Images, rules: Rules, threads: int
) -> tuple[dict[str, Range | None], list[str]]:
    """Range of each channel, and the sites whose histogram gave it; no ranges where a channel has not one image."""
    channels = list(map(str, found.names.columns))
    if rules.intensity_percentiles is None:
        return dict.fromkeys(channels, rules.intensity_range), []
    asked = sites.index[sites[CONTROL] == "negative"] if rules.intensity_from == "controls" else sites.index
    sample = [str(asked[i]) for i in np.unique(np.linspace(0, len(asked) - 1, SAMPLE).round().astype(int))]
    counts = {channel: np.zeros(2**16, np.int64) for channel in channels}
    with ThreadPoolExecutor(threads) as pool:
        for histograms in progress.track(
            pool.map(lambda site: _histograms(site, channels, found), sample), f"{plate} intensities", len(sample)
        ):
            for channel, histogram in histograms.items():
                counts[channel] += histogram
    if not all(histogram.any() for histogram in counts.values()):
        return {}, sample
    return {channel: percentiles(counts[channel], rules.intensity_percentiles) for channel in channels}, sample


def _histograms(site_id: str, channels: Sequence[str], found: Images) -> dict[str, np.ndarray]:
    """How often each value occurs, of the channels that can be read."""
    histograms = {}
    for channel in channels:
        image = _image_or_reason(site_id, channel, found)
        if not isinstance(image, str):
            histograms[channel] = np.bincount(image.ravel(), minlength=2**16)
    return histograms


def percentiles(histogram: np.ndarray, low_high: Range) -> Range:
    """Values below or at which so many percent of the pixels lie, the upper one at least 1 above the lower.

    >>> percentiles(np.array([0, 5, 4, 0, 1]), (10, 100))
    (1, 4)
    """
    cumulated = np.cumsum(histogram)
    low, high = (int(np.searchsorted(cumulated, max(share / 100 * cumulated[-1], 1))) for share in low_high)
    return low, max(high, low + 1)


def _write_fields(
    folder: Path,
    sites: pd.DataFrame,
    found: Images,
    ranges: Mapping[str, Range | None],
    rules: Rules,
    threads: int,
) -> tuple[Spec | None, dict[str, dict[str, str]]]:
    """Write fields and judge them by what most images of the plate are; return that, and faults by site and channel."""

    def write(site_id: str) -> dict[str, Spec | str]:
        pictures = {channel: _image_or_reason(site_id, channel, found) for channel in ranges}
        return _write_field(fields[site_id], pictures, ranges, rules.pixel_size)

    fields = {
        site_id: folder / hcs.field_path(well, site)
        for site_id, well, site in zip(sites.index, sites[WELL], sites[SITE], strict=True)
    }
    seen: dict[str, dict[str, Spec | str]] = {}
    with ThreadPoolExecutor(threads) as pool:
        try:
            results = progress.track(pool.map(write, fields), folder.stem, total=len(fields))
            for site_id, result in zip(fields, results, strict=True):
                seen[site_id] = result
                if len(seen) == ENOUGH_TO_JUDGE:
                    _common_spec(seen, ranges, folder.stem)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

    spec = _common_spec(seen, ranges, folder.stem)
    faults: dict[str, dict[str, str]] = {}
    for site_id, result in seen.items():
        wrong = {
            channel: value if isinstance(value, str) else f"differs from its plate: {value}, most images are {spec}"
            for channel, value in result.items()
            if value != spec
        }
        if wrong:
            faults[site_id] = wrong
            hcs.remove_field(fields[site_id])
    return spec, faults


def _image_or_reason(site_id: str, channel: str, found: Images) -> np.ndarray | str:
    try:
        return found.faults.get((site_id, channel)) or found.decode(site_id, channel)
    except ImageError as error:
        return str(error)


def _write_field(
    field: Path,
    pictures: Mapping[str, np.ndarray | str],
    ranges: Mapping[str, Range | None],
    pixel_size: float | None,
) -> dict[str, Spec | str]:
    """Write one field if its images are there and alike; return each image's spec, or the reason why there is none."""
    specs = {
        channel: value if isinstance(value, str) else Spec(value.shape, str(value.dtype))
        for channel, value in pictures.items()
    }
    pixels = {channel: value for channel, value in pictures.items() if not isinstance(value, str)}
    alike = len(pixels) == len(pictures) and len(set(specs.values())) == 1
    if alike and all(ranges[channel] or image.dtype == np.uint8 for channel, image in pixels.items()):
        data = np.stack([images.to_uint8(image, ranges[channel]) for channel, image in pixels.items()])
        hcs.write_field(field, data, tuple(pictures), pixel_size)
    return specs


def _common_spec(
    seen: Mapping[str, Mapping[str, Spec | str]], ranges: Mapping[str, Range | None], plate: str
) -> Spec | None:
    """What most decoded images are; refuse 16 bits and stacks without a rule."""
    values = [value for result in seen.values() for value in result.values()]
    specs = Counter(value for value in values if isinstance(value, Spec))
    if not specs:
        stacks = [value for value in values if isinstance(value, str) and value.startswith(images.STACK)]
        if stacks:
            raise InputError(f"plate {plate}: images hold {stacks[0]}")
        return None
    spec = specs.most_common(1)[0][0]
    try:
        images.to_uint8(np.zeros(0, spec.dtype), next(iter(ranges.values())))
    except InputError as error:
        raise InputError(f"plate {plate}: {error}") from None
    return spec


# ---------------------------------------------------------------------------------------------- what is set aside


def _set_aside_table(sites: pd.DataFrame, found: Images, faults: Mapping[str, Mapping[str, str]]) -> pd.DataFrame:
    """One row a faulty image; one row for the whole plate where not a single image is there."""
    absent = ("file absent", "no path in the table", ABSENT)
    reasons = [reason for channels in faults.values() for reason in channels.values()]
    if len(reasons) == found.names.size and all(reason in absent for reason in reasons):
        reason = f"no image of the plate: {len(sites)} sites are absent"
        return set_aside_frame([_whole_plate(sites, reason), *found.unlisted])
    keys = {site_id: key for site_id, *key in sites[[EXPERIMENT, PLATE, WELL, SITE]].itertuples()}
    rows = [
        (site_id, *keys[site_id], channel, found.names.at[site_id, channel], reason)  # noqa: PD008
        for site_id, channels in faults.items()
        for channel, reason in channels.items()
    ]
    return set_aside_frame([*rows, *found.unlisted])


def _whole_plate(sites: pd.DataFrame, reason: str) -> tuple[str, ...]:
    experiment, plate = (str(sites[column].iloc[0]) for column in (EXPERIMENT, PLATE))
    return ("", experiment, plate, "", "", "", "", reason)


def _by_reason(set_aside: pd.DataFrame) -> dict[str, int]:
    """How many rows of the table have each reason, without its details."""
    return {str(reason): int(n) for reason, n in set_aside["reason"].str.split(":").str[0].value_counts().items()}


def read_set_aside(out_dir: Path) -> pd.DataFrame:
    """What earlier runs set aside, empty without any; an InputError where the file is not one that an ingest wrote."""
    file = out_dir / SET_ASIDE_FILE
    if not file.exists():
        return set_aside_frame()
    try:
        return pd.read_csv(file, dtype=str, keep_default_na=False)[list(SET_ASIDE)]
    except (ValueError, KeyError, OSError) as error:
        raise InputError(
            f"{file} is not what an ingest wrote ({error}): move it away, or choose another folder for the plates"
        ) from error


def _what_is_there(store: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """What a plate's own store says, which another run may have written meanwhile; ``rows`` where it has no sites."""
    with contextlib.suppress(PlateError, OSError):
        plate = finished_plate(store)
        return plate.set_aside if len(plate.sites) else rows
    return rows


def _write_set_aside(out_dir: Path, judged: Mapping[str, pd.DataFrame]) -> None:
    """Bring ``set_aside.csv`` up to date: this run's plates, other finished plates, and earlier ones without a store."""
    file = out_dir / SET_ASIDE_FILE
    with owned(file):
        tables = {name: _what_is_there(out_dir / f"{name}.zarr", rows) for name, rows in judged.items()}
        since = file.stat().st_mtime - CLOCKS_DIFFER if file.exists() else 0.0
        for store in out_dir.glob("*.zarr"):
            # another tool's store, or a link that leads nowhere
            with contextlib.suppress(PlateError, OSError):
                if store.stem not in tables and store.stat().st_ctime >= since:  # finished after the file was written
                    tables[store.stem] = finished_plate(store).set_aside
        for key, rows in read_set_aside(out_dir).groupby([EXPERIMENT, PLATE], sort=False):
            tables.setdefault(hcs.store_name(*key) if any(key) else "", rows)
        everything = pd.concat([tables[name] for name in sorted(tables)] or [set_aside_frame()], ignore_index=True)
        artifacts.write_table(everything[list(SET_ASIDE)], file, force=True)
