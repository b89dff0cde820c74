"""`embed`: fields of a plate to embeddings and measures, in chunks, ahead of the computation, and past being killed."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from cellica import artifacts, camae, checkpoints, cli, embedding, encoder, images, plates, progress, quality
from cellica.schema import InputError, PlateError, quality_columns

TINY = camae.Geometry(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, max_in_chans=6)


def random_images(n, channels, size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, channels, size, size), dtype=np.uint8)


def write_tiny(folder, geometry=TINY):
    """Checkpoint whose every tensor is random: biases, norms and LayerScale too."""
    generator = torch.Generator().manual_seed(0)
    model = camae.CAMAE(geometry)
    state = {
        checkpoints.PREFIX + k: torch.randn(v.shape, generator=generator) / 4 for k, v in model.state_dict().items()
    }
    state[checkpoints.PREFIX + "pos_embed"] = model.pos_embed.data
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"max_in_chans": geometry.max_in_chans}))
    return folder / "model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return encoder.load("camae", write_tiny(tmp_path_factory.mktemp("tiny")), device="cpu")


@pytest.fixture
def said(monkeypatch):
    notes = []
    monkeypatch.setattr(progress, "say", notes.append)
    return notes


@dataclasses.dataclass
class StubPlate:
    pixels: np.ndarray
    path: Path
    sites: pd.DataFrame = dataclasses.field(init=False)
    name: str = "HEPG2-01_1"
    experiment: str = "HEPG2-01"
    plate: str = "1"
    provenance: list = dataclasses.field(default_factory=lambda: [artifacts.step("ingest", {"source": "stub"})])

    def __post_init__(self):
        self.path.mkdir(exist_ok=True)
        self.channels = [f"w{i + 1}" for i in range(self.pixels.shape[1])]
        self.shape = self.pixels.shape[1:]
        ids = [f"HEPG2-01_1_B02_{i + 1}" for i in range(len(self.pixels))]
        self.sites = pd.DataFrame({"experiment": "HEPG2-01", "plate": "1", "well": "B02"}, index=ids)

    def fields(self, chunk_size, start=0):
        for first in range(start, len(self.pixels), chunk_size):
            rows = slice(first, first + chunk_size)
            yield self.sites.iloc[rows], self.pixels[rows]


class Means(torch.nn.Module):
    """An encoder that takes no time: mean pixels. It may do something first."""

    def __init__(self, first=lambda images: None):
        super().__init__()
        self.first = first

    def forward(self, images):
        self.first(images)
        channels = images.float().mean(dim=(2, 3))[..., None].expand(-1, -1, 16)
        return channels[:, 0], channels


# ---------------------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 8])
def test_field_is_the_mean_of_its_crops(tiny, tmp_path, chunk_size):
    pixels = random_images(5, 3, 64)
    plate = StubPlate(pixels, tmp_path / "p.zarr")
    plate.channels[2] = "ER/RNA"
    adata = encoder.embed(plate, tiny, chunk_size=chunk_size)
    corners = [(0, 0), (0, 32), (32, 0), (32, 32)]
    expected = torch.stack([tiny(pixels[:, :, y : y + 32, x : x + 32]) for y, x in corners]).mean(0).numpy()
    np.testing.assert_allclose(adata.X, expected, rtol=1e-5, atol=1e-5)
    assert adata.X.dtype == np.float32
    assert list(adata.obs_names) == list(plate.sites.index)
    assert list(adata.var_names) == [f"feature_{i}" for i in range(16)]
    assert list(adata.obs["well"]) == ["B02"] * 5


def test_field_of_512_pixels_is_the_mean_of_four_crops_of_256(tmp_path):
    geometry = camae.Geometry(img_size=256, patch_size=64, embed_dim=16, depth=1, num_heads=2, max_in_chans=6)
    model = encoder.load("camae", write_tiny(tmp_path, geometry), device="cpu")
    pixels = random_images(2, 3, 512)
    adata = encoder.embed(StubPlate(pixels, tmp_path / "p.zarr"), model)
    crops = [pixels[:, :, y : y + 256, x : x + 256] for y in (0, 256) for x in (0, 256)]
    expected = np.mean([model(crop).numpy() for crop in crops], axis=0)
    np.testing.assert_allclose(adata.X, expected, rtol=1e-5, atol=1e-5)
    assert artifacts.provenance(adata)[-1]["parameters"]["crops_per_field"] == 4


def test_obs_tells_what_the_fields_are_like(tiny, tmp_path):
    pixels = random_images(5, 3, 40)
    plate = StubPlate(pixels, tmp_path / "p.zarr")
    plate.channels[2] = "ER/RNA"
    adata = encoder.embed(plate, tiny, chunk_size=2, nuclei="w2")
    expected = quality.measure(pixels, plate.channels, nuclei=1)
    assert set(expected) == set(adata.obs) - set(plate.sites)
    for name, values in expected.items():
        assert adata.obs[name].dtype == values.dtype
        np.testing.assert_array_equal(adata.obs[name], values)
    np.testing.assert_allclose(adata.obs["intensity_ER_RNA"], pixels[:, 2].mean(axis=(1, 2)), rtol=1e-6)
    assert "intensity_w1" not in plate.sites
    assert artifacts.provenance(adata)[-1]["parameters"]["nuclei"] == "w2"


def test_channels_one_after_another(tiny, tmp_path):
    pixels = random_images(3, 4, 64)
    concat = dataclasses.replace(tiny, channels="concat")
    adata = encoder.embed(StubPlate(pixels, tmp_path / "p.zarr"), concat)
    expected = tiny.channelwise(images.crops(pixels, 32)).unflatten(0, (3, 4)).mean(1)
    np.testing.assert_allclose(adata.X, expected, rtol=1e-5, atol=1e-5)
    assert list(adata.var_names) == [f"feature_{i}" for i in range(64)]
    assert artifacts.provenance(adata)[-1]["parameters"]["channels"] == "concat"


def test_provenance_is_recorded_and_written(tiny, tmp_path):
    adata = encoder.embed(StubPlate(random_images(2, 3, 32), tmp_path / "p.zarr"), tiny)
    artifacts.write_adata(adata, tmp_path / "sites.h5ad")
    first, last = artifacts.provenance(artifacts.read_adata(tmp_path / "sites.h5ad"))
    assert first["verb"] == "ingest"
    assert last["verb"] == "embed"
    assert last["weights_sha256"] == tiny.weights_sha256
    expected = {"encoder": "camae", "dtype": "float32", "device": "cpu", "channels": "mean", "crop_size": 32}
    assert last["parameters"].items() >= expected.items()


def test_the_hash_of_a_plate_is_that_of_its_pixels(tiny, tmp_path):
    def digest(pixels, chunk_size):
        adata = encoder.embed(StubPlate(pixels, tmp_path / "p.zarr"), tiny, chunk_size=chunk_size)
        return artifacts.provenance(adata)[-1]["inputs"]["p.zarr"]

    pixels = random_images(5, 2, 32)
    changed = pixels.copy()
    changed[4, 1, 31, 31] ^= 1
    assert digest(pixels, 2) == digest(pixels, 5) == digest(np.asfortranarray(pixels), 1)
    assert len({digest(pixels, 2), digest(changed, 2), digest(pixels[[1, 0, 2, 3, 4]], 2)}) == 3


def test_real_plates(tiny, shared, tmp_path):
    """Real images on disk to one embedding a site, equal to those of the pixels; intensities too."""
    root = shared / "data" / "rxrx1_images"
    channels = [f"w{i}" for i in range(1, 7)]
    paths = [root / "train" / "HUVEC-01" / "Plate1" / f"B02_s1_{channel}.png" for channel in channels]
    site = {"experiment": "HUVEC-01", "plate": "1", "well": "B02", "site": 1, "control": "negative"}
    row = site | {f"path_{channel}": str(path) for channel, path in zip(channels, paths)}
    plates.ingest(pd.DataFrame([row], index=["HUVEC-01_1_B02_1"]), tmp_path)
    adata = encoder.embed(tmp_path / "HUVEC-01_1.zarr", tiny)
    pixels = np.stack([images.decode(path) for path in paths])
    assert list(adata.obs_names) == ["HUVEC-01_1_B02_1"]
    expected = tiny(images.crops(pixels, 32)).mean(dim=0).numpy()
    np.testing.assert_allclose(adata.X[0], expected, rtol=1e-5, atol=1e-5)
    intensity = adata.obs.filter(like="intensity_").iloc[0].to_numpy(dtype=float)
    np.testing.assert_allclose(intensity, pixels.mean(axis=(1, 2)), rtol=1e-6)
    assert adata.obs["cell_count"].iloc[0] > 10
    assert [step["verb"] for step in artifacts.provenance(adata)] == ["ingest", "embed"]
    artifacts.write_adata(adata, tmp_path / "sites.h5ad")


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((2, 7, 32, 32), "7 channels, camae takes at most 6"),
        ((2, 3, 31, 64), "fields of 31 x 64 pixels, camae needs 32 x 32 at least"),
        ((0, 3, 32, 32), "has no sites"),
    ],
)
def test_plates_that_do_not_fit_are_refused_before_compute(tiny, tmp_path, shape, told):
    class Unread(StubPlate):
        def fields(self, chunk_size, start=0):
            raise AssertionError("read")

    with pytest.raises(InputError) as error:
        encoder.embed(Unread(np.zeros(shape, np.uint8), tmp_path / "p.zarr"), tiny)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"chunk_size": 0}, "chunk_size is 0"), ({"nuclei": "DNA"}, "no channel 'DNA' of nuclei: it has w1")],
)
def test_wrong_options_are_refused(tiny, tmp_path, options, told):
    with pytest.raises(InputError, match=told):
        encoder.embed(StubPlate(random_images(1, 1, 32), tmp_path / "p.zarr"), tiny, **options)


def test_channels_of_one_name_are_refused(tiny, tmp_path):
    plate = StubPlate(random_images(1, 2, 32), tmp_path / "p.zarr")
    plate.channels = ["a/b", "a_b"]
    with pytest.raises(InputError, match=r"cannot be measured: .* as many different names"):
        encoder.embed(plate, tiny)


def test_embeddings_that_are_not_finite_name_the_sites(tiny, tmp_path):
    class Broken(torch.nn.Module):
        def forward(self, images):
            channels = torch.zeros(*images.shape[:2], 16)
            channels[images.amax(dim=(1, 2, 3)) == 255] = math.nan
            return channels[:, 0], channels

    pixels = np.zeros((4, 2, 32, 32), np.uint8)
    pixels[[1, 3], 0, 5, 5] = 255
    with pytest.raises(InputError, match=r"2 sites are not finite \('HEPG2-01_1_B02_2', 'HEPG2-01_1_B02_4'\)"):
        encoder.embed(StubPlate(pixels, tmp_path / "p.zarr"), dataclasses.replace(tiny, model=Broken()))


def test_plate_that_loses_sites(tiny, tmp_path):
    class Lossy(StubPlate):
        def fields(self, chunk_size, start=0):
            yield self.sites.iloc[:1], self.pixels[:1]

    with pytest.raises(PlateError, match=r"gave the sites 'HEPG2-01_1_B02_1' where .*B02_2', .*B02_3' were expected"):
        encoder.embed(Lossy(random_images(3, 1, 32), tmp_path / "p.zarr"), tiny)


def test_fields_that_cannot_be_read_stop_the_run_and_leave_what_was_done(tiny, tmp_path):
    class Damaged(StubPlate):
        def fields(self, chunk_size, start=0):
            if start >= 3:
                raise PlateError("field B/02/4 is missing")
            yield from super().fields(chunk_size, start)

    plate = Damaged(random_images(6, 1, 32), tmp_path / "p.zarr")
    with pytest.raises(PlateError, match="B/02/4"):
        encoder.embed(plate, tiny, chunk_size=1, parts=tmp_path / "parts")
    whole = encoder.embed(StubPlate(plate.pixels, plate.path), tiny, chunk_size=1, parts=tmp_path / "parts")
    np.testing.assert_array_equal(whole.X, encoder.embed(StubPlate(plate.pixels, plate.path), tiny, chunk_size=1).X)


# ---------------------------------------------------------------------------------------------- chunks and memory


def test_what_is_computed_at_once_halves_where_memory_is_short(tiny, tmp_path, said):
    sizes = []

    def first(images):
        sizes.append(len(images))
        if len(images) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    pixels = random_images(6, 2, 64)
    adata = encoder.embed(
        StubPlate(pixels, tmp_path / "p.zarr"), dataclasses.replace(tiny, model=Means(first)), chunk_size=3
    )
    assert sizes == [12, 6, 3, 3, 3, 3, 3, 3, 3, 3]
    assert said == ["out of memory: going on with 6 crops at a time", "out of memory: going on with 3 crops at a time"]
    np.testing.assert_allclose(adata.X[:, 0], pixels.mean(axis=(1, 2, 3)), rtol=1e-5)


def test_a_single_crop_that_does_not_fit(tiny, tmp_path):
    def first(images):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(InputError, match=r"not enough memory for a single crop .*choose device=\"cpu\""):
        encoder.embed(
            StubPlate(random_images(2, 2, 32), tmp_path / "p.zarr"), dataclasses.replace(tiny, model=Means(first))
        )


@pytest.mark.parametrize(("at_once", "expected"), [(1, [4] * 5), (9, [8, 8, 4]), (10**6, [20])])
def test_chunks_are_whole_fields_of_what_the_device_takes(tiny, tmp_path, monkeypatch, at_once, expected):
    monkeypatch.setattr(embedding.Encoder, "images_at_once", lambda self, n_channels: at_once)
    monkeypatch.setattr(embedding, "ROUNDS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    crops = []
    read = embedding._Reader._read

    def counted(self, start, size):
        chunk = read(self, start, size)
        crops.append(len(chunk.crops))
        return chunk

    monkeypatch.setattr(embedding._Reader, "_read", counted)
    encoder.embed(StubPlate(random_images(5, 2, 64), tmp_path / "p.zarr"), tiny)
    assert crops == expected


def test_fields_are_read_ahead_but_not_without_limit(tiny, tmp_path):
    """While a chunk is computed the next is read; a slow device does not fill the memory with fields."""
    read, starts = threading.Event(), []

    class Watched(StubPlate):
        def fields(self, chunk_size, start=0):
            starts.append(start)
            if start == 1:
                read.set()
            yield from super().fields(chunk_size, start)

    def first(images):
        assert read.wait(10), "the second field is not read before the first is computed"
        time.sleep(0.02)
        assert len(starts) <= computed[0] + 3
        computed[0] += 1

    computed = [0]
    plate = Watched(random_images(20, 1, 32), tmp_path / "p.zarr")
    encoder.embed(plate, dataclasses.replace(tiny, model=Means(first)), chunk_size=1)
    assert computed == [20]
    assert starts == list(range(20))


@pytest.mark.parametrize("fails", [False, True])
def test_parts_run_side_by_side_on_a_cpu_and_leave_torchs_threads_as_they_were(tiny, monkeypatch, fails):
    """Two parts wait for each other: neither would end if they ran one after the other."""
    monkeypatch.setitem(embedding.TOKENS_AT_ONCE, "cpu", 1)
    meet = threading.Barrier(2)

    def first(images):
        meet.wait(10)
        assert torch.get_num_threads() == 1
        if fails:
            raise Killed

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pixels = random_images(4, 2, 32)
        model = dataclasses.replace(tiny, model=Means(first))
        if fails:
            with pytest.raises(Killed):
                model(pixels)
        else:
            np.testing.assert_allclose(model(pixels)[:, 0], pixels.mean(axis=(1, 2, 3)), rtol=1e-5)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------- killed and started again


class Killed(Exception):
    pass


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_run_that_stopped_goes_on_and_gives_the_same_bits(tiny, tmp_path, said, chunk_size, monkeypatch):
    monkeypatch.setattr(embedding.Encoder, "images_at_once", lambda self, n_channels: 5)
    monkeypatch.setattr(embedding, "ROUNDS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    plate = StubPlate(random_images(9, 3, 48), tmp_path / "p.zarr")
    whole = encoder.embed(plate, tiny, chunk_size=chunk_size)
    computed = []

    def start(self, crops):
        if len(computed) == 3:
            raise Killed
        computed.append(len(crops))
        return begin(self, crops)

    begin = embedding._Device.start
    monkeypatch.setattr(embedding._Device, "start", start)
    with pytest.raises(Killed):
        encoder.embed(plate, tiny, chunk_size=chunk_size, parts=tmp_path / "parts")
    computed[:] = [None] * 4
    again = encoder.embed(plate, tiny, chunk_size=chunk_size, parts=tmp_path / "parts")
    size = chunk_size or 1
    assert f"{2 * size} of 9 sites are embedded already" in said[-1]
    assert sum(computed[4:]) == 4 * (9 - 2 * size)
    np.testing.assert_array_equal(again.X, whole.X)
    pd.testing.assert_frame_equal(again.obs, whole.obs)
    assert artifacts.provenance(again) == artifacts.provenance(whole)


def test_parts_of_another_encoder_precision_or_plate_are_not_mixed_in(tiny, tmp_path, said):
    plate = StubPlate(random_images(3, 2, 32), tmp_path / "p.zarr")
    encoder.embed(plate, tiny, parts=tmp_path / "parts")
    other = dataclasses.replace(tiny, weights_sha256="another")
    for changed, told in ((other, "weights"), (dataclasses.replace(other, dtype="bfloat16"), "dtype")):
        adata = encoder.embed(plate, changed, parts=tmp_path / "parts")
        assert said[-1].endswith(f"discarded, it had other {told}")
        np.testing.assert_array_equal(adata.X, encoder.embed(plate, changed).X)
    plate.pixels[1, 0, 0, 0] ^= 255
    adata = encoder.embed(plate, changed, parts=tmp_path / "parts")
    assert said[-1].endswith("discarded, the pixels of its plate were others")
    np.testing.assert_array_equal(adata.X, encoder.embed(plate, changed).X)
    np.testing.assert_array_equal(adata.X, encoder.embed(plate, changed, parts=tmp_path / "parts").X)
    assert said[-1].endswith("3 of 3 sites are embedded already, by a run that stopped")


def test_a_file_of_embeddings_tells_whether_it_is_what_would_be_made(tiny, tmp_path):
    plate = StubPlate(random_images(2, 2, 32), tmp_path / "p.zarr")
    artifacts.write_adata(encoder.embed(plate, tiny), tmp_path / "sites.h5ad")
    assert encoder.is_embedded(tmp_path / "sites.h5ad", plate, tiny)
    assert encoder.is_embedded(tmp_path / "sites.h5ad", plate, tiny, nuclei="w1")
    assert not encoder.is_embedded(tmp_path / "sites.h5ad", plate, tiny, nuclei="w2")
    for change in (
        {"weights_sha256": "another"},
        {"dtype": "bfloat16"},
        {"channels": "concat"},
        {"name": "camae-mini"},
    ):
        assert not encoder.is_embedded(tmp_path / "sites.h5ad", plate, dataclasses.replace(tiny, **change))
    annotated = StubPlate(plate.pixels, plate.path)
    annotated.sites["perturbation"] = "aspirin"
    assert not encoder.is_embedded(tmp_path / "sites.h5ad", annotated, tiny)
    other = plate.pixels.copy()
    other[1, 0, 0, 0] ^= 255
    assert not encoder.is_embedded(tmp_path / "sites.h5ad", StubPlate(other, plate.path), tiny)
    again = StubPlate(plate.pixels, plate.path, provenance=[artifacts.step("ingest", {"source": "again"})])
    assert not encoder.is_embedded(tmp_path / "sites.h5ad", again, tiny)
    annotated.sites["intensity_w1"] = ["bright", None]
    artifacts.write_adata(encoder.embed(annotated, tiny), tmp_path / "annotated.h5ad")
    assert encoder.is_embedded(tmp_path / "annotated.h5ad", annotated, tiny)
    obs = artifacts.read_adata(tmp_path / "annotated.h5ad").obs
    assert obs["screen_intensity_w1"].tolist()[0] == "bright"
    assert "screen_intensity_w1" not in quality_columns(obs)
    for damaged in (b"", b"no HDF5"):
        (tmp_path / "sites.h5ad").write_bytes(damaged)
        assert not encoder.is_embedded(tmp_path / "sites.h5ad", plate, tiny)


KILLED = """
import sys, time
from cellica import cli, embedding, parts
parts.EVERY = 0.0
begin = embedding._Device.start
def slowly(self, crops):
    time.sleep(0.1)
    return begin(self, crops)
