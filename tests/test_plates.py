import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import imagecodecs
import numpy as np
import pandas as pd
import pytest
import tifffile
import zarr
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from cellica import hcs, images, ingestion, schema
from cellica.plates import Plate, ingest, plan
from cellica.schema import InputError, MissingFileError, PlateError

CHANNELS = tuple(f"w{i}" for i in range(1, 7))


def screen_table(rows: list[dict]) -> pd.DataFrame:
    """A screen table by hand: labels filled in, index = site ids."""
    labels = {"cell_type": "HUVEC", "perturbation": "EMPTY", "perturbation_type": "siRNA", "control": "negative"}
    table = pd.DataFrame([{**labels, "concentration": np.nan, **row} for row in rows])
    table.index = schema.obs_names(table)
    return table


def rxrx1_table(folder: Path) -> pd.DataFrame:
    sites: dict[tuple, dict] = {}
    for file in sorted(folder.glob("*/*/Plate*/*.png")):
        well, site, channel = re.fullmatch(r"(\w+)_s(\d)_(w\d)\.png", file.name).groups()
        key = (file.parts[-3], file.parts[-2].removeprefix("Plate"), well, int(site))
        sites.setdefault(key, {})[f"path_{channel}"] = str(file)
    return screen_table(
        [dict(zip(("experiment", "plate", "well", "site"), key), **paths) for key, paths in sites.items()]
    )


def made_table(folder: Path, wells: list[str], channels=("a", "b"), shape=(6, 8), dtype=np.uint8, sites=1, plate="1"):
    """Write random images and their screen table."""
    rng = np.random.default_rng(len(wells))
    rows = []
    for well in wells:
        for site in range(1, sites + 1):
            row = {"experiment": "E-01", "plate": plate, "well": well, "site": site}
            for channel in channels:
                path = folder / f"{plate}_{well}_{site}_{channel}.png"
                Image.fromarray(rng.integers(1, np.iinfo(dtype).max, shape, dtype=dtype)).save(path)
                row[f"path_{channel}"] = str(path)
            rows.append(row)
    return screen_table(rows)


def pixels_of(plate: Plate, **options) -> np.ndarray:
    return np.concatenate([pixels for _, pixels in plate.fields(**options)])


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def rxrx1(shared, tmp_path_factory):
    """Real RxRx1: site 1 of twelve plates is whole, site 2 lacks w5 and w6."""
    table = rxrx1_table(shared / "data" / "rxrx1_images")
    out = tmp_path_factory.mktemp("rxrx1")
    return table, out, ingest(table, out)


# ---------------------------------------------------------------------------------------------- real plates


def test_real_sites_round_trip_to_the_pixel(rxrx1):
    table, _, report = rxrx1
    assert [path.name for path in report.plates] == [
        f"{e}_{p}.zarr" for e, p in table.groupby(["experiment", "plate"]).groups
    ]
    assert report.n_sites == len(report.plates) == 12
    for path in report.plates:
        plate = Plate(path)
        assert (plate.shape, plate.channels) == ((6, 512, 512), list(CHANNELS))
        assert plate.name == f"{plate.experiment}_{plate.plate}" == path.stem
        ((part, pixels),) = plate.fields()
        assert list(part.index) == [f"{plate.name}_B02_1"]
        for channel, image in zip(CHANNELS, pixels[0], strict=True):
            with Image.open(table.loc[part.index[0], f"path_{channel}"]) as reference:
                np.testing.assert_array_equal(image, np.asarray(reference))


def test_real_incomplete_sites_are_set_aside_channel_by_channel(rxrx1):
    table, out, report = rxrx1
    faults = report.set_aside
    assert set(faults["site_id"]) == set(table.index[table["site"] == 2])
    assert list(faults["channel"]) == ["w5", "w6"] * 12
    assert set(faults["reason"]) == {"no path in the table"}
    assert "12 plates, 12 sites\nset aside 24 images of 12 sites: no path in the table" in report.summary()
    pd.testing.assert_frame_equal(
        pd.read_csv(out / "set_aside.csv", dtype=str, keep_default_na=False), faults, check_dtype=False
    )


def test_zarr_python_and_ome_zarr_models_read_a_real_plate(rxrx1):
    from ome_zarr_models.v05.hcs import HCS
    from ome_zarr_models.v05.image import Image as OmeImage

    path = rxrx1[2].plates[0]
    group = zarr.open_group(path, mode="r")
    array = group["B/02/1/0"]
    assert (array.shape, array.chunks, array.dtype) == ((1, 6, 1, 512, 512), (1, 6, 1, 512, 512), np.uint8)
    assert array.metadata.dimension_names == ("t", "c", "z", "y", "x")
    np.testing.assert_array_equal(array[0, :, 0], pixels_of(Plate(path))[0])
    model = HCS.from_zarr(group)
    assert [well.path for well in model.attributes.ome.plate.wells] == ["B/02"]
    assert OmeImage.from_zarr(group["B/02/1"]).attributes.ome.omero["channels"][5]["label"] == "w6"
    assert group.metadata.consolidated_metadata is None


@pytest.fixture
def two_fields(tmp_path) -> tuple[Path, np.ndarray]:
    """A plate with wells A01 and AF48, two fields each, and the pixels of A01's first."""
    table = made_table(tmp_path, ["A01", "AF48"], shape=(32, 48), sites=2)
    (path,) = ingest(table, tmp_path / "out", pixel_size=0.65).plates
    return path, pixels_of(Plate(path))[0]


def test_iohub_reads_a_plate(two_fields):
    ngff = pytest.importorskip("iohub.ngff", reason="iohub is not installed")
    path, expected = two_fields
    with ngff.open_ome_zarr(path, mode="r") as plate:
        positions = dict(plate.positions())
        assert set(positions) == {"A/01/1", "A/01/2", "AF/48/1", "AF/48/2"}
        field = positions["A/01/1"]
        assert (field.channel_names, field.scale) == (["a", "b"], [1, 1, 1, 0.65, 0.65])
        np.testing.assert_array_equal(np.asarray(field.data)[0, :, 0], expected)


