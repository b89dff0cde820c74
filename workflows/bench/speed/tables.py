"""Tables with the machine in their first lines: printed, written, read back, and their history."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd

from speed import machine as machines
from speed.cases import Row, limit_of, limit_text

COLUMNS = ["row", "size", "ours_s", "peer_s", "speedup", "ours_mib", "peer_mib", "limit", "quality"]
OLD = {"ours_peak_gib": "ours_mib", "peer_peak_gib": "peer_mib"}  # of the first table of recall


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    table = pd.DataFrame([{**asdict(row), "speedup": row.speedup} for row in rows], columns=COLUMNS)
    table["limit"] = [limit_text(row.limit) for row in rows]
    return table


def rows_of(table: pd.DataFrame) -> list[Row]:
    """The rows of a table that was read."""
    given = table.drop(columns="speedup").to_dict("records")
    return [Row(**{**one, "limit": limit_of(one["limit"])}) for one in given]


def header(machine: dict[str, str]) -> str:
    return "".join(f"# {name}: {text}\n" for name, text in machine.items())


def printed(table: pd.DataFrame, machine: dict[str, str]) -> str:
    shown = table.astype({"limit": object, "quality": object}).fillna("")
    for column in ("ours_s", "peer_s", "speedup", "ours_mib", "peer_mib"):
        shown[column] = [f"{value:.3g}" if np.isfinite(value) else "" for value in table[column]]
    return header(machine) + shown.to_string(index=False)


def write(table: pd.DataFrame, machine: dict[str, str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header(machine) + table.to_csv(index=False, float_format="%.4g"), encoding="utf-8")


def read(path: Path) -> tuple[pd.DataFrame, dict[str, str]]:
    """A table of this or of an earlier form, in the columns of this one, and what is known of the machine."""
    text = path.read_text(encoding="utf-8")
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    body = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    table = pd.read_csv(StringIO(body))
    for old, new in OLD.items():
        if old in table:
            table[new] = table.pop(old) * 1024
    table = table.reindex(columns=COLUMNS)
    texts = {name: table[name].astype(object).where(table[name].notna(), "") for name in ("limit", "quality")}
    named = [re.match(r"([A-Za-z ]{2,20}): (.+)", line) for line in lines]
    machine = {found[1]: found[2] for found in named if found}
    if not machine and lines:  # the first tables had sentences
        machine = {"machine": "; ".join(lines)}
    return table.assign(**texts), machine


# ------------------------------------------------------------------------------------------------------ history


def keep(table: pd.DataFrame, machine: dict[str, str], folder: Path) -> Path:
    """Add a run to the history as ``{date}_{commit or version}.csv``."""
    version, *commit = machine["cellica"].split()
    name = f"{machine['date'].split()[0]}_{(commit or [version])[0].replace('+', '')}"
    path, n = folder / f"{name}.csv", 1
    while path.exists():
        n += 1
        path = folder / f"{name}_{n}.csv"
    write(table, machine, path)
    return path


def history(folder: Path) -> pd.DataFrame:
    """Every row of every kept run, the oldest run first, with the columns ``run``, ``when`` and ``busy``."""
    runs = []
    for path in folder.glob("*.csv"):
        table, machine = read(path)
        when = machine.get("date", path.stem[:10])  # the first tables have only the day, in their name
        runs.append((when, path.stem, table.assign(run=path.stem, when=when, busy=machines.is_busy(machine))))
    tables = [table.dropna(axis="columns", how="all") for *_, table in sorted(runs, key=lambda run: run[:2])]
    if not tables:
        return pd.DataFrame(columns=["run", "when", "busy", *COLUMNS])
    return pd.concat(tables, ignore_index=True).reindex(columns=["run", "when", "busy", *COLUMNS])


def changes(kept: pd.DataFrame) -> str:
    """How each ratio changed over the kept runs: a line a row and size, a column a run, and the last over the first."""
    if kept.empty:
        return "no run is kept"
    busy = kept.groupby("run", sort=False)["busy"].any()
    names = {run: f"{run}{' (busy)' if is_busy else ''}" for run, is_busy in busy.items()}
    ratios = kept.pivot_table("speedup", ["row", "size"], "run", aggfunc="last", sort=False)
    ratios = ratios[[run for run in names if run in ratios]]
    over = ratios.apply(_last_over_first, axis=1)
    shown = ratios.rename(columns=names).assign(**{"last / first": over})
    return shown.to_string(float_format="{:.3g}".format, na_rep="")


def _last_over_first(ratios: pd.Series) -> float:
    known = ratios.dropna()
    return known.iloc[-1] / known.iloc[0] if len(known) > 1 else np.nan
