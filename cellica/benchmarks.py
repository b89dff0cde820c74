"""Benchmarks of published screens, as their authors run them, for any correction: RxRx3-core and RxRx1."""

from collections.abc import Mapping, Sequence
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from cellica import correct
from cellica.artifacts import PathLike
from cellica.compounds import compound_gene as score_compound_gene
from cellica.generalization import rxrx1_test, sirna_accuracy
from cellica.guides import GUIDE, guide_agreement, recall_without_arms
from cellica.progress import track
from cellica.relationships import relationship_recall
from cellica.schema import (
    EXPERIMENT,
    PERTURBATION,
    PERTURBATION_TYPE,
    UNS,
    InputError,
    first_few,
    labels,
    require_columns,
    treated_mask,
)
from cellica.scores import absent_row, attempt, join_notes, score_table

AUTHORS = "pca+center_scale"  # the correction of RxRx3-core's authors: z-score, PCA, centre-scale per experiment on EMPTY_control
METHODS = ("none", AUTHORS, "center_scale", "sphere", "center+sphere", "tvn", "ica")
GENE, COMPOUND = "CRISPR", "COMPOUND"
BLINDED = r"RXRX3-\d+"  # genes whose name is withheld
PLATE_CONTROLS = ("drop", "sample", "keep")


def rxrx3_core(
    adata: ad.AnnData,
    *,
    truth: PathLike | None = None,
    compound_gene: PathLike | None = None,
    gene_positions: PathLike | None = None,
    methods: Sequence[str] = METHODS,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    plate_controls: str = "drop",
    batch_key: str = EXPERIMENT,
    random_state: int = 0,
) -> pd.DataFrame:
    """Known relationships among genes, and compounds against the genes of their targets, on RxRx3-core (arXiv 2503.20158).

    Parameters
    ----------
    adata
        Wells as ``profiles.read_embeddings(..., format="rxrx3-core")`` or ``cellica import rxrx3-core`` gives them: a perturbation is the
        part of ``treatment`` before the first ``_``, and ``EMPTY_control`` wells are the negative controls. It is not changed.
    truth
        Folder for `relationship_recall`.
    compound_gene
        CSV for `compound_gene`.
    gene_positions
        Table for `correct_arms`: the means of chromosome arms are taken from genes before their relationships are scored.
    methods
        Names of ``correct.METHODS`` or chains of them; ``pca+center_scale`` is the authors' own.
    options
        Options of each method by its name, as ``{"pca+center_scale": {"n_components": 128}}``.
    plate_controls
        Genes that stand in most gene experiments, as PLK1 or MTOR do on every plate: ``drop`` them from the map, ``sample`` as many of
        their wells as the median gene has, or ``keep`` all.
    batch_key, random_state
        Given to the corrections; the seed also to samples, negatives and bootstraps.

    Returns
    -------
    Score table; ``rep`` is ``X_{method}``. Rows are those of `relationship_recall` (genes, each source), of `guide_agreement` where obs has
    ``treatment``, and of `compound_gene` (each concentration and the maximum). Controls are on no map. Notes count blinded genes, plate controls, and ids without a partner when the
    files were read. A method that cannot run is a row without a value whose note says why.

    Raises
    ------
    InputError
        Neither truth was named, a method or an option is not known, or a column is not there.
    """
    if gene_positions is not None and truth is None:
        raise InputError("gene_positions corrects genes before their relationships are scored: name these too (truth=)")
    if truth is None and compound_gene is None:
        raise InputError("name at least one truth: a folder of relationships (truth=) or a table (compound_gene=)")
    if plate_controls not in PLATE_CONTROLS:
        raise InputError(f"plate_controls={plate_controls!r} is not allowed: use one of {first_few(PLATE_CONTROLS)}")
    require_columns(adata.obs, [PERTURBATION, PERTURBATION_TYPE, batch_key], "obs")
    options = options or {}
    _check_options(methods, options)
    on_map, notes = map_wells(adata.obs, plate_controls=plate_controls, batch_key=batch_key, random_state=random_state)
    notes = [*notes, *_unmatched(adata)]
    tables = []
    for method in track(list(dict.fromkeys(methods)), "RxRx3-core"):
        work, key = ad.AnnData(X=adata.X, obs=adata.obs, var=pd.DataFrame(index=adata.var_names)), f"X_{method}"
        try:
            correct.run(work, method, batch_key=batch_key, random_state=random_state, **options.get(method, {}))
        except (ValueError, ArithmeticError, np.linalg.LinAlgError) as error:  # one method must not end the benchmark
            tables.append(score_table([absent_row(key, "all", error)]))
            continue
        profiles = ad.AnnData(obs=adata.obs[on_map], obsm={key: work.obsm[key][on_map]})
        said = [note for note in work.uns[UNS][method]["notes"] if not note.startswith("confounding:")]
        said += [] if method == "none" else ["fitted on the scored wells (transductive)"]
        table = _scores(profiles, key, truth, compound_gene, gene_positions, random_state)
        table["note"] = [join_notes([note, *said, *notes]) for note in table["note"]]
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else score_table([])


