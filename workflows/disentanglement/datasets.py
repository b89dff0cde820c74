"""Public disentanglement sets as pictures by row and classes of their factors, read where the files are.

    dSprites   the .npz              Shapes3D   3dshapes.h5          MPI3D   the .npz, of either factor layout
    Falcor3D   its folder            Isaac3D    its folder

Rows are in the order of the files. Nothing is unpickled. Pictures are read by rows, never as a whole.
"""

import hashlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

DSPRITES = {"color": 1, "shape": 3, "scale": 6, "orientation": 40, "x": 32, "y": 32}
SHAPES3D = {"floor_hue": 10, "wall_hue": 10, "object_hue": 10, "scale": 8, "shape": 4, "orientation": 15}
MPI3D_NAMES = ("object_color", "object_shape", "object_size", "camera_height", "background_color", "dof_1", "dof_2")
MPI3D = [dict(zip(MPI3D_NAMES, n, strict=True)) for n in ((6, 6, 2, 3, 3, 40, 40), (4, 4, 2, 3, 3, 40, 40))]
FALCOR3D = {
    "light_intensity": 5,
    **{f"{what}_{axis}": 6 for what in ("light", "camera") for axis in "xyz"},
}
ISAAC3D = {
    "object_shape": 3,
    "robot_x": 8,
    "robot_y": 5,
    "camera_height": 4,
    "object_scale": 4,
    "light_intensity": 4,
    "light_y": 6,
    "object_color": 4,
    "wall_color": 4,
}
MD5 = {
    "shapes3d": {"099a2078d58cec4daad0702c55d06868"},
    "mpi3d": {
        "55889cb7c7dfc655d6e0277beee88868",
        "59a6225b88b635365f70c91b3e52f70f",
        "0f33f609918fb5c97996692f91129802",
    },
}


class DatasetError(ValueError):
    """A file is not the set it was given as."""


@dataclass(frozen=True)
class FactorSet:
    """Pictures and what is in them.

    Attributes
    ----------
    factors
        Number of values by name, slowest first; a factor of one value is left out of ``classes``.
    classes
        (n, number of factors that vary), integers from 0.
    read
        Pictures uint8 (m, height, width, channels) of m ascending rows.
    """

    name: str
    factors: dict[str, int]
    classes: np.ndarray
    read: Callable[[np.ndarray], np.ndarray]

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def names(self) -> list[str]:
        """Factors that vary, in the order of the columns of ``classes``."""
        return [name for name, n in self.factors.items() if n > 1]

    def images(self, rows: np.ndarray | slice, image_size: int | None = None) -> np.ndarray:
        """Pictures uint8 (m, channels, height, width) of rows in any order, repeats included; resized where asked."""
        rows = np.arange(len(self))[rows]
        ascending, back = np.unique(rows, return_inverse=True)
        found = self.read(ascending)
        if image_size is not None and found.shape[1:3] != (image_size, image_size):
            found = np.stack([_resized(picture, image_size) for picture in found])
        return np.ascontiguousarray(found[back].transpose(0, 3, 1, 2))


def load(
    name: str, path: str | os.PathLike, *, cache: str | os.PathLike | None = None, verify: bool = False
) -> FactorSet:
    """Open a set; a file that is not that set is named, with what was looked for.

    Parameters
    ----------
    name
        A key of ``LOADERS``.
    path
        The file, or for falcor3d and isaac3d the folder that holds ``images``.
    cache
        Folder for the pictures of an .npz, unpacked once so that rows can be read; by default the file's own.
    verify
        Compare the file's MD5 with the published ones (shapes3d, mpi3d), which reads it once.
    """
    if name not in LOADERS:
        raise DatasetError(f"{name!r} is not known: use one of {', '.join(LOADERS)}")
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give the {'folder' if name in FOLDERS else 'file'} of {name}")
    if path.is_dir() != (name in FOLDERS):
        raise DatasetError(
            f"{path} is a {'folder' if path.is_dir() else 'file'}: give the {'folder' if name in FOLDERS else 'file'} of {name}"
        )
    if verify and name in MD5:
        _verify(name, path)
    return LOADERS[name](path, Path(cache) if cache is not None else path.parent)


