"""Corrections side by side: each fitted, applied and scored, with paired gains over none."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anndata as ad
import joblib
import numpy as np
import pandas as pd

from cellica import __version__, artifacts, metrics, progress
from cellica.artifacts import PathLike
from cellica.evaluation import DEFAULT, LEARNED, MAX_QUERIES, evaluate
from cellica.parts import prepare
from cellica.progress import track
from cellica.schema import EXPERIMENT, PERTURBATION, InputError, first_few
from cellica.scores import (
    AGAINST,
    CONFOUNDING,
    GAIN,
    ONE_CLASS,
    PER_QUERY,
    REFERENCE,
    PerQuery,
    absent_row,
    attempt,
    embedding_of,
    join_notes,
    score_table,
)
from cellica.unseen import HELD_OUT, held_out_retrieval

FILES = ("truth", "clusters", "compound_gene", "gene_positions")  # options that name files
PARALLEL = 2e5, 2e7  # values of a representation: below, processes cost more than they save; above, too much memory


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
    reference: str = REFERENCE,
    baselines: bool = True,
    held_out: bool = True,
    n_jobs: int | None = None,
    parts: PathLike | None = None,
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
    reference
        The method over which gains are given.
    held_out
        Also score wells that no fit has seen: each batch (of more than 12, each of 10 groups) is left out in turn, its
        treated wells are ranked against those of the others (``replicate_map_held_out``, ``class_map_held_out``). Labels of
        the perturbations that are scored are hidden from fits that read labels (`heldout.left_out`).
    n_jobs
        Methods run at a time, each in a process of its own; by default as many as there are cores, and one where a
        representation has fewer than 2e5 or more than 2e7 values.
    parts
        Folder that keeps the methods that are finished: a later call with the same data and options goes on from there.
    **scoring
        Further keywords of `evaluate`: ``scores``, ``class_key``, ``group_key``, ``truth``, ``max_queries``, ... For scores of what is
        learned in other batches (``accuracy``, ``probes``) each method is fitted to those alone.

    Returns
    -------
    Score table; ``rep`` is ``X_{method}``. Notes say that a fit saw the scored wells; a method's first holds what it said of its fit.
    A method that cannot run is a row without a value whose note says why. Where the reference is among the methods, the columns
    ``gain``, ``gain_low`` and ``gain_high`` hold the difference from it in the retrievals, paired over queries, with its 95 %
    interval over perturbations (of classes, over groups). A gain in class retrieval that rests on one class says so.

    Raises
    ------
    InputError
        An unknown method, or a column that is not there.
    """
    from cellica import correct

    names = list(dict.fromkeys(correct.DEFAULT_COMPARISON if methods is None else methods))
    for name in [*names, reference]:
        correct.parse(name)
    if reference not in (REFERENCE, *names):
        raise InputError(f"reference {reference!r} is not among the methods {first_few(names, 20)}: add it there")
    roles: dict[str, Any] = {
        "batch_key": batch_key,
        "label_key": label_key,
        "strata_key": strata_key,
        "controls": controls,
        "anchors": anchors,
        "random_state": random_state,
    }
    if adata.obs_names.has_duplicates:
        twice = adata.obs_names[adata.obs_names.duplicated()].unique()
        raise InputError(f"obs names occur twice ({first_few(twice)}): gains are paired by them, make them unique")
    if n_jobs is None:
        n_jobs = joblib.cpu_count() if PARALLEL[0] <= embedding_of(adata, use_rep).size <= PARALLEL[1] else 1
    folder = None if parts is None else Path(parts)
    if folder:
        options = {"use_rep": use_rep, "held_out": held_out, **roles, **scoring}
        prepare(folder, {"version": __version__, "data": _fingerprint(adata, use_rep), **_settings(options)})
    scoring = {"max_queries": MAX_QUERIES, **scoring, "key_added": None, "design": False, "before": use_rep or "X"}
    own = evaluate(adata, [], baselines=baselines, **roles, **scoring)
    lean = _lean(adata, use_rep)
    found = dict(_kept(folder, names))
    waiting = [name for name in names if name not in found]
    if found:
        progress.say(f"going on from {len(found)} of {len(names)} methods that an earlier run finished")
    n_jobs = min(n_jobs, max(len(waiting), 1))
    threads = None if n_jobs == 1 else max(1, joblib.cpu_count() // n_jobs)
    with joblib.parallel_config(backend="loky", inner_max_num_threads=threads):
        results = joblib.Parallel(n_jobs, return_as="generator")(
            joblib.delayed(_in_process)(os.getpid(), lean, name, use_rep, roles, scoring, held_out) for name in waiting
        )
        for name, table in zip(waiting, track(results, "compare methods", len(waiting))):
            found[name] = table
            if folder:
                _keep(table, folder / f"{name}.json")
    tables = [*(found[name] for name in names), own]
    scores = pd.concat(tables, ignore_index=True)
    for table in tables:
        table.attrs.setdefault(PER_QUERY, {})
    per_query = {key: one for table in tables for key, one in table.attrs[PER_QUERY].items()}
    scores = scores.assign(**_gains(scores, per_query, f"X_{reference}"))
    design = correct.confounding(adata, **{key: value for key, value in roles.items() if key != "random_state"})
    scores["note"] = [
        join_notes([note, _one_class(per_query, rep, metric, f"X_{reference}"), *(design.sentences if i == 0 else ())])
        for i, (rep, metric, note) in enumerate(scores[["rep", "metric", "note"]].itertuples(index=False))
    ]
    scores.attrs[AGAINST] = f"X_{reference}"
    return scores


# ------------------------------------------------------------------------------------------------------ one method


def _in_process(run: int, *arguments: Any) -> pd.DataFrame:
    """`_one`, in a process that ends with the run that began it, however that ends."""
    if os.getpid() != run:

        def watch() -> None:
            while os.getppid() == run:
                time.sleep(1)
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
    return _one(*arguments)


def _one(
    adata: ad.AnnData,
    name: str,
    use_rep: str | None,
    roles: Mapping[str, Any],
    scoring: Mapping[str, Any],
    held_out: bool,
) -> pd.DataFrame:
    """Scores of one method; one that cannot run must not end the comparison."""
    from cellica import correct

    rep = f"X_{name}"
    work = _lean(adata, use_rep)
    try:
        correct.run(work, name, use_rep=use_rep, **roles)
    except (ValueError, ArithmeticError, np.linalg.LinAlgError) as error:
        return score_table([absent_row(rep, "all", error)])
    kinds = DEFAULT if scoring.get("scores") is None else scoring["scores"]
    seen = {**scoring, "scores": [kind for kind in kinds if kind not in LEARNED]}
    table = evaluate(work, [rep], baselines=False, **roles, **seen) if seen["scores"] else score_table([])
    of_fit = [note for note in work.uns["cellica"][name]["notes"] if not note.startswith(CONFOUNDING)]
    seen_too = "" if name == REFERENCE else "fitted on the scored wells (transductive)"
    table["note"] = [join_notes([note, seen_too, *(of_fit if i == 0 else ())]) for i, note in enumerate(table["note"])]
    given: dict[str, Any] = {"use_rep": use_rep, **roles}
    tables = [table]
    if held_out and "retrieval" in kinds:
        of_class = {key: scoring[key] for key in ("class_key", "group_key", "max_queries") if key in scoring}
        tables.append(_attempt(rep, "replicate_map" + HELD_OUT, held_out_retrieval, adata, name, **given, **of_class))
    given = {key: value for key, value in given.items() if key != "anchors" or value is not None}
    for metric, learn in [pair for kind in kinds if kind in LEARNED for pair in LEARNED[kind].items()]:
        some = {"max_queries": scoring.get("max_queries")} if metric == "knn_accuracy" else {}
        tables.append(_attempt(rep, metric, learn, adata, method=name, **some, **given))
    both = pd.concat(tables, ignore_index=True)
    both.attrs[PER_QUERY] = {(rep, metric): one for table in tables for metric, one in _queries(table)}
    return both


def _queries(table: pd.DataFrame) -> Iterator[tuple[str, PerQuery]]:
    for key, one in table.attrs.get(PER_QUERY, {}).items():
        yield key if isinstance(key, str) else key[1], one


def _attempt(rep: str, metric: str, score: Callable[..., pd.DataFrame], *data: Any, **keywords: Any) -> pd.DataFrame:
    return attempt(rep, metric, lambda: score(*data, **keywords))


def _lean(adata: ad.AnnData, use_rep: str | None) -> ad.AnnData:
    """A copy with nothing but what is corrected."""
    lean = ad.AnnData(obs=adata.obs.copy(), var=adata.var.copy(), X=None if adata.X is None else adata.X.copy())
    if use_rep not in (None, "X"):
        lean.obsm[use_rep] = embedding_of(adata, use_rep)
    return lean


# ---------------------------------------------------------------------------------------------------------- gains


def _gains(
    scores: pd.DataFrame, per_query: Mapping[tuple[str, str], PerQuery], reference: str
) -> dict[str, list[float]]:
    """Columns ``GAIN`` of a score table: paired over queries, intervals over their units."""
    rows = []
    for rep, metric, group in zip(scores["rep"], scores["metric"], scores["group"]):
        gain = _gain(per_query, rep, metric, reference) if group == "all" else None
        if gain is None or not len(gain):
            rows.append((np.nan, np.nan, np.nan))
        else:
            value = gain["gain"].to_numpy()
            rows.append((float(value.mean()), *metrics.cluster_interval(value, gain["unit"].to_numpy())))
    return dict(zip(GAIN, map(list, zip(*rows)))) if rows else {name: [] for name in GAIN}


def _gain(per_query: Mapping[tuple[str, str], PerQuery], rep: str, metric: str, reference: str) -> pd.DataFrame | None:
    """Difference of each query from the reference, its unit and class."""
    mine, theirs = per_query.get((rep, metric)), per_query.get((reference, metric))
    if not mine or not theirs or rep == reference:
        return None
    difference = (mine.value - theirs.value).to_numpy() if mine.value.index.equals(theirs.value.index) else None
    if difference is None:
        difference = (mine.value - theirs.value.reindex(mine.value.index)).to_numpy()
    return pd.DataFrame({"gain": difference, "unit": mine.unit, "group": mine.group}).dropna(subset=["gain"])


def _one_class(
    per_query: Mapping[tuple[str, str], PerQuery], rep: str, metric: str, reference: str = f"X_{REFERENCE}"
) -> str:
    """A warning where an established gain in class retrieval is not established without one of the classes."""
    gain = _gain(per_query, rep, metric, reference) if metric.startswith("class_map") else None
    if gain is None or gain["group"].nunique() < 2:
        return ""
    if metrics.cluster_interval(gain["gain"].to_numpy(), gain["unit"].to_numpy())[0] <= 0:
        return ""
    sums = gain.groupby("group")["gain"].sum()
    rest = gain[gain["group"] != sums.idxmax()]
    low, high = metrics.cluster_interval(rest["gain"].to_numpy(), rest["unit"].to_numpy())
    if low > 0:
        return ""
    return (
        f"{ONE_CLASS} the gain in {metric} rests on {str(sums.idxmax()).replace(';', ',')}: without it {rest['gain'].mean():+.3f} "
        f"({low:+.3f} to {high:+.3f})"
    )


# ---------------------------------------------------------------------------------------------- finished methods


def _fingerprint(adata: ad.AnnData, use_rep: str | None) -> str:
    """Hash of all that is corrected and scored."""
    parts = [
        adata.obs.astype(str),
        embedding_of(adata, use_rep),
        None if adata.X is None else embedding_of(adata, None),
    ]
    return str(joblib.hash(parts))


def _settings(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as text, files by what they hold."""
    return {
        key: artifacts.sha256(value) if key in FILES and isinstance(value, str | Path) else str(joblib.hash(value))
        for key, value in options.items()
    }


def _keep(table: pd.DataFrame, file: Path) -> None:
    per_query = [
        [
            *key,
            one.value.index.tolist(),
            one.value.tolist(),
            one.unit.tolist(),
            None if one.group is None else one.group.tolist(),
        ]
        for key, one in table.attrs.get(PER_QUERY, {}).items()
    ]
    artifacts.write_text(json.dumps({"scores": table.to_dict("list"), PER_QUERY: per_query}), file, force=True)


def _kept(folder: Path | None, names: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Methods that an earlier run finished."""
    files = {name: folder / f"{name}.json" for name in names} if folder else {}
    for name, file in files.items():
        if not file.exists():
            continue
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            table = score_table(list(pd.DataFrame(kept["scores"]).itertuples(index=False, name=None)))
            table.attrs[PER_QUERY] = {
                (rep, metric): PerQuery(pd.Series(value, index), np.array(unit), group and np.array(group))
                for rep, metric, index, value, unit, group in kept[PER_QUERY]
            }
        except (ValueError, KeyError, TypeError) as error:
            progress.say(f"{file} is damaged and done again ({error})")
            continue
        yield name, table