def _check_options(methods: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> None:
    strange = [name for name in options if name not in methods]
    if strange:
        raise InputError(f"options name {first_few(strange)}, which is none of the methods {first_few(methods, 20)}")
    for method in methods:
        correct.parse(method, options.get(method))


def map_wells(
    obs: pd.DataFrame, *, plate_controls: str = "drop", batch_key: str = EXPERIMENT, random_state: int = 0
) -> tuple[np.ndarray, list[str]]:
    """Wells that belong on the map of RxRx3 or RxRx3-core, and what was left out. See `rxrx3_core`.

    >>> obs = pd.DataFrame({"perturbation": ["A", "RXRX3-1", "EMPTY_control"], "perturbation_type": "CRISPR", "experiment": "gene-001"})
    >>> map_wells(obs.assign(control=["", "", "negative"]))
    (array([ True, False, False]), ["1 wells of 1 blinded genes left out ('RXRX3-1')"])
    """
    label, kind, on_map = labels(obs, PERTURBATION), labels(obs, PERTURBATION_TYPE), treated_mask(obs)
    on_map &= np.array([name is not None and "_control" not in name for name in label], dtype=bool)
    is_gene = on_map & (kind == GENE)
    blinded = is_gene & obs[PERTURBATION].astype(str).str.fullmatch(BLINDED).to_numpy()
    common = _in_most_experiments(label[is_gene], labels(obs, batch_key)[is_gene])
    of_common = is_gene & np.isin(label, common)
    kindless = on_map & ~np.isin(kind, [GENE, COMPOUND])
    on_map &= ~kindless
    odd = f"{kindless.sum()} wells left out: neither {GENE} nor {COMPOUND} in {PERTURBATION_TYPE}"
    notes = [odd] if kindless.any() else []
    notes += _left_out("blinded genes", label, blinded)
    if plate_controls == "keep" or not len(common):
        return on_map & ~blinded, notes
    if plate_controls == "drop":
        return on_map & ~blinded & ~of_common, [
            *notes,
            *_left_out("genes that stand in most experiments", label, of_common),
        ]
    counts = pd.Series(label[is_gene & ~of_common & ~blinded]).value_counts()
    n = max(int(counts.median()), 1) if len(counts) else 1
    rng, left_out = np.random.default_rng(random_state), of_common.copy()
    by_name = np.argsort(obs.index.to_numpy(dtype=str), kind="stable")  # the order of rows decides no draw
    for name in common:
        rows = by_name[(of_common & (label == name))[by_name]]
        left_out[rng.choice(rows, min(n, len(rows)), replace=False)] = False
    notes += [f"{n} wells sampled of each gene that stands in most experiments ({first_few(common, 10)})"]
    return on_map & ~blinded & ~left_out, notes


def _in_most_experiments(label: np.ndarray, experiment: np.ndarray) -> list[str]:
    """Genes that stand in more than half of the experiments, where there are several and few such genes."""
    pairs = pd.DataFrame({"label": label, "experiment": experiment}).dropna().drop_duplicates()
    counts, n = pairs["label"].value_counts(), pairs["experiment"].nunique()
    common = sorted(counts.index[counts > n / 2])
    return common if n > 2 and len(common) < len(counts) / 2 else []


def _left_out(what: str, label: np.ndarray, wells: np.ndarray) -> list[str]:
    names = sorted(set(label[wells]))
    return [f"{wells.sum()} wells of {len(names)} {what} left out ({first_few(names, 10)})"] if names else []


def _unmatched(adata: ad.AnnData) -> list[str]:
    """What `profiles.read_embeddings` recorded of ids without a partner."""
    account = adata.uns.get(UNS, {}).get("import", {})
    parts = (
        ("embeddings_without_metadata", "examples_without_metadata", "embeddings had no metadata"),
        ("metadata_without_embedding", "examples_without_embedding", "rows of metadata had no embedding"),
    )
    lost = list(map(str, account.get("rows_not_finite", [])))
    return [
        *([f"{len(lost)} embeddings were not finite ({first_few(lost, 3)})"] if lost else []),
        *_counted(account, parts),
    ]


def _counted(account: Mapping[str, Any], parts: Sequence[tuple[str, str, str]]) -> list[str]:
    return [
        f"{account[count]} {what} (such as {', '.join(map(str, list(account.get(examples, []))[:3]))})"
        for count, examples, what in parts
        if account.get(count)
    ]


def _scores(
    wells: ad.AnnData,
    key: str,
    truth: PathLike | None,
    compound_gene: PathLike | None,
    positions: PathLike | None,
    random_state: int,
) -> pd.DataFrame:
    tables = []
    keys: dict[str, Any] = {"use_rep": key, "random_state": random_state}
    genes = wells[(wells.obs[PERTURBATION_TYPE] == GENE).to_numpy()].copy()
    if truth is not None and positions is not None:
        tables.append(attempt(key, "recall", lambda: recall_without_arms(genes, truth, positions, **keys)))
    elif truth is not None:
        tables.append(attempt(key, "recall", lambda: relationship_recall(genes, truth, **keys)))
    if truth is not None and GUIDE in genes.obs:
        tables.append(attempt(key, "guide_map", lambda: guide_agreement(genes, use_rep=key)))
    if compound_gene is not None:
        tables.append(attempt(key, "compound_gene_ap", lambda: score_compound_gene(wells, compound_gene, **keys)))
    return pd.concat(tables, ignore_index=True)


# ------------------------------------------------------------------------------------------------------------ RxRx1


def rxrx1(
    adata: ad.AnnData,
    *,
    methods: Sequence[str] = ("none", "center", "sphere", "wccn", "ica", "wccn+ica_drop"),
    classifiers: Sequence[str] = ("knn", "lda", "class_mean"),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    random_state: int = 0,
) -> pd.DataFrame:
    """`sirna_accuracy` on the 18 test experiments of RxRx1 with each correction, fitted on the 33 of training alone.

    Parameters
    ----------
    adata
        Wells or sites as ``profiles.read_embeddings(..., format="rxrx1")`` or ``cellica import rxrx1`` gives them. It is not changed.
    methods, options
        As in `rxrx3_core`.
    classifiers
        As in `sirna_accuracy`.
    random_state
        Seed.

    Returns
    -------
    Score table; ``rep`` is ``X_{method}``, rows are those of `sirna_accuracy`. A method that cannot run, or cannot be applied to
    experiments that it has not seen, is a row without a value whose note says why.

    Raises
    ------
    InputError
        A method or a column is not known.
    """
    options = options or {}
    _check_options(methods, options)
    test = rxrx1_test(adata.obs)
    train = ~test if (~test).any() else test
    notes, tables = _unmatched(adata), []
    for method in track(list(dict.fromkeys(methods)), "RxRx1"):
        key = f"X_{method}"
        work = ad.AnnData(X=adata.X, obs=adata.obs.copy(), var=pd.DataFrame(index=adata.var_names))
        try:
            corrector = correct.fit(work[train].copy(), method, random_state=random_state, **options.get(method, {}))
            corrector.transform(work)
            del work.uns[UNS]  # so that it is not taken for a fit to all wells
            work.obsm["fitted"] = work.obsm.pop(key)
        except (ValueError, ArithmeticError, np.linalg.LinAlgError) as error:  # one method must not end the benchmark
            tables.append(score_table([absent_row(key, "all", error)]))
            continue
        table = sirna_accuracy(work, classifiers=classifiers, use_rep="fitted", random_state=random_state).assign(
            rep=key
        )
        said = [f"{method} fitted on {train.sum()} rows of training experiments", *notes]
        if method != "none":  # where test wells have no siRNA, training experiments are scored
            seen = table["metric"].str.endswith("_left_out") & table["value"].notna()
            table.loc[seen, "note"] = "the fit saw the wells that are scored (transductive); " + table.loc[seen, "note"]
        table["note"] = [join_notes([note, *said]) for note in table["note"]]
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else score_table([])
