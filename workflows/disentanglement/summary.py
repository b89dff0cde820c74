"""Tables of all runs: scores by arm over seeds, what the claims are worth, beside the numbers of the paper.

    python workflows/disentanglement/summary.py SCORES.csv... --weight-decays CHOSEN.csv... --out FOLDER

A claim is judged by paired differences: of two arms of the same run, or of two models of the same seed. Intervals are Student's over
seeds. ``holds``: the whole interval is on the claimed side; ``refuted``: on the other; ``open`` else.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))
import validation

SCORES = ("infom", "infoe", "infoc", "infoe_converged", "dci_d", "dci_c", "dci_i", "mig", "mcc")
MORE = ("chance_infom", "chance_infoc", "condition", "n_active", "n_latents", "n_converged", "cross_entropy")
CLAIMS = (  # score, what is said to be higher, than what; as (model, arm)
    ("infom", ("ae", "ica"), ("ae", "raw"), "whitening and ICA raise InfoM of an autoencoder"),
    ("infom", ("ae", "ica"), ("ae", "whitened"), "... which whitening alone does not"),
    ("infom", ("ae", "ica"), ("ae", "rotated"), "... nor any rotation of whitened codes"),
    ("infoc", ("ae", "ica"), ("ae", "raw"), "InfoC rises too"),
    ("infoe", ("ae", "ica"), ("ae", "raw"), "published InfoE rises"),
    (
        "infoe_converged",
        ("ae", "ica"),
        ("ae", "raw"),
        "InfoE of a converged solver rises, which no linear map could do",
    ),
    ("dci_d", ("ae", "ica"), ("ae", "raw"), "DCI's disentanglement rises"),
    ("mig", ("ae", "ica"), ("ae", "raw"), "MIG rises"),
    ("mcc", ("ae", "ica"), ("ae", "raw"), "MCC rises"),
    ("infom", ("beta-vae", "raw"), ("ae", "raw"), "a beta-VAE has higher InfoM than an autoencoder"),
    ("infom", ("ae", "ica"), ("beta-vae", "raw"), "an autoencoder with ICA has higher InfoM than a beta-VAE"),
    ("infom", ("ae", "ica"), ("beta-tcvae", "raw"), "an autoencoder with ICA has higher InfoM than a beta-TCVAE"),
    ("infom", ("beta-vae", "ica"), ("beta-vae", "raw"), "whitening and ICA raise InfoM of a beta-VAE"),
)
PAPER = pd.DataFrame(  # arXiv 2603.11970, table 2: InfoM, InfoE, InfoC
    [
        ("AE", "mean", 0.39, 0.76, 0.25),
        ("beta-VAE", "mean", 0.59, 0.81, 0.55),
        ("beta-TCVAE", "mean", 0.58, 0.72, 0.59),
        ("BioAE", "mean", 0.54, 0.75, 0.36),
        ("AE + ICA", "mean", 0.65, 0.83, 0.40),
        ("AE", "Shapes3D", 0.34, 0.99, 0.16),
        ("beta-VAE", "Shapes3D", 0.59, 0.99, 0.49),
        ("beta-TCVAE", "Shapes3D", 0.61, 0.82, 0.62),
        ("BioAE", "Shapes3D", 0.56, 0.98, 0.44),
        ("AE + ICA", "Shapes3D", 0.79, 0.99, 0.52),
        ("AE", "MPI3D", 0.42, 0.40, 0.31),
        ("beta-VAE", "MPI3D", 0.45, 0.71, 0.51),
        ("beta-TCVAE", "MPI3D", 0.51, 0.60, 0.57),
        ("BioAE", "MPI3D", 0.45, 0.66, 0.36),
        ("AE + ICA", "MPI3D", 0.44, 0.66, 0.31),
        ("AE", "Falcor3D", 0.37, 0.83, 0.20),
        ("beta-VAE", "Falcor3D", 0.71, 0.73, 0.70),
        ("beta-TCVAE", "Falcor3D", 0.66, 0.74, 0.71),
        ("BioAE", "Falcor3D", 0.54, 0.73, 0.31),
        ("AE + ICA", "Falcor3D", 0.71, 0.83, 0.33),
        ("AE", "Isaac3D", 0.41, 0.80, 0.34),
        ("beta-VAE", "Isaac3D", 0.60, 0.80, 0.51),
        ("beta-TCVAE", "Isaac3D", 0.54, 0.70, 0.46),
        ("BioAE", "Isaac3D", 0.63, 0.65, 0.33),
        ("AE + ICA", "Isaac3D", 0.64, 0.82, 0.43),
    ],
    columns=["model", "data", "infom", "infoe", "infoc"],
)


def runs_of(files: list[Path]) -> pd.DataFrame:
    """One row a data set, model, seed and arm: rotations are averaged within their run."""
    tables = [pd.read_csv(file).assign(data=file.parent.parent.name) for file in files]
    whole = pd.concat(tables, ignore_index=True)
    by = ["data", "model", "run_seed", "arm"]
    values = [name for name in (*SCORES, *MORE) if name in whole]
    return whole.groupby(by, sort=False)[values].mean().reset_index()


def claims_of(runs: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for data, part in runs.groupby("data", sort=False):
        by_arm = {key: group.set_index("run_seed") for key, group in part.groupby(["model", "arm"])}
        for score, higher, lower, said in CLAIMS:
            if higher in by_arm and lower in by_arm:
                gain = (by_arm[higher][score] - by_arm[lower][score]).dropna()
                mean, low, high = validation.interval(gain)
                verdict = "holds" if low > 0 else "refuted" if high < 0 else "open"
                rows.append([data, said, score, *higher, *lower, mean, low, high, len(gain), verdict])
    names = ["data", "claim", "score", "model", "arm", "than_model", "than_arm", "mean", "low", "high", "n_seeds"]
    return pd.DataFrame(rows, columns=[*names, "verdict"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scores", type=Path, nargs="+", help="DATA/scores/RUN.csv")
    parser.add_argument(
        "--weight-decays", type=Path, nargs="+", required=True, help="DATA/weight_decay.csv of choose.py"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = runs_of(options.scores)
    names = [name for name in (*SCORES, *MORE) if name in runs]
    validation.write(runs, options.out / "runs.csv")
    validation.write(validation.over_seeds(runs, ["data", "model", "arm"], names), options.out / "scores.csv")
    decays = [pd.read_csv(file).assign(data=file.parent.name) for file in options.weight_decays]
    validation.write(pd.concat(decays), options.out / "weight_decays.csv")
    validation.write(claims_of(runs), options.out / "claims.csv")
    validation.write(PAPER, options.out / "paper.csv")


if __name__ == "__main__":
    main()
