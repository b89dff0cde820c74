"""Corrections saved by earlier releases stay readable and give the rows that they gave then."""

import importlib.util
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from cellica import correct
from cellica.joint import Joint
from cellica.schema import InputError

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))


@pytest.fixture(scope="module")
def kept():
    with np.load(GOLDEN / "corrected.npz") as file:
        return dict(file)


def wells(kept) -> ad.AnnData:
    obs = pd.read_csv(GOLDEN / "obs.csv", index_col=0, dtype=str, keep_default_na=False)
    return ad.AnnData(kept["X"], obs=obs)


@pytest.mark.parametrize("name", FILES)
def test_saved_corrections_give_the_rows_they_gave(name, kept):
    adata = wells(kept)
    correct.load(GOLDEN / f"{name}.safetensors").transform(adata, key_added="again")
    np.testing.assert_allclose(adata.obsm["X_again"], kept[name], atol=1e-5)


@pytest.mark.parametrize("name", FILES)
def test_a_batch_alone_gives_the_same_rows(name, kept):
    """What was fitted stays, and what is read per plate or batch is read from its own controls."""
    adata = wells(kept)
    part = (adata.obs["experiment"] == "exp-1").to_numpy()
    adata = adata[part].copy()
    correct.load(GOLDEN / f"{name}.safetensors").transform(adata, key_added="again")
    np.testing.assert_allclose(adata.obsm["X_again"], kept[name][part], atol=1e-5)


@pytest.mark.parametrize("name", FILES)
def test_a_new_batch_is_corrected_and_what_is_read_from_it_is_said(name, kept):
    adata = wells(kept)
    adata = adata[adata.obs["experiment"] == "exp-1"].copy()
    adata.obs["experiment"] = "exp-9"
    correct.load(GOLDEN / f"{name}.safetensors").transform(adata, key_added="again")
    assert np.isfinite(adata.obsm["X_again"]).all()
    notes = "\n".join(adata.uns["cellica"]["again"]["notes"])
    assert "1 batches were not in the fit ('exp-9')" in notes
    own = any(step in name for step in ("center", "tvn", "mixed"))
    assert ("takes its offsets from the controls" in notes or "takes the offsets of new batches" in notes) == own
    assert ("nothing is estimated from them" in notes) == (not own)


@pytest.mark.parametrize("name", FILES)
def test_other_features_are_refused(name, kept):
    with pytest.raises(InputError, match="fitted on 5 features and the data has 4"):
        correct.load(GOLDEN / f"{name}.safetensors").transform(wells(kept)[:, :4].copy())


def test_every_method_has_a_file():
    spec = importlib.util.spec_from_file_location("golden_corrections", GOLDEN / "corrections.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    adata = maker.wells()
    joint = {name for name in correct.METHODS if isinstance(fitted_last(adata, name), Joint)}
    assert set(FILES) == set(correct.METHODS) - joint | {"mixed", maker.CHAIN}
    assert joint == {"combat", "harmony", "harmony_full"}


def fitted_last(adata: ad.AnnData, name: str):
    options = {"check_stability": False} if name in ("ica", "ica_drop") else {}
    return correct.fit(adata, name, **options).transform_.parts[-1]
