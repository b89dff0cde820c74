"""Scripts of a workflow as modules, though other workflows have scripts of the same names."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load(folder: Path, *names: str) -> list[ModuleType]:
    """Import scripts, and what they import of their own folder, and leave no module of that name behind."""
    paths, own = list(sys.path), [file.stem for file in folder.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path[:] = paths
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update(others)


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: object, code: int = 0) -> None:
    """Call a script's main with a command line; ``code`` is how it must end."""
    monkeypatch.setattr(sys, "argv", [str(script.__file__), *map(str, words)])
    try:
        script.main()
        ended = 0
    except SystemExit as end:
        ended = end.code
    assert ended == code


def snakemake(workflow: Path, cwd: Path, config: Path | str, *more: str, code: int | None = 0) -> str:
    """Run a workflow with ``out=out`` below ``cwd``, and give what it told; ``code`` is how it must end, None: not well."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    line = [sys.executable, "-m", "snakemake", "-s", workflow / "Snakefile", "--configfile", config, "--cores", "2"]
    words = [*map(str, line), *(word for word in more if word.startswith("-"))]
    settings = [word for word in more if not word.startswith("-")]
    done = subprocess.run(
        [*words, "--config", "out=out", *settings],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) if code is None else done.returncode == code, done.stdout
    return done.stdout
