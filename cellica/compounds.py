"""Compounds and genes on one map: does a compound look like the knock-outs of its targets (Kraus et al., arXiv 2503.20158)?"""

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import anndata as ad
import numpy as np
import pandas as pd

from cellica import maps, metrics
from cellica.artifacts import PathLike, read_csv
from cellica.schema import (
    CONCENTRATION,
    PERTURBATION,
    PERTURBATION_TYPE,
    InputError,
    first_few,
    labels,
    require_columns,
    treated_mask,
)
from cellica.scores import DETAILS, Detail, mean_profiles, score_row, score_table, spelling_hint

ACTIVE, LEFT_OUT = 1_000.0, 10_000.0  # nM up to which a gene is a target of a compound, and up to which it is neither
MIN_NEGATIVES = 20
MAXIMUM = "max"  # the group of the maximum over concentrations
QUANTILES = (0.25, 0.5, 0.75)
N_RANDOM_MAPS = 10


class Measured(NamedTuple):
    """Of each compound and concentration: the scores (table), average precision for each set of negatives (rows x seeds).

    ``random`` is average precision with random similarities (table of compounds x random maps).
    """

    table: pd.DataFrame
    by_seed: np.ndarray
    random: pd.DataFrame
    n_dropped: int
    notes: list[str]


class Task(NamedTuple):
    """What is asked of one compound: indices of its targets among genes, and sets of other genes (seeds x genes)."""

    positives: np.ndarray
    negatives: np.ndarray


def compound_gene(
    adata: ad.AnnData,
    truth: PathLike,
    *,
    label_key: str = PERTURBATION,
    type_key: str = PERTURBATION_TYPE,
    concentration_key: str = CONCENTRATION,
    compound_type: str = "COMPOUND",
    gene_type: str = "CRISPR",
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    min_compounds: int = 5,
    n_seeds: int = 100,
    random_state: int = 0,
) -> pd.DataFrame:
    """How well compounds find the genes of their targets, by |cosine| of mean profiles.

    Parameters
    ----------
    truth
        CSV with columns ``treatment``, ``gene_symbol`` and ``nM_value``; the lowest value of a pair counts.
    label_key, type_key, concentration_key, compound_type, gene_type
        Columns of obs, and which perturbations are compounds and which genes. Profiles are means of treated wells, of a
        compound at each concentration, of a gene over all wells.
    controls, use_rep
        As in `replicate_retrieval`.
    min_compounds
        Concentrations with fewer compounds get no rows of their own.
    n_seeds, random_state
        Sets of negatives that are averaged over, and their seed.

    Returns
    -------
    Score table, higher is better, for each concentration and for the maximum of |cosine| over concentrations (group
    ``max``): ``compound_gene_ap`` and ``compound_gene_auroc``, means over compounds, and ``compound_gene_ap_q25``, ``_q50``, ``_q75``, quantiles of
    average precision among compounds. Queries and units are compounds. Chance: the mean over random rankings, .5, and for quantiles
    those of random similarities. Notes hold the spread over sets of negatives and what does not match on either side.

    Raises
    ------
    MissingFileError, InputError
        As in `compound_gene_detail`.

    Notes
    -----
    Source: Kraus et al., 2025 (RxRx3-core, arXiv:2503.20158). A gene is a target up to 1,000 nM; up to 10,000 nM it is left out. Negatives are max(2 x targets, 20) of the truth's other
    genes on the map, drawn from a sorted pool ``n_seeds`` times: their choice does not hang on an interpreter's hash seed.
    """
    types = compound_type, gene_type
    keys = label_key, type_key, concentration_key
    measured = _measured(adata, truth, keys, types, controls, use_rep, n_seeds, random_state)
    groups = measured.table.groupby("concentration", sort=False)
    few = [str(group) for group, table in groups if len(table) < min_compounds and group != MAXIMUM]
    said = f"{len(few)} concentrations have fewer than {min_compounds} compounds ({first_few(few)})" if few else ""
    rows = [
        row for group, table in groups if group not in few for row in _rows(use_rep, str(group), table, measured, said)
    ]
    scores = score_table(rows)
    scores.attrs[DETAILS] = {"compound_gene": Detail(measured.table)}
    return scores


