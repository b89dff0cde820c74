"""Plates: ingest of PNGs and of parquet shards against decoding alone, reading against zarr-python and the machine."""

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

from cellica import plates, screen, shards, simulate
from speed.cases import Agreement, Case, Limit, Spec
from speed.measure import memcpy

FIELDS = {"full": (192, 512), "quick": (16, 512), "tiny": (4, 64)}  # and their size in pixels
SHARD_FIELDS = {"full": 48, "quick": 8, "tiny": 2}
REAL_WELLS = 308  # a plate of RxRx1
N_CHANNELS = 6
THREADS = 2
ALONE = "decoding alone"


def specs(scale: str, *, rxrx1: Path | None = None) -> list[Spec]:
    simulated, small = (dict(zip(("n", "size"), FIELDS[one])) for one in (scale, "tiny"))
    sharded, few = ({"n_sharded": SHARD_FIELDS[one]} for one in (scale, "tiny"))
    rounds = 2 if scale == "tiny" else 5
    found = [
        Spec("ingest", ingest_case, simulated, rounds, small=small),
        Spec("read", read_case, simulated, rounds, small=small),
        Spec("ingest shards", shards_case, simulated | sharded, rounds, small=small | few),
    ]
    if rxrx1:
        real = {"source": rxrx1, "n_wells": REAL_WELLS}
        found.append(Spec("ingest", real_case, real, rounds, small={**real, "n_wells": 2}))
    return found


# ------------------------------------------------------------------------------------------------ ingest


def ingest_case(folder: Path, seed: int, n: int, size: int) -> Case:
    return case_of(folder, simulated_screen(folder, n, size), f"{n} simulated fields of {N_CHANNELS} x {size} x {size}")


def real_case(folder: Path, seed: int, source: Path, n_wells: int) -> Case:
    """A plate of RxRx1's size, made of copies of the real sites that are whole in ``source``."""
    if not (folder / "real.csv").exists():
        write_real_screen(folder, source, n_wells)
    table = screen.read_table(folder / "real.csv")
    return case_of(folder, table, f"{len(table)} real fields of {N_CHANNELS} x 512 x 512")


def case_of(folder: Path, table: pd.DataFrame, size: str) -> Case:
    """Against decoding the same files by the same codec on as many threads."""
    files = table[[column for column in table if column.startswith("path_")]].to_numpy().ravel()

    def ours() -> plates.Plate:
        out = Path(tempfile.mkdtemp(dir=folder))
        return plates.Plate(plates.ingest(table, out, threads=THREADS).plates[0])

    def peer() -> None:
        decode_all(decode_png, files)

    def agreement(plate: plates.Plate, _: None) -> Agreement:
        read = (image for _, fields in plate.fields() for field in fields for image in field)
        return equal(zip(map(decode_png, files), read, strict=True))

    return Case(size, ours, peer, agreement, (Limit(ALONE),))


def shards_case(folder: Path, seed: int, n: int, size: int, n_sharded: int) -> Case:
    """The same pixels as JPEG 2000 in two parquet shards, the channels of a well in both."""
    fields = next(simulated_plate(folder, n, size).fields(n_sharded))[1]
    if not (folder / "core").exists():
        write_shards(folder, fields)
    table, encoded = screen.read_rxrx3_core(folder / "core"), read_shards(folder)

    def ours() -> plates.Plate:
        out = Path(tempfile.mkdtemp(dir=folder))
        shards.ingest(table, folder / "core", out, threads=THREADS)
        return plates.Plate(out / "gene-001_1.zarr")

    def peer() -> None:
        decode_all(imagecodecs.jpeg2k_decode, encoded)

    def agreement(plate: plates.Plate, _: None) -> Agreement:
        read = (image for _, fields in plate.fields() for field in fields for image in field)
        return equal(zip(map(imagecodecs.jpeg2k_decode, encoded), read, strict=True))

    return Case(f"{len(fields)} fields of {N_CHANNELS} x {size} x {size}", ours, peer, agreement, (Limit(ALONE),))


# ------------------------------------------------------------------------------------------------ reading


def read_case(folder: Path, seed: int, n: int, size: int) -> Case:
    """Decoding alone: of chunks that are in memory, as the store compressed them."""
    plate = simulated_plate(folder, n, size)
    places = [f"{site.well[0]}/{site.well[1:]}/{site.site}/0" for site in plate.sites.itertuples()]
    packed = [chunk_of(plate.path / place).read_bytes() for place in places]
    into = np.empty((N_CHANNELS, size, size), np.uint8)

    def ours() -> np.ndarray:
        return np.concatenate([sums(pixels) for _, pixels in plate.fields()])

    def peer() -> np.ndarray:
        group = zarr.open_group(plate.path, mode="r")
        return np.concatenate([sums(group[place][:, :, 0]) for place in places])

    def decode() -> None:
        for chunk in packed:
            imagecodecs.blosc_decode(chunk, out=into.data.cast("B"), numthreads=1)

    def agreement(mine: np.ndarray, theirs: np.ndarray) -> Agreement:
        group = zarr.open_group(plate.path, mode="r")
        read = (field for _, fields in plate.fields() for field in fields)
        pairs = equal(zip(read, (group[place][0, :, 0] for place in places), strict=True))
        return pairs if np.array_equal(mine, theirs) else pairs._replace(error=1.0)

    limits = (Limit(ALONE, decode), memcpy(n * into.nbytes))
    return Case(f"{n} fields of {N_CHANNELS} x {size} x {size}", ours, peer, agreement, limits)


