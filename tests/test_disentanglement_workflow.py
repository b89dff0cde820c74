import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import workflow_scripts
from PIL import Image

FOLDER = Path(__file__).parents[1] / "workflows" / "disentanglement"


scenes, datasets = workflow_scripts.load(FOLDER, "scenes", "datasets")
DatasetError = datasets.DatasetError

# ---------------------------------------------------------------------------------------------- scenes


def pictures(classes, image_size: int = 32, **options) -> np.ndarray:
    return scenes.render(scenes.values_of(np.atleast_2d(classes)), image_size, **options).numpy()


MIDDLE = [1, 6, 4, 4, 0, 9, 3]


def test_pictures_are_those_of_their_factors_alone():
    classes = scenes.draw_classes(12, random_state=1)
    found = pictures(classes)
    assert found.shape == (12, 3, 32, 32)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(pictures(classes), found)
    apart = np.concatenate([pictures(one) for one in classes])
    assert np.abs(apart.astype(int) - found).max() <= 1  # a sum may round another way in another batch
    assert len(np.unique(found.reshape(12, -1), axis=0)) == 12


def test_the_size_of_a_batch_is_limited_in_silence(monkeypatch):
    classes = scenes.draw_classes(5)
    found = pictures(classes, 16)
    monkeypatch.setattr(scenes, "SAMPLES_AT_ONCE", 2 * 32**2)
    assert np.abs(pictures(classes, 16).astype(int) - found).max() <= 1
    assert pictures(np.zeros((0, 7), int)).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("factor", range(len(scenes.FACTORS)))
@pytest.mark.parametrize("shape", range(4))
def test_each_factor_changes_the_picture_at_every_step(factor, shape):
    n = scenes.N_VALUES[factor]
    classes = np.tile(MIDDLE, (n, 1))
    classes[:, 4] = shape
    classes[:, factor] = np.arange(n)
    found = pictures(classes).astype(int)
    for one, two in itertools.pairwise(found):
        assert np.mean(np.abs(one - two).max(axis=0) > 8) > 0.005


def test_hues_color_what_they_name():
    def colored(index, hue):
        values = scenes.values_of(np.array([MIDDLE]))
        values[0, :3] = 1 / 3
        values[0, index] = hue
        return scenes.render(values, 64, supersample=1)[0].float()  # no pixel mixes two surfaces

    places = {0: (60, 8), 1: (4, 32), 2: None}
    for index, place in places.items():
        red, green = colored(index, 0.0), colored(index, 1 / 3)
        changed = (red - green).abs().amax(dim=0) > 20
        assert (red[0] > red[1])[changed].all()
        assert (green[1] > green[0])[changed].all()
        if place:
            assert changed[place]
    assert torch.equal(colored(0, 0.0), colored(0, 1.0))  # wraps


@pytest.mark.parametrize("shape", range(4))
def test_an_object_grows_and_moves(shape):
    def covered(**factor):
        classes = np.array(MIDDLE)
        classes[4] = shape
        for name, value in factor.items():
            classes[list(scenes.FACTORS).index(name)] = value
        here, other = pictures(classes, 64)[0].astype(int), classes.copy()
        other[2] = 9
        mask = np.abs(here - pictures(other, 64)[0]).max(axis=0) > 5
        return mask.sum(), np.nonzero(mask)[1].mean()

    small, large = covered(size=0)[0], covered(size=7)[0]
    assert large > 2.5 * small > 25
    assert covered(position=0)[1] < 30 < 34 < covered(position=5)[1]


@pytest.mark.parametrize("shape", range(4))
def test_factors_mean_the_same_at_any_resolution(shape):
    classes = scenes.draw_classes(6, random_state=2)
    classes[:, 4] = shape
    small, large = pictures(classes, 32, supersample=4), pictures(classes, 128, supersample=1)
    reduced = large.reshape(6, 3, 32, 4, 32, 4).mean(axis=(3, 5))
    assert np.abs(reduced - small).max() <= 2
    assert np.abs(pictures(classes, 48).mean(axis=(2, 3)) - small.mean(axis=(2, 3))).max() < 2


