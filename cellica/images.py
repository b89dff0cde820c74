"""Image files to pixels: decoding, bit depth, tiling.

Knows arrays and files, no tables. A file that is not a whole two-dimensional grey picture is an error, never a guess.
"""

import functools
import io
import math
import os
import struct

import imagecodecs
import numpy as np
import tifffile
from PIL import Image

from cellica.schema import ImageError, InputError

MAX_PIXELS = 2**26  # 8192 x 8192: more than a field of any camera, less than a decompression bomb
PNG = b"\x89PNG\r\n\x1a\n"
JP2, J2K, J2K_END = b"\x00\x00\x00\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51", b"\xff\xd9"
TIFF = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")


def decode(path: str | os.PathLike[str]) -> np.ndarray:
    """Decode a PNG, TIFF or JPEG 2000 file, told apart by content.

    Parameters
    ----------
    path
        A file with one grey picture of at most ``MAX_PIXELS`` pixels.

    Returns
    -------
    Pixels (Y, X), uint8 or uint16 in native byte order.

    Raises
    ------
    ImageError
        ``"{path}: {reason}"``: absent, empty, zero-filled, not an image, truncated or damaged, too large, not grey
        and two-dimensional, or every pixel 0. The reason's part before a colon is one of a fixed few.

    Notes
    -----
    imagecodecs decodes; what its TIFF and JPEG 2000 codecs refuse is tried again with tifffile and Pillow. PNG has no
    second codec: libpng verifies each checksum, others do not, and would let damage pass.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read()
    except FileNotFoundError:
        raise ImageError(f"{path}: file absent") from None
    except OSError as error:
        raise ImageError(f"{path}: file not readable: {error.strerror}") from error
    try:
        image = _decode(data)
    except ImageError as error:
        raise ImageError(f"{path}: {error}") from error.__cause__
    return image


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
                "images of 16 bits need a fixed range that becomes 0 to 255: pass intensity_range=(low, high), "
                "for example (0, 65535) or the darkest and brightest values that matter in the whole screen"
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


def _decode(data: bytes) -> np.ndarray:
    if not data:
        raise ImageError("empty file: 0 bytes")
    try:
        if data.startswith(PNG):
            image = _png(data)
        elif data.startswith((JP2, J2K)):
            image = _jpeg2000(data)
        elif data.startswith(TIFF):
            image = _tiff(data)
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
    if not image.any():
        raise ImageError("every pixel is 0")
    return image.astype(image.dtype.newbyteorder("="), copy=False)


def _png(data: bytes) -> np.ndarray:
    _refuse_huge(*struct.unpack_from(">II", data, 16))
    return imagecodecs.png_decode(data)


def _jpeg2000(data: bytes) -> np.ndarray:
    start = data.index(J2K)
    x_end, y_end, x_start, y_start = struct.unpack_from(">IIII", data, start + 8)
    _refuse_huge(x_end - x_start, y_end - y_start)
    if data.find(J2K_END, start) < 0:  # decoders fill what is missing when a file's end holds zeros
        raise ImageError("truncated or damaged: the end of the codestream is missing")
    try:
        return imagecodecs.jpeg2k_decode(data)
    except imagecodecs.Jpeg2kError:
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image)


def _tiff(data: bytes) -> np.ndarray:
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        if len(file.pages) != 1:
            raise ImageError(f"not a single picture: {len(file.pages)} pages")
        page = file.pages[0]
        _refuse_huge(*page.shape)
        if page.compression != tifffile.COMPRESSION.NONE:  # no codec ends in zeros, and libtiff does not notice
            ends = (offset + size for offset, size in zip(page.dataoffsets, page.databytecounts, strict=True))
            if not all(any(data[end - 8 : end]) for end in ends):
                raise ImageError("truncated or damaged: a strip or tile ends in zeros")
        try:
            return imagecodecs.tiff_decode(data)
        except imagecodecs.TiffError:
            return page.asarray(maxworkers=1)


def _refuse_huge(*shape: int) -> None:
    if not 1 <= math.prod(shape) <= MAX_PIXELS:
        raise ImageError(f"too large: {' x '.join(map(str, shape))} pixels, at most {MAX_PIXELS} are read")