def _dsprites(path: Path, cache: Path) -> FactorSet:
    with _npz(path, ("imgs", "latents_classes")) as archive:
        classes = _plain(path, archive, "latents_classes")
    pixels = _unpacked(path, "imgs", cache)
    _is_pictures(path, "imgs", pixels, 3)
    classes = _checked_classes(path, "latents_classes", classes, DSPRITES, len(pixels))
    return FactorSet("dsprites", DSPRITES, classes, lambda rows: 255 * (pixels[rows][..., None] > 0).astype(np.uint8))


def _shapes3d(path: Path, cache: Path) -> FactorSet:
    try:
        file = h5py.File(path)
    except OSError as error:
        raise DatasetError(f"{path} is not an HDF5 file: give 3dshapes.h5 ({error})") from error
    if missing := {"images", "labels"} - set(file):
        raise DatasetError(f"{path} has no {' and '.join(sorted(missing))}, only {', '.join(file)}: give 3dshapes.h5")
    pixels = file["images"]
    _is_pictures(path, "images", pixels, 4)
    classes = _from_values(path, "labels", file["labels"][:], SHAPES3D, len(pixels))
    return FactorSet("shapes3d", SHAPES3D, classes, lambda rows: pixels[rows])


def _mpi3d(path: Path, cache: Path) -> FactorSet:
    with _npz(path, ("images",)):
        pixels = _unpacked(path, "images", cache)
    _is_pictures(path, "images", pixels, 4)
    by_length = {int(np.prod(list(layout.values()))): layout for layout in MPI3D}
    if len(pixels) not in by_length:
        raise DatasetError(
            f"{path} has {len(pixels):,} pictures: MPI3D has {' or '.join(f'{n:,}' for n in by_length)}, and its factors follow from the row"
        )
    factors = by_length[len(pixels)]
    classes = np.stack(np.unravel_index(np.arange(len(pixels)), list(factors.values())), axis=1)
    return FactorSet("mpi3d", factors, classes, lambda rows: pixels[rows])