def test_ngio_reads_a_plate(two_fields):
    ngio = pytest.importorskip("ngio", reason="ngio is not installed")
    path, expected = two_fields
    plate = ngio.open_ome_zarr_plate(str(path))
    assert (plate.rows, plate.columns) == (["A", "AF"], ["01", "48"])
    image = plate.get_images(max_workers=1)["A/01/1"].get_image()
    assert (image.channel_labels, image.pixel_size.x) == (["a", "b"], 0.65)
    np.testing.assert_array_equal(image.get_as_numpy(axes_order="tczyx").reshape(expected.shape), expected)


def test_ome_zarr_py_reads_a_plate(two_fields):
    pytest.importorskip("ome_zarr", reason="ome-zarr is not installed")
    from ome_zarr.io import parse_url
    from ome_zarr.reader import Reader

    path, expected = two_fields
    (node, *_) = Reader(parse_url(str(path)))()
    grid = np.asarray(node.data[0])  # wells side by side
    np.testing.assert_array_equal(grid[0, :, 0, :32, :48], expected)
    (field, *_) = Reader(parse_url(str(path / "A" / "01" / "1")))()
    assert field.metadata["channel_names"] == ["a", "b"]


def test_pixel_size_is_claimed_only_where_it_is_given(two_fields, tmp_path):
    def axes_and_scale(path: Path) -> tuple[dict, list]:
        ome = json.loads((path / "A" / "01" / "1" / "zarr.json").read_text())["attributes"]["ome"]
        multiscale = ome["multiscales"][0]
        scale = multiscale["datasets"][0]["coordinateTransformations"][0]["scale"]
        return {axis["name"]: axis.get("unit") for axis in multiscale["axes"]}, scale

    units, scale = axes_and_scale(two_fields[0])
    assert (units, scale) == (
        {"t": None, "c": None, "z": None, "y": "micrometer", "x": "micrometer"},
        [1, 1, 1, 0.65, 0.65],
    )
    units, scale = axes_and_scale(ingest(made_table(tmp_path, ["A01"]), tmp_path / "unknown").plates[0])
    assert (set(units.values()), scale) == ({None}, [1] * 5)


def test_sixteen_bit_tiffs_need_a_range_and_keep_it_in_the_provenance(shared, tmp_path):
    rows = {}
    for file in sorted((shared / "data" / "hcs_tiff_samples").glob("*/*.tif")):
        well, *_, channel, _ = file.stem.split("_")
        row = rows.setdefault(
            well, {"experiment": "NF1", "plate": "2", "well": schema.format_well(*schema.parse_well(well))}
        )
        row.update({"site": 1, f"path_{channel}": str(file)})
    table = screen_table(list(rows.values()))
    with pytest.raises(InputError, match=r"plate NF1_2: images of 16 bits .* --intensity-range LOW HIGH"):
        ingest(table, tmp_path)
    assert not list(tmp_path.glob("*.zarr"))
    report = ingest(table, tmp_path, intensity_range=(256, 65535))
    plate = Plate(report.plates[0])
    assert plate.shape == (3, 904, 1224)
    assert plate.provenance[0]["parameters"] == {"intensity_range": [256, 65535]}
    with Image.open(table.iloc[0]["path_GFP"]) as reference:
        expected = images.to_uint8(np.asarray(reference), (256, 65535))
    np.testing.assert_array_equal(pixels_of(plate)[0, plate.channels.index("GFP")], expected)


def test_real_jpeg2000_on_a_1536_well_plate(shared, tmp_path):
    folder = shared / "data" / "rxrx3_jp2_sample"
    paths = {f"path_w{i}": str(folder / f"AA41_s1_{i}.jp2") for i in range(1, 7)}
    report = ingest(
        screen_table([{"experiment": "gene-001", "plate": "9", "well": "AA41", "site": 1, **paths}]), tmp_path
    )
    assert (report.plates[0] / "AA" / "41" / "1" / "zarr.json").exists()
    with Image.open(paths["path_w3"]) as reference:
        np.testing.assert_array_equal(pixels_of(Plate(report.plates[0]))[0, 2], np.asarray(reference))


# ---------------------------------------------------------------------------------------------- any plate


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wells=st.lists(
        st.builds(schema.format_well, st.integers(0, 31), st.integers(0, 47)), min_size=1, max_size=4, unique=True
    ),
    channels=st.lists(st.text("abcXYZ019 _-", min_size=1, max_size=6), min_size=1, max_size=4, unique=True),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    sites=st.integers(1, 3),
    chunk_size=st.integers(1, 5),
    plate=st.sampled_from(["1", "BR0001.x", "Plate 2"]),
)
def test_any_plate_round_trips(tmp_path_factory, wells, channels, shape, sites, chunk_size, plate):
    folder = tmp_path_factory.mktemp("any")
    table = made_table(folder, wells, channels, shape, sites=sites, plate=plate)
    table["dose"] = pd.array([None, *range(1, len(table))], dtype="Int64")
    table["gene"] = [None if i % 2 else f"g{i}" for i in range(len(table))]
    table["flag"] = np.arange(len(table)) % 2 == 0
    (path,) = ingest(table, folder / "out").plates
    opened = Plate(path)
    kept = table.drop(columns=[f"path_{channel}" for channel in channels])
    pd.testing.assert_frame_equal(opened.sites, kept, check_dtype=False, check_index_type=False)
    for column in ("site", "concentration", "dose", "flag"):
        assert opened.sites[column].dtype == table[column].dtype
    expected = [[np.asarray(Image.open(row[f"path_{channel}"])) for channel in channels] for _, row in table.iterrows()]
    np.testing.assert_array_equal(pixels_of(opened, chunk_size=chunk_size), np.array(expected))
    assert [len(part) for part, _ in opened.fields(chunk_size)][:-1] == [chunk_size] * ((len(table) - 1) // chunk_size)


def test_threads_do_not_change_a_byte(tmp_path):
    table = made_table(tmp_path, ["A01", "B02", "AF48"], sites=2)
    for threads in (1, 3):
        ingest(table, tmp_path / str(threads), threads=threads)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "3")


