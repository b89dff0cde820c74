"""The notebook, and what other tools of the field ask of our AnnData."""

from pathlib import Path

import anndata as ad
import nbclient
import nbformat
import numpy as np
import pytest

from cellica import artifacts, correct, simulate

NOTEBOOK = Path(__file__).parents[1] / "workflows" / "explore" / "explore.ipynb"


@pytest.fixture(scope="module")
def corrected(tmp_path_factory):
    """As the demo writes it: the same corrections of a simulated screen, read back from a file."""
    wells = simulate.profiles("small", n_treatments=40)
    for method in ("center+sphere", "ica"):
        correct.run(wells, method)
    file = tmp_path_factory.mktemp("explore") / "corrected.h5ad"
    artifacts.write_adata(wells, file)
    return file


def test_the_notebook_runs_from_start_to_end(corrected, monkeypatch, tmp_path):
    monkeypatch.setenv("CELLICA_WELLS", str(corrected))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    settings = {"timeout": 300, "kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    nbclient.NotebookClient(notebook, **settings).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 6
    assert not any(output.output_type == "error" for output in outputs)
    assert "component_" in "".join(output.get("data", {}).get("text/plain", "") for output in outputs)


def test_the_notebook_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")


def test_keys_and_dtypes_are_those_that_gpu_tools_take(corrected):
    wells = ad.read_h5ad(corrected)
    for rows in (wells.X, *wells.obsm.values()):
        assert isinstance(rows, np.ndarray)
        assert rows.dtype == np.float32
        assert rows.flags.c_contiguous
        assert len(rows) == wells.n_obs
    assert {"X_center+sphere", "X_ica"} <= set(wells.obsm)
    assert all(str(kind) in ("category", "float64", "float32", "int64", "bool") for kind in wells.obs.dtypes)
    assert wells.obs_names.is_unique
    assert wells.var_names.is_unique


@pytest.mark.filterwarnings("ignore")  # of scib-metrics, umap and jax
def test_scib_metrics_takes_the_same_file(corrected):
    from scib_metrics.benchmark import BatchCorrection, Benchmarker, BioConservation
    from scib_metrics.nearest_neighbors import jax_approx_min_k

    wells = ad.read_h5ad(corrected)
    wells = wells[wells.obs["moa"].notna()].copy()  # controls are of no class
    some = dict.fromkeys(
        ("isolated_labels", "nmi_ari_cluster_labels_leiden", "nmi_ari_cluster_labels_kmeans", "clisi_knn"), False
    )
    bench = Benchmarker(
        wells,
        batch_key="experiment",
        label_key="moa",
        embedding_obsm_keys=["X_ica"],
        bio_conservation_metrics=BioConservation(**some, silhouette_label=True),
        batch_correction_metrics=BatchCorrection(
            bras=True, ilisi_knn=False, kbet_per_label=False, graph_connectivity=False, pcr_comparison=False
        ),
        n_jobs=1,
        progress_bar=False,
    )
    bench.prepare(neighbor_computer=lambda x, k: jax_approx_min_k(x, k, chunk_size=256))  # which compiles little
    bench.benchmark()
    assert np.isfinite(bench.get_results(min_max_scale=False)["Silhouette label"].iloc[0])
