"""Quality of fields from their pixels: brightness, focus, saturation, a rough count of cells, empty fields.

Cheap enough to be measured wherever fields are read. It needs no encoder, so it is also what an embedding has to beat.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from scipy import fft, ndimage

MIN_SIZE = 16  # px: fewest rows and columns of a field
SCALES = (0.7, 1.0, 1.4, 2.0, 2.8)  # widths of smoothing in units of 4 px: nuclei of about 10 to 40 px across
NEXT_SCALE = 1.6  # ratio of the two widths of a difference of Gaussians that resembles the Laplacian most (Marr 1980)
CONTRAST = 1.0  # least height of a peak, grey levels: about a tenth of a dim nucleus
SHARE_OF_BRIGHT = 0.25  # and as a share of the upper quartile of the field's peaks


def measure(fields: np.ndarray, channels: Sequence[str], nuclei: int = 0) -> dict[str, np.ndarray]:
    """Measure each field.

    Parameters
    ----------
    fields
        uint8 (n, C, Y, X), Y and X at least 16 px.
    channels
        Names of the C channels; a "/" in them becomes "_".
    nuclei
        Which channel shows nuclei, counted from 0.

    Returns
    -------
    Arrays (n,) by name:

    ``intensity_{channel}``
        Mean pixel, 0 to 255, float32.
    ``focus_{channel}``
        Slope of log power over log spatial frequency, without unit, float32; more negative is more blurred, see `focus`.
        NaN where all pixels are alike.
    ``saturation_{channel}``
        Share of pixels at 255, 0 to 1, float32.
    ``cell_count``
        Nuclei in the field, int32, roughly: see `count_nuclei`.
    ``empty``
        Whether there is no nucleus, bool.

    Raises
    ------
    ValueError
        Fields of another dtype or shape, another number of names, two channels of one name, no such channel of nuclei.
    """
    names = [name.replace("/", "_") for name in channels]
    _check(fields, names, nuclei)
    by_channel = {
        what: np.zeros((len(fields), len(names)), np.float32) for what in ("intensity", "focus", "saturation")
    }
    count = np.zeros(len(fields), np.int32)
    for i, field in enumerate(fields):
        count[i] = count_nuclei(field[nuclei])
        for c, image in enumerate(field):
            by_channel["intensity"][i, c] = image.sum(dtype=np.uint64) / image.size
            by_channel["focus"][i, c] = focus(image)
            by_channel["saturation"][i, c] = np.count_nonzero(image == 255) / image.size
    measured = {f"{what}_{name}": values[:, c] for what, values in by_channel.items() for c, name in enumerate(names)}
    return {**measured, "cell_count": count, "empty": count == 0}


def focus(image: np.ndarray) -> float:
    """Slope of log power over log spatial frequency; more negative is more blurred.

    CellProfiler's PowerLogLogSlope (MeasureImageQuality; Bray et al., J. Biomol. Screen. 17, 266, 2012): power of the
    Fourier transform, summed over rings one frequency wide, and a straight line through its logarithm by least squares.
    Here on means of 2 x 2 pixels: noise of single pixels else flattens the slope of blurred images. Gain and offset of
    the microscope do not change it; what the image shows does, so compare a channel with itself. Noise alone has a slope
    near 1, and sharp images of cells have one of about -1 to -2.

    Parameters
    ----------
    image
        uint8 (Y, X).

    Returns
    -------
    The slope; NaN where all pixels are alike.
    """
    binned = _binned(image).astype(np.float32)
    spectrum = fft.rfft2(binned - binned.mean())
    power = spectrum.real**2 + spectrum.imag**2
    power[:, 1 : (binned.shape[1] + 1) // 2] *= 2  # their mirror images are not stored
    ring, n_rings = _rings(binned.shape)
    total = np.bincount(ring, power.ravel(), minlength=n_rings)[1:n_rings]
    if not total.all():
        return float("nan")
    frequency = np.log(np.arange(1, n_rings))
    frequency -= frequency.mean()
    return float(frequency @ np.log(total) / (frequency @ frequency))


def count_nuclei(image: np.ndarray) -> int:
    """Count nuclei roughly, without segmentation: peaks of a difference of Gaussians as wide as the field's nuclei.

    On means of 4 x 4 pixels. A bin counts no more than its brightest neighbour, so that hot pixels vanish. The width is
    the mean of `SCALES`, weighted by how much each stands out (the 6th power of the standard deviation of its
    difference of Gaussians; scale selection as in Lindeberg, Int. J. Comput. Vis. 30, 79, 1998), and so changes little
    between similar fields. A peak counts where it is the highest within that width and above the noise, `CONTRAST` and
    `SHARE_OF_BRIGHT`. Haze and uneven light are no peaks. Nuclei that overlap, and those of less than a quarter of the
    usual brightness, are missed; debris of their size is counted.

    Parameters
    ----------
    image
        uint8 (Y, X), of nuclei 10 to 40 px across.
    """
    binned = _without_specks(_binned(_binned(image)).astype(np.float32) / 16)
    smooth = [ndimage.gaussian_filter(binned, scale, truncate=3) for scale in SCALES]
    stands_out = np.array([np.std(fine - coarse) for fine, coarse in pairwise(smooth)])
    if not stands_out.any():
        return 0
    width = float(np.average(SCALES[:-1], weights=(stands_out / stands_out.max()) ** 6))
    blobs = ndimage.gaussian_filter(binned, width, truncate=3)
    blobs -= ndimage.gaussian_filter(binned, NEXT_SCALE * width, truncate=3)
    highest = blobs == ndimage.maximum_filter(blobs, 2 * round(width) + 1)
    peaks = blobs[highest & (blobs > max(_noise(image), CONTRAST))]
    return int(np.count_nonzero(peaks > SHARE_OF_BRIGHT * np.percentile(peaks, 75))) if len(peaks) else 0


def _noise(image: np.ndarray) -> float:
    """Standard deviation of the noise of a pixel, from differences between neighbours; texture adds to it."""
    rows = image[::8].astype(np.int16)
    bend = 2 * rows[:, 1:-1] - rows[:, :-2] - rows[:, 2:]
    return float(np.abs(bend).mean() * np.sqrt(np.pi / 2) / np.sqrt(6))


def _without_specks(image: np.ndarray) -> np.ndarray:
    """Each pixel, and at most its brightest neighbour of four."""
    around = np.pad(image, 1)
    up, down, left, right = around[:-2, 1:-1], around[2:, 1:-1], around[1:-1, :-2], around[1:-1, 2:]
    return np.minimum(image, np.maximum(np.maximum(up, down), np.maximum(left, right)))


def _binned(image: np.ndarray) -> np.ndarray:
    """Sums of 2 x 2 pixels, uint16; an odd last row or column is left out."""
    y, x = (n - n % 2 for n in image.shape)
    rows = image[0:y:2, :x].astype(np.uint16) + image[1:y:2, :x]
    return rows[:, 0::2] + rows[:, 1::2]


@lru_cache(maxsize=8)
def _rings(shape: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Ring of each coefficient of ``rfft2`` of an image, flat, and how many lie within half the sampling rate."""
    side = min(shape)
    radius = np.hypot(np.fft.fftfreq(shape[0])[:, None], np.fft.rfftfreq(shape[1])) * side
    return np.rint(radius).astype(np.intp).ravel(), side // 2 + 1


def _check(fields: np.ndarray, names: Sequence[str], nuclei: int) -> None:
    if fields.ndim != 4 or fields.dtype != np.uint8 or min(fields.shape[2:]) < MIN_SIZE:
        raise ValueError(
            f"fields are {fields.dtype} {fields.shape}: uint8 (n, C, Y, X) with Y and X of at least {MIN_SIZE} is needed"
        )
    if len(names) != fields.shape[1] or len(set(names)) < len(names):
        raise ValueError(f"{fields.shape[1]} channels need as many different names, got {', '.join(names) or 'none'}")
    if not 0 <= nuclei < len(names):
        raise ValueError(f"nuclei={nuclei} is no channel: choose 0 to {len(names) - 1} ({', '.join(names)})")