def test_only_wells_that_exist_are_listed(tmp_path):
    table = made_table(tmp_path, ["C05", "AA02"])
    (path,) = ingest(table, tmp_path / "out").plates
    plate = json.loads((path / "zarr.json").read_text())["attributes"]["ome"]["plate"]
    assert plate["wells"] == [
        {"path": "C/05", "rowIndex": 0, "columnIndex": 1},
        {"path": "AA/02", "rowIndex": 1, "columnIndex": 0},
    ]
    assert [row["name"] for row in plate["rows"]] == ["C", "AA"]


# ---------------------------------------------------------------------------------------------- faults


def damage(kind: str, table: pd.DataFrame, site_id: str) -> None:
    """Damage channel b of one site."""
    path = Path(table.loc[site_id, "path_b"])
    data = path.read_bytes()
    if kind == "absent":
        path.unlink()
    elif kind == "no path":
        table.loc[site_id, "path_b"] = None
    elif kind == "twice":
        table.loc[site_id, "path_b"] = table.loc[site_id, "path_a"]
    elif kind == "shape":
        Image.fromarray(np.ones((5, 5), np.uint8)).save(path)
    elif kind == "depth":
        Image.fromarray(np.ones((6, 8), np.uint16)).save(path)
    elif kind == "black":
        Image.fromarray(np.zeros((6, 8), np.uint8)).save(path)
    else:
        path.write_bytes({"empty": b"", "truncated": data[: len(data) // 2], "zeroed": bytes(len(data))}[kind])


FAULTS = {
    "absent": "file absent",
    "no path": "no path in the table",
    "twice": "file listed more than once: also for",
    "shape": "differs from its plate: 5 x 5 uint8, most images are 6 x 8 uint8",
    "depth": "differs from its plate: 6 x 8 uint16, most images are 6 x 8 uint8",
    "black": "every pixel is 0",
    "empty": "empty file: 0 bytes",
    "truncated": "truncated or damaged",
    "zeroed": "zero-filled file",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_damaged_site_is_set_aside_with_its_reason_and_the_rest_goes_on(tmp_path, kind):
    table = made_table(tmp_path, ["A01", "A02", "B01"])
    bad = table.index[1]
    damage(kind, table, bad)
    report = ingest(table, tmp_path / "out")
    plate = Plate(report.plates[0])
    assert list(plate.sites.index) == [table.index[0], table.index[2]]
    assert pixels_of(plate).shape == (2, 2, 6, 8)
    assert not (plate.path / "A" / "02").exists()
    assert set(report.set_aside["site_id"]) == {bad}
    row = report.set_aside.set_index("channel").loc["b"]
    assert row["reason"].startswith(FAULTS[kind])
    assert (row["well"], row["site"]) == ("A02", "1")
    assert list(report.set_aside["channel"]) == (["a", "b"] if kind == "twice" else ["b"])
    pd.testing.assert_frame_equal(plate.set_aside, report.set_aside)
    listed = pd.read_csv(tmp_path / "out" / "set_aside.csv", dtype=str, keep_default_na=False)
    pd.testing.assert_frame_equal(listed, report.set_aside, check_dtype=False)


def test_each_failing_channel_is_reported_and_sites_of_another_shape_leave_whole(tmp_path):
    table = made_table(tmp_path, ["A01", "A02", "A03", "C01"], channels=("a", "b", "c"))
    damage("empty", table, table.index[1])
    Path(table.iloc[1]["path_c"]).unlink()
    for channel in "abc":  # a whole site of another shape, the first in the table
        Image.fromarray(np.ones((4, 4), np.uint8)).save(table.iloc[0][f"path_{channel}"])
    report = ingest(table, tmp_path / "out")
    assert list(Plate(report.plates[0]).sites["well"]) == ["A03", "C01"]
    reasons = report.set_aside.groupby("well")["reason"].apply(list)
    assert [reason.split(":")[0] for reason in reasons["A01"]] == ["differs from its plate"] * 3
    assert [reason.split(":")[0] for reason in reasons["A02"]] == ["empty file", "file absent"]


def test_a_file_named_by_two_sites_keeps_both_out(tmp_path):
    table = made_table(tmp_path, ["A01", "A02", "A03"])
    table.loc[table.index[2], "path_a"] = table.loc[table.index[0], "path_b"]
    report = ingest(table, tmp_path / "out")
    assert list(report.set_aside["site_id"]) == [table.index[0], table.index[2]]
    assert f"also for '{table.index[0]} b'" in report.set_aside["reason"].iloc[1]


def test_a_plate_without_images_is_reported_in_one_row(tmp_path):
    table = pd.concat([made_table(tmp_path, ["A01"]), made_table(tmp_path, ["A01", "A02"], plate="2")])
    for path in table.loc[table["plate"] == "2", ["path_a", "path_b"]].to_numpy().ravel():
        Path(path).unlink()
    report = ingest(table, tmp_path / "out")
    assert [path.name for path in report.plates] == ["E-01_1.zarr"]
    (row,) = report.set_aside.to_dict("records")
    assert (row["plate"], row["site_id"], row["reason"]) == ("2", "", "no image of the plate: 2 sites are absent")
    assert report.summary() == "1 plates, 1 sites\nset aside 1 plates: no image of the plate"


@pytest.mark.parametrize("way", ["dotted", "folder link", "file link", "hard link"])
def test_one_file_under_two_names_is_found_however_it_is_spelled(tmp_path, way):
    table = made_table(tmp_path, ["A01", "A02", "A03"])
    first = Path(table.iloc[0]["path_a"])
    if way == "dotted":
        (tmp_path / "sub").mkdir()
        other = f"{tmp_path}/sub/../{first.name}"
    elif way == "folder link":
        (tmp_path / "link").symlink_to(tmp_path)
        other = f"{tmp_path}/link/{first.name}"
    else:
        (os.symlink if way == "file link" else os.link)(first, tmp_path / "other.png")
        other = str(tmp_path / "other.png")
    table.loc[table.index[0], "path_b"] = other
    report = ingest(table, tmp_path / "out")
    assert report.n_sites == 2
    assert set(report.set_aside["site_id"]) == {table.index[0]}
    assert report.set_aside["reason"].str.startswith("file listed more than once").all()


def test_devices_and_pipes_are_refused(tmp_path):
    table = made_table(tmp_path, ["A01", "A02", "A03"])
    os.mkfifo(tmp_path / "pipe.png")
    table.loc[table.index[0], "path_a"] = "/dev/zero"
    table.loc[table.index[1], "path_a"] = str(tmp_path / "pipe.png")
    report = ingest(table, tmp_path / "out")
    assert report.n_sites == 1
    assert report.set_aside["reason"].tolist() == ["not a regular file: a folder, a device or a pipe"] * 2


def test_files_that_the_table_does_not_name_are_counted(tmp_path):
    table = made_table(tmp_path, ["A01", "A02"])
    (tmp_path / "notes.txt").write_text("")
    report = ingest(table.iloc[:1], tmp_path / "out", count_unlisted=True)
    assert report.n_sites == 1
    assert report.set_aside["reason"].tolist() == ["file not in the table"] * 2
    assert report.set_aside["path"].tolist() == [str(tmp_path / f"1_A02_1_{channel}.png") for channel in "ab"]
    assert "set aside 2 images: file not in the table" in report.summary()
    assert len(ingest(table, tmp_path / "all", count_unlisted=True).set_aside) == 0


def test_a_folder_without_one_of_the_images_is_an_error_before_any_work(tmp_path):
    table = made_table(tmp_path, ["A01"]).replace(str(tmp_path), str(tmp_path / "nowhere"), regex=True)
    with pytest.raises(MissingFileError, match=r"none of the 2 image files .* the first is .*nowhere"):
        ingest(table, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_table_of_several_plates_becomes_one_store_a_plate(tmp_path):
    tables = [made_table(tmp_path, ["A01", "B02"], plate=plate) for plate in "123"]
    mixed = pd.concat(tables).sample(frac=1, random_state=0)
    for path in ingest(mixed, tmp_path / "out").plates:
        plate = Plate(path)
        assert set(plate.sites["plate"]) == {plate.plate}
        assert len(plate.sites) == 2


# ---------------------------------------------------------------------------------------------- intensities


def cumulated(values: np.ndarray, percentile: float) -> int:
    return int(np.percentile(values, percentile, method="inverted_cdf"))


@pytest.mark.parametrize("intensity_from", ["all", "controls"])
def test_percentiles_of_a_plate_are_those_of_numpy_and_stand_in_the_provenance(tmp_path, intensity_from):
    table = made_table(tmp_path, ["A01", "A02", "A03"], dtype=np.uint16, sites=2)
    table["control"] = ["negative", "negative", "", "", "positive", ""]
    report = ingest(table, tmp_path / "out", intensity_percentiles=(2, 98.5), intensity_from=intensity_from)
    plate = Plate(report.plates[0])
    used = table if intensity_from == "all" else table[table["control"] == "negative"]
    (step,) = plate.provenance
    assert step["intensity_sample"] == list(used.index)
    for i, channel in enumerate("ab"):
        stored = np.stack([np.asarray(Image.open(path)) for path in table[f"path_{channel}"]])
        chosen = stored[table.index.isin(used.index)]
        expected = [cumulated(chosen, 2), cumulated(chosen, 98.5)]
        assert step["intensity_ranges"][channel] == expected
        np.testing.assert_array_equal(pixels_of(plate)[:, i], images.to_uint8(stored, tuple(expected)))
    parameters = {"intensity_percentiles": [2, 98.5], "intensity_from": intensity_from}
    assert step["parameters"] == parameters
    assert (
        ingest(table, tmp_path / "out", intensity_percentiles=(2, 98.5), intensity_from=intensity_from).outdated == []
    )
    assert ingest(table, tmp_path / "out", intensity_percentiles=(2, 99), intensity_from=intensity_from).outdated


def test_percentiles_of_many_fields_come_from_a_sample_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ingestion, "SAMPLE", 3)
    table = made_table(tmp_path, [f"A{i:02d}" for i in range(1, 8)], dtype=np.uint16)
    (path,) = ingest(table, tmp_path / "out", intensity_percentiles=(0, 100)).plates
    assert Plate(path).provenance[0]["intensity_sample"] == list(table.index[[0, 3, 6]])


def test_percentiles_without_a_picture_to_take_them_from(tmp_path):
    table = made_table(tmp_path, ["A01", "A02"], dtype=np.uint16)
    with pytest.raises(InputError, match=r"1 plates have no negative control .* \('E-01_1'\): mark controls"):
        ingest(table.assign(control=""), tmp_path / "out", intensity_percentiles=(1, 99), intensity_from="controls")
    Path(table.iloc[0]["path_a"]).write_bytes(b"")
    controls = table.assign(control=["negative", ""])
    report = ingest(controls, tmp_path / "out", intensity_percentiles=(1, 99), intensity_from="controls")
    assert report.plates == []
    assert report.set_aside["reason"].tolist() == ["no image to take percentiles from: 1 sites tried"]


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=60),
    st.tuples(st.floats(0, 100), st.floats(0, 100)).filter(lambda pair: pair[0] < pair[1]),
)
def test_percentiles_of_a_histogram(values, low_high):
    low, high = ingestion.percentiles(np.bincount(values, minlength=2**16), low_high)
    assert low == cumulated(np.array(values), low_high[0])
    assert high == max(cumulated(np.array(values), low_high[1]), low + 1)


# ---------------------------------------------------------------------------------------------- stacks


def test_stacks_need_a_choice_and_the_provenance_keeps_it(tmp_path):
    rng = np.random.default_rng(0)
    stacks = rng.integers(1, 255, (2, 4, 6, 8), dtype=np.uint8)
    for i, stack in enumerate(stacks):
        tifffile.imwrite(tmp_path / f"{i}.tif", stack, imagej=True, metadata={"axes": "ZYX"})
        for k, plane in enumerate(stack):
            Image.fromarray(plane).save(tmp_path / f"{i}_{k}.png")
    base = [{"experiment": "e", "plate": "1", "well": f"A0{i + 1}", "site": 1} for i in range(2)]
    inside = screen_table([{**row, "path_a": str(tmp_path / f"{i}.tif")} for i, row in enumerate(base)])
    files = [tuple(str(tmp_path / f"{i}_{k}.png") for k in range(4)) for i in range(2)]
    beside = screen_table([{**row, "path_a": planes} for row, planes in zip(base, files)])
    for name, table in {"inside": inside, "beside": beside}.items():
        with pytest.raises(
            InputError, match=r"plate e_1: images hold a stack of pictures: 4 z planes; choose with z = max"
        ):
            ingest(table, tmp_path / name)
        (path,) = ingest(table, tmp_path / name, z="mean").plates
        np.testing.assert_array_equal(pixels_of(Plate(path))[:, 0], np.floor(stacks.mean(axis=1) + 0.5))
        assert Plate(path).provenance[0]["parameters"] == {"z": "mean"}
    (tmp_path / "1_2.png").unlink()
    report = ingest(beside, tmp_path / "beside", z="max", force=True)
    (row,) = report.set_aside.to_dict("records")
    assert (row["site_id"], row["reason"]) == (
        "e_1_A02_1",
        f"a plane of the stack: {tmp_path / '1_2.png'}: file absent",
    )


# ---------------------------------------------------------------------------------------------- side by side


def test_what_killed_runs_left_goes_and_what_others_write_stays(tmp_path):
    table = made_table(tmp_path, ["A01"])
    out = tmp_path / "out"
    for name in (".E-01_1.zarr.abc.part", ".E-01_2.zarr.abc.part", ".set_aside.csv.abc.part"):
        (out / name / "A").mkdir(parents=True)
    ingest(table, out)
    assert sorted(path.name for path in out.glob(".*.part")) == [".E-01_2.zarr.abc.part"]


def test_a_second_process_waits_for_the_one_that_writes_the_plate(tmp_path):
    table = made_table(tmp_path, ["A01"])
    (path,) = ingest(table, tmp_path / "made").plates
    out = tmp_path / "out"
    (out / ".E-01_1.zarr.abc.part").mkdir(parents=True)
    other = FileLock(out / ".locks" / "E-01_1.zarr.lock")
    with ThreadPoolExecutor(1) as pool:
        with other:
            waiting = pool.submit(ingest, table, out)
            time.sleep(0.3)
            assert not waiting.done()
            assert (out / ".E-01_1.zarr.abc.part").exists()
            shutil.copytree(path, out / path.name)
        report = waiting.result(timeout=10)
    assert report.skipped == [out / "E-01_1.zarr"]


def test_two_processes_at_once_write_a_plate_once(tmp_path):
    table = made_table(tmp_path, [f"A{i:02d}" for i in range(1, 13)])
    with ThreadPoolExecutor(2) as pool:
        reports = [run.result() for run in [pool.submit(ingest, table, tmp_path / "out") for _ in range(2)]]
    assert sorted(len(report.skipped) for report in reports) == [0, 1]
    assert [report.n_sites for report in reports] == [12, 12]


# ---------------------------------------------------------------------------------------------- again


def test_rerun_skips_finished_plates_and_the_list_stays_whole(tmp_path):
    one, two = made_table(tmp_path, ["A01", "A02"]), made_table(tmp_path, ["A01", "A02"], plate="2")
    broken = made_table(tmp_path, ["A01"], plate="3")
    for channel in "ab":
        Path(broken.iloc[0][f"path_{channel}"]).write_bytes(b"")
    for table in (one, two):
        damage("empty", table, table.index[1])
    out = tmp_path / "out"
    assert ingest(broken, out).plates == []
    first = ingest(one, out)
    before = files_of(out / "E-01_1.zarr")
    report = ingest(pd.concat([one, two]), out)
    assert (report.skipped, report.plates, report.n_sites) == (
        first.plates,
        [out / "E-01_1.zarr", out / "E-01_2.zarr"],
        2,
    )
    assert "1 plates were finished earlier and skipped" in report.summary()
    assert files_of(out / "E-01_1.zarr") == before
    assert list(report.set_aside["plate"]) == ["1", "2"]
    listed = pd.read_csv(out / "set_aside.csv", dtype=str)
    assert list(listed["plate"]) == ["1", "2", "3", "3"]

    (out / "set_aside.csv").unlink()
    ingest(two, out)
    assert list(pd.read_csv(out / "set_aside.csv", dtype=str)["plate"]) == ["1", "2"]


def test_a_skipped_plate_whose_sites_changed_is_named_and_force_writes_it_again(tmp_path):
    table = made_table(tmp_path, ["A01", "A02"])
    (path,) = ingest(table.iloc[:1], tmp_path / "out").plates
    report = ingest(table, tmp_path / "out")
    assert report.outdated == [path]
    assert "1 of these are not what the screen table and options now ask for: 'E-01_1'" in report.summary()
    report = ingest(table, tmp_path / "out", force=True)
    assert (report.skipped, report.outdated, len(Plate(path).sites)) == ([], [], 2)


def test_update_writes_again_what_the_table_or_options_change_and_nothing_else(tmp_path):
    one, two = made_table(tmp_path, ["A01", "A02"]), made_table(tmp_path, ["A01"], plate="2")
    table, out = pd.concat([one, two]), tmp_path / "out"
    ingest(table.drop(table.index[1]), out)
    before = files_of(out / "E-01_2.zarr")
    assert list(plan(table, out)["state"]) == ["outdated", "finished"]
    report = ingest(table, out, update=True)
    assert ([path.name for path in report.skipped], report.outdated, report.n_sites) == (["E-01_2.zarr"], [], 3)
    assert files_of(out / "E-01_2.zarr") == before
    assert list(plan(table, out)["state"]) == ["finished", "finished"]
    assert list(plan(table, out, pixel_size=0.5)["state"]) == ["outdated", "outdated"]
    ingest(table, out, update=True, pixel_size=0.5)
    assert list(plan(table, out, pixel_size=0.5)["state"]) == ["finished", "finished"]


def test_the_plan_knows_a_plate_by_all_that_makes_it(tmp_path):
    table = pd.concat([made_table(tmp_path, ["A01", "A02"]), made_table(tmp_path, ["A01"], plate="2")])
    first = plan(table, tmp_path / "out")
    assert first[["name", "wells", "sites", "state"]].to_numpy().tolist() == [
        ["E-01_1", 2, 2, "to do"],
        ["E-01_2", 1, 1, "to do"],
    ]
    changed = plan(table.assign(perturbation=["x", "y", None]), tmp_path / "out")
    moved = plan(table.assign(path_a=table["path_b"], path_b=table["path_a"]), tmp_path / "out")
    fewer = plan(table.iloc[1:], tmp_path / "out")
    assert list(first["sha256"] == changed["sha256"]) == list(first["sha256"] == moved["sha256"]) == [False, False]
    assert list(first["sha256"] == fewer["sha256"]) == [False, True]
    with pytest.raises(MissingFileError, match="none of the 6 image files"):
        plan(table.assign(path_a="nowhere.png", path_b="neither.png"), tmp_path / "out")


def test_a_plate_that_is_kept_empty_is_tried_again_and_takes_no_place(tmp_path):
    table, out = made_table(tmp_path, ["A01", "A02"]), tmp_path / "out"
    images_of = {path: Path(path).read_bytes() for path in table[["path_a", "path_b"]].to_numpy().ravel()}
    for path in images_of:
        Path(path).unlink()
    report = ingest(table, out, keep_empty=True)
    assert (report.plates, report.n_sites) == ([], 0)
    empty = Plate(out / "E-01_1.zarr")
    assert (len(empty.sites), empty.channels, empty.shape, empty.experiment, empty.plate) == (
        0,
        ["a", "b"],
        (2, 0, 0),
        "E-01",
        "1",
    )
    assert empty.provenance[0]["plates"]["E-01_1"] == {
        "sites": 0,
        "set_aside": 2,
        "reasons": {"no image of the plate": 1},
    }
    assert list(empty.fields()) == []
    assert list(plan(table.assign(path_a=[*table["path_a"][:1], __file__]), out)["state"]) == ["without sites"]
    for path, content in images_of.items():
        Path(path).write_bytes(content)
    assert ingest(table, out).n_sites == 2
    for path in images_of:
        Path(path).write_bytes(b"")
    assert ingest(table, out, keep_empty=True, force=True).n_sites == 0
    assert len(Plate(out / "E-01_1.zarr").sites) == 2


def test_a_plate_that_cannot_be_written_again_stays_and_it_is_said(tmp_path):
    table, out = made_table(tmp_path, ["A01", "A02"]), tmp_path / "out"
    damage("empty", table, table.index[1])
    (path,) = ingest(table, out).plates
    moved = table.assign(path_a="nowhere.png", path_b="neither.png")
    report = ingest(moved, out, update=True, keep_empty=True)
    assert (report.plates, report.outdated, len(Plate(path).sites)) == ([], [path], 1)
    assert "no image of it can be used now, and the plate of before stays as it was" in report.summary()
    listed = pd.read_csv(out / "set_aside.csv", dtype=str)
    assert list(listed["reason"].str.split(":").str[0].unique()) == [
        "empty file"
    ]  # what is true of the plate that is there


def test_the_list_tells_what_another_run_wrote_meanwhile(tmp_path, monkeypatch):
    one, two = made_table(tmp_path, ["A01", "A02"]), made_table(tmp_path, ["A01"], plate="2")
    out, table = tmp_path / "out", pd.concat([one, two])
    damage("empty", one, one.index[1])
    ingest(one, out)
    write = ingestion._write_plate

    def meanwhile(store, *arguments, **options):
        monkeypatch.setattr(ingestion, "_write_plate", write)
        ingest(one.iloc[:1], out, update=True)  # of which nothing is set aside
        return write(store, *arguments, **options)

    monkeypatch.setattr(ingestion, "_write_plate", meanwhile)
    ingest(table, out)
    assert len(pd.read_csv(out / "set_aside.csv")) == 0


@pytest.mark.parametrize("options", [{}, {"update": True}, {"force": True}])
def test_a_store_of_another_tool_or_of_another_plate_is_never_replaced(tmp_path, options):
    out = tmp_path / "out"
    group = zarr.open_group(out / "E-01_1.zarr", mode="w", zarr_format=3)
    group.attrs["ome"] = {"version": "0.5", "plate": {"wells": [], "rows": [], "columns": []}}
    with pytest.raises(PlateError):
        ingest(made_table(tmp_path, ["A01"]), out, **options)
    assert dict(zarr.open_group(out / "E-01_1.zarr", mode="r").attrs)
    first = screen_table(
        [{**row, "experiment": "a_b", "plate": "c"} for row in made_table(tmp_path, ["A01"]).to_dict("records")]
    )
    second = screen_table([{**row, "experiment": "a", "plate": "b_c"} for row in first.to_dict("records")])
    ingest(first, out)
    with pytest.raises(
        PlateError, match="holds plate 'c' of experiment 'a_b', and is asked to hold plate 'b_c' of 'a'"
    ):
        ingest(second, out, **options)


def test_a_link_in_the_place_of_a_plate_is_replaced_and_its_target_stays(tmp_path):
    table, out, far = made_table(tmp_path, ["A01", "A02"]), tmp_path / "out", tmp_path / "far"
    (path,) = ingest(table.iloc[:1], far).plates
    out.mkdir()
    (out / path.name).symlink_to(path)
    (out / "loop.zarr").symlink_to(out / "loop.zarr")
    ingest(table, out, update=True)
    assert ((out / path.name).is_symlink(), len(Plate(out / path.name).sites), len(Plate(path).sites)) == (False, 2, 1)


def test_a_dry_run_asks_for_no_image_of_a_finished_plate(tmp_path):
    table = made_table(tmp_path, ["A01"])
    ingest(table, tmp_path / "out")
    for file in tmp_path.glob("*.png"):
        file.unlink()
    assert list(plan(table, tmp_path / "out")["state"]) == ["finished"]


def test_an_empty_plate_where_there_is_nothing_to_take_percentiles_from(tmp_path):
    table = made_table(tmp_path, ["A01"], dtype=np.uint16)
    Path(table.iloc[0]["path_a"]).write_bytes(b"")
    ingest(table, tmp_path / "out", intensity_percentiles=(1, 99), keep_empty=True)
    reasons = Plate(tmp_path / "out" / "E-01_1.zarr").provenance[0]["plates"]["E-01_1"]["reasons"]
    assert reasons == {"no image to take percentiles from": 1}


def test_force_without_images_keeps_the_plate_that_is_there(tmp_path):
    table = made_table(tmp_path, ["A01"])
    (path,) = ingest(table, tmp_path / "out").plates
    before = files_of(path)
    for file in tmp_path.glob("*.png"):
        file.unlink()
    with pytest.raises(MissingFileError, match=r"none of the 2 image files .* is there, the first is .*1_A01_1_a\.png"):
        ingest(table, tmp_path / "out", force=True)
    (tmp_path / "1_A01_1_a.png").write_bytes(b"")
    assert ingest(table, tmp_path / "out", force=True).plates == []
    assert files_of(path) == before


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError("no space left on device")])
def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path, monkeypatch, fault):
    table = made_table(tmp_path, ["A01", "A02", "A03"])
    decode, out = images.decode, tmp_path / "out"

    def fail_on_the_last(path, z, t):
        if "A03" in str(path):
            raise fault
        return decode(path, z, t)

    monkeypatch.setattr(images, "decode", fail_on_the_last)
    with pytest.raises(type(fault)):
        ingest(table, out)
    assert {path.name for path in out.iterdir()} <= {"set_aside.csv", ".locks"}
    monkeypatch.undo()
    assert ingest(table, out).n_sites == 3


