"""Speed and exactness against the peers: medians of interleaved rounds in one run, as ratios."""

import argparse
import dataclasses
import itertools
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anndata as ad
import imagecodecs
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from sklearn.decomposition import FastICA

from cellica import __version__, encoder, ica, images, plates, retrieval, screen, shards, simulate

Row = tuple[str, str, float, float, str]
GROUPS = ("ica", "scores", "plates", "encoder")


def medians(ours: Callable[[], object], peer: Callable[[], object], rounds: int) -> tuple[float, float]:
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for call, kept in zip((ours, peer), times):
            start = time.perf_counter()
            call()
            kept.append(time.perf_counter() - start)
    return float(np.median(times[0])), float(np.median(times[1]))


def ica_round(n: int, k: int, seed: int) -> tuple[list[float], list[float], int]:
    """Times and mean matched correlations with the non-Gaussian sources, ours and the peer's, and our iterations.

    The peer runs in float64, since in float32 it breaks down on Gaussian sources.
    """
    rng = np.random.default_rng(seed)
    non_gaussian = k - k // 3
    sources = np.hstack([rng.laplace(size=(n, non_gaussian)), rng.normal(size=(n, k - non_gaussian))])
    x = sources @ rng.normal(size=(k, k))
    sources = sources[:, :non_gaussian].astype(np.float32)
    model = ica.ICA(random_state=seed)
    peer = FastICA(whiten="unit-variance", whiten_solver="eigh", max_iter=25, random_state=seed)
    times, correlations = [], []
    for estimator, rows in ((model, x.astype(np.float32)), (peer, x)):
        start = time.perf_counter()
        found = estimator.fit_transform(rows)
        times.append(time.perf_counter() - start)
        correlations.append(float(ica.matched_correlation(sources, found.astype(np.float32)).mean()))
    return times, correlations, model.n_iter_


def bench_ica(n: int, k: int, seeds: int) -> Row:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times, correlations, iterations = zip(*(ica_round(n, k, seed) for seed in range(seeds)))
    ratios = [peer_s / ours_s for ours_s, peer_s in times]
    (ours_q, peer_q), (ours_s, peer_s) = np.min(correlations, axis=0), np.median(times, axis=0)
    quality = (
        f"correlation {ours_q:.4f}, peer {peer_q:.4f} (least of {seeds} seeds); ratio {min(ratios):.2f} to "
        f"{max(ratios):.2f}, median {np.median(ratios):.2f}; {max(iterations)} iterations, peer 25"
    )
    return "ica", f"{n} x {k}, a third Gaussian", float(ours_s), float(peer_s), quality


def bench_picard(n: int = 20_000, k: int = 64) -> Row:
    from picard import picard

    rng = np.random.default_rng(0)
    x = rng.laplace(size=(n, k)) @ rng.normal(size=(k, k))
    x32 = x.astype(np.float32)
    model = ica.ICA(solver="picard", random_state=0)
    found: dict[str, np.ndarray] = {}

    def peer() -> None:
        whitening, rotation, *_ = picard(x.T, random_state=0, tol=1e-4)
        found["unmixing"] = rotation @ whitening

    times = medians(lambda: model.fit(x32), peer, 3)
    agreement = np.abs(found["unmixing"] @ model.mixing_)
    agreement /= np.linalg.norm(agreement, axis=1, keepdims=True)
    return "ica, picard", f"{n} x {k}", *times, f"least cosine of the two unmixings {agreement.max(axis=1).min():.5f}"


