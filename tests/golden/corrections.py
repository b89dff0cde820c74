"""Makes the saved corrections and expected outputs beside this file: python tests/golden/corrections.py.

Run it for a new method or a new kind of file only. Files of earlier releases stay, as they must stay readable.
"""

from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd

from cellica import correct
from cellica.joint import Joint

HERE = Path(__file__).parent
CHAIN = "ica_drop+center+wccn"
OPTIONS = {"ica_drop": {"check_stability": False}, "mixed": {"mixed": "regress", "check_stability": False}}


def wells() -> ad.AnnData:
    """96 wells of 3 batches in two cell types, 5 features; factor 0 carries the batch, 1 batch and perturbation."""
    rng = np.random.default_rng(0)
    rows = [
        (f"exp-{batch}", plate, f"{chr(65 + i // 4)}{i % 4 + 1:02d}", name, "" if name[0] == "p" else "negative", cell)
        for batch, cell in enumerate(("a", "a", "b", "b"))
        for plate in "12"
        for i, name in enumerate(["DMSO"] * 4 + [f"p{j}" for j in range(8)])
    ]
    obs = pd.DataFrame(rows, columns=["experiment", "plate", "well", "perturbation", "control", "cell_type"])
    obs.index = pd.Index([f"{r[0]}_{r[1]}_{r[2]}" for r in rows], dtype=object)
    batch, label = (pd.factorize(obs[name])[0] for name in ("experiment", "perturbation"))
    factors = rng.laplace(size=(len(obs), 5))
    factors[:, 0] = 0.3 * factors[:, 0] + 3 * (batch % 2)
    factors[:, 1] = 0.3 * factors[:, 1] + 2 * np.isin(batch, (1, 2)) + 4 * (label % 3)
    factors[:, 2] += 3 * (label == 2)
    return ad.AnnData((factors @ rng.normal(size=(5, 5)) + 4).astype(np.float32), obs=obs)


def fitted() -> dict[str, correct.Corrector]:
    """A corrector for each method that can be saved, one for mixed components and one for a chain."""
    made = {name: correct.fit(wells(), name, **OPTIONS.get(name, {})) for name in correct.METHODS if name != "ica"}
    made |= {"ica": correct.fit(wells(), "ica", check_stability=False)}
    made |= {"mixed": correct.fit(wells(), "ica_drop", **OPTIONS["mixed"])}
    made |= {CHAIN: correct.fit(wells(), CHAIN, check_stability=False)}
    return {name: one for name, one in made.items() if not any(isinstance(p, Joint) for p in one.transform_.parts)}


def main() -> None:
    adata, expected = wells(), {}
    for name, corrector in fitted().items():
        corrector.save(HERE / f"{name}.safetensors", force=True)
        corrector.transform(adata, key_added=name)
        expected[name] = adata.obsm[f"X_{name}"]
    np.savez_compressed(HERE / "corrected.npz", X=adata.X, **expected)
    adata.obs.to_csv(HERE / "obs.csv")


if __name__ == "__main__":
    main()