# ---------------------------------------------------------------------------------------------- reading


@pytest.fixture
def written(tmp_path) -> Plate:
    (path,) = ingest(made_table(tmp_path, ["A01", "A02"]), tmp_path / "out").plates
    return Plate(path)


def test_a_missing_or_damaged_field_is_an_error_never_a_black_picture(written):
    chunk = written.path / "A" / "02" / "1" / "0" / hcs.CHUNK
    data = chunk.read_bytes()
    for bad in (data[:-3], b"", data + b"x", imagecodecs.zstd_encode(bytes(10), 1)):
        chunk.write_bytes(bad)
        with pytest.raises(PlateError, match=r"field A/02/1 of .* is missing or damaged"):
            pixels_of(written)
    chunk.unlink()
    with pytest.raises(PlateError, match="field A/02/1"):
        pixels_of(written)
    assert next(written.fields(1))[1].any()
    shutil.rmtree(written.path / "A" / "02")
    with pytest.raises(PlateError, match="field A/02/1"):
        pixels_of(written)


def test_fields_that_zarr_python_rewrote_in_other_chunks_read_the_same(written):
    expected = pixels_of(written)
    for i, field in enumerate(("A/01/1", "A/02/1")):
        array = zarr.create_array(
            written.path / field / "0", shape=(1, 2, 1, 6, 8), chunks=(1, 1, 1, 3, 8), dtype="u1", overwrite=True
        )
        array[0, :, 0] = expected[i]
    np.testing.assert_array_equal(pixels_of(written), expected)
    (written.path / "A" / "01" / "1" / "0" / "c" / "0" / "1" / "0" / "0" / "0").unlink()
    with pytest.raises(PlateError, match="1 of 4 chunks are missing"):
        pixels_of(written)
    zarr.create_array(written.path / "A/01/1/0", data=np.ones((1, 2, 1, 6, 7), np.uint8), overwrite=True)
    with pytest.raises(PlateError, match="instead of uint8"):
        pixels_of(written)


