"""Train small channel-agnostic masked autoencoders on one simulated screen, each from another seed, and embed the screen.

    python workflows/identifiability/camae.py OUT_FOLDER --seeds 0 1 2 --steps 600

Same plates, same settings; weights, order of the fields, crops and masks differ. OUT_FOLDER/seed_S.h5ad are the wells' embeddings,
seed_S.csv the curve of training. Half-trained models agree less than converged ones: the curve says how far they came.
A run that was killed goes on; runs of other settings in the folder are removed.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import torch

from cellica import artifacts, encoder, plates, pretrain, profiles, progress, screen, simulate

SCREEN_SEED = 4000  # of no screen that an encoder of cellica was trained or judged on


def remember(folder: Path, settings: dict[str, Any]) -> None:
    """Begin anew where the folder holds runs of other settings."""
    said, file = json.dumps(settings, sort_keys=True), folder / "settings.json"
    if file.exists() and file.read_text(encoding="utf-8") != said:
        shutil.rmtree(folder)
    if folder.exists() and any(folder.iterdir()) and not file.exists():
        raise ValueError(f"{folder} holds something else: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    artifacts.write_text(said, file, force=True)


def simulated(folder: Path, **sizes: int) -> list[Path]:
    """Plates of the screen, made once."""
    done = folder / "plates"
    if not done.exists():
        simulate.screen(folder / "screen", random_state=SCREEN_SEED, force=True, **sizes)
        plates.ingest(screen.read_rxrx1(folder / "screen"), folder / "ingesting", force=True)
        (folder / "ingesting").rename(done)
        shutil.rmtree(folder / "screen")
    return sorted(done.glob("*.zarr"))


def embedded(stores: list[Path], weights: Path, device: str) -> ad.AnnData:
    model = encoder.load("camae", weights=weights, device=device, channels="mean")
    return profiles.wells([encoder.embed(plates.Plate(store), model) for store in stores])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--minibatch", type=int, default=16)
    parser.add_argument("--experiments", type=int, default=4)
    parser.add_argument("--plates", type=int, default=2)
    parser.add_argument("--treatments", type=int, default=32)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    progress.show()
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = {"n_experiments": options.experiments, "n_plates": options.plates, "n_treatments": options.treatments}
    try:
        remember(options.out, {**sizes, "steps": options.steps, "minibatch": options.minibatch})
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    stores = simulated(options.out, **sizes)
    for seed in options.seeds:
        weights, wells = options.out / f"seed_{seed}.safetensors", options.out / f"seed_{seed}.h5ad"
        settings = pretrain.Settings(options.steps, options.minibatch, learning_rate=5e-4, random_state=seed)
        if not weights.exists():
            pretrain.run(stores, weights, settings, geometry="camae-mini", device=options.device)
        if not wells.exists():
            artifacts.write_adata(embedded(stores, weights, options.device), wells)


if __name__ == "__main__":
    main()
