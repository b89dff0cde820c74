"""Plates of other tools: OME-Zarr 0.4 and 0.5, written by plain zarr and by the tools themselves where they are installed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pandas as pd
import pytest
import zarr

from cellica import foreign, images
from cellica.hcs import Plate
from cellica.schema import InputError, MissingFileError, PlateError

WELLS = {"A/1": ["0", "1"], "B/12": ["0"]}
CHANNELS = ("DNA", "ER")


def field_pixels(seed: int, lengths: dict[str, int], dtype: str = "uint8") -> np.ndarray:
    """Random pixels with the axes t, c, z, y, x."""
    shape = [lengths.get(axis, 1) for axis in "tczyx"]
    return np.random.default_rng(seed).integers(1, np.iinfo(dtype).max, shape, dtype=dtype)


def write_plate(
    path: Path,
    *,
    version: str = "0.4",
    axes: str = "tczyx",
    lengths: dict[str, int] | None = None,
    dtype: str = "uint8",
    wells: dict[str, list[str]] | None = None,
    labels: tuple[str, ...] | None = CHANNELS,
    chunks: tuple[int, ...] | None = None,
) -> dict[str, np.ndarray]:
    """Write a plate as other tools do; return the pixels (t, c, z, y, x) of each field."""
    lengths = {"c": 2, "y": 12, "x": 16, **(lengths or {})}
    wells = wells or WELLS
    v3 = version == "0.5"

    def attributes(ome: dict[str, Any]) -> dict[str, Any]:
        return {"ome": {"version": version, **ome}} if v3 else ome

    root = zarr.create_group(path, zarr_format=3 if v3 else 2)
    rows, columns = ([{"name": name} for name in sorted({well.split("/")[i] for well in wells})] for i in (0, 1))
    listed = [{"path": well, "rowIndex": 0, "columnIndex": 0} for well in wells]
    root.attrs.update(attributes({"plate": {"rows": rows, "columns": columns, "wells": listed, "version": version}}))
    written = {}
    for i, (well, fields) in enumerate(wells.items()):
        group = root.require_group(well)
        group.attrs.update(attributes({"well": {"images": [{"path": field} for field in fields], "version": version}}))
        for k, field in enumerate(fields):
            pixels = field_pixels(10 * i + k, {axis: lengths.get(axis, 1) for axis in axes}, dtype)
            image = group.require_group(field)
            named = [{"name": axis, "type": {"t": "time", "c": "channel"}.get(axis, "space")} for axis in axes]
            scale = [{"type": "scale", "scale": [1.0] * len(axes)}]
            multiscale = {
                "axes": named,
                "version": version,
                "datasets": [{"path": "0", "coordinateTransformations": scale}],
            }
            omero = {"omero": {"channels": [{"label": label} for label in labels]}} if labels else {}
            image.attrs.update(attributes({"multiscales": [multiscale], **omero}))
            stored = pixels.transpose(
                ["tczyx".index(a) for a in axes] + ["tczyx".index(a) for a in "tczyx" if a not in axes]
            )
            stored = stored.reshape([lengths.get(axis, 1) for axis in axes])
            image.create_array("0", data=stored, chunks=chunks or "auto")
            written[f"{well}/{field}"] = pixels
    return written


def pixels_of(plate: Plate, **options) -> np.ndarray:
    return np.concatenate([pixels for _, pixels in plate.fields(**options)])


# ---------------------------------------------------------------------------------------------- whole


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("axes", ["tczyx", "czyx", "cyx", "zcyx", "yxc"])
def test_any_version_and_order_of_axes_opens_as_it_is(tmp_path, version, axes):
    written = write_plate(
        tmp_path / "HUVEC-1_7.zarr", version=version, axes=axes, chunks=(1,) * (len(axes) - 2) + (8, 8)
    )
    plate = Plate(tmp_path / "HUVEC-1_7.zarr")
    assert (plate.experiment, plate.plate, plate.name, plate.ours) == ("HUVEC-1", "7", "HUVEC-1_7", False)
    assert (plate.channels, plate.shape) == (["DNA", "ER"], (2, 12, 16))
    assert list(plate.sites.index) == ["HUVEC-1_7_A01_0", "HUVEC-1_7_A01_1", "HUVEC-1_7_B12_0"]
    assert plate.sites["control"].tolist() == [""] * 3
    assert plate.sites["site"].tolist() == [0, 1, 0]
    np.testing.assert_array_equal(pixels_of(plate, chunk_size=2), [pixels[0, :, 0] for pixels in written.values()])
    np.testing.assert_array_equal(pixels_of(plate, start=2)[0], written["B/12/0"][0, :, 0])
    assert len(plate.set_aside) == 0
    (step,) = plate.provenance
    assert (step["verb"], step["plates"]) == ("open", {"HUVEC-1_7": {"sites": 3, "set_aside": 0}})


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a_b_3.zarr", ("a_b", "3")),
        ("BR001.zarr", ("BR001", "BR001")),
        ("x_2.ome.zarr", ("x", "2")),
        ("_4.zarr", ("_4", "_4")),
    ],
)
def test_experiment_and_plate_come_from_the_name(tmp_path, name, parts):
    write_plate(tmp_path / name)
    plate = Plate(tmp_path / name)
    assert (plate.experiment, plate.plate) == parts


@pytest.mark.parametrize("labels", [None, ("DNA",), ("DNA", "DNA"), ("", "ER")])
def test_channels_without_names_are_numbered(tmp_path, labels):
    write_plate(tmp_path / "e_1.zarr", labels=labels)
    assert Plate(tmp_path / "e_1.zarr").channels == ["0", "1"]


def test_sharded_and_compressed_arrays(tmp_path):
    written = write_plate(tmp_path / "e_1.zarr", version="0.5", wells={"A/1": ["0"]})
    zarr.create_array(
        tmp_path / "e_1.zarr/A/1/0/0",
        data=written["A/1/0"],
        chunks=(1, 1, 1, 6, 8),
        shards=(1, 2, 1, 12, 16),
        overwrite=True,
    )
    np.testing.assert_array_equal(pixels_of(Plate(tmp_path / "e_1.zarr"))[0], written["A/1/0"][0, :, 0])


# ---------------------------------------------------------------------------------------------- choices


def test_sixteen_bits_need_a_range(tmp_path):
    written = write_plate(tmp_path / "e_1.zarr", dtype="uint16")
    with pytest.raises(PlateError, match=r"e_1\.zarr: images of 16 bits .* pass --intensity-range LOW HIGH"):
        Plate(tmp_path / "e_1.zarr")
    plate = Plate(tmp_path / "e_1.zarr", intensity_range=(100, 60000))
    expected = images.to_uint8(np.array([pixels[0, :, 0] for pixels in written.values()]), (100, 60000))
    np.testing.assert_array_equal(pixels_of(plate), expected)
    assert plate.provenance[0]["parameters"] == {"intensity_range": [100, 60000]}


@pytest.mark.parametrize("axes", ["tczyx", "ztcyx"])
def test_stacks_and_series_need_a_choice(tmp_path, axes):
    written = write_plate(tmp_path / "e_1.zarr", axes=axes, lengths={"z": 5, "t": 3})
    with pytest.raises(PlateError, match=r"5 z planes, 3 time points; choose with z = max, mean .*--z.* and t = .*--t"):
        Plate(tmp_path / "e_1.zarr")
    with pytest.raises(PlateError, match="3 time points"):
        Plate(tmp_path / "e_1.zarr", z="max", t=3)
    with pytest.raises(InputError, match="z is 'sum'"):
        Plate(tmp_path / "e_1.zarr", z="sum", t=0)
    reduce = {"max": lambda p: p.max(axis=1), "mean": lambda p: np.floor(p.mean(axis=1) + 0.5), 3: lambda p: p[:, 3]}
    for z, of in reduce.items():
        found = pixels_of(Plate(tmp_path / "e_1.zarr", z=z, t=2))
        np.testing.assert_array_equal(found, [of(pixels[2]) for pixels in written.values()])


# ---------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_what_is_listed_and_not_there_is_set_aside(tmp_path, version):
    wells = {**{f"{row}/{column}": ["0"] for row in "ABCDEFGH" for column in range(1, 4)}, "H/4": ["0", "1"]}
    store = tmp_path / "e_1.zarr"
    write_plate(store, version=version, wells=wells)
    shutil.rmtree(store / "A" / "1")
    shutil.rmtree(store / "A" / "2" / "0")
    metadata = "zarr.json" if version == "0.5" else ".zattrs"
    (store / "A" / "3" / metadata).write_text("{")
    (store / "B" / "1" / "0" / metadata).unlink()
    for chunk in [
        file for file in (store / "B" / "2" / "0" / "0").rglob("*") if file.is_file() and file.name[0] not in ".z"
    ]:
        chunk.unlink()
    zarr.create_array(store / "B" / "3" / "0" / "0", data=np.ones((1, 2, 1, 5, 5), np.uint8), overwrite=True)
    plate = Plate(store)
    reasons = dict(zip(plate.set_aside["well"], plate.set_aside["reason"]))
    assert reasons.pop("A03").startswith("well without readable metadata")
    assert reasons.pop("B01").startswith("field without readable metadata")
    assert reasons.pop("B03").startswith("differs from its plate: 1 t x 2 c x 1 z x 5 y x 5 x uint8")
    assert reasons == {
        "A01": "well listed and absent",
        "A02": "field listed and absent",
        "B02": "no chunk of channel DNA, ER",
    }
    assert len(plate.sites) == len(pixels_of(plate)) == 26 - 6
    assert plate.set_aside.set_index("well").loc["B02", "site_id"] == "e_1_B02_0"
    assert plate.set_aside.set_index("well").loc["B02", "path"] == str(store / "B" / "2" / "0" / "0")


def test_a_channel_without_a_chunk_is_never_a_black_picture(tmp_path):
    store = tmp_path / "e_1.zarr"
    write_plate(store, chunks=(1, 1, 1, 6, 16))
    for part in "01":
        (store / "A" / "1" / "1" / "0" / f"0.1.0.{part}.0").unlink()
    plate = Plate(store)
    assert plate.set_aside["reason"].tolist() == ["no chunk of channel ER"]
    assert list(plate.sites.index) == ["e_1_A01_0", "e_1_B12_0"]


@pytest.mark.parametrize("axis", ["t", "z"])
def test_a_time_point_or_plane_without_chunks_is_never_a_black_picture(tmp_path, axis):
    path = tmp_path / "e_1.zarr"
    at = "tczyx".index(axis)
    write_plate(path, lengths={axis: 2}, chunks=tuple(1 if a in "tcz" else 16 for a in "tczyx"))
    gone = [0, 1, 0, 0, 0]
    gone[at] = 1
    array = zarr.open_array(path / "B/12/0/0", mode="r")
    (path / "B/12/0/0" / array.metadata.encode_chunk_key(tuple(gone))).unlink()
    assert len(Plate(path, **{axis: 0}).sites) == 3
    plate = Plate(path, **{axis: 1})
    assert list(plate.set_aside["reason"]) == ["no chunk of channel ER"]
    assert len(plate.sites) == 2
    if axis == "z":
        assert len(Plate(path, z="max").sites) == 3


def test_a_sparse_plate_of_384_wells(tmp_path):
    store = tmp_path / "e_1.zarr"
    write_plate(store, wells={"A/1": ["0"], "P/24": ["0"]})
    attributes = json.loads((store / ".zattrs").read_text())
    every = [{"path": f"{row}/{column}"} for row in "ABCDEFGHIJKLMNOP" for column in range(1, 25)]
    (store / ".zattrs").write_text(json.dumps({"plate": {**attributes["plate"], "wells": every}}))
    plate = Plate(store)
    assert plate.sites["well"].tolist() == ["A01", "P24"]
    assert plate.set_aside["reason"].tolist() == ["well listed and absent"] * 382


def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path):
    with pytest.raises(MissingFileError):
        Plate(tmp_path / "nowhere.zarr")
    write_plate(tmp_path / "floats_1.zarr")
    for array in (tmp_path / "floats_1.zarr").glob("*/*/*/0"):
        zarr.create_array(array, data=np.ones((1, 2, 1, 4, 4), np.float32), overwrite=True, zarr_format=2)
    with pytest.raises(PlateError, match=r"no readable field: 3 are listed.*not a picture of 8 or 16 bits: float32"):
        Plate(tmp_path / "floats_1.zarr")
    zarr.create_array(tmp_path / "image_1.zarr", data=np.ones((4, 4), np.uint8), zarr_format=2)
    with pytest.raises(PlateError, match="is not a plate"):
        Plate(tmp_path / "image_1.zarr")


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("compressor", ["blosc", "zstd", "gzip", "none"])
def test_a_truncated_chunk_never_decodes(tmp_path, version, compressor):
    store = tmp_path / "e_1.zarr"
    write_plate(store, version=version, wells={"A/1": ["0"]})
    from zarr import codecs as v3

    codecs = {"blosc": v3.BloscCodec(), "zstd": v3.ZstdCodec(), "gzip": v3.GzipCodec(), "none": None}
    v2 = {"blosc": numcodecs.Blosc(), "zstd": numcodecs.Zstd(), "gzip": numcodecs.GZip(), "none": None}
    chosen = (codecs if version == "0.5" else v2)[compressor]
    array = store / "A" / "1" / "0" / "0"
    data = field_pixels(0, {"c": 2, "y": 12, "x": 16})  # noise: what Blosc then stores is read past its end
    zarr.create_array(array, data=data, compressors=chosen, overwrite=True, zarr_format=3 if version == "0.5" else 2)
    plate = Plate(store)
    np.testing.assert_array_equal(pixels_of(plate)[0], data[0, :, 0])
    (chunk,) = (
        file for file in array.rglob("*") if file.is_file() and file.name not in ("zarr.json", ".zarray", ".zattrs")
    )
    chunk.write_bytes(chunk.read_bytes()[:-7])
    with pytest.raises(PlateError, match=r"field A/1/0/0 of .* is missing or damaged .*: write the plate again"):
        pixels_of(plate)


# ---------------------------------------------------------------------------------------------- plate maps


def test_a_layout_adds_what_was_done_to_the_wells(tmp_path):
    write_plate(tmp_path / "e_1.zarr")
    layout = pd.DataFrame(
        {"well": ["a1", "B12", "C03"], "perturbation": ["DMSO", "taxol", "x"], "dose": [0.0, 3.0, 1.0]}
    )
    layout["control"] = ["negative", "", ""]
    layout.to_csv(tmp_path / "layout.csv", index=False)
    plate = Plate(tmp_path / "e_1.zarr", layout=tmp_path / "layout.csv")
    assert plate.sites["perturbation"].tolist() == ["DMSO", "DMSO", "taxol"]
    assert plate.sites["control"].tolist() == ["negative", "negative", ""]
    assert plate.sites["dose"].tolist() == [0, 0, 3]
    assert list(plate.sites.index) == list(Plate(tmp_path / "e_1.zarr").sites.index)
    assert len(pixels_of(plate)) == 3


def test_a_layout_of_several_plates_gives_each_its_own(tmp_path):
    write_plate(tmp_path / "e_2.zarr")
    table = {"experiment": "e", "plate": [1, 1, 2, 2], "well": ["A1", "B12"] * 2, "perturbation": list("abcd")}
    plate = Plate(tmp_path / "e_2.zarr", layout=pd.DataFrame(table))
    assert plate.sites["perturbation"].tolist() == ["c", "c", "d"]
    by_site = pd.DataFrame({"well": ["A01", "A01"], "site": [0, 1], "perturbation": ["p", "q"]})
    annotated = Plate(tmp_path / "e_2.zarr", layout=by_site).sites["perturbation"]
    assert annotated.tolist()[:2] == ["p", "q"]
    assert annotated.isna().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"well": ["C03"], "perturbation": ["a"]}, "no well of the plate .* is in the plate map"),
        ({"well": ["A01", "A1"], "perturbation": ["a", "b"]}, "wells more than once: 'A01'"),
        ({"plate": [9], "well": ["A01"], "perturbation": ["a"]}, "the plate map has no plate '1'; it holds '9'"),
        ({"perturbation": ["a"]}, "the plate map has no column 'well'"),
        ({"well": ["A01"], "control": ["DMSO"]}, "'control' is none of"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(tmp_path, table, message):
    write_plate(tmp_path / "e_1.zarr")
    with pytest.raises(InputError, match=message):
        Plate(tmp_path / "e_1.zarr", layout=pd.DataFrame(table))


# ---------------------------------------------------------------------------------------------- the tools themselves


def test_a_plate_that_iohub_wrote(tmp_path):
    ngff = pytest.importorskip("iohub.ngff", reason="iohub is not installed")
    pixels = field_pixels(0, {"c": 2, "z": 1, "y": 12, "x": 16}, "uint16")
    for version in ("0.4", "0.5"):
        store = tmp_path / f"e{version[-1]}_1.zarr"
        with ngff.open_ome_zarr(store, layout="hcs", mode="w-", channel_names=["DNA", "ER"], version=version) as plate:
            plate.create_position("B", "03", "0").create_image("0", pixels)
        opened = Plate(store, intensity_range=(0, 65535))
        assert (opened.channels, opened.sites["well"].tolist()) == (["DNA", "ER"], ["B03"])
        np.testing.assert_array_equal(pixels_of(opened)[0], images.to_uint8(pixels[0, :, 0], (0, 65535)))


@pytest.mark.filterwarnings("ignore:Call to deprecated class Scaler")  # raised by its own import
def test_a_plate_that_ome_zarr_py_wrote(tmp_path):
    pytest.importorskip("ome_zarr", reason="ome-zarr is not installed")
    from ome_zarr.format import FormatV04, FormatV05
    from ome_zarr.writer import write_image, write_plate_metadata, write_well_metadata

    pixels = field_pixels(1, {"c": 2, "y": 64, "x": 64})[0, :, 0]
    for version in (FormatV04(), FormatV05()):
        store = tmp_path / f"e{version.version[-1]}_1.zarr"
        root = zarr.create_group(store, zarr_format=version.zarr_format)
        write_plate_metadata(root, ["A"], ["1", "2"], ["A/1", "A/2"], fmt=version)
        well = root.require_group("A/1")
        write_well_metadata(well, ["0"], fmt=version)
        write_image(pixels, well.require_group("0"), axes="cyx", fmt=version, scaler=None)
        opened = Plate(store)
        assert opened.set_aside["reason"].tolist() == ["well listed and absent"]
        np.testing.assert_array_equal(pixels_of(opened)[0], pixels)


def test_a_plate_that_ngio_wrote(tmp_path):
    ngio = pytest.importorskip("ngio", reason="ngio is not installed")
    pixels = field_pixels(2, {"c": 2, "z": 1, "y": 32, "x": 32})[0]
    for version in ("0.4", "0.5"):
        store = tmp_path / f"e{version[-1]}_1.zarr"
        wells = [ngio.ImageInWellPath(path="0", row="A", column="01")]
        ngio.create_empty_plate(str(store), name="e", images=wells, ngff_version=version)
        ngio.create_ome_zarr_from_array(
            str(store / "A" / "01" / "0"),
            pixels,
            pixelsize=0.5,
            axes_names="czyx",
            channels_meta=["DNA", "ER"],
            overwrite=True,
            consolidation_mode="auto",
            ngff_version=version,
        )
        opened = Plate(store)
        assert opened.channels == ["DNA", "ER"]
        np.testing.assert_array_equal(pixels_of(opened)[0], pixels[:, 0])


def test_opening_reads_no_pixels(tmp_path, monkeypatch):
    write_plate(tmp_path / "e_1.zarr")
    monkeypatch.setattr(foreign.Field, "read", lambda *_: pytest.fail("read"))
    assert len(Plate(tmp_path / "e_1.zarr").sites) == 3


@pytest.mark.parametrize("wells", [None, 5, "abc", [1], [{}], [{"path": 5}]])
def test_damaged_plate_metadata_is_a_plate_error(tmp_path, wells):
    plate = {"version": "0.4", "rows": [{"name": "A"}], "columns": [{"name": "1"}], "wells": wells}
    folder = tmp_path / "e_1.zarr"
    folder.mkdir()
    (folder / ".zgroup").write_text('{"zarr_format": 2}')
    (folder / ".zattrs").write_text(json.dumps({"plate": plate}))
    with pytest.raises(PlateError, match=r"damaged attributes|no readable field"):
        Plate(folder)