def test_what_ingest_wrote_is_read_without_zarr_python(written, monkeypatch):
    monkeypatch.setattr(hcs, "_read_with_zarr", lambda *_: pytest.fail("slow path"))
    assert pixels_of(written).all()


def test_plates_of_the_first_release_read_the_same_and_fast(written, monkeypatch):
    expected = pixels_of(written)
    for pixels, field in zip(expected, ("A/01/1", "A/02/1")):
        array = written.path / field / "0"
        (array / hcs.CHUNK).write_bytes(imagecodecs.zstd_encode(np.ascontiguousarray(pixels), 1))
        metadata = json.loads((array / "zarr.json").read_text())
        first = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
        (array / "zarr.json").write_text(json.dumps({**metadata, "codecs": first}))
    np.testing.assert_array_equal(zarr.open_array(written.path / "A/02/1/0", mode="r")[0, :, 0], expected[1])
    monkeypatch.setattr(hcs, "_read_with_zarr", lambda *_: pytest.fail("slow path"))
    np.testing.assert_array_equal(pixels_of(written), expected)


def test_reading_starts_where_it_is_asked_to(written):
    expected = pixels_of(written)
    np.testing.assert_array_equal(pixels_of(written, start=1), expected[1:])
    assert list(written.fields(start=2)) == []
    with pytest.raises(InputError, match="start is -1"):
        next(written.fields(start=-1))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_chunk_cut_or_zeroed_anywhere_never_reads(written, data):
    chunk = written.path / "A" / "01" / "1" / "0" / hcs.CHUNK
    whole = chunk.read_bytes()
    kept = data.draw(st.integers(0, len(whole) - 1))
    try:
        for bad in (whole[:kept], whole + whole[:kept]):
            chunk.write_bytes(bad)
            if bad != whole:
                with pytest.raises(PlateError):
                    next(written.fields(1))
    finally:
        chunk.write_bytes(whole)


