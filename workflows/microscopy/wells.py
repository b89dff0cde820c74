"""Simulated wells: profiles alone, or images that the bundled encoder camae-mini embeds.

python workflows/microscopy/wells.py profiles wells.h5ad --seed 0 --experiments 5 --plates 4 --treatments 60 --controls 16
python workflows/microscopy/wells.py screen wells.h5ad --seed 0 --experiments 4 --plates 2 --treatments 24 --controls 8
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from cellica import artifacts, simulate


def simulated(kind: str, out: Path, image_size: int, random_state: int, **sizes: int) -> None:
    if kind == "profiles":
        wells = simulate.profiles("small", **sizes, random_state=random_state)
        artifacts.write_adata(wells, out, force=True)
        return
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        simulate.screen(folder / "screen", "small", **sizes, image_size=image_size, random_state=random_state)
        verb("ingest", "rxrx1", folder / "screen", folder / "plates")
        plates = sorted((folder / "plates").glob("*.zarr"))
        verb("embed", *plates, "--out", folder / "sites.h5ad", "--encoder", "camae-mini", "--channels", "concat")
        verb("profile", folder / "sites.h5ad", "--out", out, "--force")


def verb(*words: object) -> None:
    subprocess.run([Path(sys.executable).parent / "cellica", *map(str, words), "--quiet"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["profiles", "screen"])
    parser.add_argument("out", type=Path)
    for size in ("experiments", "plates", "treatments", "controls"):
        parser.add_argument(f"--{size}", type=int, required=True)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sizes = {f"n_{size}": getattr(options, size) for size in ("experiments", "plates", "treatments", "controls")}
    simulated(options.kind, options.out, options.image_size, options.seed, **sizes)


if __name__ == "__main__":
    main()
