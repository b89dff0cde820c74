"""Make, and judge, the encoder that is bundled as `camae-mini`.

    python workflows/pretrain/camae_mini.py train OUT_DIR       simulate screens, train, export: about an hour on two cores
    python workflows/pretrain/camae_mini.py judge OUT_DIR       score it on screens of another range of parameters

The screens that judge it are seeded apart from those that train it, and lie outside of their range: larger cells,
stronger batch effects. Settings were chosen by the held-out reconstruction error, and channels one after another rather
than averaged by three of the training screens, never by the score of `judge`.
"""

import argparse
import shutil
from pathlib import Path
from typing import NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cellica import artifacts, correct, encoder, plates, pretrain, profiles, progress, retrieval, screen, simulate


class Series(NamedTuple):
    """Simulated screens: how many, their seeds, and the range that their parameters are drawn from."""

    n: int
    draws: int
    first_seed: int
    magnification: tuple[float, float]
    batch_strength: tuple[float, float]


TRAIN = Series(24, draws=7, first_seed=1000, magnification=(0.75, 1.1), batch_strength=(0.6, 1.0))
JUDGED = Series(5, draws=8, first_seed=2000, magnification=(1.2, 1.5), batch_strength=(1.0, 1.4))
SETTINGS = pretrain.Settings(steps=4000, batch_size=16, learning_rate=5e-4)
METHODS = ("none", "center+sphere", "ica")
BOOTSTRAPS = 2000


def simulated(folder: Path, series: Series, i: int, **sizes: int) -> list[Path]:
    """Plates of the i-th screen of a series."""
    folder = folder / f"{i:02d}"
    done = folder / "plates"
    if not done.exists():
        rng = np.random.default_rng([series.draws, i])
        drawn = {name: rng.uniform(*getattr(series, name)) for name in ("magnification", "batch_strength")}
        simulate.screen(folder / "screen", random_state=series.first_seed + i, force=True, **drawn, **sizes)
        plates.ingest(screen.read_rxrx1(folder / "screen"), folder / "ingesting")
        (folder / "ingesting").rename(done)
        shutil.rmtree(folder / "screen" / "images")
    return sorted(done.glob("*.zarr"))


def train(out: Path) -> None:
    stores = [
        store for i in range(TRAIN.n) for store in simulated(out / "train", TRAIN, i, n_experiments=4, n_plates=1)
    ]
    curve = pretrain.run(stores, out / "model.safetensors", SETTINGS, geometry="camae-mini")
    print(curve.tail(1).to_string(index=False))
    export(out / "model.safetensors", out / "camae-mini.safetensors")


def export(model: Path, to: Path) -> None:
    """Keep the encoder, in float16."""
    tensors = {key: tensor for key, tensor in load_file(model).items() if key.startswith("encoder.")}
    with safe_open(model, framework="pt") as archive:
        metadata = archive.metadata()
    with artifacts.atomic(to, force=True) as temporary:
        save_file({key: tensor.half().contiguous() for key, tensor in tensors.items()}, temporary, metadata)
    print(f"{to}: {to.stat().st_size / 1e6:.2f} MB")


def judge(out: Path, weights: Path) -> None:
    """Replicate retrieval of the trained encoder, of random weights and of mean intensities, after each correction."""
    encoders = {
        "trained": encoder.load("camae-mini", weights, channels="concat"),
        "random weights": encoder.load("camae-mini", "random", channels="concat"),
    }
    rows = []
    for i in range(JUDGED.n):
        stores = simulated(out / "judge", JUDGED, i)
        for name, model in encoders.items():
            wells = profiles.wells([encoder.embed(store, model) for store in stores])
            rows += scores(wells, i, name)
            rows += scores(averaged(wells, model.n_features), i, f"{name}, mean of channels")
        rows += scores(intensities(wells), i, "intensity")
    table = pd.DataFrame(rows)
    table.to_csv(out / "judge.csv", index=False)
    means = table.pivot_table("average_precision", "representation", "method")
    print(means.round(3).to_string())
    best = {name: best_method(table, name) for name in table["representation"].unique()}
    for other in ("random weights", "intensity"):
        for label, mine, its in [
            *((method, method, method) for method in METHODS),
            ("the best of each", best["trained"], best[other]),
        ]:
            a, b = units(table, "trained", mine), units(table, other, its)
            low, high = interval(a - b)
            print(f"trained - {other}, {label}: {(a - b).mean():+.3f} ({low:+.3f} to {high:+.3f})")


def scores(wells: ad.AnnData, seed: int, name: str) -> list[dict[str, object]]:
    """Mean average precision of each treatment, after each method."""
    rows = []
    for method in METHODS:
        correct.run(wells, method)
        treated = (wells.obs["control"] == "").to_numpy()
        found = retrieval.average_precision(
            wells,
            pos_sameby=["perturbation"],
            pos_diffby=["experiment"],
            neg_diffby=["perturbation", "experiment"],
            use_rep=f"X_{method}",
            queries=treated,
            candidates=treated,
        )
        values = found["average_precision"].groupby(wells.obs["perturbation"].astype(str)[found.index]).mean()
        rows += [
            {"seed": seed, "representation": name, "method": method, "perturbation": key, "average_precision": value}
            for key, value in values.items()
        ]
    return rows


def intensities(wells: ad.AnnData) -> ad.AnnData:
    """The mean intensity of each channel as features."""
    columns = [column for column in wells.obs if column.startswith("intensity_")]
    X = wells.obs[columns].to_numpy(np.float32)
    return ad.AnnData(X, obs=wells.obs.copy(), var=pd.DataFrame(index=columns))


def averaged(wells: ad.AnnData, n_features: int) -> ad.AnnData:
    """The mean over channels of embeddings that hold them one after another."""
    channels = np.asarray(wells.X).reshape(wells.n_obs, -1, n_features)
    return ad.AnnData(channels.mean(axis=1), obs=wells.obs.copy())


def best_method(table: pd.DataFrame, name: str) -> str:
    means = table[table["representation"] == name].groupby("method")["average_precision"].mean()
    return str(means.idxmax())


def units(table: pd.DataFrame, name: str, method: str) -> pd.Series:
    chosen = table[(table["representation"] == name) & (table["method"] == method)]
    return chosen.set_index(["seed", "perturbation"])["average_precision"].sort_index()


def interval(differences: pd.Series) -> tuple[float, float]:
    """95 % interval of the mean: bootstrap over screens, and over perturbations within each."""
    rng = np.random.default_rng(0)
    by_seed = [group.to_numpy() for _, group in differences.groupby(level="seed")]
    means = [
        np.mean([rng.choice(by_seed[k], len(by_seed[k])).mean() for k in rng.integers(0, len(by_seed), len(by_seed))])
        for _ in range(BOOTSTRAPS)
    ]
    return tuple(np.quantile(means, [0.025, 0.975]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "judge"])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--weights", type=Path, help="judge these, not OUT_DIR/camae-mini.safetensors")
    given = parser.parse_args()
    progress.show()
    if given.what == "train":
        train(given.out_dir)
    else:
        judge(given.out_dir, given.weights or given.out_dir / "camae-mini.safetensors")
