"""Image files to pixels: decoding, bit depth, tiling.

Knows arrays and files, no tables. A file that is not a whole two-dimensional grey picture is an error, never a guess.
"""

import functools
import io
import itertools
import math
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from PIL import Image

from cellica.schema import ImageError, InputError

Planes = int | str | None
MAX_BYTES = 2**30  # of a file
MAX_PIXELS = 2**26  # 8192 x 8192: more than a field of any camera, less than a decompression bomb
PNG = b"\x89PNG\r\n\x1a\n"
TAG_SIZES = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}  # bytes; of others 1
JP2, J2K, J2K_END = b"\x00\x00\x00\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51", b"\xff\xd9"
STACK = "a stack of pictures"
HOW = {"z": "z = max, mean or the number of a plane (--z)", "t": "t = the number of a time point (--t), counted from 0"}
TIFF = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")


def decode(path: str | os.PathLike[str], z: Planes = None, t: int | None = None) -> np.ndarray:
    """Decode a PNG, TIFF or JPEG 2000 file, told apart by content.

    Parameters
    ----------
    path
        A regular file of at most ``MAX_BYTES``, whose pictures have at most ``MAX_PIXELS`` pixels each.
    z
        What to take of a z-stack: "max" or "mean" over its planes, or one plane, counted from 0.
    t
        Which time point to take of a series, counted from 0.

    Returns
    -------
    Pixels (Y, X), uint8 or uint16 in native byte order.

    Raises
    ------
    ImageError
        ``"{path}: {reason}"``: absent, not a regular file, empty, zero-filled, not an image, truncated or damaged, too
        large, not grey, a stack without a choice of ``z`` or ``t``, or every pixel 0. The reason's part before a colon is
        one of a fixed few.

    Notes
    -----
    imagecodecs decodes; what its TIFF and JPEG 2000 codecs refuse is tried again with tifffile and Pillow. PNG has no
    second codec: libpng verifies each checksum, others do not, and would let damage pass. Pages of a TIFF without names of
    axes are planes of z, or time points where only ``t`` is given. A file of one picture needs no choice, and none acts.
    """
    try:
        return decode_bytes(_read(path), z, t)
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from error.__cause__


def project(planes: Iterable[np.ndarray], z: Planes) -> np.ndarray:
    """Reduce the planes of a z-stack to one: the "max" or the rounded "mean" of all, or one of them by number.

    >>> project([np.array([1, 2], np.uint8), np.array([4, 2], np.uint8)], "mean").tolist()
    [3, 2]
    """
    pictures = iter(planes)
    if isinstance(z, int):
        return next(itertools.islice(pictures, z, None))
    first = next(pictures)
    total, count = first.astype(np.float64 if z == "mean" else first.dtype), 1
    for picture in pictures:
        if picture.shape != first.shape or picture.dtype != first.dtype:
            raise ImageError("planes of a stack differ in size or depth")
        (np.add if z == "mean" else np.maximum)(total, picture, out=total)
        count += 1
    return np.floor(total / count + 0.5).astype(first.dtype) if z == "mean" else total


def check_planes(z: Planes, t: int | None) -> None:
    """Raise an InputError where a choice of planes is none."""
    if not (z in (None, "max", "mean") or (isinstance(z, int) and z >= 0)):
        raise InputError(f"z is {z!r}: choose 'max', 'mean' or the number of a plane, counted from 0")
    if not (t is None or (isinstance(t, int) and t >= 0)):
        raise InputError(f"t is {t!r}: choose the number of a time point, counted from 0")


def choose(counts: Mapping[str, int], z: Planes, t: int | None) -> None:
    """Check a choice against what is there: raise an ImageError that says how to choose.

    Parameters
    ----------
    counts
        Number of planes ("z") and of time points ("t").
    """
    many = {"z": "z planes", "t": "time points"}
    if (counts["z"] > 1 and z is None) or (counts["t"] > 1 and t is None):
        there = ", ".join(f"{n} {many[axis]}" for axis, n in counts.items() if n > 1)
        raise ImageError(
            f"{STACK}: {there}; choose with {' and '.join(HOW[axis] for axis in counts if counts[axis] > 1)}"
        )
    for axis, chosen in (("z", z), ("t", t)):
        if isinstance(chosen, int) and 1 < counts[axis] <= chosen:
            raise ImageError(f"{STACK}: {axis} is {chosen}, and there are {counts[axis]} {many[axis]} (counted from 0)")


