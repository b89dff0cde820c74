"""Draw every figure of the validation workflows from their committed tables.

python workflows/all_figures.py [OUT]      into OUT/WORKFLOW, or in place
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
WORKFLOWS = ("identifiability", "disentanglement", "microscopy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    options = parser.parse_args()
    for name in WORKFLOWS:
        tables = HERE / name / "results" / "small"
        out = tables if options.out is None else options.out / name
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, HERE / name / "figures.py", tables, out], check=True)


if __name__ == "__main__":
    main()
