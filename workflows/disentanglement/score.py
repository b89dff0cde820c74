"""Score the codes of a run against the true factors, as they are and after linear maps.

    python workflows/disentanglement/score.py RUN.npz... --out SCORES.csv

Arms: ``raw``; ``whitened``, the principal components at unit variance; ``ica``, whitened and rotated to independent components;
``rotated``, whitened and rotated at random, several times. Whitening leaves out directions whose deviation is below a
twentieth of the largest, as the published InfoMEC leaves out latents of such a range: what is nearly silent is not
raised to the loudness of all others. Whitening and ICA see codes only, never factors. A quantized code has the arm ``raw``
alone, and its mutual information is counted.

With --conditions, one more arm a condition number: the whitened code of the first run, stretched and turned so that
nothing but the condition of the code changes. It shows what of InfoE is owed to a solver that is stopped early.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import archives
import numpy as np
import pandas as pd
from scipy.stats import ortho_group
from sklearn.preprocessing import StandardScaler

from cellica import identifiability, progress
from cellica.ica import ICA
from cellica.whitening import Whitening, principal_directions

sys.path.insert(0, str(Path(__file__).parents[1]))
import validation

SILENT = 1 / 20  # share of the largest deviation


def whitening(latents: np.ndarray) -> Whitening:
    """Of the directions that are not silent, two at least."""
    deviations = np.sqrt(np.clip(principal_directions(latents)[1], 0, None))
    return Whitening(max(2, int(np.sum(deviations > SILENT * deviations[0])))).fit(latents)


def arms(latents: np.ndarray, n_rotations: int, seed: int) -> Iterator[tuple[str, np.ndarray, dict]]:
    """Name, code and remarks of each arm."""
    yield "raw", latents, {}
    white = whitening(latents).transform(latents)
    k = white.shape[1]
    yield "whitened", white, {}
    model = ICA(k, max_iter=2000, tol=1e-6, random_state=seed)
    yield "ica", model.fit_transform(white), {"n_converged": int(model.converged_.sum())}
    for i in range(n_rotations):
        yield "rotated", white @ ortho_group.rvs(k, random_state=1000 * seed + i), {"rotation": i}


def conditioned(white: np.ndarray, number: float, seed: int = 0) -> np.ndarray:
    """The code turned, stretched to a condition number and turned again, so that no scaling of columns undoes it."""
    first, second = (ortho_group.rvs(white.shape[1], random_state=seed + i) for i in (0, 1))
    return white @ first * np.geomspace(1, 1 / number, white.shape[1]) @ second


def condition(latents: np.ndarray) -> float:
    """Largest over least singular value of the standardized code: what the regression of InfoE has to cope with."""
    values = np.linalg.svd(StandardScaler().fit_transform(latents), compute_uv=False)
    return float(values[0] / values[-1]) if values[-1] > 0 else float("inf")


def scores(classes: np.ndarray, latents: np.ndarray, discrete: bool, options: argparse.Namespace) -> dict[str, float]:
    found = identifiability.infomec(
        classes, latents, discrete_latents=discrete, n_shuffles=options.shuffles, random_state=options.seed
    )
    trees = identifiability.dci(classes, latents, n_trees=options.trees, random_state=options.seed)
    named = ("infom", "infoe", "infoc", "infoe_converged")
    return {
        **{name: found[name] for name in (*named, "n_active")},
        **{f"chance_{name}": found["chance"][name] for name in named if options.shuffles},
        **{f"dci_{name[:1]}": trees[name] for name in ("disentanglement", "completeness", "informativeness")},
        "mig": identifiability.mig(classes, latents, discrete_latents=discrete),
        "mcc": identifiability.mcc(classes, latents),
        "condition": condition(latents),
    }


def of_a_run(file: Path, options: argparse.Namespace) -> list[dict]:
    run = archives.run(file)
    latents, classes, shape = run["latents"], run["classes"], json.loads(str(run["shape"]))
    said = {
        "model": shape["kind"],
        "architecture": shape["architecture"],
        "weight_decay": float(run["weight_decay"]),
        "run_seed": int(run["seed"]),
        "steps": int(run["steps"]),
        "cross_entropy": float(run["cross_entropy"]),
    }
    discrete = shape["kind"] == "qlae"
    found = [("raw", latents, {})] if discrete else list(arms(latents.astype(float), options.rotations, options.seed))
    return [
        {**said, "arm": arm, **extra, "n_latents": code.shape[1], **scores(classes, code, discrete, options)}
        for arm, code, extra in progress.track(found, f"scores of {file.stem}")
    ]


def of_conditions(file: Path, options: argparse.Namespace) -> list[dict]:
    """InfoE of one whitened code under other conditions; few rows do, as both fits see the same ones."""
    run = archives.run(file)
    latents, classes = run["latents"].astype(float), run["classes"]
    white = whitening(latents).transform(latents)
    rows = []
    for number in options.conditions:
        code = conditioned(white, number)
        found = identifiability.infomec(classes, code, random_state=options.seed)
        rows.append(
            {"asked": number, "condition": condition(code), **{k: found[k] for k in ("infoe", "infoe_converged")}}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rotations", type=int, default=5)
    parser.add_argument("--shuffles", type=int, default=1, help="of the rows of the code, for the level of chance")
    parser.add_argument("--trees", type=int, default=100)
    parser.add_argument("--conditions", type=float, nargs="+", help="score InfoE alone, under these condition numbers")
    parser.add_argument("--seed", type=int, default=0, help="of ICA, rotations, jitter and forests")
    options = parser.parse_args()
    progress.show()
    each = of_conditions if options.conditions else of_a_run
    try:
        rows = [row for file in options.runs for row in each(file, options)]
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    validation.write(pd.DataFrame(rows), options.out)


if __name__ == "__main__":
    main()