def test_shapes_are_what_they_are_called():
    """A ray that meets a surface ends on it."""
    rng = np.random.default_rng(0)
    eye = torch.tensor([0.0, -4.0, 2.0]).expand(2000, 3)[None]
    direction = torch.from_numpy(rng.normal([0, 4, -1.2], 0.5, size=(1, 2000, 3))).float()
    direction = torch.nn.functional.normalize(direction, dim=-1)
    size = torch.full((1, 1), 0.8)
    for name, surface in scenes.SURFACES.items():
        t, normal = surface(eye, direction, size)
        met = t < scenes.FAR
        assert 100 < met.sum() < 2000, name
        x, y, z = (eye + t[..., None] * direction)[met].T
        around = torch.hypot(x, y)
        on = {
            "cube": torch.maximum(torch.maximum(x.abs(), y.abs()), (z - 0.6).abs()) - 0.6,
            "sphere": torch.sqrt(around**2 + (z - 0.8) ** 2) - 0.8,
            "cylinder": torch.maximum(around - 0.64, (z - 0.8).abs() - 0.8),
            "capsule": torch.hypot(around, z - z.clamp(0.44, 1.16)) - 0.44,
        }[name]
        torch.testing.assert_close(on, torch.zeros_like(on), atol=1e-4, rtol=0)
        assert ((normal * direction).sum(dim=-1)[met] < 1e-4).all(), name  # turned to the eye
        torch.testing.assert_close(normal[met].norm(dim=-1), torch.ones(int(met.sum())), atol=1e-3, rtol=0)


def test_the_grid_and_draws():
    n = int(np.prod(scenes.N_VALUES))
    assert scenes.classes_of([0, 1, n - 1]).tolist() == [[0] * 7, [0] * 6 + [1], [v - 1 for v in scenes.N_VALUES]]
    drawn = scenes.draw_classes(5000)
    assert np.array_equal(drawn, scenes.draw_classes(5000))
    assert not np.array_equal(drawn, scenes.draw_classes(5000, random_state=1))
    assert np.abs(np.corrcoef(drawn.T) - np.eye(7)).max() < 0.06
    assert scenes.contact_sheet(8).shape == (56, 120, 3)


def test_wrong_factors_are_named():
    with pytest.raises(ValueError, match=r"row 1 has shape 4: use 0 to 3"):
        scenes.values_of(np.array([MIDDLE, [0, 0, 0, 0, 4, 0, 0]]))
    with pytest.raises(ValueError, match=r"a column for each of floor_hue, wall_hue"):
        scenes.values_of(np.zeros((2, 6)))
    with pytest.raises(ValueError, match=r"values have the shape \(2, 6\)"):
        scenes.render(np.zeros((2, 6)))
    with pytest.raises(ValueError, match=r"image_size=0"):
        scenes.render(np.zeros((2, 7)), 0)


# ---------------------------------------------------------------------------------------------- files


def dsprites(folder: Path, **changed) -> Path:
    rng = np.random.default_rng(0)
    classes = rng.integers(0, list(datasets.DSPRITES.values()), size=(30, 6))
    arrays = {
        "imgs": rng.integers(0, 2, size=(30, 8, 8), dtype=np.uint8),
        "latents_classes": classes,
        "latents_values": classes / 40,
    }
    metadata = np.array({"author": "pickled"}, dtype=object)  # as in the real file
    np.savez_compressed(folder / "dsprites.npz", metadata=metadata, **{**arrays, **changed})
    return folder / "dsprites.npz"


def shapes3d(folder: Path, **changed) -> Path:
    n = list(datasets.SHAPES3D.values())
    classes = np.stack([np.arange(60) % one for one in n], axis=1)
    arrays = {
        "images": np.random.default_rng(0).integers(0, 256, size=(60, 8, 8, 3), dtype=np.uint8),
        "labels": 0.25 * classes - 3,
    }
    with h5py.File(folder / "3dshapes.h5", "w") as file:
        for key, value in {**arrays, **changed}.items():
            if value is not None:
                file[key] = value
    return folder / "3dshapes.h5"


def mpi3d(folder: Path, n: int = 460_800) -> Path:
    pixels = (np.arange(n, dtype=np.uint32)[:, None] >> np.array([0, 8, 16], dtype=np.uint32)).astype(np.uint8)
    np.savez(folder / "mpi3d.npz", images=pixels.reshape(n, 1, 1, 3))
    return folder / "mpi3d.npz"