def compound_gene_detail(
    adata: ad.AnnData,
    truth: PathLike,
    *,
    label_key: str = PERTURBATION,
    type_key: str = PERTURBATION_TYPE,
    concentration_key: str = CONCENTRATION,
    compound_type: str = "COMPOUND",
    gene_type: str = "CRISPR",
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    n_seeds: int = 100,
    random_state: int = 0,
) -> pd.DataFrame:
    """`compound_gene` of each compound and concentration. Keywords are the same.

    Returns
    -------
    One row a compound and concentration (as text, ascending, then ``max``): ``average_precision`` and ``auroc``, means over sets of
    negatives, ``chance`` of the former, ``n_targets`` and ``n_negatives``. ``attrs["notes"]`` says what was left out.

    Raises
    ------
    MissingFileError, InputError
        The file is not there or lacks a column, a column of obs or one of the types is not there, or no compound has a target
        and negatives on the map.
    """
    keys, types = (label_key, type_key, concentration_key), (compound_type, gene_type)
    measured = _measured(adata, truth, keys, types, controls, use_rep, n_seeds, random_state)
    measured.table.attrs["notes"] = measured.notes
    return measured.table


def read_truth(file: PathLike) -> pd.DataFrame:
    """Table of ``treatment``, ``gene_symbol`` and the lowest ``nM_value`` of each pair."""
    table = read_csv(file, "table of compounds and genes")
    columns = ["treatment", "gene_symbol", "nM_value"]
    require_columns(table, columns, str(file))
    table = table[columns].dropna()
    value = pd.to_numeric(table["nM_value"], errors="coerce")
    if value.isna().any():
        wrong = table.loc[value.isna(), "nM_value"].unique()
        raise InputError(f"{file}: nM_value holds what is no number ({first_few(wrong)}): give nM as plain numbers")
    table["nM_value"] = value
    pairs = table.astype({"treatment": str, "gene_symbol": str}).groupby(columns[:2])
    return pairs["nM_value"].min().reset_index()


def _measured(
    adata: ad.AnnData,
    truth: PathLike,
    keys: tuple[str, str, str],
    types: tuple[str, str],
    controls: Sequence[str] | None,
    use_rep: str | None,
    n_seeds: int,
    random_state: int,
) -> Measured:
    label_key, type_key, concentration_key = keys
    require_columns(adata.obs, keys, "obs")
    known = read_truth(truth)
    kind, treated = labels(adata.obs, type_key), treated_mask(adata.obs, controls, label_key)
    for name in types:
        if not (treated & (kind == name)).any():
            there = sorted({one for one in kind if one is not None})
            raise InputError(f"not applicable: no treated well has {type_key} {name!r}; there are {first_few(there)}")
    is_compound, is_gene = (treated & (kind == name) for name in types)
    gene, genes, lost, said = mean_profiles(adata, is_gene, [label_key], use_rep)
    dose, doses, more_lost, more_said = mean_profiles(adata, is_compound, [label_key, concentration_key], use_rep)
    names, compounds = genes[label_key].tolist(), doses[label_key].to_numpy(dtype=object)
    tasks, notes = _tasks(known, names, sorted(set(compounds)), n_seeds, random_state)
    if not tasks:
        raise InputError("not applicable: no compound has a target and other genes on the map: " + "; ".join(notes))
    similarity = np.abs(metrics.unit_rows(dose) @ metrics.unit_rows(gene).T)
    level = doses[concentration_key].to_numpy(dtype=object)
    rows, by_seed = [], []
    for name, task in tasks.items():
        at = np.flatnonzero(compounds == name)
        for group, scores in (*zip(level[at], similarity[at]), (MAXIMUM, similarity[at].max(axis=0))):
            precision, auroc = _score(scores, task)
            rows.append((name, group, precision.mean(), auroc.mean(), len(task.positives), task.negatives.shape[1]))
            by_seed.append(precision)
    columns = ["compound", "concentration", "average_precision", "auroc", "n_targets", "n_negatives"]
    table = pd.DataFrame(rows, columns=columns)
    table["chance"] = metrics.chance_average_precision(table["n_targets"].to_numpy(), table["n_negatives"].to_numpy())
    order = np.lexsort((table["compound"], pd.to_numeric(table["concentration"], errors="coerce")))
    rng = np.random.default_rng(random_state)
    maps_at_random = rng.random((N_RANDOM_MAPS, len(names)))
    random = [[_score(scores, task)[0].mean() for scores in maps_at_random] for task in tasks.values()]
    return Measured(
        table.iloc[order].reset_index(drop=True),
        np.array(by_seed)[order],
        pd.DataFrame(random, index=pd.Index(tasks)),
        lost + more_lost,
        [*notes, *said, *more_said],
    )