def bench_average_precision(n: int, d: int = 128) -> Row:
    from copairs.map import average_precision

    rng = np.random.default_rng(0)
    obs = pd.DataFrame({"perturbation": [f"p{i // 4}" for i in range(n)], "batch": [f"b{i % 4}" for i in range(n)]})
    obs.index = obs.index.astype(str)
    x = rng.normal(size=(n, d)).astype(np.float32) + rng.normal(size=(n // 4, d)).repeat(4, axis=0).astype(np.float32)
    adata = ad.AnnData(x, obs=obs)
    pairs = {"pos_sameby": ["perturbation"], "pos_diffby": ["batch"], "neg_sameby": [], "neg_diffby": ["perturbation"]}
    found: dict[str, np.ndarray] = {}

    def ours() -> None:
        found["ours"] = retrieval.average_precision(adata, **pairs)["average_precision"].to_numpy()

    def peer() -> None:
        table = average_precision(obs, x, **pairs, progress_bar=False)
        found["peer"] = table["average_precision"].to_numpy()

    times = medians(ours, peer, 3)
    return (
        "average precision",
        f"{n} x {d}",
        *times,
        f"largest difference {np.abs(found['ours'] - found['peer']).max():.1e}",
    )


def bench_plates(folder: Path) -> Iterator[Row]:
    """A plate of simulated images."""
    table = simulate.screen(
        folder / "screen", n_experiments=1, n_plates=1, n_treatments=188, n_controls=4, image_size=512, random_state=0
    )
    yield bench_ingest(folder, table, "simulated")
    plate = plates.Plate(next((folder / "plates-0").glob("*.zarr")))

    def ours_read() -> None:
        for _ in plate.fields():
            pass

    def peer_read() -> None:
        group = zarr.open_group(plate.path, mode="r")
        for site in plate.sites.itertuples():
            group[f"{site.well[0]}/{site.well[1:]}/{site.site}/0"][0]

    yield "read", f"{len(plate.sites)} fields of 6 x 512 x 512", *medians(ours_read, peer_read, 5), ""
    yield bench_shards(folder, next(plate.fields(48))[1])


def bench_real_ingest(folder: Path, source: Path) -> Row:
    """A plate of RxRx1's size, 308 wells, made of copies of the real sites that are whole in ``source``."""
    sites: dict[tuple[Path, str], list[Path]] = {}
    for file in sorted(source.rglob("*_w?.png")):
        sites.setdefault((file.parent, file.stem[:-3]), []).append(file)
    whole = [files for files in sites.values() if len(files) == 6]
    (folder / "real").mkdir()
    rows = []
    for i in range(308):
        row: dict[str, object] = {"experiment": "real", "plate": "1", "well": f"{chr(65 + i // 24)}{i % 24 + 1:02d}"}
        for channel, file in enumerate(whole[i % len(whole)], 1):
            row[f"path_w{channel}"] = str(shutil.copy(file, folder / "real" / f"{i}_{file.name}"))
        rows.append({**row, "perturbation": "p"})
    pd.DataFrame(rows).to_csv(folder / "real.csv", index=False)
    return bench_ingest(folder / "of-real", screen.read_table(folder / "real.csv"), "real")


def bench_ingest(folder: Path, table: pd.DataFrame, what: str) -> Row:
    """Against decoding the same files alone, by the same codec on as many threads."""
    files = table[[column for column in table if column.startswith("path_")]].to_numpy().ravel()
    fresh = (folder / f"plates-{i}" for i in itertools.count())
    cpu: dict[str, list[float]] = {"ours": [], "peer": []}

    def decode(path: str) -> np.ndarray:
        return imagecodecs.png_decode(Path(path).read_bytes())

    def peer_decode() -> None:
        start = time.process_time()
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(decode, files):
                pass
        cpu["peer"].append(time.process_time() - start)

    def ours_ingest() -> None:
        start = time.process_time()
        plates.ingest(table, next(fresh), threads=2)
        cpu["ours"].append(time.process_time() - start)

    times = medians(ours_ingest, peer_decode, 5)
    plate = plates.Plate(next((folder / "plates-0").glob("*.zarr")))
    images_read = (image for _, fields in plate.fields() for field in fields for image in field)
    exact = all(np.array_equal(decode(path), image) for path, image in zip(files, images_read, strict=True))
    share = np.median(cpu["peer"]) / np.median(cpu["ours"])
    size = f"{len(table)} {what} fields of 6 x 512 x 512"
    return "ingest", size, *times, f"pixels equal: {exact}; {share:.2f} in CPU time"


def bench_shards(folder: Path, fields: np.ndarray) -> Row:
    """The same pixels as JPEG 2000 in two parquet shards, the channels of a well in both."""
    wells = [f"gene-001_1_{chr(65 + i // 24)}{i % 24 + 1:02d}" for i in range(len(fields))]
    parts = {"treatment": "EMPTY_control", "gene": "EMPTY_control", "SMILES": None, "concentration": None}
    (folder / "core").mkdir()
    pd.DataFrame({"well_id": wells, **parts, "perturbation_type": "CRISPR", "cell_type": "HUVEC"}).to_csv(
        folder / "core" / "metadata_rxrx3_core.csv", index=False
    )
    with ThreadPoolExecutor() as pool:
        encoded = list(pool.map(lambda image: imagecodecs.jpeg2k_encode(image, level=20), fields.reshape(-1, 512, 512)))
    keys = [f"gene-001/Plate1/{well.split('_')[2]}_s1_{channel}" for well in wells for channel in range(1, 7)]
    for i in range(2):
        shard = pa.table({"__key__": keys[i::2], "jp2": encoded[i::2]})
        pq.write_table(shard, folder / "core" / f"train-{i:05d}-of-00002.parquet")
    table = screen.read_rxrx3_core(folder / "core")
    fresh = (folder / f"shards-{i}" for i in itertools.count())

    def ours() -> None:
        shards.ingest(table, folder / "core", next(fresh), threads=2)

    def peer() -> None:
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(imagecodecs.jpeg2k_decode, encoded):
                pass

    times = medians(ours, peer, 5)
    found = np.concatenate([pixels for _, pixels in plates.Plate(folder / "shards-0" / "gene-001_1.zarr").fields()])
    exact = all(
        np.array_equal(imagecodecs.jpeg2k_decode(image), pixels)
        for image, pixels in zip(encoded, found.reshape(-1, *found.shape[2:]))
    )
    return "ingest shards", f"{len(fields)} fields of 6 x 512 x 512", *times, f"pixels equal: {exact}"


def bench_encoder(folder: Path) -> Iterator[Row]:
    """OpenPhenom's geometry with random weights, on the crops of two fields; from the plate too."""
    import torch
    from plain_camae import PlainCAMAE

    table = simulate.screen(
        folder / "two", n_experiments=1, n_plates=1, n_treatments=1, n_controls=1, image_size=512, random_state=0
    )
    plate = plates.Plate(plates.ingest(table, folder / "of-two").plates[0])
    exact = encoder.load("openphenom", "random", device="cpu")
    peer = PlainCAMAE(384, 12, 6, 256, 16, 11).eval()
    peer.load_state_dict(exact.model.state_dict())
    crops = images.crops(next(plate.fields(2))[1], exact.img_size)
    size = f"{len(crops)} crops of 6 x 256 x 256"
    found: dict[str, np.ndarray] = {}

    @torch.inference_mode()
    def plain() -> None:
        found["peer"] = peer(torch.from_numpy(crops)).numpy()

    for dtype in ("float32", "bfloat16"):
        ours = dataclasses.replace(exact, dtype=dtype)
        if dtype != "float32" and not multiplies_faster(torch.bfloat16):
            print(f"{dtype} is left out: this CPU multiplies it more slowly than float32", file=sys.stderr)
            continue

        def embed(ours: encoder.Encoder = ours) -> None:
            found["ours"] = ours(crops).numpy()

        times = medians(embed, plain, 9)
        norms = np.linalg.norm(found["ours"], axis=1) * np.linalg.norm(found["peer"], axis=1)
        cosine = (found["ours"].astype(np.float64) * found["peer"]).sum(axis=1) / norms
        yield f"encoder {dtype}", size, *times, f"least cosine {cosine.min():.7f}"

    times = medians(lambda: encoder.embed(plate, exact), lambda: exact(crops), 9)
    yield "embed", "2 fields of 6 x 512 x 512", *times, "peer: the encoder alone, on the same crops"


def multiplies_faster(dtype: object) -> bool:
    import torch

    def seconds(x: torch.Tensor) -> float:
        return medians(lambda: x @ x, lambda: None, 5)[0]

    x = torch.ones(1024, 1024)
    return seconds(x.to(dtype)) < seconds(x)  # type: ignore[call-overload]


def rows(arguments: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Rows of the groups that were asked for."""
    if "ica" in arguments.only:
        yield bench_ica(20_000, 64, 5)
        yield bench_ica(60_000, 192, 5)
        yield bench_picard()
        if arguments.large:
            yield bench_ica(200_000, 384, 5)
    if "scores" in arguments.only:
        yield bench_average_precision(2400)
        yield bench_average_precision(4800)
    if "plates" in arguments.only:
        yield from bench_plates(folder)
        if arguments.rxrx1:
            yield bench_real_ingest(folder, arguments.rxrx1)
    if "encoder" in arguments.only:
        yield from bench_encoder(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="CSV file for the table")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="groups of rows")
    parser.add_argument("--large", action="store_true", help="also ICA of 200,000 x 384: half an hour")
    parser.add_argument("--rxrx1", type=Path, help="folder with images of RxRx1: also the ingest of real ones")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = list(rows(arguments, Path(folder)))
    table = pd.DataFrame(found, columns=["row", "size", "ours_s", "peer_s", "quality"])
    table.insert(4, "speedup", table["peer_s"] / table["ours_s"])
    machine = (
        f"# cellica {__version__}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    )
    print(machine)
    print(table.to_string(index=False, float_format="{:.3g}".format))
    if arguments.out:
        arguments.out.write_text(machine + "\n" + table.to_csv(index=False, float_format="%.4g"))


if __name__ == "__main__":
    main()
