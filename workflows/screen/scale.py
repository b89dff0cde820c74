"""What each verb costs: core-seconds, memory, bytes read and written; of a plate, and of screens of up to 1,000 plates.

    python workflows/screen/scale.py                       results/scale.csv and scale.png beside this file
    python workflows/screen/scale.py --plates 10 20        smaller screens

Images are simulated as RxRx1's are stored (512 x 512, six 8-bit PNGs a site) and embedded by a model of OpenPhenom's geometry with
random weights. Wells have RxRx1's design (four plates an experiment, two sites a well, 384 features), with planted effects.
Every verb runs as a process of its own; core-seconds are those of the process and its children, memory that of the process, bytes those that it
asked for, from disk or cache. Core-seconds change little beside other work; a machine where nothing else runs is better still.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anndata as ad
import imagecodecs
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from cellica import __version__, artifacts, progress, simulate
from cellica.camae import Geometry
from cellica.encoder import NAMED

PLATES = (16, 64, 250, 1000)
MOST = {"compare": 64, "evaluate": 250}  # plates; more take hours on two cores
N_SITES = 32
# sites, wells, how they are ingested, and bytes of a site in a plate: two real sites of RxRx1, one of RxRx3-core
SCREENS = {
    "RxRx1": (125_510, 62_755, "ingest", 1_130_000),
    "RxRx3-core": (222_601, 222_601, "ingest shards", 680_000),
}
GPU_FLOP = (
    5e13  # a second: what a GPU for data centres holds in half precision, a sixth of an A100's peak; not measured by us
)
CORE_SECONDS_READ = 0.02  # of a field: read, unpacked, hashed, and measured by cellica.quality, on one core
READERS = 16  # threads that do so for one GPU
METHODS = ("none", "center+sphere", "ica")
FITTED = {  # verb and its options, by row of the table
    "correct center+sphere": ("correct", "--method", "center+sphere"),
    "correct ica": ("correct", "--method", "ica"),
    "evaluate": ("evaluate", "--rep", "X"),
    "compare": ("compare", "--jobs", "1", *(word for name in METHODS for word in ("--method", name))),
}
CHILD = """
import json, os, resource, sys
from cellica import cli
try:
    cli.main(json.loads(sys.argv[1]))
except SystemExit as end:
    code = end.code
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
status = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
print(json.dumps({"code": code, "core_seconds": sum(one.ru_utime + one.ru_stime for one in used),
    "peak_gib": int(status["VmHWM"].split()[0]) / 2**20, "read": int(io["rchar"]), "written": int(io["wchar"])}))