def isaac3d(folder: Path, factors: dict[str, int] | None = None, labels: str = "labels.npy") -> Path:
    factors = factors or datasets.ISAAC3D
    values = np.stack([(np.arange(8) % n) / max(1, n - 1) for n in factors.values()], axis=1).astype(np.float32)
    (folder / "set" / "images").mkdir(parents=True)
    with (folder / "set" / labels).open("wb") as file:
        np.save(file, values)
    for i in range(len(values)):
        Image.new("RGB", (16, 16), (i, 10 * i, 255)).save(folder / "set" / "images" / f"{i:06}.png")
    return folder / "set"


def test_dsprites(tmp_path):
    path = dsprites(tmp_path)
    found = datasets.load("dsprites", path, cache=tmp_path / "cache")
    with np.load(path) as arrays:
        imgs, classes = arrays["imgs"], arrays["latents_classes"]
    assert len(found) == 30
    assert found.names == ["shape", "scale", "orientation", "x", "y"]
    np.testing.assert_array_equal(found.classes, classes[:, 1:])
    rows = np.array([7, 2, 7, 29])
    np.testing.assert_array_equal(found.images(rows), 255 * imgs[rows][:, None])
    assert found.images(slice(0, 5), 4).shape == (5, 1, 4, 4)
    (unpacked,) = (tmp_path / "cache").glob("dsprites.imgs.*.npy")
    stamp = unpacked.stat().st_mtime_ns
    datasets.load("dsprites", path, cache=tmp_path / "cache")
    assert unpacked.stat().st_mtime_ns == stamp  # once
    other = datasets.load("dsprites", dsprites(tmp_path, imgs=1 - imgs), cache=tmp_path / "cache")
    np.testing.assert_array_equal(other.images(rows), 255 - found.images(rows))


def test_shapes3d(tmp_path):
    path = shapes3d(tmp_path)
    found = datasets.load("shapes3d", path)
    with h5py.File(path) as file:
        images = file["images"][:]
    np.testing.assert_array_equal(found.classes[:, 5], np.arange(60) % 15)
    np.testing.assert_array_equal(found.images(np.array([40, 3, 3])), images[[40, 3, 3]].transpose(0, 3, 1, 2))
    with pytest.raises(DatasetError, match=r"3dshapes.h5 has the MD5 .*, published are 099a"):
        datasets.load("shapes3d", path, verify=True)


