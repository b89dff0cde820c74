"""Speed and exactness against the peers: medians of interleaved rounds in one run, as ratios."""

import argparse
import itertools
import os
import platform
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
    table = simulate.screen(
        folder / "screen", n_experiments=1, n_plates=1, n_treatments=44, n_controls=4, image_size=512, random_state=0
    )
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

    times = medians(ours_ingest, peer_decode, 9)
    plate = plates.Plate(next((folder / "plates-0").glob("*.zarr")))
    fields = np.concatenate([pixels for _, pixels in plate.fields()])
    size = f"{len(fields)} fields of 6 x 512 x 512"
    exact = all(
        np.array_equal(decode(path), image) for path, image in zip(files, fields.reshape(-1, *fields.shape[2:]))
    )
    share = np.median(cpu["peer"]) / np.median(cpu["ours"])
    yield "ingest", size, *times, f"pixels equal: {exact}; {share:.2f} in CPU time"

    def ours_read() -> None:
        for _ in plate.fields():
            pass

    def peer_read() -> None:
        group = zarr.open_group(plate.path, mode="r")
        for site in plate.sites.itertuples():
            group[f"{site.well[0]}/{site.well[1:]}/{site.site}/0"][0]

    yield "read", size, *medians(ours_read, peer_read, 9), ""
    yield bench_shards(folder, fields)


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


def bench_encoder(folder: Path, rounds: int = 3) -> Iterator[Row]:
    """OpenPhenom's geometry with random weights, on the first crops of a plate that `bench_plates` wrote."""
    import torch
    from plain_camae import PlainCAMAE

    ours = encoder.load("openphenom", "random", device="cpu")
    peer = PlainCAMAE(384, 12, 6, 256, 16, 11).eval()
    peer.load_state_dict(ours.model.state_dict())
    plate = plates.Plate(next((folder / "plates-0").glob("*.zarr")))
    crops = images.crops(next(plate.fields(2))[1], ours.img_size)
    found: dict[str, np.ndarray] = {}

    def embed() -> None:
        found["ours"] = ours(crops).numpy()

    @torch.inference_mode()
    def plain() -> None:
        found["peer"] = peer(torch.from_numpy(crops)).numpy()

    times = medians(embed, plain, rounds)
    difference = np.abs(found["ours"] - found["peer"]).max() / np.abs(found["peer"]).max()
    yield "encoder", f"{len(crops)} crops of 6 x 256 x 256", *times, f"largest relative difference {difference:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="CSV file for the table")
    parser.add_argument("--large", action="store_true", help="also ICA of 200,000 x 384: minutes")
    arguments = parser.parse_args()
    out = arguments.out
    rows = [bench_ica(20_000, 64, 5), bench_ica(60_000, 192, 5), bench_picard()]
    if arguments.large:
        rows.append(bench_ica(200_000, 384, 1))
    rows += [bench_average_precision(2400), bench_average_precision(4800)]
    with tempfile.TemporaryDirectory() as folder:
        rows += bench_plates(Path(folder))
        rows += bench_encoder(Path(folder))
    table = pd.DataFrame(rows, columns=["row", "size", "ours_s", "peer_s", "quality"])
    table.insert(4, "speedup", table["peer_s"] / table["ours_s"])
    machine = (
        f"# cellica {__version__}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    )
    print(machine)
    print(table.to_string(index=False, float_format="{:.3g}".format))
    if out:
        out.write_text(machine + "\n" + table.to_csv(index=False, float_format="%.4g"))


if __name__ == "__main__":
    main()