def test_arrays_are_the_callers_own(written):
    first, second = (pixels for _, pixels in written.fields(1))
    assert not np.shares_memory(first, second)
    assert not np.array_equal(first, second)


def test_what_is_no_plate_is_refused_with_the_remedy(tmp_path, written):
    with pytest.raises(MissingFileError, match=r"nowhere\.zarr"):
        Plate(tmp_path / "nowhere.zarr")
    with pytest.raises(PlateError, match="is not a plate: it has no readable OME-Zarr metadata"):
        Plate(tmp_path)
    foreign = tmp_path / "foreign.zarr"
    zarr.create_group(foreign, attributes={"ome": {"version": "0.5"}})
    with pytest.raises(PlateError, match="is not a plate"):
        Plate(foreign)
    metadata = json.loads((written.path / "zarr.json").read_text())
    del metadata["attributes"]["cellica"]["channels"]
    (written.path / "zarr.json").write_text(json.dumps(metadata))
    with pytest.raises(PlateError, match="damaged attributes"):
        Plate(written.path)
    with pytest.raises(InputError, match="chunk_size is 0"):
        next(written.fields(0))


def test_another_store_of_that_name_stops_before_any_work(tmp_path):
    table = made_table(tmp_path, ["A01"])
    zarr.create_group(tmp_path / "out" / "E-01_1.zarr")
    with pytest.raises(PlateError, match="not a plate"):
        ingest(table, tmp_path / "out")
    zarr.create_group(tmp_path / "out" / "other.zarr")
    assert ingest(table, tmp_path / "out", force=True).n_sites == 1