def _tasks(
    known: pd.DataFrame, genes: Sequence[str], compounds: Sequence[str], n_seeds: int, random_state: int
) -> tuple[dict[str, Task], list[str]]:
    """Targets and negatives of each compound that has both, and what does not match."""
    place = {name: i for i, name in enumerate(genes)}
    annotated = sorted(set(known["gene_symbol"]))
    pool = np.array([place[name] for name in annotated if name in place], dtype=np.int64)
    tasks, without, short = {}, [], []
    for name, mine in known[known["treatment"].isin(compounds)].groupby("treatment", sort=True):
        on_map = mine[mine["gene_symbol"].isin(place)]
        positives, kept_out = (
            np.array([place[gene] for gene in on_map.loc[on_map["nM_value"] <= most, "gene_symbol"]], dtype=np.int64)
            for most in (ACTIVE, LEFT_OUT)
        )
        others = pool[~np.isin(pool, kept_out)]
        if not len(positives) or not len(others):
            without.append(name)
            continue
        wanted = max(2 * len(positives), MIN_NEGATIVES)
        short += [name] if len(others) < wanted else []
        rng = np.random.default_rng([random_state, crc32(str(name).encode())])
        tasks[str(name)] = Task(positives, others[maps.subsets(len(others), wanted, n_seeds, rng)])
    absent = sorted(set(known["treatment"]) - set(compounds))
    strange = sorted(set(annotated) - set(genes))
    unknown = sorted(set(compounds) - set(known["treatment"]))
    counts = (
        (absent, f"of {known['treatment'].nunique()} compounds of the truth {len(absent)} are not on the screen"),
        (unknown, f"of {len(compounds)} compounds of the screen {len(unknown)} are not in the truth"),
        (strange, f"of {len(annotated)} genes of the truth {len(strange)} are not on the map"),
        (without, f"{len(without)} compounds have no gene of at most {ACTIVE:g} nM on the map, or no other genes"),
        (short, f"{len(short)} compounds have fewer other genes than are to be drawn: all are taken"),
    )
    notes = [f"{text} ({first_few(names, 3)})" for names, text in counts if names]
    return tasks, [
        *notes,
        *spelling_hint(unknown, absent),
        *spelling_hint(sorted(set(genes) - set(annotated)), strange),
    ]


def _score(scores: np.ndarray, task: Task) -> tuple[np.ndarray, np.ndarray]:
    return maps.ranking_scores(scores[task.positives], scores[task.negatives])


def _rows(use_rep: str | None, group: str, table: pd.DataFrame, measured: Measured, note: str) -> list[tuple]:
    """Rows of a score table for one concentration."""
    names = table["compound"].to_numpy(dtype=str)
    precision, auroc = table["average_precision"].to_numpy(), table["auroc"].to_numpy()
    spread = measured.by_seed[table.index].mean(axis=0).std()
    said = [f"queries are compounds; over sets of negatives average precision has standard deviation {spread:.2g}"]
    rest = len(table), measured.n_dropped, [*said, note, *measured.notes], group
    rows = [
        score_row(use_rep, "compound_gene_ap", precision.mean(), table["chance"].mean(), *rest, of=(precision, names)),
        score_row(use_rep, "compound_gene_auroc", auroc.mean(), 0.5, *rest, of=(auroc, names)),
    ]
    for share in QUANTILES:
        chance = measured.random.loc[names].quantile(share).mean()
        interval = maps.quantile_interval(precision, share)
        metric = f"compound_gene_ap_q{100 * share:.0f}"
        rows.append(score_row(use_rep, metric, np.quantile(precision, share), chance, *rest, interval=interval))
    return rows
