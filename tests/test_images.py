import io
import os
import struct
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from cellica import images
from cellica.images import crop_starts, crops, decode, to_uint8
from cellica.schema import ImageError, InputError

PIXELS = np.random.default_rng(0).integers(1, 200, (40, 56), dtype=np.uint8)
PIXELS16 = np.random.default_rng(1).integers(1, 60000, (40, 56), dtype=np.uint16)


def tiff(pixels: np.ndarray, **options) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, pixels, **{"photometric": "minisblack", **options})
    return stream.getvalue()


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def jp2(pixels: np.ndarray, **options) -> bytes:
    return imagecodecs.jpeg2k_encode(pixels, level=0, reversible=True, **options)


def saved(folder: Path, data: bytes) -> Path:
    path = folder / "image"
    path.write_bytes(data)
    return path


# ---------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(encode(pixels), id=f"{name}-{pixels.dtype}")
        for pixels in (PIXELS, PIXELS16)
        for name, encode in {
            "png": png,
            "jp2": jp2,
            "j2k": lambda pixels: jp2(pixels, codecformat="j2k"),
            "tiff": tiff,
            "tiff-big-endian": lambda pixels: tiff(pixels, byteorder=">"),
            "tiff-big": lambda pixels: tiff(pixels, bigtiff=True),
            "tiff-lzw": lambda pixels: tiff(pixels, compression="lzw", predictor=True),
            "tiff-tiled": lambda pixels: tiff(pixels, tile=(16, 16)),
            "tiff-jp2": lambda pixels: tiff(pixels, compression="jpeg2000", compressionargs={"level": 0}),
        }.items()
    ],
)
def test_lossless_formats_decode_to_the_pixels_that_were_written(tmp_path, data):
    image = decode(saved(tmp_path, data))
    expected = PIXELS if image.dtype == np.uint8 else PIXELS16
    assert image.dtype.isnative
    np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize(
    "pattern", ["rxrx1_images/**/Plate1/*_s1_*.png", "rxrx3_jp2_sample/*.jp2", "hcs_tiff_samples/**/*.tif"]
)
def test_real_images_decode_as_pillow_reads_them(shared, pattern):
    files = sorted((shared / "data").glob(pattern))
    assert len(files) >= 6
    for file in files:
        with Image.open(file) as reference:
            np.testing.assert_array_equal(decode(file), np.asarray(reference))


def test_second_codec_reads_what_the_first_refuses(tmp_path, monkeypatch):
    def refuse(data):
        raise imagecodecs.Jpeg2kError("opj_decode", "refused")

    monkeypatch.setattr(imagecodecs, "jpeg2k_decode", refuse)
    np.testing.assert_array_equal(decode(saved(tmp_path, jp2(PIXELS))), PIXELS)


def png_of_size(width: int, height: int) -> bytes:
    data = bytearray(png(PIXELS))
    data[16:24] = struct.pack(">II", width, height)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (bytes(5000), "zero-filled file: 5000 bytes"),
        (b"site_id,well\n1,B02\n", "not an image"),
        (b"\x89PNG\r\n\x1a\n", "truncated or damaged"),
        (b"II*\x00", "truncated or damaged"),
        (b"\xff\x4f\xff\x51", "truncated or damaged"),
        (png(np.zeros((8, 8), np.uint8)), "every pixel is 0"),
        (tiff(np.zeros((8, 8), np.uint16)), "every pixel is 0"),
        (tiff(PIXELS, photometric="miniswhite"), "inverted grey values"),
        (png(np.full((8, 8, 3), 7, np.uint8)), "not a grey picture"),
        (tiff(np.full((3, 8, 8), 7, np.uint8)), "a stack of pictures: 3 z planes; choose with z = max"),
        (tiff(np.full((8, 8), 0.5, np.float32)), "not a grey picture of 8 or 16 bits: float32"),
        (png_of_size(100_000, 100_000), "too large: 100000 x 100000"),
        (jp2(PIXELS).replace(struct.pack(">II", 56, 40), struct.pack(">II", 2**31, 2**31)), "too large"),
    ],
)
def test_what_is_no_whole_grey_picture_is_an_error_with_path_and_reason(tmp_path, data, reason):
    path = saved(tmp_path, data)
    with pytest.raises(ImageError) as error:
        decode(path)
    assert str(error.value).startswith(f"{path}: {reason}")