def sums(pixels: np.ndarray) -> np.ndarray:
    """A pixel of each picture: what was read has been there."""
    return pixels.reshape(-1, N_CHANNELS, *pixels.shape[-2:])[:, :, 0, 0].ravel()


def chunk_of(array: Path) -> Path:
    """The one chunk of a field."""
    (chunk,) = (file for file in (array / "c").rglob("*") if file.is_file())
    return chunk


# ------------------------------------------------------------------------------------------------ their data


# Each is written by the first process that asks for it.


def simulated_screen(folder: Path, n: int, size: int) -> pd.DataFrame:
    """One plate, one site a well."""
    if not (folder / "screen").exists():
        n_controls = min(4, n // 2)
        sizes = {"n_experiments": 1, "n_plates": 1, "n_treatments": n - n_controls, "n_controls": n_controls}
        simulate.screen(folder / "screen", **sizes, image_size=size, random_state=0)
    return screen.read_rxrx1(folder / "screen")


def simulated_plate(folder: Path, n: int, size: int) -> plates.Plate:
    return plates.Plate(plates.ingest(simulated_screen(folder, n, size), folder / "plate", threads=THREADS).plates[0])


def write_real_screen(folder: Path, source: Path, n_wells: int) -> None:
    sites: dict[tuple[Path, str], list[Path]] = {}
    for file in sorted(source.rglob("*_w?.png")):
        sites.setdefault((file.parent, file.stem[:-3]), []).append(file)
    whole = [files for files in sites.values() if len(files) == N_CHANNELS]
    if not whole:
        raise SystemExit(f"--rxrx1 {source}: no site with {N_CHANNELS} images *_w1.png to *_w6.png lies there")
    (folder / "real").mkdir()
    rows = []
    for i in range(n_wells):
        row: dict[str, object] = {"experiment": "real", "plate": "1", "well": f"{chr(65 + i // 24)}{i % 24 + 1:02d}"}
        for channel, file in enumerate(whole[i % len(whole)], 1):
            row[f"path_w{channel}"] = str(shutil.copy(file, folder / "real" / f"{i}_{file.name}"))
        rows.append({**row, "perturbation": "p"})
    pd.DataFrame(rows).to_csv(folder / "real.csv", index=False)


def write_shards(folder: Path, fields: np.ndarray) -> None:
    wells = [f"gene-001_1_{chr(65 + i // 24)}{i % 24 + 1:02d}" for i in range(len(fields))]
    parts = {"treatment": "EMPTY_control", "gene": "EMPTY_control", "SMILES": None, "concentration": None}
    (folder / "core").mkdir()
    pd.DataFrame({"well_id": wells, **parts, "perturbation_type": "CRISPR", "cell_type": "HUVEC"}).to_csv(
        folder / "core" / "metadata_rxrx3_core.csv", index=False
    )
    with ThreadPoolExecutor() as pool:
        pictures = fields.reshape(-1, *fields.shape[2:])
        encoded = list(pool.map(lambda image: imagecodecs.jpeg2k_encode(image, level=20), pictures))
    keys = [f"gene-001/Plate1/{well.split('_')[2]}_s1_{channel}" for well in wells for channel in range(1, 7)]
    for i in range(2):
        shard = pa.table({"__key__": keys[i::2], "jp2": encoded[i::2]})
        pq.write_table(shard, folder / "core" / f"train-{i:05d}-of-00002.parquet")


def read_shards(folder: Path) -> list[bytes]:
    """The images of both shards, in the order of wells and channels."""
    parts = [pq.read_table(file)["jp2"].to_pylist() for file in sorted((folder / "core").glob("*.parquet"))]
    return [image for pair in zip(*parts, strict=True) for image in pair]


def decode_png(path: str) -> np.ndarray:
    return imagecodecs.png_decode(Path(path).read_bytes())


def decode_all(decode: Callable[[Any], np.ndarray], items: Iterable[Any]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(decode, items):
            pass


def equal(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Agreement:
    exact = all(itertools.starmap(np.array_equal, pairs))
    return Agreement(f"pixels equal: {exact}", float(not exact), 0.0)