"""


def measured(*words: object) -> dict[str, float]:
    """Costs of one command line."""
    arguments = json.dumps([*map(str, words), "--force", "--quiet"])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", CHILD, arguments], env=environment, capture_output=True, text=True)
    if done.returncode or '"code"' not in done.stdout:
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if found.pop("code") not in (0, 1):
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    return found


def flop_per_crop(geometry: Geometry, channels: int) -> float:
    """Multiplications and additions of the products of one crop: per layer 24 T d^2 + 4 T^2 d, and the patches."""
    tokens, d = channels * (geometry.img_size // geometry.patch_size) ** 2 + 1, geometry.embed_dim
    return geometry.depth * (24 * tokens * d**2 + 4 * tokens**2 * d) + 2 * tokens * geometry.patch_size**2 * d


def write_shards(screen: Path, folder: Path) -> None:
    """The same images as RxRx3-core keeps them: JPEG 2000 in parquet, of wells of one site."""
    files = sorted((screen / "images").rglob("*_s1_w*.png"))
    wells = sorted({file.name.split("_")[0] for file in files})
    names = {"well_id": [f"gene-001_1_{well}" for well in wells], "treatment": "EMPTY_control", "gene": "EMPTY_control"}
    folder.mkdir()
    table = pd.DataFrame(
        {**names, "SMILES": None, "concentration": None, "perturbation_type": "CRISPR", "cell_type": "HUVEC"}
    )
    table.to_csv(folder / "metadata_rxrx3_core.csv", index=False)
    keys = [f"gene-001/Plate1/{file.stem.replace('_w', '_')}" for file in files]
    packed = [imagecodecs.jpeg2k_encode(imagecodecs.imread(file), level=20) for file in files]
    pq.write_table(pa.table({"__key__": keys, "jp2": packed}), folder / "train-00000-of-00001.parquet")


def of_a_plate(folder: Path) -> Iterator[dict[str, Any]]:
    """Ingest and embed, a site."""
    progress.say(f"render {N_SITES} sites")
    sizes = {"n_experiments": 1, "n_plates": 1, "n_treatments": 24, "n_controls": 6, "n_anchors": 2}
    simulate.screen(folder / "screen", **sizes, n_sites=N_SITES // 32, image_size=512)
    table = pd.read_csv(folder / "screen" / "metadata.csv")
    store = next(iter({f"{e}_{p}" for e, p in zip(table["experiment"], table["plate"])}))
    plate = folder / "plates" / f"{store}.zarr"
    write_shards(folder / "screen", folder / "core")
    rows = {
        "ingest shards": ("ingest", "rxrx3-core", folder / "core", folder / "from shards"),
        "ingest": ("ingest", "rxrx1", folder / "screen", folder / "plates"),
        "embed": ("embed", plate, "--out", folder / "sites.h5ad", "--encoder", "openphenom", "--weights", "random"),
    }
    for verb, words in rows.items():
        start, found = measured(*words, "--dry-run"), measured(*words)
        for name in ("core_seconds", "read", "written"):  # what starting Python takes is no cost of a site
            found[name] = max(found[name] - start[name], 0.0)
        crops = (512 // NAMED["openphenom"].img_size) ** 2 * len(table)
        flop = flop_per_crop(NAMED["openphenom"], 6) * crops if verb == "embed" else 0.0
        n = len(table) // (N_SITES // 32 if verb == "ingest shards" else 1)
        yield {"verb": verb, "plates": n / 616, "rows": n, **found, "flop": flop}


def write_sites(folder: Path, n_plates: int) -> list[Path]:
    """Site embeddings, one file a plate."""
    wells = simulate.profiles("rxrx1-like", n_experiments=-(-n_plates // 4), n_plates=4, n_features=384)
    wells.obsm, wells.varm, wells.uns = {}, {}, {}
    rng, files = np.random.default_rng(0), []
    groups = wells.obs.groupby(["experiment", "plate"], sort=False, observed=True).indices
    for name, rows in progress.track(list(groups.items())[:n_plates], "sites"):
        plate = wells[np.repeat(rows, 2)]
        obs = plate.obs.assign(site=np.tile([1, 2], len(rows)))
        obs.index = obs.index.astype(str) + "_" + obs["site"].astype(str)
        noise = 0.3 * rng.standard_normal(plate.shape, dtype=np.float32)
        files.append(folder / f"{'_'.join(map(str, name))}.h5ad")
        artifacts.write_adata(ad.AnnData(np.asarray(plate.X) + noise, obs=obs, var=plate.var), files[-1])
    return files


def of_a_screen(folder: Path, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The verbs that take all wells, by number of plates."""
    files = write_sites(folder, max(sizes))
    for n in sizes:
        wells = folder / f"wells-{n}.h5ad"
        found = measured("profile", *files[:n], "--out", wells)
        n_wells = artifacts.read_adata(wells).n_obs
        yield {"verb": "profile", "plates": n, "rows": n_wells, **found}
        for name, (verb, *options) in FITTED.items():
            if n <= MOST.get(verb, n):
                out = folder / ("out.h5ad" if verb == "correct" else "out.csv")
                yield {"verb": name, "plates": n, "rows": n_wells, **measured(verb, wells, "--out", out, *options)}
        yield {
            "verb": "report",
            "plates": n,
            "rows": n_wells,
            **measured("report", folder / "out.h5ad", "--out", folder / "out.html", "--scores", folder / "out.csv"),
        }
        wells.unlink()


