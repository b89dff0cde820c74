"""Corrections side by side: each fitted, applied and scored, with paired gains over none."""

from collections.abc import Mapping, Sequence
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from cellica import metrics
from cellica.evaluation import evaluate
from cellica.progress import track
from cellica.schema import EXPERIMENT, PERTURBATION
from cellica.scores import GAIN, PER_QUERY, REFERENCE, PerQuery, absent_row, embedding_of, join_notes, score_table


def compare(
    adata: ad.AnnData,
    methods: Sequence[str] | None = None,
    *,
    use_rep: str | None = None,
    batch_key: str = EXPERIMENT,
    label_key: str = PERTURBATION,
    strata_key: str | None = "auto",
    controls: Sequence[str] | None = None,
    anchors: Sequence[str] | None = None,
    random_state: int = 0,
    baselines: bool = True,
    **scoring: Any,
) -> pd.DataFrame:
    """Correct by each method and score the result. Changes nothing in ``adata``.

    Parameters
    ----------
    methods
        Names of methods or chains (``"center+sphere"``), by default ``correct.DEFAULT_COMPARISON``.
    use_rep
        What to correct: a key of obsm, by default X.
    batch_key, label_key, strata_key, controls, anchors, random_state
        Given to each method and to `evaluate`.
    **scoring
        Further keywords of `evaluate`: ``class_key``, ``group_key``, ``truth``, ``max_queries``.

    Returns
    -------
    Score table; ``rep`` is ``X_{method}``. Notes hold what the method said of its fit, and that it saw the scored wells.
    A method that cannot run is a row without a value whose note says why. Where ``none`` is among the methods, the columns
    ``gain``, ``gain_low`` and ``gain_high`` hold the difference from it in the retrievals, paired over queries, with its 95 %
    interval over perturbations (of classes, over groups).

    Raises
    ------
    InputError
        An unknown method, or a column that is not there.
    """
    from cellica import correct

    names = list(dict.fromkeys(correct.DEFAULT_COMPARISON if methods is None else methods))
    for name in names:
        correct.parse(name)
    roles: dict[str, Any] = {
        "batch_key": batch_key,
        "label_key": label_key,
        "strata_key": strata_key,
        "controls": controls,
        "anchors": anchors,
        "random_state": random_state,
    }
    tables = [evaluate(adata, [], baselines=baselines, **roles, **scoring)]
    per_query = dict(tables[0].attrs[PER_QUERY])
    for name in track(names, "compare methods"):
        work = ad.AnnData(obs=adata.obs.copy(), var=adata.var.copy(), X=None if adata.X is None else adata.X.copy())
        if use_rep not in (None, "X"):
            work.obsm[use_rep] = embedding_of(adata, use_rep)
        try:
            correct.run(work, name, use_rep=use_rep, **roles)
        except (ValueError, ArithmeticError, np.linalg.LinAlgError) as error:  # one method must not end the comparison
            tables.append(score_table([absent_row(f"X_{name}", "all", error)]))
            continue
        table = evaluate(work, [f"X_{name}"], baselines=False, **roles, **scoring)
        said = [
            *(note for note in work.uns["cellica"][name]["notes"] if not note.startswith("confounding:")),
            "" if name == "none" else "fitted on the scored wells (transductive)",
        ]
        table["note"] = [join_notes([note, *said]) for note in table["note"]]
        per_query |= table.attrs[PER_QUERY]
        tables.append(table)
    scores = pd.concat([*tables[1:], tables[0]], ignore_index=True)
    return scores.assign(**_gains(scores, per_query, f"X_{REFERENCE}"))


def _gains(
    scores: pd.DataFrame, per_query: Mapping[tuple[str, str], PerQuery], reference: str
) -> dict[str, list[float]]:
    """Columns ``GAIN`` of a score table: paired over queries, intervals over their units."""
    rows = []
    for rep, metric in zip(scores["rep"], scores["metric"]):
        mine, theirs = per_query.get((rep, metric)), per_query.get((reference, metric))
        row = (np.nan, np.nan, np.nan)
        if mine and theirs and rep != reference:
            unit = pd.Series(mine.unit, mine.value.index)
            gain = (mine.value - theirs.value).dropna()
            if len(gain):
                row = (float(gain.mean()), *metrics.cluster_interval(gain.to_numpy(), unit[gain.index].to_numpy()))
        rows.append(row)
    return dict(zip(GAIN, map(list, zip(*rows)))) if rows else {name: [] for name in GAIN}
