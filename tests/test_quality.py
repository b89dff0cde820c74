"""Quality of fields: planted brightness, slopes, blur and cells come out again; what holds no cells is empty."""

import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from cellica import quality, simulate

CHANNELS = ["w1", "w2", "w3", "w4", "w5", "w6"]


def simulated(seed: int, size: int = 512, **biology: float) -> tuple[np.ndarray, int]:
    """A field (6, size, size) of a random screen, and how many nuclei have their centre in it."""
    rng = np.random.default_rng(seed)
    cells = {name: rng.normal() for name in simulate.BIOLOGY} | biology
    batch = {
        name: step * rng.normal() if centre == 0 else centre * np.exp(step * rng.normal())
        for name, (centre, step) in simulate.BATCH.items()
    }
    placed = simulate._cells(cells, size, 1.0, np.random.default_rng(seed))  # the first draws of paint
    inside = np.all([(placed[axis] > 0) & (placed[axis] < size) for axis in "xy"], axis=0)
    light = simulate.paint(cells, size, simulate._texture(np.random.default_rng(0)), np.random.default_rng(seed))
    return simulate.expose(light, batch, rng), int(inside.sum())


@pytest.fixture(scope="module")
def fields() -> tuple[np.ndarray, np.ndarray]:
    """Ten fields of 60 to 300 cells, and their true counts."""
    pictures = [simulated(seed, cell_count=count) for seed, count in enumerate(np.linspace(-5, 5, 10))]
    return np.stack([picture for picture, _ in pictures]), np.array([count for _, count in pictures])


def real(shared, pattern: str) -> list[np.ndarray]:
    files = sorted((shared / "data" / "rxrx1_images" / "train").glob(pattern))
    return [imagecodecs.png_decode(file.read_bytes()) for file in files]


# ---------------------------------------------------------------------------------------------- what is measured


def test_every_measure_of_every_channel_has_its_name_and_type(fields):
    measured = quality.measure(fields[0], ["DNA/Hoechst", *CHANNELS[1:]])
    of_channels = [f"{what}_{name}" for what in ("intensity", "focus", "saturation") for name in CHANNELS]
    assert list(measured) == [name.replace("w1", "DNA_Hoechst") for name in of_channels] + ["cell_count", "empty"]
    kinds = {name: values.dtype for name, values in measured.items()}
    assert {kinds.pop("cell_count"), kinds.pop("empty")} == {np.dtype(np.int32), np.dtype(bool)}
    assert set(kinds.values()) == {np.dtype(np.float32)}
    assert {values.shape for values in measured.values()} == {(10,)}


@settings(max_examples=20, deadline=None)
@given(n=st.integers(0, 3), y=st.integers(16, 40), x=st.integers(16, 40), seed=st.integers(0, 99))
def test_intensity_and_saturation_are_means_of_any_fields(n, y, x, seed):
    fields = np.random.default_rng(seed).integers(250, 256, (n, 2, y, x), dtype=np.uint8)
    measured = quality.measure(fields, ["a", "b"], nuclei=1)
    for c, name in enumerate("ab"):
        np.testing.assert_allclose(measured[f"intensity_{name}"], fields[:, c].mean(axis=(1, 2)), rtol=1e-6)
        np.testing.assert_allclose(measured[f"saturation_{name}"], (fields[:, c] == 255).mean(axis=(1, 2)), rtol=1e-6)
    assert len(measured["cell_count"]) == n


def test_fields_do_not_depend_on_each_other(fields):
    together = quality.measure(fields[0][:3], CHANNELS)
    alone = [quality.measure(field[None], CHANNELS) for field in fields[0][:3]]
    for name, values in together.items():
        np.testing.assert_array_equal(values, np.concatenate([one[name] for one in alone]))


def test_nuclei_may_be_any_channel(fields):
    turned = quality.measure(fields[0][:2, ::-1], CHANNELS[::-1], nuclei=5)
    for name, values in quality.measure(fields[0][:2], CHANNELS).items():
        np.testing.assert_array_equal(values, turned[name])


@pytest.mark.parametrize(
    ("fields", "channels", "nuclei", "message"),
    [
        (np.zeros((1, 2, 32, 32), np.uint16), ["a", "b"], 0, r"fields are uint16 \(1, 2, 32, 32\)"),
        (np.zeros((2, 32, 32), np.uint8), ["a", "b"], 0, r"\(n, C, Y, X\)"),
        (np.zeros((1, 2, 15, 32), np.uint8), ["a", "b"], 0, "at least 16"),
        (np.zeros((1, 2, 32, 32), np.uint8), ["a"], 0, "2 channels need as many different names, got a"),
        (np.zeros((1, 2, 32, 32), np.uint8), ["a/b", "a_b"], 0, "different names, got a_b, a_b"),
        (np.zeros((1, 2, 32, 32), np.uint8), ["a", "b"], 2, "nuclei=2 is no channel: choose 0 to 1"),
    ],
)
def test_what_cannot_be_measured_is_named(fields, channels, nuclei, message):
    with pytest.raises(ValueError, match=message):
        quality.measure(fields, channels, nuclei)