@pytest.mark.parametrize(("n", "first"), [(460_800, (4, 4, 2, 3, 3, 40, 40)), (1_036_800, (6, 6, 2, 3, 3, 40, 40))])
def test_mpi3d_of_both_layouts(tmp_path, n, first):
    found = datasets.load("mpi3d", mpi3d(tmp_path, n))
    assert tuple(found.factors.values()) == first
    row = n // 2 + 41
    digits = []
    for base in reversed(first):
        row, digit = divmod(row, base)
        digits.append(digit)
    assert found.classes[n // 2 + 41].tolist() == digits[::-1]
    assert found.images(np.array([n - 1, 300]))[:, :, 0, 0].tolist() == [
        [(n - 1) & 255, (n - 1) >> 8 & 255, (n - 1) >> 16],
        [44, 1, 0],
    ]


@pytest.mark.parametrize(
    ("name", "labels"), [("falcor3d", "train-rec.labels"), ("isaac3d", "labels.npy"), ("isaac3d", "train-rec.labels")]
)
def test_folders_of_pictures(tmp_path, name, labels):
    found = datasets.load(name, isaac3d(tmp_path, datasets.FOLDERS[name], labels))
    assert found.classes.shape == (8, len(datasets.FOLDERS[name]))
    assert found.classes[:, 0].tolist() == [i % next(iter(datasets.FOLDERS[name].values())) for i in range(8)]
    assert found.images(np.array([5, 1])).shape == (2, 3, 16, 16)
    assert found.images(np.array([5, 1]))[:, :, 0, 0].tolist() == [[5, 50, 255], [1, 10, 255]]
    assert found.images(slice(None), 8).shape == (8, 3, 8, 8)


def test_numbers_of_factors_are_those_of_the_grids():
    sizes = [datasets.DSPRITES, datasets.SHAPES3D, *datasets.MPI3D, datasets.FALCOR3D, datasets.ISAAC3D]
    assert [int(np.prod(list(one.values()))) for one in sizes] == [
        737_280,
        480_000,
        1_036_800,
        460_800,
        233_280,
        737_280,
    ]


def text(folder: Path) -> Path:
    (folder / "notes.npz").write_text("no archive")
    return folder / "notes.npz"


def one_array(folder: Path) -> Path:
    np.save(folder / "one.npy", np.zeros(3))
    return folder / "one.npy"


def damaged(folder: Path) -> Path:
    path = folder / "mpi3d.npz"
    np.savez_compressed(path, images=np.random.default_rng(0).integers(0, 256, size=(2000, 1, 1, 3), dtype=np.uint8))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    return path


def without(folder: Path, file: str) -> Path:
    (isaac3d(folder) / file).unlink()
    return folder / "set"


def pickled(folder: Path) -> Path:
    np.save(isaac3d(folder) / "labels.npy", np.array([{}], dtype=object), allow_pickle=True)
    return folder / "set"


WRONG = {
    "name": ("cars3d", text, r"'cars3d' is not known: use one of dsprites, shapes3d, mpi3d, falcor3d, isaac3d"),
    "a folder": ("mpi3d", lambda folder: folder, r"is a folder: give the file of mpi3d"),
    "a file": ("falcor3d", text, r"notes.npz is a file: give the folder of falcor3d"),
    "no archive": ("mpi3d", text, r"notes.npz is not an .npz file"),
    "one array": ("mpi3d", one_array, r"one.npy holds one array: give the .npz with images"),
    "another archive": ("mpi3d", dsprites, r"dsprites.npz has no images, only metadata, imgs"),
    "pictures left out": (
        "mpi3d",
        lambda folder: mpi3d(folder, 1000),
        r"has 1,000 pictures: MPI3D has 1,036,800 or 460,800",
    ),
    "damaged": ("mpi3d", damaged, r"mpi3d.npz is damaged in images: fetch it again"),
    "floats": (
        "dsprites",
        lambda folder: dsprites(folder, imgs=np.zeros((30, 8, 8))),
        r"imgs of float64 .*: uint8 \(n, height, width\)",
    ),
    "objects": (
        "dsprites",
        lambda folder: dsprites(folder, latents_classes=np.array([{}], dtype=object)),
        r"latents_classes that is no plain array",
    ),
    "object pictures": (
        "dsprites",
        lambda folder: dsprites(folder, imgs=np.array([{}], dtype=object)),
        r"imgs that is no plain array",
    ),
    "other rows": (
        "dsprites",
        lambda folder: dsprites(folder, latents_classes=np.zeros((29, 6), int)),
        r"integers \(30, 6\) are needed",
    ),
    "other classes": (
        "dsprites",
        lambda folder: dsprites(folder, latents_classes=np.full((30, 6), 5)),
        r"row 0 of latents_classes has color 5, 0 to 0",
    ),
    "no hdf5": ("shapes3d", text, r"notes.npz is not an HDF5 file: give 3dshapes.h5"),
    "no labels": ("shapes3d", lambda folder: shapes3d(folder, labels=None), r"3dshapes.h5 has no labels, only images"),
    "fewer labels": (
        "shapes3d",
        lambda folder: shapes3d(folder, labels=np.zeros((59, 6))),
        r"labels of the shape \(59, 6\): \(60, 6\) is needed",
    ),
    "fewer values": (
        "shapes3d",
        lambda folder: shapes3d(folder, labels=np.zeros((60, 6))),
        r"floor_hue takes 1 values in labels, 10 are needed",
    ),
    "no label file": (
        "isaac3d",
        lambda folder: without(folder, "labels.npy"),
        r"has no train-rec.labels and no labels.npy",
    ),
    "a picture left out": (
        "isaac3d",
        lambda folder: without(folder, "images/000003.png"),
        r"1 of the 8 pictures .* such as .*000003.png",
    ),
    "pickled labels": ("isaac3d", pickled, r"labels.npy is not an array of numbers"),
    "another folder": ("falcor3d", isaac3d, r"labels.npy has labels of the shape \(8, 9\): \(n, 7\) is needed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_named(case, tmp_path):
    name, make, message = WRONG[case]
    with pytest.raises(DatasetError, match=message):
        datasets.load(name, make(tmp_path))
    assert not list(tmp_path.glob("*.part"))


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"3dshapes.h5 does not exist: give the file of shapes3d"):
        datasets.load("shapes3d", tmp_path / "3dshapes.h5")