# ---------------------------------------------------------------------------------------------- input


def test_faulty_input_is_refused_before_an_image_is_opened(tmp_path, monkeypatch):
    table = made_table(tmp_path, ["A01", "A02"])
    monkeypatch.setattr(images, "decode", lambda path: pytest.fail("decoded"))

    def refused(match: str, changed: pd.DataFrame = table, out: Path = tmp_path / "out", **options) -> None:
        with pytest.raises(InputError, match=match):
            ingest(changed, out, **options)
        assert not (tmp_path / "out").exists()

    (tmp_path / "file").write_text("")
    refused("is a file: name a folder", out=tmp_path / "file")
    refused("threads is 0", threads=0)
    refused("low must be less than high", intensity_range=(9, 1))
    refused("empty", table.iloc[:0])
    refused("no column 'well'", table.drop(columns="well"))
    refused("names no images", table.drop(columns=["path_a", "path_b"]))
    refused("more than once", pd.concat([table, table]))
    refused("A99", table.assign(well=["A01", "A99"]))
    refused("site ids .* 0, 1", table.reset_index(drop=True))

    def renamed(**columns) -> pd.DataFrame:
        changed = table.assign(**columns)
        return changed.set_axis(schema.obs_names(changed))

    refused(r"cannot name a file.*'\.\./E'", renamed(experiment="../E"))
    refused("neither numbers nor letters", renamed(site=["1", "f_1"]))
    refused("share a store: 'a_b_c'", renamed(experiment=["a_b", "a"], plate=["c", "b_c"]))
    refused("two spellings", renamed(well=["A1", "A01"]))


