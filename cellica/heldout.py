"""Fits on some batches, applied to the others: scores of wells that no fit has seen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from cellica.methods import ON_LABELS, chain_of, fit_chain, options_of, parse
from cellica.metrics import Pairs, average_precision, chance_average_precision
from cellica.roles import Roles, only
from cellica.schema import InputError

OWN = -1.0  # stands for each method's own default ridge, where a chain's methods have different ones


@dataclass(frozen=True)
class Task:
    """What is retrieved: which pairs are positives and negatives, and which wells (n,) are queries and candidates."""

    positive: Pairs
    negative: Pairs
    wells: np.ndarray


def left_out(
    x: np.ndarray,
    roles: Roles,
    method: str,
    tasks: Mapping[str, Task],
    groups: Sequence[Sequence[str]],
    *,
    ridges: Sequence[float] = (OWN,),
    options: Mapping[str, Any],
    max_queries: int | None = None,
    random_state: int = 0,
) -> pd.DataFrame:
    """Average precision of wells in batches left out of the fit, ranked against wells of the batches in it.

    Each group of batches is left out in turn, the chain is fitted to the others and applied to all. Where a method sees
    labels of anchors, those of the perturbations that are scored are hidden from it: half of them at a time.

    Parameters
    ----------
    x
        Rows (n, d).
    ridges, options
        Ridges to try, and other options of the chain's methods, given to each method that has them.
    max_queries
        Most queries of a task in a group, a random sample; the same for every method and order of rows.

    Returns
    -------
    One row for each task, ridge and query: ``task``, ``ridge`` (NaN where the chain has none), ``batch`` (the first of its
    group), ``row``, ``value``, ``chance``. ``attrs["failed"]`` says which groups could not be left out, and why.

    Raises
    ------
    InputError
        The chain cannot be fitted without any of the groups, or no query has a positive and a negative.
    """
    steps = parse(method)
    folds = _folds(roles, steps, random_state)
    place = np.arange(len(x)) if roles.names is None else np.argsort(roles.names.astype(str), kind="stable")
    rows, reasons = [], []
    for group in groups:
        out = np.isin(roles.batch.astype(str), group)
        drawn = {
            name: _sample(place[(out & task.wells)[place]], max_queries, random_state) for name, task in tasks.items()
        }
        for hidden in folds:
            asked = {name: rows_[np.isin(roles.label[rows_], hidden)] for name, rows_ in drawn.items()}
            if not sum(map(len, asked.values())):
                continue
            try:
                fits = corrected(x, roles, ~out, hidden if len(folds) > 1 else hidden[:0], steps, ridges, options)
                for ridge, y in fits:
                    for name, task in tasks.items():
                        found = _scored(y, task, asked[name], ~out & task.wells)
                        rows.append(found.assign(task=name, ridge=ridge, batch=group[0]))
            except InputError as error:
                reasons.append(f"without {', '.join(group)}: {error}")
    if not sum(map(len, rows)):
        why = reasons[0] if reasons else "no query has a positive and a negative elsewhere"
        raise InputError(f"{method} cannot be tried with batches left out: {why}")
    table = pd.concat([part for part in rows if len(part)], ignore_index=True)
    table.attrs["failed"] = list(dict.fromkeys(reasons))
    return table


def _sample(rows: np.ndarray, most: int | None, random_state: int) -> np.ndarray:
    if most is None or len(rows) <= most:
        return rows
    return np.random.default_rng(random_state).choice(rows, most, replace=False)


def _scored(y: np.ndarray, task: Task, queries: np.ndarray, candidates: np.ndarray) -> pd.DataFrame:
    found = average_precision(y, task.positive, task.negative, queries=queries, candidates=np.flatnonzero(candidates))
    table = pd.DataFrame({"row": queries, "value": found.value})
    table["chance"] = chance_average_precision(found.n_pos, found.n_neg)
    return table[np.isfinite(found.value) & (found.n_neg > 0)]


def corrected(
    x: np.ndarray,
    roles: Roles,
    train: np.ndarray,
    hidden: np.ndarray,
    steps: Sequence[str],
    ridges: Sequence[float],
    options: Mapping[str, Any],
) -> Iterator[tuple[float, np.ndarray]]:
    """All rows, corrected by fits to the training rows; what comes before the first ridge is fitted once."""
    seen = roles.take(train)
    secret = np.isin(seen.label, hidden) & ~seen.control
    seen.label = only(seen.label, ~secret)
    seen.anchor = seen.anchor & ~secret
    whole = roles.take(np.ones(len(x), dtype=bool))
    chain = chain_of(steps)
    first = next((i for i, fit in enumerate(chain) if "ridge" in options_of(fit)), len(chain))
    before, _, x_train = fit_chain(x[train], seen, chain[:first], options)
    x_all = before.apply(x, whole)
    if first == len(chain):
        yield float("nan"), x_all
        return
    for ridge in ridges:
        given = dict(options) if ridge == OWN else {**options, "ridge": ridge}
        after, _, _ = fit_chain(x_train, seen, chain[first:], given)
        yield ridge, after.apply(x_all, whole)


def _folds(roles: Roles, steps: Sequence[str], random_state: int) -> list[np.ndarray]:
    """Perturbations to score: all at once, or in two halves where labels of anchors enter the fit."""
    names = np.unique(roles.label[roles.treated].astype(str))
    if not ON_LABELS & set(steps) or len(names) < 4:
        return [names]
    shuffled = np.random.default_rng(random_state).permutation(names)
    return [shuffled[0::2], shuffled[1::2]]
