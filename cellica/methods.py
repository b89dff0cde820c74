"""Every correction method by name, and the fitting of chains of them, on rows and the roles of their wells."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cellica.erasure import leace, ruv
from cellica.joint import combat, harmony, harmony_full
from cellica.normalize import (
    center,
    center_scale,
    ica_shrink,
    none,
    pca,
    sphere,
    standardize,
    tvn,
    wccn,
)
from cellica.removal import ica_drop, pca_drop, random_drop
from cellica.roles import Account, Chain, Fit, Roles, Transform
from cellica.schema import CellicaError, InputError

FITS: dict[str, Fit] = {
    fit.__name__: fit
    for fit in (
        none,
        center,
        center_scale,
        pca,
        sphere,
        wccn,
        tvn,
        combat,
        harmony,
        harmony_full,
        ruv,
        leace,
        ica_drop,
        pca_drop,
        random_drop,
        ica_shrink,
    )
}
CHAINS = {"ica": "ica_drop+sphere"}
ON_LABELS = {
    "wccn",
    "ica_shrink",
    "ruv",
    "leace",
    "ica_drop",
    "pca_drop",
    "random_drop",
}  # fits that see anchors' labels
JOINT = {"combat", "harmony", "harmony_full"}  # correct only the rows they were fitted on


def parse(method: str, options: Mapping[str, Any] | None = None) -> list[str]:
    """Names of the single methods that a chain stands for.

    >>> parse("center+sphere"), parse("ica")
    (['center', 'sphere'], ['ica_drop', 'sphere'])
    """
    steps: list[str] = []
    for name in method.split("+"):
        if name not in FITS and name not in CHAINS:
            raise InputError(
                f"method {name!r} is not known: use one of {', '.join([*FITS, *CHAINS])}, or a chain of them such as "
                "'center+sphere'"
            )
        steps += CHAINS[name].split("+") if name in CHAINS else [name]
    allowed = {option for name in steps for option in options_of(FITS[name])}
    for option in options or ():
        if option not in allowed:
            raise InputError(f"{method} has no option {option!r}: it has {', '.join(sorted(allowed)) or 'none'}")
    return steps


def options_of(function: Callable) -> list[str]:
    """Names of the options of a method."""
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def fit_chain(
    x: np.ndarray, wells: Roles, steps: Sequence[Fit], options: Mapping[str, Any]
) -> tuple[Chain, list[tuple[str, Account]], np.ndarray]:
    """Fit methods one after the other to rows (n, d); give the transforms, what each found, and the rows corrected.

    ``options`` are given to each method that has them.
    """
    parts: list[Transform] = []
    accounts: list[tuple[str, Account]] = []
    for fit in steps:
        chosen = {name: options[name] for name in options_of(fit) if name in options}
        try:
            part, found = fit(x, wells, **chosen)
        except (ValueError, np.linalg.LinAlgError) as error:
            if isinstance(error, CellicaError):
                raise
            raise InputError(f"{fit.__name__} cannot be fitted to these wells: {error}") from error
        x = finite(part.apply(x, wells), fit.__name__)
        parts.append(part)
        accounts.append((fit.__name__, found))
    return Chain(parts), accounts, x


def chain_of(steps: Sequence[str]) -> list[Fit]:
    """The z-score that every chain starts with, and its methods."""
    return [standardize, *(FITS[name] for name in steps)]


def finite(x: np.ndarray, method: str) -> np.ndarray:
    """Rows as they are, or an InputError where some are not finite."""
    lost = int(np.sum(~np.isfinite(x).all(axis=1)))
    if lost:
        raise InputError(
            f"{method} gives {lost} of {len(x)} wells values that are not finite: wells or features may be identical, or an "
            "option out of range"
        )
    return x
