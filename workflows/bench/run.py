"""Speed and exactness against the peers: medians of interleaved rounds in one run, as ratios."""

import argparse
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
import zarr
from sklearn.decomposition import FastICA

from cellica import __version__, ica, plates, retrieval, simulate

Row = tuple[str, str, float, float, str]


def medians(ours: Callable[[], object], peer: Callable[[], object], rounds: int) -> tuple[float, float]:
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for call, kept in zip((ours, peer), times):
            start = time.perf_counter()
            call()
            kept.append(time.perf_counter() - start)
    return float(np.median(times[0])), float(np.median(times[1]))


def bench_ica(n: int = 20_000, k: int = 64) -> Row:
    rng = np.random.default_rng(0)
    gaussian = k // 3
    sources = np.hstack([rng.laplace(size=(n, k - gaussian)), rng.normal(size=(n, gaussian))])
    x = sources @ rng.normal(size=(k, k))
    x32 = x.astype(np.float32)
    found: dict[str, np.ndarray] = {}

    def ours() -> None:
        found["ours"] = ica.ICA(random_state=0).fit_transform(x32)

    def peer() -> None:
        fast = FastICA(whiten="unit-variance", whiten_solver="eigh", max_iter=25, random_state=0)
        found["peer"] = fast.fit_transform(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = medians(ours, peer, 3)
    quality = [ica.matched_correlation(sources[:, :-gaussian], found[who]).mean() for who in ("ours", "peer")]
    return "ica", f"{n} x {k}, a third Gaussian", *times, f"correlation {quality[0]:.4f}, peer {quality[1]:.4f}"


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
    screen = simulate.screen(
        folder / "screen", n_experiments=1, n_plates=1, n_treatments=44, n_controls=4, image_size=512, random_state=0
    )
    files = screen[[column for column in screen if column.startswith("path_")]].to_numpy().ravel()

    def decode(path: str) -> np.ndarray:
        return imagecodecs.png_decode(Path(path).read_bytes())

    def peer_decode() -> None:
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(decode, files):
                pass

    def ours_ingest() -> None:
        plates.ingest(screen, folder / "plates", threads=2, force=True)

    times = medians(ours_ingest, peer_decode, 5)
    plate = plates.Plate(next((folder / "plates").glob("*.zarr")))
    fields = np.concatenate([images for _, images in plate.fields()])
    exact = all(
        np.array_equal(decode(path), image) for path, image in zip(files, fields.reshape(-1, *fields.shape[2:]))
    )
    yield "ingest", f"{len(fields)} fields of 6 x 512 x 512", *times, f"pixels equal: {exact}"

    def ours_read() -> None:
        for _ in plate.fields():
            pass

    def peer_read() -> None:
        group = zarr.open_group(plate.path, mode="r")
        for site in plate.sites.itertuples():
            group[f"{site.well[0]}/{site.well[1:]}/{site.site}/0"][0]

    yield "read", f"{len(fields)} fields of 6 x 512 x 512", *medians(ours_read, peer_read, 5), ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="CSV file for the table")
    out = parser.parse_args().out
    rows = [bench_ica(), bench_average_precision(2400), bench_average_precision(4800)]
    with tempfile.TemporaryDirectory() as folder:
        rows += bench_plates(Path(folder))
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