def exponents(table: pd.DataFrame) -> dict[str, float]:
    """Slope of log core-seconds over log rows, from the second-smallest size on: 1 is linear."""
    slopes = {}
    for verb, rows in table.groupby("verb", sort=False):
        if len(rows) > 2:
            rows = rows.iloc[1:]
            slopes[str(verb)] = float(np.polyfit(np.log(rows["rows"]), np.log(rows["core_seconds"]), 1)[0])
    return slopes


def needs(table: pd.DataFrame) -> str:
    """Table (Markdown) of the hours that public screens need, from the costs of a site and of the largest screen that was measured."""
    a_site = table[table["plates"] < 1].set_index("verb")
    a_site = a_site[["core_seconds", "flop"]].div(a_site["rows"], axis=0)
    largest = table[table["plates"] >= 1].sort_values("plates").groupby("verb", sort=False).last()
    columns = {}
    for name, (sites, wells, ingest, size) in SCREENS.items():
        ingested, embedded = (sites * a_site["core_seconds"][verb] for verb in (ingest, "embed"))
        on_gpu = sites * max(a_site["flop"]["embed"] / GPU_FLOP, CORE_SECONDS_READ / READERS)
        joined = {verb: wells * cost["core_seconds"] / cost["rows"] for verb, cost in largest.iterrows()}
        hours = {
            "`ingest`, core-hours": ingested,
            "`embed`, core-hours without a GPU": embedded,
            "`embed`, hours of one GPU": on_gpu,
            "`embed`, hours of eight GPUs": on_gpu / 8,
            "`ingest` and `embed`, hours of a laptop of 8 cores": (ingested + embedded) / 8,
            **{f"`{verb}`, core-hours": seconds for verb, seconds in joined.items()},
        }
        columns[f"{name}: {sites:,} sites, {wells:,} wells"] = {
            "plates on disk, GB": f"{sites * size / 1e9:,.0f}",
            **{row: f"{seconds / 3600:{',.0f' if seconds > 36_000 else '.2g'}}" for row, seconds in hours.items()},
        }
    rows = [["", *columns], ["---"] * (len(columns) + 1)]
    rows += [[row, *(column[row] for column in columns.values())] for row in next(iter(columns.values()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(table: pd.DataFrame, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for ax, (column, label) in zip(
        figure.subplots(1, 2), (("core_seconds", "core-seconds"), ("peak_gib", "peak memory, GiB"))
    ):
        for i, (verb, rows) in enumerate(table[table["plates"] >= 2].groupby("verb", sort=False)):
            ax.plot(rows["rows"], rows[column], marker="osD^vP"[i % 6], color=f"C{i}", label=verb)
        ax.set(xscale="log", yscale="log", xlabel="wells", ylabel=label)
    ax.legend(fontsize="x-small", frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plates", type=int, nargs="+", default=list(PLATES))
    parser.add_argument(
        "--only", choices=("plate", "screen"), help="keep what was measured of the other, and of other sizes"
    )
    parser.add_argument("--needs", action="store_true", help="measure nothing: print what public screens need")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scale.csv")
    arguments = parser.parse_args()
    if arguments.needs:
        return print(needs(pd.read_csv(arguments.out)))
    progress.show()
    parts = {"plate": of_a_plate, "screen": lambda folder: of_a_screen(folder, sorted(arguments.plates))}
    rows: list[dict[str, Any]] = []
    if arguments.only:
        earlier = pd.read_csv(arguments.out)
        anew = earlier["plates"].isin(arguments.plates) if arguments.only == "screen" else earlier["plates"] < 1
        rows = earlier[~anew].to_dict("records")
        parts = {arguments.only: parts[arguments.only]}
    machine = f"cellica {__version__}, {platform.machine()}, {os.cpu_count()} cores"
    with tempfile.TemporaryDirectory() as folder:
        for row in itertools.chain.from_iterable(part(Path(folder)) for part in parts.values()):
            rows.append({**row, "machine": machine})
            table = pd.DataFrame(rows)
            artifacts.write_table(table, arguments.out, force=True)
    draw(table, arguments.out.with_suffix(".png"))
    print(table.round(3).to_string())
    print("exponents of core-seconds over rows:", {verb: round(slope, 2) for verb, slope in exponents(table).items()})


if __name__ == "__main__":
    main()
