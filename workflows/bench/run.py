"""Speed, memory and exactness against the peers and the machine: one table of ratios, all measured in this run.

    python workflows/bench/run.py                  the whole table, with the machine's description
    python workflows/bench/run.py --keep           and keep it in results/history/, and draw results/speed.png
    python workflows/bench/run.py --history        measure nothing: how the ratios changed over the runs that were kept

Times are medians of rounds in which the calls take turns. Memory is what a call adds at its peak, in a process of its own.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from speed import figure, machine, measure, tables
from speed.cases import Row
from speed.groups import GROUPS, specs

RESULTS = Path(__file__).parent / "results"


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.history:
        print(tables.changes(tables.history(options.results / "history")))
        return
    if options.keep and (options.quick or set(options.only) != set(GROUPS)):
        raise SystemExit("--keep keeps whole tables: leave out --quick and --only")
    about = machine.describe()
    print(tables.header(about), end="", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measured(options, Path(folder)))
    about["minutes"] = f"{(time.monotonic() - start) / 60:.1f}"
    if machine.is_busy(about):
        rows = [marked(row) for row in rows]
    table = tables.frame(rows)
    print(tables.printed(table, about))
    if options.out:
        tables.write(table, about, options.out)
    if options.keep:
        print(tables.keep(table, about, options.results / "history").name)
        figure.save(rows, about, options.results / "speed.png")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="groups of rows")
    made.add_argument("--quick", action="store_true", help="small sizes, to try it: their ratios say little")
    made.add_argument("--out", type=Path, metavar="FILE.csv", help="write the table there")
    made.add_argument("--keep", action="store_true", help="add the table to the history and draw the figure")
    made.add_argument("--history", action="store_true", help="print the ratios of the runs that were kept, and stop")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder of history/ and speed.png")
    made.add_argument("--large", action="store_true", help="also ICA of 200,000 x 384: half an hour")
    made.add_argument("--rxrx1", type=Path, metavar="FOLDER", help="images of RxRx1: also the ingest of real ones")
    made.add_argument("--truth", type=Path, metavar="FOLDER", help="CORUM.txt and the like: recall of real annotations")
    return made


def measured(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Rows of the groups that were asked for, each said as soon as it is there."""
    given = {name: getattr(options, name) for name in ("large", "rxrx1", "truth")}
    for group in options.only:
        files = folder / group
        files.mkdir()
        for spec in specs(group, "quick" if options.quick else "full", **given):
            start = time.monotonic()
            try:
                row = measure.row(spec, files)
            except ModuleNotFoundError as error:
                print(f"{spec.row} is left out: {error.name} is not installed", file=sys.stderr)
                continue
            print(f"{row.row}, {row.size}: {row.speedup:.3g} ({time.monotonic() - start:.0f} s)", flush=True)
            yield row


def marked(row: Row) -> Row:
    return replace(row, quality=f"busy machine; {row.quality}")


if __name__ == "__main__":
    main()