def to_uint8(image: np.ndarray, intensity_range: tuple[float, float] | None = None) -> np.ndarray:
    """Bring pixels to 8 bits by a stated rule, the same for every image.

    Parameters
    ----------
    image
        uint8 or uint16, any shape.
    intensity_range
        ``(low, high)``: ``low`` and less become 0, ``high`` and more become 255, linear and rounded between. Without
        it uint8 is returned as it is and uint16 is refused: no range is guessed, as one taken from each image would
        make intensities incomparable.

    Returns
    -------
    uint8 array of the same shape.

    Raises
    ------
    InputError
        16-bit pixels without a range, a range that does not rise, or another dtype.

    >>> to_uint8(np.array([90, 100, 1100, 2100, 3000], dtype=np.uint16), (100, 2100))
    array([  0,   0, 128, 255, 255], dtype=uint8)
    """
    if image.dtype not in (np.uint8, np.uint16):
        raise InputError(f"pixels are {image.dtype}: uint8 or uint16 is needed")
    if intensity_range is None:
        if image.dtype == np.uint16:
            raise InputError(
                "images of 16 bits need a range that becomes 0 to 255: pass --intensity-range LOW HIGH "
                "(intensity_range=...), such as 0 65535 or the darkest and brightest values that matter in the whole "
                "screen, or have it taken from each plate by --intensity-percentiles (intensity_percentiles=...)"
            )
        return image
    low, high = intensity_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"intensity_range is ({low}, {high}): low must be less than high, both finite")
    return _lookup_table(float(low), float(high))[image]


def crop_starts(length: int, size: int) -> list[int]:
    """First pixels of the fewest crops that cover ``length``, evenly spaced: without overlap where size divides it.

    >>> crop_starts(512, 256), crop_starts(500, 256), crop_starts(256, 256)
    ([0, 256], [0, 244], [0])
    """
    if not 1 <= size <= length:
        raise InputError(f"crop size {size} does not fit a field of {length} pixels: choose 1 to {length}")
    n_crops = math.ceil(length / size)
    return [round(i * (length - size) / max(n_crops - 1, 1)) for i in range(n_crops)]


def crops(field: np.ndarray, size: int) -> np.ndarray:
    """Tile fields into square crops, row by row; no pixel is left out.

    Parameters
    ----------
    field
        Pixels (C, Y, X) or (N, C, Y, X), any dtype.
    size
        Side of a crop in pixels.

    Returns
    -------
    Crops (n_crops, C, size, size), in order of field, row, column; of N fields each gives n_crops / N. Where ``size``
    does not divide a side, the fewest crops that cover it are spaced evenly and overlap (`crop_starts`), so that
    512 x 512 gives 4 crops of 256, and 500 x 512 also 4, whose rows start at 0 and 244.

    Raises
    ------
    InputError
        A side is smaller than the crop, or the array has another number of axes.

    >>> crops(np.arange(16).reshape(1, 4, 4), 2)[1, 0]
    array([[2, 3],
           [6, 7]])
    """
    if field.ndim not in (3, 4):
        raise InputError(f"fields have the axes (C, Y, X) or (N, C, Y, X), not {field.ndim} axes: {field.shape}")
    fields = field if field.ndim == 4 else field[None]
    rows, columns = (crop_starts(length, size) for length in fields.shape[2:])
    tiles = np.stack([fields[:, :, y : y + size, x : x + size] for y in rows for x in columns], axis=1)
    return tiles.reshape(-1, *tiles.shape[2:])


@functools.lru_cache(maxsize=16)
def _lookup_table(low: float, high: float) -> np.ndarray:
    scaled = (np.arange(2**16) - low) / (high - low)
    return (np.clip(scaled, 0, 1) * 255 + 0.5).astype(np.uint8)


# ---------------------------------------------------------------------------------------------- bytes to pixels


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise ImageError("not a regular file: a folder, a device or a pipe")
        if found.st_size > MAX_BYTES:
            raise ImageError(f"too large: {found.st_size} bytes, at most {MAX_BYTES} are read")
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        raise ImageError("file absent") from None
    except ImageError:
        raise
    except (OSError, ValueError) as error:
        raise ImageError(f"file not readable: {getattr(error, 'strerror', None) or error}") from error


def decode_bytes(data: bytes, z: Planes = None, t: int | None = None) -> np.ndarray:
    """Decode the content of an image file, as `decode` does; the ImageError has the reason alone."""
    if not data:
        raise ImageError("empty file: 0 bytes")
    try:
        if data.startswith(PNG):
            image = _png(data)
        elif data.startswith((JP2, J2K)):
            image = _jpeg2000(data)
        elif data.startswith(TIFF):
            image = _tiff(data, z, t)
        elif not any(data):
            raise ImageError(f"zero-filled file: {len(data)} bytes, each 0")
        else:
            raise ImageError(f"not an image: starts with {data[:8]!r}, neither PNG, TIFF nor JPEG 2000")
    except ImageError:
        raise
    except Exception as error:  # whatever a codec raises, it means this
        raise ImageError(f"truncated or damaged: {error}") from error
    if image.ndim != 2 or image.dtype.newbyteorder("=") not in (np.uint8, np.uint16):
        raise ImageError(f"not a grey picture of 8 or 16 bits: {image.dtype}, shape {image.shape}")
    if image.max(initial=0) == 0:
        raise ImageError("every pixel is 0")
    return image.astype(image.dtype.newbyteorder("="), copy=False)


def _png(data: bytes) -> np.ndarray:
    _refuse_huge(*struct.unpack_from(">II", data, 16))
    return imagecodecs.png_decode(data)


