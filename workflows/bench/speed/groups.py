"""The groups of rows, by name, and what to look for in each."""

from collections.abc import Callable
from pathlib import Path

from speed.cases import Spec

GROUPS = ("ica", "scores", "correct", "plates", "encoder")
SCALES = ("full", "quick", "tiny")
ROWS = {  # the group of each row's name, for figures of tables that were read
    "ica": ("ica", "ica, picard"),
    "scores": ("average precision", "relationship recall"),
    "correct": ("sphere", "sphere, float64", "harmony", "combat"),
    "plates": ("ingest", "ingest shards", "read"),
    "encoder": ("encoder float32", "encoder bfloat16", "embed"),
}
PEERS = {  # in the figure
    "ica": "scikit-learn",
    "ica, picard": "picard",
    "average precision": "copairs",
    "relationship recall": "look-ups in pandas",
    "sphere": "scikit-learn",
    "sphere, float64": "scikit-learn",
    "harmony": "harmonypy",
    "combat": "scanpy",
    "ingest": "decoding alone",
    "ingest shards": "decoding alone",
    "read": "zarr-python",
    "encoder float32": "plain torch",
    "encoder bfloat16": "plain torch, float32",
    "embed": "the encoder alone",
}


def specs(group: str, scale: str = "full", **options: Path | bool | None) -> list[Spec]:
    """Rows of a group, whose modules are imported only now: torch takes seconds."""
    from speed import rows_correct, rows_encoder, rows_ica, rows_plates, rows_scores

    makers: dict[str, tuple[Callable[..., list[Spec]], tuple[str, ...]]] = {
        "ica": (rows_ica.specs, ("large",)),
        "scores": (rows_scores.specs, ("truth",)),
        "correct": (rows_correct.specs, ()),
        "plates": (rows_plates.specs, ("rxrx1",)),
        "encoder": (rows_encoder.specs, ()),
    }
    make, names = makers[group]
    return make(scale, **{name: options[name] for name in names if name in options})


def group_of(row: str) -> str:
    return next((group for group, rows in ROWS.items() if row in rows), "other")
