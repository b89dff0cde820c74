"""Names, roles and ids (`cellica.schema`), and what stages leave behind (`cellica.artifacts`)."""

import hashlib
import signal
import subprocess
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellica import artifacts, schema
from cellica.schema import InputError, Well, format_well, parse_well

FORMATS = [96, 384, 1536]


@st.composite
def wells(draw):
    rows, columns = schema.PLATE_FORMATS[draw(st.sampled_from(FORMATS))]
    return Well(draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1)))


# ------------------------------------------------------------------------------------------------------- well names


@given(well=wells(), zeros=st.integers(0, 2), lower=st.booleans())
def test_well_names_round_trip_whatever_their_zeros(well, zeros, lower):
    name = format_well(*well)
    assert parse_well(name) == well
    loose = schema.row_letters(well.row) + "0" * zeros + str(well.column + 1)
    assert parse_well(loose.lower() if lower else loose) == well


@pytest.mark.parametrize(("n_wells", "last"), [(96, "H12"), (384, "P24"), (1536, "AF48")])
def test_plates_have_distinct_names_up_to_their_last_well(n_wells, last):
    rows, columns = schema.PLATE_FORMATS[n_wells]
    names = [format_well(row, column) for row in range(rows) for column in range(columns)]
    assert len(set(names)) == n_wells
    assert (names[0], names[-1]) == ("A01", last)
    assert schema.plate_format(names) == schema.plate_format([last]) == (rows, columns)


@given(st.lists(wells(), min_size=1))
def test_plate_format_is_the_smallest_that_holds_the_wells(positions):
    rows, columns = schema.plate_format([format_well(*well) for well in positions])
    smaller = [s for s in schema.PLATE_FORMATS.values() if s[0] < rows and s[1] < columns]
    assert all(well.row < rows and well.column < columns for well in positions)
    assert not any(all(w.row < r and w.column < c for w in positions) for r, c in smaller)


@pytest.mark.parametrize(
    "name", ["", "A", "12", "1A", "A0", "A00", "A49", "AG01", "BA01", "A1B", "A-1", "DMSO", None, 3.0]
)
def test_names_that_are_no_wells_are_refused_by_name(name):
    with pytest.raises(InputError, match="write the row") as caught:
        parse_well(name)
    assert repr(name) in str(caught.value)


# ------------------------------------------------------------------------------------------------------ roles of wells


def screen():
    return pd.DataFrame(
        {
            "experiment": ["e1", "e1", "e1", "e2", "e2", "e3", "e3", None],
            "perturbation": ["EMPTY", "a", "b", "EMPTY", "a", "a", None, "a"],
            "control": ["negative", "", "positive", "negative", "", "", "", ""],
            "cell_type": ["x", "x", "x", "y", "y", None, "y", "y"],
        }
    )


def test_controls_are_the_negative_ones_or_those_named():
    assert schema.control_mask(screen()).nonzero()[0].tolist() == [0, 3]
    assert schema.control_mask(screen(), ["b"]).nonzero()[0].tolist() == [2]
    assert not schema.control_mask(screen().drop(columns="control")).any()
    with pytest.raises(InputError, match=r"controls 'DMSO' not found .*holds 'EMPTY', 'a', 'b'"):
        schema.control_mask(screen(), ["DMSO", "a"])


def test_anchors_are_perturbations_of_most_batches_and_controls():
    # a is in 3 of 3 batches, EMPTY in 2, b in 1; the last well has no batch and cannot count
    assert schema.anchor_mask(screen()).nonzero()[0].tolist() == [0, 1, 3, 4, 5]
    assert schema.anchor_mask(screen(), ["b"]).nonzero()[0].tolist() == [2]
    one_batch = screen().assign(experiment="e1")
    assert schema.anchor_mask(one_batch).nonzero()[0].tolist() == [0, 3]


def test_half_of_the_batches_is_not_most():
    obs = pd.DataFrame({"experiment": ["e1", "e2", "e2"], "perturbation": ["a", "b", "b"]})
    assert not schema.anchor_mask(obs).any()


def test_strata_are_cell_types_unless_said_otherwise():
    assert schema.strata_labels(screen()).tolist() == ["x", "x", "x", "y", "y", "unknown", "y", "y"]
    assert set(schema.strata_labels(screen(), None)) == set(schema.strata_labels(screen()[["control"]])) == {"all"}
    assert schema.strata_labels(screen(), "experiment")[-1] == "unknown"
    with pytest.raises(InputError, match="no column 'tissue'"):
        schema.strata_labels(screen(), "tissue")