def _jpeg2000(data: bytes) -> np.ndarray:
    start = data.index(J2K)
    x_end, y_end, x_start, y_start = struct.unpack_from(">IIII", data, start + 8)
    _refuse_huge(x_end - x_start, y_end - y_start)
    (n_components,) = struct.unpack_from(">H", data, start + 40)
    if n_components != 1:  # up to 16384 of them, and a decoder makes room for all
        raise ImageError(f"not a grey picture of 8 or 16 bits: {n_components} components")
    if data.find(J2K_END, start) < 0:  # decoders fill what is missing when a file's end holds zeros
        raise ImageError("truncated or damaged: the end of the codestream is missing")
    try:
        return imagecodecs.jpeg2k_decode(data)
    except imagecodecs.Jpeg2kError:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image)


def _tiff(data: bytes, z: Planes, t: int | None) -> np.ndarray:
    _refuse_cut_tiff(data)
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page: Any = file.pages[0]
        if len(file.pages) > 1 or len(page.shape) > 2:
            image = _tiff_stack(file, data, z, t)
        else:
            _refuse_huge(*page.shape)
            _refuse_open_end(page, data)
            try:
                image = imagecodecs.tiff_decode(data)
            except imagecodecs.TiffError:
                image = page.asarray(maxworkers=1)
        if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE:
            raise ImageError("inverted grey values (photometric MinIsWhite): write it again with 0 as black")
        return image


def _refuse_cut_tiff(data: bytes) -> None:
    """Refuse a TIFF whose directories or tags lie past its end: tifffile passes over them, and pages would be missing."""
    order, big = ("<" if data.startswith(b"II") else ">"), data[2:4] in (b"+\0", b"\0+")
    offset, n_tags, tag, inline = (
        ("Q", "Q", struct.Struct(order + "2xHQQ"), 8) if big else ("I", "H", struct.Struct(order + "2xHII"), 4)
    )
    seen = set()
    (at,) = struct.unpack_from(order + offset, data, inline)
    while at:
        if at in seen:
            raise ImageError("truncated or damaged: its pages go round in a circle")
        seen.add(at)
        (n,) = struct.unpack_from(order + n_tags, data, at)
        at += struct.calcsize(n_tags)
        for _ in range(n):
            kind, count, value = tag.unpack_from(data, at)
            size = count * TAG_SIZES.get(kind, 1)
            if size > inline and value + size > len(data):
                raise ImageError("truncated or damaged: a tag lies past the end of the file")
            at += tag.size
        (at,) = struct.unpack_from(order + offset, data, at)


def _tiff_stack(file: tifffile.TiffFile, data: bytes, z: Planes, t: int | None) -> np.ndarray:
    if len(file.series) > 1:
        raise ImageError(f"not a single picture: {len(file.series)} series of pictures in one file")
    series = file.series[0]
    leading = [(axis, n) for axis, n in zip(series.axes[:-2], series.shape[:-2]) if n > 1]
    unnamed = "t" if z is None and t is not None else "z"
    names = [{"Z": "z", "T": "t", "Q": unnamed, "I": unnamed}.get(axis, "") for axis, _ in leading]
    if series.axes[-2:] != "YX" or "" in names or len(set(names)) < len(names):
        raise ImageError(
            f"not a grey picture of 8 or 16 bits: {series.dtype}, shape {series.shape}, axes {series.axes}"
        )
    lengths = [n for _, n in leading]
    counts = {"z": 1, "t": 1} | dict(zip(names, lengths))
    choose(counts, z, t)
    _refuse_huge(*series.shape[-2:])
    order: np.ndarray = np.arange(math.prod(lengths)).reshape(lengths)
    if "t" in names:
        order = order.take(t or 0, axis=names.index("t"))
    z = z if counts["z"] > 1 else 0
    if len(series.pages) == math.prod(lengths):
        return project((_tiff_page(series.pages[i], data) for i in order.ravel()), z)
    _refuse_huge(*series.shape)  # one page with depth is decoded whole
    planes = series.asarray(maxworkers=1).reshape(-1, *series.shape[-2:])
    return project((planes[i] for i in order.ravel()), z)


def _tiff_page(page: tifffile.TiffPage | tifffile.TiffFrame | None, data: bytes) -> np.ndarray:
    if page is None:
        raise ImageError("truncated or damaged: a page is missing")
    _refuse_open_end(page, data)
    return page.asarray(maxworkers=1)


def _refuse_open_end(page: tifffile.TiffPage | tifffile.TiffFrame, data: bytes) -> None:
    """Refuse a compressed page that ends in zeros: no codec does, and libtiff does not notice."""
    if page.compression != tifffile.COMPRESSION.NONE:
        ends = (offset + size for offset, size in zip(page.dataoffsets, page.databytecounts, strict=True))
        if not all(any(data[end - 8 : end]) for end in ends):
            raise ImageError("truncated or damaged: a strip or tile ends in zeros")


def _refuse_huge(*shape: int) -> None:
    if not 1 <= math.prod(shape) <= MAX_PIXELS:
        raise ImageError(f"too large: {' x '.join(map(str, shape))} pixels, at most {MAX_PIXELS} are read")
