"""Pictures to train on and to score, of the scenes that are drawn here or of a public set.

    python workflows/disentanglement/pictures.py scenes OUT.npz --image-size 32 --n-train 50000 --n-scored 10000
    python workflows/disentanglement/pictures.py shapes3d OUT.npz --path 3dshapes.h5 --image-size 64 --n-train 470000

Rows are drawn at random without replacement, by a fixed seed, so that all models see the same: first those that are
scored, then those that are trained on. Written to a file, pictures of scenes are drawn once; training may also draw them on
the fly, where that is faster than reading.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import archives
import datasets
import numpy as np
import scenes

from cellica import artifacts, progress

SCENES = "scenes"
AT_ONCE = 1000


@dataclass(frozen=True)
class Pictures:
    """``train(rows)``: uint8 pictures (m, c, s, s), rows from 0 to n_train - 1; ``scored`` those to be scored, with ``classes``."""

    factors: list[str]
    n_train: int
    train: Callable[[np.ndarray], np.ndarray]
    scored: np.ndarray
    classes: np.ndarray


def draw(
    data: str,
    path: Path | None,
    *,
    image_size: int,
    n_train: int | None,
    n_scored: int,
    cache: Path | None = None,
    device: str = "cpu",
    random_state: int = 0,
) -> Pictures:
    """Choose rows of a set; None for ``n_train`` takes all that are not scored."""
    if data == SCENES:
        n, names = int(np.prod(scenes.N_VALUES)), list(scenes.FACTORS)
        classes_of = scenes.classes_of

        def images(rows: np.ndarray) -> np.ndarray:
            return scenes.render(scenes.values_of(classes_of(rows)), image_size, device=device).cpu().numpy()
    else:
        if path is None:
            raise ValueError(f"{data} is read from a file: give its path")
        found = datasets.load(data, path, cache=cache, verify=True)
        n, names = len(found), found.names

        def classes_of(rows: np.ndarray) -> np.ndarray:
            return found.classes[rows]

        def images(rows: np.ndarray) -> np.ndarray:
            return found.images(rows, image_size)

    n_train = n - n_scored if n_train is None else n_train
    if min(n_train, n_scored) < 1 or n_train + n_scored > n:
        raise ValueError(f"{data} has {n:,} pictures: {n_scored:,} to be scored and {n_train:,} to train on do not fit")
    order = np.random.default_rng(random_state).permutation(n)
    scored, trained = order[:n_scored], order[n_scored : n_scored + n_train]
    parts = [images(scored[i : i + AT_ONCE]) for i in range(0, n_scored, AT_ONCE)]
    return Pictures(names, n_train, lambda rows: images(trained[rows]), np.concatenate(parts), classes_of(scored))


def read(file: Path) -> Pictures:
    """Pictures that `write` wrote."""
    found = archives.read(file, ("train", "scored", "classes", "factors"), "a file of pictures.py")
    train = found["train"]
    return Pictures(found["factors"].tolist(), len(train), lambda rows: train[rows], found["scored"], found["classes"])


def write(pictures: Pictures, file: Path) -> None:
    starts = range(0, pictures.n_train, AT_ONCE)
    parts = [
        pictures.train(np.arange(i, min(i + AT_ONCE, pictures.n_train))) for i in progress.track(starts, "pictures")
    ]
    with artifacts.atomic(file, force=True) as part, part.open("wb") as stream:
        np.savez(
            stream,
            train=np.concatenate(parts),
            scored=pictures.scored,
            classes=pictures.classes,
            factors=np.array(pictures.factors),
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which pictures."""
    parser.add_argument("--path", type=Path, help="file or folder of a public set")
    parser.add_argument("--cache", type=Path, help="folder for the unpacked pictures of an .npz")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--n-train", type=int, help="pictures to train on; by default all that are not scored")
    parser.add_argument("--n-scored", type=int, default=10_000)


def chosen(data: str, options: argparse.Namespace, device: str = "cpu") -> Pictures:
    """What the options name: a file that was written before, or a set."""
    if data.endswith(".npz") and options.path is None:
        return read(Path(data))
    names = ("image_size", "n_train", "n_scored", "cache")
    return draw(data, options.path, device=device, **{name: getattr(options, name) for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=[SCENES, *datasets.LOADERS])
    parser.add_argument("out", type=Path)
    add_options(parser)
    options = parser.parse_args()
    progress.show()
    try:
        write(chosen(options.data, options), options.out)
    except (ValueError, FileNotFoundError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
