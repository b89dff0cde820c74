"""The S/16 encoder on a GPU, in one run of a few minutes: exactness, speed of the model alone, and of `embed` from plates.

python workflows/bench/gpu.py --out workflows/bench/results/gpu.csv
"""

import argparse
import dataclasses
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from plain_camae import PlainCAMAE

from cellica import __version__, encoder, images, plates, simulate

TERA = 1e12
CROP = 0.1088 * TERA  # operations of a 6-channel crop
SIZE = (6, 256, 256)
Row = tuple[str, str, float, str]


def median_seconds(call: Callable[[], object], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))  # the first warms up


def cosine(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(got.cpu().double(), expected.cpu().double()).min())


def bench_model(exact: encoder.Encoder) -> Iterator[Row]:
    few = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (4, *SIZE), dtype=np.uint8))
    on_cpu = encoder.load("openphenom", "random", device="cpu")(few)
    yield "float32 against the CPU", "4 crops", 1 - cosine(exact(few), on_cpu), "1 - cosine"

    n = 4 * exact.images_at_once(SIZE[0])
    crops = torch.randint(0, 256, (n, *SIZE), dtype=torch.uint8, device=exact.device)
    expected = exact(crops)
    for dtype in encoder.DTYPES:
        model = dataclasses.replace(exact, dtype=dtype)
        yield f"{dtype} against float32", f"{n} crops", 1 - cosine(model(crops), expected), "1 - cosine"
        seconds = median_seconds(lambda model=model: model(crops))  # type: ignore[misc]
        yield f"model alone, {dtype}", f"{n} crops", n / seconds, "crops/s"
        yield f"model alone, {dtype}", f"{n} crops", n * CROP / seconds / TERA, "TFLOP/s"

    plain = PlainCAMAE(width=384, depth=12, heads=6, img_size=256, patch_size=16, max_in_chans=11).eval()
    plain.load_state_dict(exact.model.state_dict())
    plain.to(exact.device)
    batches = crops.split(exact.images_at_once(SIZE[0]))
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        seconds = median_seconds(lambda: [plain(batch) for batch in batches])
    yield "plain model, bfloat16 autocast", f"{n} crops", n / seconds, "crops/s"


def bench_embed(folder: Path, exact: encoder.Encoder, copies: int = 16) -> Iterator[Row]:
    """A plate of many fields; its files are in the system's cache after the first round."""
    sizes = {"n_experiments": 1, "n_plates": 1, "n_treatments": 20, "n_controls": 4, "image_size": 512}
    screen = simulate.screen(folder / "screen", **sizes, random_state=0)
    many = pd.concat([copied(screen, folder / f"copy{i}", 10 * i) for i in range(copies)])
    plates.ingest(many, folder / "plates", threads=os.cpu_count() or 1)
    plate = plates.Plate(next((folder / "plates").glob("*.zarr")))
    model = dataclasses.replace(exact, dtype="bfloat16")
    n_crops = 4 * len(plate.sites)
    crops = torch.from_numpy(images.crops(next(plate.fields(64))[1], 256)).to(model.device)
    alone = len(crops) / median_seconds(lambda: model(crops))
    whole = n_crops / median_seconds(lambda: encoder.embed(plate, model), 3)
    size = f"{len(plate.sites)} fields of 6 x 512 x 512"
    yield "embed from plates, bfloat16", size, whole, "crops/s"
    yield "embed from plates / model alone", size, whole / alone, "ratio"


def copied(screen: pd.DataFrame, folder: Path, first_site: int) -> pd.DataFrame:
    """The same images as further sites, in files of their own: a file that is listed twice would be set aside."""
    folder.mkdir()
    table = screen.assign(site=screen["site"].astype(int) + first_site)
    for column in table.columns[table.columns.str.startswith("path_")]:
        names = [folder / f"{i}_{column}.png" for i in range(len(table))]
        for source, target in zip(table[column], names):
            shutil.copyfile(source, target)
        table[column] = [str(name) for name in names]
    keys = table[["experiment", "plate", "well", "site"]].astype(str)
    return table.set_axis(pd.Index(keys.agg("_".join, axis=1), dtype=object))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file for the table")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU")
    machine = (
        f"# cellica {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores"
    )
    print(machine, flush=True)
    rows = []
    exact = encoder.load("openphenom", "random", device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        for bench in (bench_model(exact), bench_embed(Path(folder), exact)):
            for row in bench:
                print("{}, {}: {:.4g} {}".format(*row), flush=True)
                rows.append(row)
    if out:
        table = pd.DataFrame(rows, columns=["row", "size", "value", "unit"])
        out.write_text(machine + "\n" + table.to_csv(index=False, float_format="%.4g"))
    tests = Path(__file__).parents[2] / "tests"
    files = [str(tests / f"test_{name}.py") for name in ("fused", "encoder", "embedding")]
    raise SystemExit(subprocess.run([sys.executable, "-m", "pytest", "-q", "-k", "gpu", *files]).returncode)


if __name__ == "__main__":
    main()
