"""Paint what each independent component of a code does: a row a component, from -2 to 2 deviations, all others at 0.

    python workflows/disentanglement/components.py RUN.npz OUT.png

The weights lie beside the run. Each row is named by the factor that the component tells most of, and by how much of it. Below:
pictures that were not trained on, and what the autoencoder makes of them.
"""

import argparse
import json
import sys
from pathlib import Path

import archives
import numpy as np
import torch
from matplotlib.figure import Figure
from models import Autoencoder, Shape
from safetensors.torch import load
from score import whitening

from cellica import identifiability
from cellica.ica import ICA

sys.path.insert(0, str(Path(__file__).parents[1]))
import validation

DEVIATIONS = np.linspace(-2, 2, 9)
N_PAINTED = 9


@torch.inference_mode()
def painted(model: Autoencoder, codes: np.ndarray) -> np.ndarray:
    """Pictures (n, s, s, c) in [0, 1] of codes."""
    logits = model.decoder(torch.from_numpy(codes).float())
    return torch.sigmoid(logits).permute(0, 2, 3, 1).numpy()


def components(model: Autoencoder, latents: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of pictures (k, 9, s, s, c), and the share of each factor that a component tells (f, k)."""
    white = whitening(latents)
    ica = ICA(white.rank_, max_iter=2000, tol=1e-6, random_state=0)
    sources = ica.fit_transform(white.transform(latents))
    mixing = white.dewhitening_ @ ica.mixing_
    codes = latents.mean(axis=0) + DEVIATIONS[:, None] * mixing.T[:, None]
    told = identifiability.infomec(classes, sources)["nmi"]
    return np.stack([painted(model, row) for row in codes]), told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    try:
        run = archives.run(options.run)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    latents, classes, names = run["latents"].astype(float), run["classes"], run["factors"].tolist()
    shown, copies, shape = run["pictures"], run["painted"], json.loads(str(run["shape"]))
    model = Autoencoder(Shape(**shape)).eval()
    model.load_state_dict(load(options.run.with_suffix(".safetensors").read_bytes()))
    rows, told = components(model, latents, classes)
    order = np.argsort(-told.max(axis=0))
    height = len(rows) + 2.5
    figure = Figure(figsize=(7.5, 0.62 * height), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[len(rows), 2.5])
    for axes, i in zip(upper.subplots(len(rows), 1, squeeze=False).ravel(), order):
        axes.imshow(np.concatenate(list(rows[i]), axis=1), cmap="gray")
        factor = int(told[:, i].argmax())
        label = f"{names[factor]} {told[factor, i]:.2f}"
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    for axes, which, label in zip(lower.subplots(2, 1), (shown, copies), ("unseen", "painted")):
        axes.imshow(np.concatenate(list(which[:N_PAINTED].transpose(0, 2, 3, 1)), axis=1), cmap="gray")
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    upper.suptitle(f"components of {shape['kind']} + ICA: 2 deviations down to 2 up", fontsize=9)
    validation.save(figure, options.out)


if __name__ == "__main__":
    main()
