"""The words of the benchmark: a row is two calls on the same data, what they must agree on, and what no program can beat."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Call = Callable[[], Any]


class Agreement(NamedTuple):
    """How far two results differ, and how far they may."""

    text: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


class Limit(NamedTuple):
    """Work that cannot be left out, done alone.

    ``call`` does it, and ``scale`` is how much of it the row's own work needs: of a product of matrices, the operations
    needed over those of the call. Without a call, the peer is the limit.
    """

    name: str
    call: Call | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Case:
    """Data that are ready, and the two calls on them."""

    size: str
    ours: Call
    peer: Call
    agreement: Callable[[Any, Any], Agreement]  # of what the two calls gave
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A row to be measured. ``build(folder, seed, **arguments)`` makes its case, also in a process of its own.

    ``small`` are arguments in place of ``arguments``, of a case that takes no time.
    """

    row: str
    build: Callable[..., Case]
    arguments: dict[str, Any] = field(default_factory=dict)
    rounds: int = 3  # of each seed
    seeds: int = 1
    remark: str = ""
    small: dict[str, Any] = field(default_factory=dict)

    def case(self, folder: Path, seed: int = 0) -> Case:
        return self.build(folder, seed, **self.arguments)


@dataclass(frozen=True)
class Row:
    """A row of the table; memory in MiB that the call adds, ``limit`` the fraction reached of each physical limit."""

    row: str
    size: str
    ours_s: float
    peer_s: float
    ours_mib: float
    peer_mib: float
    limit: dict[str, float]
    quality: str

    @property
    def speedup(self) -> float:
        return self.peer_s / self.ours_s


def limit_text(limit: dict[str, float]) -> str:
    """Fractions as they stand in a table.

    >>> limit_text({"decoding alone": 0.871, "memcpy": 0.052})
    '0.87 of decoding alone; 0.052 of memcpy'
    """
    return "; ".join(f"{value:.2g} of {name}" for name, value in limit.items())


def limit_of(text: str) -> dict[str, float]:
    """Fractions from a table.

    >>> limit_of("0.87 of decoding alone; 0.052 of memcpy")
    {'decoding alone': 0.87, 'memcpy': 0.052}
    """
    return {name: float(value) for value, name in re.findall(r"([\d.e+-]+) of ([^;]+)", text)}
