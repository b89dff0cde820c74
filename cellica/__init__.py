"""Make microscopy screens comparable across experiments.

Data flows one way: screen table, plates, embeddings, wells, correction, scores, report. Each stage is one module
and one verb of the command line; submodules load on first use, so ``import cellica`` costs nothing.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = (
    "artifacts",
    "benchmarks",
    "components",
    "correct",
    "demo",
    "download",
    "encoder",
    "errors",
    "fetch",
    "foreign",
    "glossary",
    "hcs",
    "ica",
    "identifiability",
    "images",
    "ingestion",
    "manifests",
    "methods",
    "metrics",
    "plates",
    "plot",
    "profiles",
    "quality",
    "report",
    "retrieval",
    "schema",
    "screen",
    "shards",
    "simulate",
    "whitening",
)
__all__ = ["__version__", *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