def test_the_callers_table_is_left_alone(tmp_path):
    table = made_table(tmp_path, ["A01"])
    before = table.copy(deep=True)
    ingest(table, tmp_path / "out")
    pd.testing.assert_frame_equal(table, before)


def test_provenance_names_the_verb_and_hashes_the_table(written):
    (step,) = written.provenance
    assert (step["verb"], step["plates"]) == ("ingest", {"E-01_1": {"sites": 2, "set_aside": 0}})
    assert len(step["inputs"]["screen table of E-01_1"]) == 64


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_memory_of_a_plate_is_bounded(tmp_path):
    """96 sites of 6 x 512 x 512, 150 MB of pixels; the peak grows by what two sites at a time need."""
    rng = np.random.default_rng(0)
    for channel in range(6):
        Image.fromarray(rng.integers(1, 9, (512, 512), dtype=np.uint8)).save(
            tmp_path / f"{channel}.png", compress_level=1
        )
    program = (
        "import shutil, sys\n"
        "from pathlib import Path\n"
        "import pandas as pd\n"
        "from cellica import plates, schema\n"
        "root = Path(sys.argv[1])\n"
        "rows = []\n"
        "for i in range(int(sys.argv[2])):\n"
        "    row = {'experiment': 'e', 'plate': '1', 'well': schema.format_well(i // 2 // 24, i // 2 % 24), 'site': i % 2}\n"
        "    for channel in range(6):\n"
        "        row[f'path_w{channel}'] = shutil.copyfile(root / f'{channel}.png', root / f'{i}_{channel}.png')\n"
        "    rows.append({**row, 'control': ''})\n"
        "table = pd.DataFrame(rows).astype({'site': int})\n"
        "table.index = schema.obs_names(table)\n"
        "def peak():  # of this program alone: ru_maxrss begins with what its parent had\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('VmHWM')) / 1024\n"
        "before = peak()\n"
        "report = plates.ingest(table, root / 'plates')\n"
        "print(report.n_sites, peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "96"], capture_output=True, text=True, check=True
    )
    n_sites, grown = done.stdout.split()
    assert n_sites == "96"
    assert float(grown) < 100
