"""Pictures of a simple room with one object, of factors that are known and independent, drawn on the fly at any size.

    python workflows/disentanglement/scenes.py sheet.png      a row a factor, a column a value, all else in the middle

A camera circles a square room, whose floor and walls have a hue each, around an object that stands on the floor. Each
pixel is a ray that meets planes, a sphere, a cylinder, a box or a capsule. Same factors, same picture.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image

SHAPES = ("cube", "cylinder", "sphere", "capsule")
FACTORS = {  # slowest first: number of values, and the least and the greatest
    "floor_hue": (10, 0.0, 0.9),
    "wall_hue": (10, 0.0, 0.9),
    "object_hue": (10, 0.0, 0.9),
    "size": (8, 0.45, 0.95),
    "shape": (len(SHAPES), 0, len(SHAPES) - 1),
    "orientation": (15, -30.0, 30.0),  # of the camera, in degrees about the room's middle
    "position": (6, -0.8, 0.8),  # of the object, from left to right
}
N_VALUES = tuple(n for n, _, _ in FACTORS.values())
ROOM = 3.5  # from the middle to a wall
CAMERA = (3.2, 2.3, 0.75)  # distance and height of the camera, height of what it looks at
VIEW = math.radians(60)
LIGHT = (0.35, -0.5, 0.8)  # direction from which it comes
AMBIENT = 0.55
FAR = 1e6
SAMPLES_AT_ONCE = 2**22


def classes_of(rows: np.ndarray) -> np.ndarray:
    """Classes (n, 7) of rows of the full grid, the last factor fastest."""
    return np.stack(np.unravel_index(np.asarray(rows), N_VALUES), axis=1)


def draw_classes(n: int, random_state: int = 0) -> np.ndarray:
    """Independent, uniform classes (n, 7)."""
    return np.random.default_rng(random_state).integers(0, N_VALUES, size=(n, len(N_VALUES)))


def values_of(classes: np.ndarray) -> np.ndarray:
    """Values (n, 7), as `render` takes them, of classes (n, 7)."""
    classes = np.asarray(classes)
    if classes.ndim != 2 or classes.shape[1] != len(FACTORS):
        raise ValueError(f"classes have the shape {classes.shape}: use a column for each of {', '.join(FACTORS)}")
    wrong = np.argwhere((classes < 0) | (classes >= N_VALUES))
    if len(wrong):
        row, factor = wrong[0]
        name = list(FACTORS)[factor]
        raise ValueError(f"row {row} has {name} {classes[row, factor]}: use 0 to {N_VALUES[factor] - 1}")
    low, high = (np.array([bounds[i] for bounds in FACTORS.values()]) for i in (1, 2))
    return low + (high - low) * classes / (np.array(N_VALUES) - 1)


def render(values: np.ndarray, image_size: int = 64, *, supersample: int = 2, device: str = "cpu") -> torch.Tensor:
    """Pictures uint8 (n, 3, image_size, image_size), of values (n, 7) in the order and the units of ``FACTORS``.

    Values need not lie on the grid; hues wrap at 1, the shape is rounded. A pixel is the mean of supersample^2 rays.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != len(FACTORS) or not np.isfinite(values).all():
        raise ValueError(
            f"values have the shape {values.shape}: use finite numbers, a column for each of {', '.join(FACTORS)}"
        )
    if min(image_size, supersample) < 1:
        raise ValueError(f"image_size={image_size} and supersample={supersample} are not allowed: use 1 or more")
    side = image_size * supersample
    step = max(1, SAMPLES_AT_ONCE // side**2)
    parts = [_rendered(values[i : i + step], side, supersample, device) for i in range(0, len(values), step)]
    return torch.cat(parts) if parts else torch.zeros(0, 3, image_size, image_size, dtype=torch.uint8, device=device)


def contact_sheet(image_size: int = 64) -> np.ndarray:
    """A row a factor, a column a value, the others in the middle: uint8 (height, width, 3)."""
    middle = np.array(N_VALUES) // 2
    middle[:3] = (1, 6, 4)  # hues that are not one
    classes = np.tile(middle, (len(FACTORS), max(N_VALUES), 1))
    for i, n in enumerate(N_VALUES):
        classes[i, :, i] = np.minimum(np.arange(max(N_VALUES)), n - 1)
    pictures = render(values_of(classes.reshape(-1, len(FACTORS))), image_size).numpy()
    pictures = pictures.reshape(len(FACTORS), max(N_VALUES), 3, image_size, image_size)
    for i, n in enumerate(N_VALUES):
        pictures[i, n:] = 255
    return pictures.transpose(0, 3, 1, 4, 2).reshape(len(FACTORS) * image_size, -1, 3)


def _rendered(values: np.ndarray, side: int, supersample: int, device: str) -> torch.Tensor:
    origin, direction = _rays(values, side)
    origin, direction = origin.to(device), direction.to(device)
    floor, wall, thing = (_color(torch.tensor(values[:, i], dtype=torch.float32, device=device)) for i in range(3))
    distance, normal, on_floor = _room(origin, direction)
    color = torch.where(on_floor[..., None], floor[:, None], wall[:, None])
    shape = np.rint(values[:, 4]).astype(int)
    size = torch.tensor(values[:, 3], dtype=torch.float32, device=device)
    position = torch.tensor(values[:, 6], dtype=torch.float32, device=device)
    for i, name in enumerate(SHAPES):
        rows = torch.from_numpy(np.flatnonzero(shape == i)).to(device)
        if not len(rows):
            continue
        local = origin[rows].clone()
        local[..., 0] -= position[rows, None]
        t, facing = SURFACES[name](local, direction[rows], size[rows, None])
        near = t < distance[rows]
        normal[rows] = torch.where(near[..., None], facing, normal[rows])
        color[rows] = torch.where(near[..., None], thing[rows, None], color[rows])
    light = torch.nn.functional.normalize(torch.tensor(LIGHT, device=device), dim=0)
    shade = AMBIENT + (1 - AMBIENT) * (normal @ light).clamp(min=0)
    pixels = (color * shade[..., None]).reshape(
        len(values), side // supersample, supersample, side // supersample, supersample, 3
    )
    return (255 * pixels.mean(dim=(2, 4))).round().to(torch.uint8).permute(0, 3, 1, 2).contiguous()


def _rays(values: np.ndarray, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Origin (n, 1, 3) and unit directions (n, side^2, 3) of the rays, from the upper left pixel by rows."""
    turn = np.deg2rad(values[:, 5])
    distance, height, target = CAMERA
    eye = np.stack([distance * np.sin(turn), -distance * np.cos(turn), np.full_like(turn, height)], axis=1)
    forward = np.array([0, 0, target]) - eye
    forward /= np.linalg.norm(forward, axis=1, keepdims=True)
    right = np.stack([np.cos(turn), np.sin(turn), np.zeros_like(turn)], axis=1)
    up = np.cross(right, forward)
    offset = np.tan(VIEW / 2) * (2 * (np.arange(side) + 0.5) / side - 1)
    rays = forward[:, None, None] + offset[:, None] * right[:, None, None] - offset[:, None, None] * up[:, None, None]
    rays /= np.linalg.norm(rays, axis=-1, keepdims=True)
    origin = torch.from_numpy(eye[:, None]).float().expand(-1, side**2, -1)
    return origin, torch.from_numpy(rays.reshape(len(values), -1, 3)).float()


def _room(origin: torch.Tensor, direction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distance to the floor or the wall that a ray leaves by, the normal there, and whether it is the floor."""
    across, along = direction[..., :2], origin[..., :2]
    walls = (torch.sign(across) * ROOM - along) / torch.where(across == 0, 1e-9, across)
    wall, axis = walls.min(dim=-1)
    floor = torch.where(direction[..., 2] < 0, -origin[..., 2] / direction[..., 2].clamp(max=-1e-9), FAR)
    on_floor = floor < wall
    facing = -torch.sign(across.gather(-1, axis[..., None]))
    normal = torch.zeros_like(direction).scatter(-1, axis[..., None], facing)
    normal = torch.where(on_floor[..., None], torch.tensor([0.0, 0.0, 1.0], device=direction.device), normal)
    return torch.minimum(wall, floor), normal, on_floor


def _cube(origin: torch.Tensor, direction: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A box of edge 1.5 size, by slabs."""
    half = 0.75 * size
    center = torch.stack([torch.zeros_like(half), torch.zeros_like(half), half], dim=-1)
    steep = torch.where(direction == 0, 1e-9, direction)
    one, two = (center - half[..., None] - origin) / steep, (center + half[..., None] - origin) / steep
    enter, axis = torch.minimum(one, two).max(dim=-1)
    leave = torch.maximum(one, two).min(dim=-1).values
    facing = -torch.sign(direction.gather(-1, axis[..., None]))
    normal = torch.zeros_like(direction).scatter(-1, axis[..., None], facing)
    return torch.where((enter < leave) & (enter > 0), enter, FAR), normal


def _sphere(origin: torch.Tensor, direction: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _ball(origin, direction, size, size)


def _cylinder(origin: torch.Tensor, direction: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upright, of radius 0.8 size and height 2 size, with a lid."""
    radius, height = 0.8 * size, 2 * size
    side, normal = _tube(origin, direction, radius, torch.zeros_like(height), height)
    lid = (height - origin[..., 2]) / torch.where(direction[..., 2] == 0, 1e-9, direction[..., 2])
    within = (origin + lid[..., None] * direction)[..., :2].square().sum(dim=-1) < radius**2
    lid = torch.where(within & (lid > 0), lid, FAR)
    up = torch.tensor([0.0, 0.0, 1.0], device=direction.device)
    return torch.minimum(side, lid), torch.where((lid < side)[..., None], up, normal)


def _capsule(origin: torch.Tensor, direction: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upright, of radius 0.55 size and height 2 size, with round ends."""
    radius = 0.55 * size
    low, high = radius, 2 * size - radius
    distance, normal = _tube(origin, direction, radius, low, high)
    for center in (low, high):
        end, outward = _ball(origin, direction, center, radius)
        normal = torch.where((end < distance)[..., None], outward, normal)
        distance = torch.minimum(distance, end)
    return distance, normal


SURFACES = {"cube": _cube, "cylinder": _cylinder, "sphere": _sphere, "capsule": _capsule}


def _ball(
    origin: torch.Tensor, direction: torch.Tensor, height: torch.Tensor, radius: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance to a ball whose middle is at (0, 0, height), and the normal."""
    from_center = origin.clone()
    from_center[..., 2] -= height
    b = (from_center * direction).sum(dim=-1)
    gap = b**2 - from_center.square().sum(dim=-1) + radius**2
    t = torch.where(gap > 0, -b - gap.clamp(min=0).sqrt(), FAR)
    t = torch.where(t > 0, t, FAR)
    return t, (from_center + t[..., None] * direction) / radius[..., None]


def _tube(
    origin: torch.Tensor, direction: torch.Tensor, radius: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance to the side of an upright cylinder about (0, 0) between two heights, and the normal."""
    flat, base = direction[..., :2], origin[..., :2]
    a = flat.square().sum(dim=-1).clamp(min=1e-12)
    b = (base * flat).sum(dim=-1)
    gap = b**2 - a * (base.square().sum(dim=-1) - radius**2)
    t = torch.where(gap > 0, (-b - gap.clamp(min=0).sqrt()) / a, FAR)
    z = origin[..., 2] + t * direction[..., 2]
    t = torch.where((t > 0) & (z >= low) & (z <= high), t, FAR)
    outward = (base + t[..., None] * flat) / radius[..., None]
    return t, torch.nn.functional.pad(outward, (0, 1))


def _color(hue: torch.Tensor, saturation: float = 0.75, value: float = 0.95) -> torch.Tensor:
    """RGB (n, 3) in [0, 1] of hues that wrap at 1."""
    place = (torch.tensor([5.0, 3.0, 1.0], device=hue.device) + 6 * hue[:, None]) % 6
    return value * (1 - saturation * torch.minimum(place, 4 - place).clamp(0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--image-size", type=int, default=64)
    options = parser.parse_args()
    Image.fromarray(contact_sheet(options.image_size)).save(options.out)


if __name__ == "__main__":
    main()