def test_labels_are_text_and_missing_ones_none():
    obs = pd.DataFrame({"batch": [1, 2, 2], "dose": [0.1, np.nan, 10.0]})
    assert schema.labels(obs, "batch").tolist() == ["1", "2", "2"]
    assert schema.labels(obs, "dose").tolist() == ["0.1", None, "10.0"]


def test_ids_hold_experiment_plate_well_and_site():
    obs = pd.DataFrame({"experiment": ["HUVEC-01"], "plate": [1], "well": ["B02"]})
    assert schema.obs_names(obs).tolist() == ["HUVEC-01_1_B02"]
    assert schema.obs_names(obs.assign(site=2)).tolist() == ["HUVEC-01_1_B02_2"]
    with pytest.raises(InputError, match=r"no column 'well'; it has experiment, plate"):
        schema.obs_names(obs.drop(columns="well"))


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (schema.InputError, ValueError),
        (schema.MissingFileError, FileNotFoundError),
        (schema.OutputExistsError, FileExistsError),
        (schema.ImageError, OSError),
        (schema.PlateError, ValueError),
        (schema.WeightsError, ValueError),
    ],
)
def test_errors_are_ours_and_the_builtin_kind(error, builtin):
    assert issubclass(error, schema.CellicaError)
    assert issubclass(error, builtin)


# -------------------------------------------------------------------------------------------------------- atomic writes