# ---------------------------------------------------------------------------------------------- focus


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("shape", [(256, 256), (300, 402), (301, 256)])
def test_focus_is_the_slope_of_a_power_law(exponent, shape):
    """Power f^-exponent in two dimensions is f^(1 - exponent) on rings; bins of 2 x 2 damp the finest frequencies."""
    rng = np.random.default_rng(0)
    y, x = (n // 2 for n in shape)
    f = np.hypot(np.fft.fftfreq(y)[:, None], np.fft.rfftfreq(x))
    f[0, 0] = np.inf
    spectrum = f ** (-exponent / 2) * np.exp(2j * np.pi * rng.random(f.shape))
    coarse = np.fft.irfft2(spectrum, s=(y, x))
    coarse = np.rint(128 + 25 * coarse / coarse.std())
    image = np.pad(np.repeat(np.repeat(coarse, 2, 0), 2, 1), ((0, shape[0] % 2), (0, shape[1] % 2)))
    assert quality.focus(np.clip(image, 0, 255).astype(np.uint8)) == pytest.approx(1 - exponent, abs=0.08)


def test_focus_does_not_see_gain_and_offset(fields):
    for image in fields[0][:4, 0]:
        other = np.rint(0.7 * image + 30).astype(np.uint8)
        assert quality.focus(other) == pytest.approx(quality.focus(image), abs=0.06)


def test_blur_lowers_focus_of_simulated_fields(fields):
    for image in fields[0][:3].reshape(-1, 512, 512):
        slopes = [quality.focus(ndimage.gaussian_filter(image, sigma)) for sigma in (0, 1, 2)]
        assert slopes == sorted(slopes, reverse=True)


def test_a_blurred_channel_is_told_from_all_sharp_ones_of_real_screens(shared):
    """Three cell types, four plates: blur of 2 px and its noise move focus by more than plates and cells do."""
    rng = np.random.default_rng(0)
    for channel in (1, 2, 3, 4, 6):  # mitochondria are out of focus in some of these fields already
        images = real(shared, f"*/*/B02_s1_w{channel}.png")
        blurred = [ndimage.gaussian_filter(i.astype(float), 2) + rng.normal(0, 0.5, i.shape) for i in images]
        worst = max(quality.focus(np.clip(np.rint(image), 0, 255).astype(np.uint8)) for image in blurred)
        assert len(images) == 12
        assert worst < min(quality.focus(image) for image in images)


# ---------------------------------------------------------------------------------------------- cells


def test_count_follows_the_true_count_of_simulated_cells(fields):
    measured, true = quality.measure(fields[0], CHANNELS), fields[1]
    ratio = measured["cell_count"] / true
    assert true.min() < 90
    assert true.max() > 250
    assert ratio.min() > 0.9
    assert ratio.max() < 1.12
    assert np.corrcoef(measured["cell_count"], true)[0, 1] > 0.99
    assert not measured["empty"].any()


@pytest.mark.parametrize(("seed", "radius"), [(0, 6), (1, 9), (2, 14)])
def test_disks_apart_are_counted_one_by_one(seed, radius):
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:512, :512]
    centres = [(r, c) for r in range(32, 512, 64) for c in range(32, 512, 64) if rng.random() < 0.6]
    image = 8 + rng.normal(0, 1, (512, 512)) + 20 * x / 512
    for row, column in centres + rng.uniform(-8, 8, (len(centres), 2)):
        image += rng.uniform(15, 60) * (np.hypot(y - row, x - column) < radius)
    assert quality.count_nuclei(np.rint(image).astype(np.uint8)) == len(centres)


@pytest.mark.parametrize("size", [(512, 512), (16, 16), (61, 47)])
def test_fields_without_cells_are_empty(size):
    rng = np.random.default_rng(0)
    ramp = 0.08 * np.arange(size[1])  # grey levels
    hot = np.full(size, 5)
    hot[12::40, 11::40] = 200  # single pixels
    pictures = [
        *(np.full(size, value) for value in (0, 7, 255)),
        *(np.clip(20 + ramp + noise * rng.normal(size=size), 0, 255) for noise in (0.5, 2, 8)),
        hot,
        np.clip(5 + rng.poisson(3, size), 0, 255),
    ]
    fields = np.rint(pictures).astype(np.uint8)[:, None]
    measured = quality.measure(fields, ["w1"])
    assert measured["cell_count"].tolist() == [0] * len(fields)
    assert measured["empty"].all()
    assert np.isnan(measured["focus_w1"][:3]).all()
    assert np.isfinite(measured["focus_w1"][3:]).all()


def test_counts_of_real_fields_are_what_the_eye_counts(shared):
    """HEPG2 lie in heaps (350 to 650 a field, by eye), HUVEC and RPE one by one (about 120 and 90)."""
    for cell_type, low, high in (("HEPG2", 350, 650), ("HUVEC", 90, 150), ("RPE", 75, 125)):
        counts = [quality.count_nuclei(image) for image in real(shared, f"{cell_type}*/*/B02_s?_w1.png")]
        assert len(counts) == 8
        assert low <= min(counts)
        assert max(counts) <= high
