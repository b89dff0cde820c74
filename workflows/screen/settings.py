"""The configuration of a screen, checked, and turned into command lines of cellica. Paths are relative to the folder of the run."""

import csv
import hashlib
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

SCHEMA = Path(__file__).with_name("config.schema.yaml")
PAIRS = ("intensity-range", "intensity-percentiles")  # LOW HIGH of one option, not an option twice
N_PICTURES = 8
FILES = ("source", "metadata", "weights", "layout", "truth", "clusters", "compound-gene", "gene-positions")
METADATA = "*.csv"  # of a data set's folder
MOST_LINES = 20


class Run:
    """What a configuration asks for.

    Raises
    ------
    ValueError
        The configuration is not as the schema says; every fault has a line.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
        errors = sorted(Draft202012Validator(schema).iter_errors(config), key=lambda error: list(map(str, error.path)))
        if errors:
            faults = [fault for error in errors for fault in _in_words(error)]
            raise ValueError("the configuration has to be mended:\n  " + "\n  ".join(faults))
        self.config = config
        self.out = config["out"].rstrip("/") or "/"
        self.screen = config["screen"]
        self.in_one_pass = self.screen["kind"] == "rxrx3-core"
        # compare corrects by the defaults of each method, so it says nothing of corrections with options of their own
        self.own_options = bool(set(config["correct"]) - {"method", "random-state"})
        self.scored = "evaluate" in config or self.own_options

    def options(self, verb: str) -> str:
        """Options of a verb, with the roles of columns, which several verbs share."""
        return words({**self.config.get("roles", {}), **self.config.get(verb, {})})

    def files(self, section: str) -> list[str]:
        """Files that a section names, or that lie in folders it names: when they change, what depends on them is redone."""
        found: list[str] = []
        for key in set(FILES) & set(self.config.get(section, {})):
            path = Path(self.config[section][key])
            files = sorted(path.glob(METADATA if key == "source" else "*")) if path.is_dir() else [path]
            found += [str(file).replace("{", "{{").replace("}", "}}") for file in files if file.is_file()]
        return sorted(found)

    def losses(self) -> list[str]:
        """What was set aside, for the screen: the report and the tables have it too."""
        table = Path(self.out) / "plates" / "set_aside.csv"
        if not table.exists():
            return []
        with table.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        of_plates = Counter(f"{row['experiment']}_{row['plate']}: {row['reason'].partition(':')[0]}" for row in rows)
        lines = [f"  {plate} ({n})" for plate, n in of_plates.most_common()]
        more = [f"  and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        which = f"set aside, images or whole plates (all in {table}, and in the report):"
        return [which, *lines[:MOST_LINES], *more] if lines else []

    def ingest(self, plate: str | None = None) -> str:
        """Command line for all plates, or for one."""
        chosen = ("kind", "source", "experiment", "leave-out")
        options = {key: value for key, value in self.screen.items() if key not in chosen}
        if plate is None:
            options["experiment"] = self.screen.get("experiment", [])
        else:
            (row,) = [row for row in self._table() if row["name"] == plate]
            options |= {"experiment": row["experiment"], "plate": row["plate"]}
        source = [self.screen["kind"], self.screen["source"], f"{self.out}/plates"]
        return f"cellica ingest {shlex.join(source)} {words(options)}".rstrip()

    def embed(self, plate: str) -> str:
        """Command line for one plate."""
        files = shlex.join([self._store(plate), "--out", f"{self.out}/sites"])
        return f"cellica embed {files} {words(self.config['embed'])}"

    def checks(self) -> list[list[str]]:
        """Command lines that check the options of later verbs, before hours of work."""
        wells, nowhere = f"{self.out}/wells.h5ad", f"{self.out}/options.checked"
        wanted = (
            ("embed", f"{self.out}/options.zarr", ".h5ad", f"{words(self.config['embed'])} --device cpu"),
            ("correct", wells, ".h5ad", self.options("correct")),
            ("compare", wells, ".csv", self.options("compare")),
        )
        return [
            ["cellica", verb, name, "--out", nowhere + ending, "--dry-run", *shlex.split(options)]
            for verb, name, ending, options in wanted
        ]

    def left_out(self) -> str:
        """Options of `cellica profile` that name the plates which the configuration leaves out, and why."""
        return words({"left-out": self.screen.get("leave-out", {})})

    def pictures(self) -> str:
        """Options of `cellica report`: a few plates, evenly chosen."""
        most = self.config.get("report", {}).get("pictures", N_PICTURES)
        names = self.plates()
        n = min(most, len(names))
        chosen = [names[i * (len(names) - 1) // max(n - 1, 1)] for i in range(n)]
        return words({"plate": [self._store(name) for name in chosen]})

    def plates(self) -> list[str]:
        """Names of the plates, without those that are left out."""
        known, left_out = [row["name"] for row in self._table()], self.screen.get("leave-out", {})
        unknown = sorted(set(left_out) - set(known))
        if unknown:
            raise ValueError(f"screen.leave-out names {unknown}, which are no plates: {', '.join(known[:8])} ... are")
        return [name for name in known if name not in left_out]

    def fingerprint(self, plate: str | None = None) -> str:
        """SHA-256 of what a plate (or all) is made from: it changes when the plate has to be made again."""
        found = [row["sha256"] for row in self._table() if plate in (None, row["name"])]
        return hashlib.sha256(" ".join(found).encode()).hexdigest()

    def _store(self, plate: str) -> str:
        return f"{self.out}/plates/{plate}.zarr"

    def _table(self) -> list[dict[str, str]]:
        with open(f"{self.out}/plates.csv", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))


def words(options: Mapping[str, Any]) -> str:
    """Options as they stand on a command line.

    >>> words({"method": ["ica", "center+sphere"], "column": {"well": "Well ID"}, "z": "max", "held-out": False})
    "--method ica --method center+sphere --column 'well=Well ID' --z max --no-held-out"
    >>> words({"intensity-percentiles": [0.1, 99.9], "tune": True})
    '--intensity-percentiles 0.1 99.9 --tune'
    """
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        elif name in PAIRS:
            found += [f"--{name}", *map(str, value)]
        else:
            for one in _each(value):
                found += [f"--{name}", str(one)]
    return shlex.join(found)


def _each(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [f"{key}={one}" for key, one in value.items()]
    return value if isinstance(value, list) else [value]


def _in_words(error: ValidationError) -> list[str]:
    """What is wrong, where, and what is allowed."""
    where = ".".join(map(str, error.path)) or "the configuration"
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        unknown = [name for name in error.instance if name not in known]
        return [f"{where}: {name!r} is not known; known are {', '.join(known)}" for name in unknown]
    if error.validator == "required":
        return [f"{where}: {error.message}"]
    if error.validator == "pattern" and "description" in error.schema:
        return [f"{where} is {error.instance!r}: {error.schema['description']}"]
    return [f"{where} is {error.instance!r}: {error.message}"]