@pytest.mark.parametrize("folder", [False, True])
def test_a_failed_write_leaves_what_was_there_and_nothing_else(tmp_path, folder):
    path = tmp_path / "out"

    def write(temporary, content):
        if folder:
            temporary.mkdir()
            temporary = temporary / "part"
        temporary.write_text(content)

    def fail(force):
        with artifacts.atomic(path, force=force) as temporary:
            write(temporary, "half")
            raise OSError("disk full")

    with pytest.raises(schema.DiskFullError, match="was not written, the disk is full"), artifacts.atomic(path):
        raise RuntimeError("Can't write data (errno = 28, error message = 'No space left on device')")
    for force in (False, True):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(OSError, match="disk full"):
            fail(force)
        assert sorted(tmp_path.rglob("*")) == before
        if not force:
            with artifacts.atomic(path) as temporary:
                write(temporary, "whole")
    with pytest.raises(schema.OutputExistsError, match="--force"), artifacts.atomic(path):
        pass
    with (
        pytest.raises(schema.OutputExistsError, match="choose another name"),
        artifacts.atomic(path, force=True) as temporary,
    ):
        temporary.write_text("a file") if folder else temporary.mkdir()
    kept = path / "part" if folder else path
    assert kept.read_text() == "whole"
    with artifacts.atomic(path, force=True) as temporary:
        write(temporary, "new")
    assert kept.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_killed_write_leaves_nothing_under_the_final_name(tmp_path):
    program = (
        "import os, signal, sys; from cellica.artifacts import atomic\n"
        "with atomic(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half'); print(temporary, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "table.csv"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert Path(done.stdout.strip()).read_text() == "half"  # it was on its way
    assert not path.exists()
    artifacts.write_text("whole", path)  # and the next run is not disturbed
    assert path.read_text() == "whole"


def test_sha256_covers_contents_and_names(tmp_path):
    file = tmp_path / "a" / "x.csv"
    artifacts.write_text("x,y\n", file)
    assert artifacts.sha256(file) == hashlib.sha256(b"x,y\n").hexdigest()
    before = artifacts.sha256(tmp_path / "a")
    file.rename(file.with_name("z.csv"))
    assert artifacts.sha256(tmp_path / "a") != before


# --------------------------------------------------------------------------------------------------------- AnnData files


def wild_adata():
    """Every kind of column that was seen to break on the way to a file and back."""
    obs = pd.DataFrame(
        {
            "gene": ["RPLP2", None, "nan"],
            "compound": pd.Series([pd.NA, "taxol", ""], dtype="string"),
            "kind": pd.Categorical(["a", None, "a"], categories=["b", "a"], ordered=True),
            "concentration": [np.nan, 0.1, 10.0],
            "mixed": [1, None, "x"],
            "count": pd.array([1, None, 3], dtype="Int64"),
            "site": [1, 2, 3],
            "good": [True, False, True],
            "nothing": [None, None, None],
        },
        index=["e_1_A01", "e_1_A02", "e_1_AF48"],
    )
    adata = ad.AnnData(np.arange(6, dtype=np.float32).reshape(3, 2), obs=obs, obsm={"X_sphere": np.eye(3)})
    adata.uns["cellica"] = {"import": {"dropped": np.array([], dtype=object), "n": 3}}
    return adata


@pytest.mark.parametrize("suffix", artifacts.SUFFIXES)
def test_adata_round_trips_with_missing_strings_and_numbers(tmp_path, suffix):
    adata = wild_adata()
    artifacts.write_adata(adata, tmp_path / f"x{suffix}")
    back = artifacts.read_adata(tmp_path / f"x{suffix}")
    for name in adata.obs:
        expected = [None if pd.isna(value) else value for value in adata.obs[name]]
        if name == "mixed":
            expected = ["1", None, "x"]
        assert [None if pd.isna(value) else value for value in back.obs[name]] == expected, name
    assert back.obs["concentration"].dtype == np.float64
    assert back.obs["site"].dtype == np.int64
    assert list(back.obs["kind"].cat.categories) == ["b", "a"]
    assert back.obs["kind"].cat.ordered
    assert back.obs_names.tolist() == adata.obs_names.tolist()
    np.testing.assert_array_equal(back.X, adata.X)
    np.testing.assert_array_equal(back.obsm["X_sphere"], np.eye(3))
    assert len(back.uns["cellica"]["import"]["dropped"]) == 0
    artifacts.write_adata(back, tmp_path / f"again{suffix}")  # what was read can be written
    pd.testing.assert_frame_equal(artifacts.read_adata(tmp_path / f"again{suffix}").obs, back.obs)


@pytest.mark.parametrize("suffix", artifacts.SUFFIXES)
def test_writing_leaves_the_callers_adata_as_it_is(tmp_path, suffix):
    adata = wild_adata()
    before = adata.obs.copy()
    artifacts.write_adata(adata, tmp_path / f"x{suffix}")
    pd.testing.assert_frame_equal(adata.obs, before)


def test_files_that_are_no_adata_are_named(tmp_path):
    with pytest.raises(InputError, match=r"one that ends in \.h5ad or \.zarr"):
        artifacts.write_adata(wild_adata(), tmp_path / "x.csv")
    with pytest.raises(schema.MissingFileError, match=r"absent\.h5ad"):
        artifacts.read_adata(tmp_path / "absent.h5ad")
    artifacts.write_adata(wild_adata(), tmp_path / "x.h5ad")
    (tmp_path / "cut.h5ad").write_bytes((tmp_path / "x.h5ad").read_bytes()[:1000])
    with pytest.raises(InputError, match=r"cut\.h5ad cannot be read"):
        artifacts.read_adata(tmp_path / "cut.h5ad")


def test_provenance_is_kept_in_order(tmp_path):
    adata = wild_adata()
    artifacts.add_step(adata, artifacts.step("import", {"format": "table", "features": None}, {"a.csv": "12ab"}))
    artifacts.add_step(adata, artifacts.step("correct", {"method": "sphere"}, notes=["one"]))
    artifacts.write_adata(adata, tmp_path / "x.h5ad")
    first, second = artifacts.provenance(artifacts.read_adata(tmp_path / "x.h5ad"))
    assert (first["verb"], first["parameters"], first["inputs"]) == ("import", {"format": "table"}, {"a.csv": "12ab"})
    assert (second["verb"], second["notes"]) == ("correct", ["one"])
    assert artifacts.provenance(ad.AnnData(np.zeros((1, 1)))) == []


def test_a_block_that_writes_nothing_or_a_file_over_a_folder_keeps_what_was_there(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    with pytest.raises(RuntimeError, match="nothing was written"), artifacts.atomic(folder, force=True):
        pass
    with pytest.raises(schema.OutputExistsError, match="is a folder"):
        artifacts.write_text("new", folder, force=True)
    assert (folder / "kept").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_anchors_are_on_most_plates_where_each_plate_holds_perturbations_of_its_own():
    rows = [
        (f"e{e}", str(p), name, control)
        for e in range(3)
        for p in (1, 2, 3)
        for name, control in (("EMPTY", "negative"), ("kif11", "positive"), (f"p{p}", ""))
    ]
    obs = pd.DataFrame(rows, columns=["experiment", "plate", "perturbation", "control"])
    anchors = schema.anchor_mask(obs)
    assert set(obs.loc[anchors, "perturbation"]) == {"EMPTY", "kif11"}
    assert set(obs.loc[schema.anchor_mask(obs.drop(columns="plate")), "perturbation"]) > {"EMPTY", "kif11"}