def test_only_regular_files_of_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in ("/dev/zero", tmp_path / "pipe.png", tmp_path):
        with pytest.raises(ImageError, match="not a regular file: a folder, a device or a pipe"):
            decode(path)
    with open(tmp_path / "sparse.tif", "wb") as stream:
        stream.truncate(2**41)
    with pytest.raises(ImageError, match=r"too large: 2199023255552 bytes, at most 1073741824 are read"):
        decode(tmp_path / "sparse.tif")
    with pytest.raises(ImageError, match="file not readable"):
        decode("a\0b.png")


# ---------------------------------------------------------------------------------------------- stacks

STACK = np.random.default_rng(2).integers(1, 60000, (3, 5, 24, 32), dtype=np.uint16)  # t, z, y, x


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"imagej": True, "metadata": {"axes": "TZYX"}}, id="imagej"),
        pytest.param({"ome": True, "metadata": {"axes": "TZYX"}}, id="ome"),
        pytest.param({"ome": True, "metadata": {"axes": "TZYX"}, "compression": "zlib"}, id="ome-zlib"),
    ],
)
@pytest.mark.parametrize(
    ("z", "expected"),
    [
        ("max", STACK[2].max(axis=0)),
        ("mean", np.floor(STACK[2].mean(axis=0) + 0.5).astype(np.uint16)),
        (4, STACK[2, 4]),
    ],
    ids=["max", "mean", "plane"],
)
def test_planes_are_chosen_along_named_axes(tmp_path, options, z, expected):
    path = saved(tmp_path, tiff(STACK, **options))
    np.testing.assert_array_equal(decode(path, z, 2), expected)
    with pytest.raises(ImageError, match=r"a stack of pictures: 5 z planes, 3 time points; choose with z = .*--z.*--t"):
        decode(path)
    with pytest.raises(ImageError, match=r"z is 5, and there are 5 z planes \(counted from 0\)"):
        decode(path, 5, 0)
    with pytest.raises(ImageError, match=r"a stack of pictures: 3 time points; choose with t"):
        decode(saved(tmp_path, tiff(STACK[:, :1], **options)))


def test_axes_in_another_order_and_pages_without_names(tmp_path):
    swapped = saved(tmp_path, tiff(STACK.swapaxes(0, 1), ome=True, metadata={"axes": "ZTYX"}))
    np.testing.assert_array_equal(decode(swapped, 4, 1), STACK[1, 4])
    pages = saved(tmp_path, tiff(STACK[0]))
    np.testing.assert_array_equal(decode(pages, 2), STACK[0, 2])
    np.testing.assert_array_equal(decode(pages, t=3), STACK[0, 3])
    volume = saved(tmp_path, tiff(STACK[0], volumetric=True, tile=(5, 16, 16)))
    np.testing.assert_array_equal(decode(volume, "max"), STACK[0].max(axis=0))
    for axes in ("CYX", "QQYX"):
        colours = saved(
            tmp_path,
            tiff(
                STACK[:, :3] if axes == "QQYX" else STACK[0, :3],
                **({"imagej": True, "metadata": {"axes": axes}} if axes == "CYX" else {}),
            ),
        )
        with pytest.raises(ImageError, match=f"not a grey picture of 8 or 16 bits: uint16, .* axes {axes}"):
            decode(colours, "max", 0)


@pytest.mark.parametrize("compression", [None, "zlib", "lzw"])
@pytest.mark.parametrize("part", [0.4, 0.8, 0.97])
def test_a_stack_without_its_end_never_decodes(tmp_path, compression, part):
    whole = tiff(
        STACK, imagej=compression is None, **({"compression": compression, "ome": True} if compression else {})
    )
    kept = int(len(whole) * part)
    with pytest.raises(ImageError):
        decode(saved(tmp_path, whole[:kept]), "max", 2)


def test_a_picture_alone_needs_no_choice(tmp_path):
    path = saved(tmp_path, tiff(PIXELS))
    np.testing.assert_array_equal(decode(path, 3, 7), PIXELS)


@pytest.mark.parametrize(("z", "t"), [("sum", None), (-1, None), (1.5, None), (None, -1), (None, "max")])
def test_choices_that_are_none_are_refused(z, t):
    with pytest.raises(InputError, match=r"choose '?(max|the number of a time point)"):
        images.check_planes(z, t)


@given(hnp.arrays(np.uint8, (4, 3, 2)))
def test_projections_are_those_of_numpy(planes):
    np.testing.assert_array_equal(images.project(list(planes), "max"), planes.max(axis=0))
    np.testing.assert_array_equal(images.project(iter(planes), 2), planes[2])
    assert np.abs(images.project(planes, "mean") - planes.mean(axis=0)).max() <= 0.5