def _rendered(name: str, factors: dict[str, int]) -> Callable[[Path, Path], FactorSet]:
    def read(folder: Path, cache: Path) -> FactorSet:
        found = [folder / file for file in ("train-rec.labels", "labels.npy") if (folder / file).is_file()]
        if not found:
            raise DatasetError(
                f"{folder} has no train-rec.labels and no labels.npy: give the folder of {name} that holds images"
            )
        try:
            labels = np.load(found[0], allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DatasetError(f"{found[0]} is not an array of numbers in .npy format: {error}") from error
        classes = _from_values(found[0], "labels", labels, factors, None)
        files = [folder / "images" / f"{i:06}.png" for i in range(len(classes))]
        if lost := [file for file in files if not file.is_file()]:
            raise DatasetError(
                f"{len(lost)} of the {len(files)} pictures that {found[0].name} speaks of are not there, such as {lost[0]}"
            )
        return FactorSet(name, factors, classes, lambda rows: np.stack([_png(files[row]) for row in rows]))

    return read


FOLDERS = {"falcor3d": FALCOR3D, "isaac3d": ISAAC3D}
LOADERS: dict[str, Callable[[Path, Path], FactorSet]] = {
    "dsprites": _dsprites,
    "shapes3d": _shapes3d,
    "mpi3d": _mpi3d,
    **{name: _rendered(name, factors) for name, factors in FOLDERS.items()},
}


def _verify(name: str, path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found not in MD5[name]:
        raise DatasetError(f"{path} has the MD5 {found}, published are {', '.join(sorted(MD5[name]))}: fetch it again")


def _npz(path: Path, needed: tuple[str, ...]) -> Any:
    try:
        archive = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise DatasetError(f"{path} is not an .npz file: {error}") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DatasetError(f"{path} holds one array: give the .npz with {' and '.join(needed)}")
    if missing := [key for key in needed if key not in archive.files]:
        raise DatasetError(f"{path} has no {' and '.join(missing)}, only {', '.join(archive.files)}")
    return archive


def _plain(path: Path, archive: Any, key: str) -> np.ndarray:
    try:
        return archive[key]
    except ValueError as error:
        raise DatasetError(f"{path} has {key} that is no plain array: {error}") from error


def _unpacked(path: Path, key: str, cache: Path) -> np.ndarray:
    """An array of an .npz as a memory map, of a file that is written once and appears whole."""
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"{key}.npy")
        target = cache / f"{path.stem}.{key}.{member.CRC:08x}.npy"  # of other content under the same name, another file
        if not (target.is_file() and target.stat().st_size == member.file_size):
            cache.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(f".{os.getpid()}.part")
            try:
                with archive.open(member) as source, part.open("wb") as sink:
                    while block := source.read(2**24):
                        sink.write(block)
                part.replace(target)
            except (zipfile.BadZipFile, EOFError) as error:
                raise DatasetError(f"{path} is damaged in {key}: fetch it again ({error})") from error
            finally:
                part.unlink(missing_ok=True)
    try:
        return np.load(target, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DatasetError(f"{path} has {key} that is no plain array: {error}") from error


def _is_pictures(path: Path, key: str, pixels: Any, axes: int) -> None:
    if pixels.dtype != np.uint8 or pixels.ndim != axes or (axes == 4 and pixels.shape[-1] != 3):
        wanted = "(n, height, width, 3)" if axes == 4 else "(n, height, width)"
        raise DatasetError(f"{path} has {key} of {pixels.dtype} {pixels.shape}: uint8 {wanted} is needed")


def _checked_classes(path: Path, key: str, classes: np.ndarray, factors: dict[str, int], n: int) -> np.ndarray:
    """Classes of the factors that vary, as integers."""
    if classes.shape != (n, len(factors)) or not np.issubdtype(classes.dtype, np.integer):
        raise DatasetError(
            f"{path} has {key} of {classes.dtype} {classes.shape}: integers ({n}, {len(factors)}) are needed"
        )
    n_values = np.array(list(factors.values()))
    wrong = np.argwhere((classes < 0) | (classes >= n_values))
    if len(wrong):
        row, factor = wrong[0]
        raise DatasetError(
            f"{path}: row {row} of {key} has {list(factors)[factor]} {classes[row, factor]}, 0 to {n_values[factor] - 1} is needed"
        )
    return classes[:, n_values > 1].astype(np.int64)


def _from_values(path: Path, key: str, values: np.ndarray, factors: dict[str, int], n: int | None) -> np.ndarray:
    """Classes by the order of the values of each factor, of which there must be as many as it has."""
    if values.ndim != 2 or values.shape[1] != len(factors) or n not in (None, len(values)):
        rows = "n" if n is None else n
        raise DatasetError(f"{path} has {key} of the shape {values.shape}: ({rows}, {len(factors)}) is needed")
    classes = np.empty(values.shape, dtype=np.int64)
    for i, (name, n_values) in enumerate(factors.items()):
        found, classes[:, i] = np.unique(values[:, i], return_inverse=True)
        if len(found) != n_values:
            raise DatasetError(f"{path}: {name} takes {len(found)} values in {key}, {n_values} are needed")
    return classes


def _png(file: Path) -> np.ndarray:
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))


def _resized(picture: np.ndarray, image_size: int) -> np.ndarray:
    """Bicubic, which averages where it shrinks."""
    squeezed = picture[..., 0] if picture.shape[-1] == 1 else picture
    resized = Image.fromarray(squeezed).resize((image_size, image_size), Image.Resampling.BICUBIC)
    return np.asarray(resized).reshape(image_size, image_size, -1)
