"""Retrieval by wells that no fit has seen: corrections fitted to some batches, queries in the others."""

from collections.abc import Sequence
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from cellica.corrector import representation
from cellica.heldout import Task, left_out
from cellica.methods import JOINT, ON_LABELS, parse
from cellica.metrics import label_codes
from cellica.neighbors import class_pairs, replicate_pairs
from cellica.probes import batch_groups
from cellica.roles import roles_of
from cellica.schema import EXPERIMENT, PERTURBATION, InputError, labels, treated_mask
from cellica.scores import PER_QUERY, PerQuery, absent_row, score_row, score_table, unscored

HELD_OUT = "_held_out"  # ends the metrics


def held_out_retrieval(
    adata: ad.AnnData,
    method: str,
    *,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    class_key: str | None = None,
    group_key: str | None = None,
    controls: Sequence[str] | None = None,
    anchors: Sequence[str] | None = None,
    use_rep: str | None = None,
    max_queries: int | None = None,
    random_state: int = 0,
    **options: Any,
) -> pd.DataFrame:
    """`replicate_retrieval` and `class_retrieval` by wells that the correction was not fitted on.

    Each batch (of more than 12, each of 10 random groups) is left out in turn, the correction is fitted to the others and
    applied to all, and the treated wells left out are ranked against those of the batches in the fit. Where a method reads
    labels, those of the perturbations that are scored are hidden from it, half of them at a time. Higher is better.

    Parameters
    ----------
    method
        Name of a method or chain.
    batch_key, label_key, strata_key, class_key, group_key, controls
        As in those two; without ``class_key`` only replicates are retrieved.
    anchors
        Given to the method.
    use_rep
        Key of obsm to correct, by default X.
    max_queries
        About as many queries, sampled evenly from the groups of batches.
    **options
        Options of the method.

    Returns
    -------
    Score table, metrics ``replicate_map_held_out`` and ``class_map_held_out``; chance is the mean over random rankings.

    Raises
    ------
    InputError
        There is one batch, the method corrects only the wells it was fitted on, or it cannot be fitted to the others.

    Notes
    -----
    The formula is that of `replicate_retrieval`. Higher is better. Chance: the mean over random rankings, exact.
    Source: cellica.
    """
    steps, rep, obs = parse(method, options), f"X_{method}", adata.obs
    if joint := JOINT & set(steps):
        raise InputError(f"not applicable: {' and '.join(sorted(joint))} corrects only the wells it was fitted on")
    x, _ = representation(adata, use_rep)
    roles: dict[str, Any] = {"batch_key": batch_key, "label_key": label_key, "strata_key": strata_key}
    wells = roles_of(obs, anchors=anchors, controls=controls, **roles)
    names, code = np.unique(wells.batch.astype(str), return_inverse=True)
    dealt = batch_groups(code, label_codes(wells.strata), random_state=random_state)
    groups = [names[np.unique(code[dealt == group])].tolist() for group in np.unique(dealt)]
    if len(groups) < 2:
        raise InputError("not applicable: all wells are of one batch")
    asked = {"replicate_map": (label_key, label_key, replicate_pairs(obs, **roles))}
    if class_key:
        group_key = group_key or label_key
        asked["class_map"] = (class_key, group_key, class_pairs(obs, class_key, group_key, batch_key))
    treated = treated_mask(obs, controls, label_key)
    known = {
        key: np.array([value is not None for value in labels(obs, key)])
        for key, unit, _ in asked.values()
        for key in (key, unit)
    }
    tasks = {metric: Task(*pairs, treated & known[key] & known[unit]) for metric, (key, unit, pairs) in asked.items()}
    most = None if max_queries is None else max(1, max_queries // len(groups))
    options = {"check_stability": False, "random_state": random_state, **options}
    found = left_out(x, wells, method, tasks, groups, options=options, max_queries=most, random_state=random_state)
    notes = [f"fitted without the batches that are scored ({len(groups)} groups left out in turn)"]
    if ON_LABELS & set(steps):
        notes.append("and without the labels of the perturbations that are scored")
    if most is not None:
        notes.append(f"at most {most} queries sampled of each group (random_state {random_state})")
    failed = found.attrs["failed"]
    if failed:
        notes.append(f"{len(failed)} fits failed, and their wells are not scored: {failed[0].replace('; ', ', ')}")
    rows, per_query = [], {}
    for metric, (key, unit, _) in asked.items():
        one = found[found["task"] == metric]
        at, value = one["row"].to_numpy(), one["value"].to_numpy()
        if not len(one):
            absent = InputError(f"not applicable: no query has a positive and a negative in other batches; {notes[0]}")
            rows.append(absent_row(rep, metric + HELD_OUT, absent))
            continue
        units, classes = labels(obs, unit)[at].astype(str), labels(obs, key)[at].astype(str)
        lost = int(np.count_nonzero(treated & ~tasks[metric].wells))
        said = [*notes, f"{lost} wells left out: without {' or '.join(dict.fromkeys((key, unit)))}" if lost else ""]
        if most is None:
            said.append(unscored(np.count_nonzero(tasks[metric].wells) - len(one), "queries"))
        chance = one["chance"].mean()
        rows.append(score_row(rep, metric + HELD_OUT, value.mean(), chance, len(one), lost, said, of=(value, units)))
        per_query[rep, metric + HELD_OUT] = PerQuery(pd.Series(value, obs.index[at]), units, classes)
    table = score_table(rows)
    table.attrs[PER_QUERY] = {metric: one for (_, metric), one in per_query.items()}
    return table