def test_absent_file_and_folder(tmp_path):
    with pytest.raises(ImageError, match=r"absent\.png: file absent"):
        decode(tmp_path / "absent.png")
    with pytest.raises(ImageError, match="not a regular file"):
        decode(tmp_path)


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.97])
@pytest.mark.parametrize("end", ["cut", "zeros"])
@pytest.mark.parametrize(
    "encode",
    [
        png,
        jp2,
        pytest.param(lambda pixels: tiff(pixels, compression="zlib"), id="tiff-zlib"),
        pytest.param(lambda pixels: tiff(pixels, compression="lzw"), id="tiff-lzw"),
        pytest.param(lambda pixels: tiff(pixels, compression="zstd", tile=(16, 16)), id="tiff-zstd-tiles"),
    ],
)
def test_a_file_without_its_end_never_decodes(tmp_path, encode, end, part):
    """Cut, or as long as it should be with zeros at the end: what an interrupted download leaves."""
    data = encode(PIXELS)
    kept = int(len(data) * part)
    rest = b"" if end == "cut" else bytes(len(data) - kept)
    with pytest.raises(ImageError, match="truncated or damaged"):
        decode(saved(tmp_path, data[:kept] + rest))


def test_real_jpeg2000_whose_end_is_zeros_is_refused(tmp_path, shared):
    data = (shared / "data" / "rxrx3_jp2_sample" / "AA41_s1_1.jp2").read_bytes()
    half = data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
    assert imagecodecs.jpeg2k_decode(half).shape == (512, 512)  # the codec alone invents the rest
    with pytest.raises(ImageError, match="truncated or damaged: the end of the codestream is missing"):
        decode(saved(tmp_path, half))


# ---------------------------------------------------------------------------------------------- bit depth


def test_uint8_is_unchanged_and_16_bits_need_a_rule():
    assert to_uint8(PIXELS) is PIXELS
    with pytest.raises(InputError, match="pass --intensity-range LOW HIGH"):
        to_uint8(PIXELS16)


@given(hnp.arrays(np.uint16, (5, 7)), st.integers(0, 65534), st.integers(1, 65535))
def test_range_is_linear_clipped_and_rounded(image, low, width):
    scaled = (image.astype(float) - low) / width * 255
    result = to_uint8(image, (low, low + width))
    assert result.dtype == np.uint8
    assert np.abs(result - np.clip(scaled, 0, 255)).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("bad", [(5, 5), (9, 1), (0, np.inf), (np.nan, 1)])
def test_range_that_does_not_rise_is_refused(bad):
    with pytest.raises(InputError, match="low must be less than high"):
        to_uint8(PIXELS, bad)


def test_other_dtypes_are_refused():
    with pytest.raises(InputError, match="pixels are float64"):
        to_uint8(np.ones((2, 2)))


# ---------------------------------------------------------------------------------------------- tiling


def test_512_gives_four_crops_row_by_row():
    field = np.random.default_rng(0).integers(0, 256, (6, 512, 512), dtype=np.uint8)
    tiles = crops(field, 256)
    assert tiles.shape == (4, 6, 256, 256)
    np.testing.assert_array_equal(tiles[1], field[:, :256, 256:])
    np.testing.assert_array_equal(tiles[2], field[:, 256:, :256])


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_crops_cover_the_whole_field_with_as_few_as_can_be(n, c, height, width, size):
    fields = np.arange(n * c * height * width).reshape(n, c, height, width)
    if size > min(height, width):
        with pytest.raises(InputError, match="does not fit a field"):
            crops(fields, size)
        return
    tiles = crops(fields, size)
    assert tiles.shape == (n * -(-height // size) * -(-width // size), c, size, size)
    assert set(tiles.ravel()) == set(fields.ravel())
    np.testing.assert_array_equal(tiles, np.concatenate([crops(field, size) for field in fields]))


@given(st.integers(1, 3000), st.integers(1, 300))
def test_starts_are_evenly_spaced(length, size):
    if size > length:
        return
    starts = crop_starts(length, size)
    steps = np.diff(starts)
    assert (starts[0], starts[-1]) == (0, length - size)
    assert len(steps) == 0 or (steps.max() <= size and steps.max() - steps.min() <= 1)


def test_odd_fields_and_other_axes():
    assert crops(np.zeros((1, 500, 512)), 256).shape == (4, 1, 256, 256)
    assert len(crop_starts(2160, 256)) == 9
    with pytest.raises(InputError, match="not 2 axes"):
        crops(np.zeros((512, 512)), 256)


def test_the_bound_is_below_pillows_bomb_limit():
    assert Image.MAX_IMAGE_PIXELS is None or images.MAX_PIXELS < Image.MAX_IMAGE_PIXELS