embedding._Device.start = slowly
cli.main(sys.argv[1:])
"""


def test_kill_9_at_any_moment(tmp_path, said):
    """A killed run leaves nothing under the output's name; one that is not killed gives what one run gives."""
    weights = write_tiny(tmp_path)
    pixels = random_images(12, 2, 32)
    sites = pd.DataFrame({"experiment": "E", "plate": "1", "well": [f"B{i + 2:02d}" for i in range(12)], "site": 1})
    sites["control"] = ""
    sites.index = pd.Index([f"E_1_{well}_1" for well in sites["well"]])
    for channel in range(2):
        files = [tmp_path / f"{i}_{channel}.png" for i in range(12)]
        for file, field in zip(files, pixels):
            file.write_bytes(images.imagecodecs.png_encode(field[channel]))
        sites[f"path_w{channel}"] = [str(file) for file in files]
    plates.ingest(sites, tmp_path / "plates")
    out, folder = tmp_path / "sites.h5ad", tmp_path / ".sites.h5ad.parts" / "0-E_1"
    words = ["embed", tmp_path / "plates" / "E_1.zarr", "--out", out, "--encoder", "camae", "--weights", weights]
    words += ["--device", "cpu", "--chunk-size", 1]
    with subprocess.Popen([sys.executable, "-c", KILLED, *map(str, words)], stderr=subprocess.PIPE) as run:
        while run.poll() is None and len(list(folder.glob("*.npz"))) < 3:
            time.sleep(0.01)
        run.kill()
    assert run.returncode == -signal.SIGKILL
    assert not out.exists()
    found = len(list(folder.glob("*.npz")))
    assert 3 <= found < 12
    with pytest.raises(SystemExit) as done:
        cli.main(list(map(str, words)))
    assert done.value.code == 0
    assert f"E_1: {found} of 12 sites are embedded already, by a run that stopped" in said
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    model = encoder.load("camae", weights, device="cpu")
    whole = encoder.embed(tmp_path / "plates" / "E_1.zarr", model, chunk_size=1)
    again = artifacts.read_adata(out)
    np.testing.assert_array_equal(again.X, whole.X)
    assert artifacts.provenance(again)[-1]["inputs"] == artifacts.provenance(whole)[-1]["inputs"]


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("dtype", list(encoder.DTYPES))
def test_gpu_embeds_plates_as_the_cpu_does(tmp_path, dtype):
    weights = write_tiny(tmp_path)
    plate = StubPlate(random_images(70, 4, 64), tmp_path / "p.zarr")
    expected = encoder.embed(plate, encoder.load("camae", weights, device="cpu"))
    on_gpu = encoder.load("camae", weights, device="cuda", dtype=dtype)
    for chunk_size in (None, 3):
        adata = encoder.embed(plate, on_gpu, chunk_size=chunk_size)
        dot = (adata.X * expected.X).sum(axis=1) / np.linalg.norm(adata.X, axis=1) / np.linalg.norm(expected.X, axis=1)
        assert dot.min() > 0.9999
        columns = [name for name in adata.obs if name.startswith("intensity")]
        pd.testing.assert_frame_equal(adata.obs[columns], expected.obs[columns])


def test_readers_do_not_outlive_a_run_that_fails(tiny, tmp_path):
    def first(images):
        raise Killed

    with pytest.raises(Killed):
        encoder.embed(
            StubPlate(random_images(30, 1, 32), tmp_path / "p.zarr"), dataclasses.replace(tiny, model=Means(first))
        )
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("read") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
