"""Guides to genes: profiles in which each guide counts alike, whether guides agree, and the bias of chromosome arms."""

import re
from collections.abc import Sequence
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd

from cellica import maps, metrics
from cellica.artifacts import PathLike, read_csv
from cellica.metrics import Pairs, label_codes
from cellica.relationships import relationship_recall
from cellica.schema import PERTURBATION, UNS, InputError, first_few, labels, numbers, require_columns, treated_mask
from cellica.scores import embedding_of, join_notes, mean_of, mean_profiles, score_row, score_table, unscored

GUIDE = "treatment"  # the column that names guides
GUIDE_NAME = r"^(.+)_guide_([^_]+)$"
ARMS = "arms"  # key of the correction
ARM = r"(?:chr)?(?:[0-9]{1,2}|[XYxyZWzw])[pq](?:[0-9.]*)"  # a chromosome and its arm, with or without a band
MIN_GENES = 5  # fewest genes of an arm whose mean is taken off


def genes_of_guides(
    adata: ad.AnnData,
    *,
    guide_key: str = GUIDE,
    how: str = "guides",
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
) -> ad.AnnData:
    """Mean profile of each gene, over its guides.

    Parameters
    ----------
    guide_key
        Column of obs with names ``GENE_guide_n``; other wells are left out and counted.
    how
        ``guides``: mean over wells of a guide, then over guides, so that a guide of more wells counts no more. ``wells``: mean over
        all wells of the gene.
    controls, use_rep
        As in `replicate_retrieval`.

    Returns
    -------
    AnnData of float32, one row a gene, index and ``obs["perturbation"]`` its name, with ``n_guides``, ``n_wells`` and ``guide_cosine``, the mean
    cosine between its guides (NaN for a single one). ``uns["cellica"]["genes"]`` says what was left out.

    Raises
    ------
    InputError
        The column or representation is not there, it names no guides, or ``how`` is not known.
    """
    if how not in ("guides", "wells"):
        raise InputError(f"how={how!r} is not allowed: use 'guides' or 'wells'")
    profiles, table, dropped, notes = _guides(adata, guide_key, controls, use_rep)
    genes, code = np.unique(table["gene"].to_numpy(dtype=str), return_inverse=True)
    n_wells = table["n_wells"].to_numpy()
    weight = (n_wells if how == "wells" else np.ones(len(n_wells)))[:, None]
    means = metrics.group_means(profiles * weight, code) / metrics.group_means(weight, code)
    obs = pd.DataFrame(
        {
            PERTURBATION: genes.astype(object),
            "n_guides": np.bincount(code),
            "n_wells": np.bincount(code, weights=n_wells).astype(int),
            "guide_cosine": maps.mean_cosine(profiles, code),
        },
        index=pd.Index(genes, dtype=object),
    )
    account = {"how": how, "n_dropped": dropped, "notes": np.array(notes, dtype=object)}
    return ad.AnnData(means.astype(np.float32), obs=obs, uns={UNS: {"genes": account}})


def guide_agreement(
    adata: ad.AnnData, *, guide_key: str = GUIDE, controls: Sequence[str] | None = None, use_rep: str | None = None
) -> pd.DataFrame:
    """Do the guides of a gene find each other among the guides of all genes?

    Keywords are those of `genes_of_guides`.

    Returns
    -------
    Score table of two rows, higher is better, queries are mean profiles of guides, units genes: ``guide_map``, mean average precision of
    guides of the same gene among those of others, chance over random rankings; ``guide_auroc``, the chance that a guide of the gene is more
    similar than one of another, .5 without agreement.

    Raises
    ------
    InputError
        The column or representation is not there, or it names no guides.

    Notes
    -----
    Average precision (`metrics.average_precision`) and AUROC of guides of the same gene among all guides, by cosine.
    Higher is better. Chance: random rankings, and .5. Source: cellica.
    """
    profiles, table, dropped, notes = _guides(adata, guide_key, controls, use_rep)
    gene = table["gene"].to_numpy(dtype=str)
    code = label_codes(gene)
    ranked = metrics.average_precision(profiles, Pairs([code]), Pairs([], [code]))
    scored = (ranked.n_pos > 0) & (ranked.n_neg > 0)
    counts = np.bincount(code)
    if not len(counts):
        raise InputError("not applicable: no guide has a well that can be scored")
    said = [f"queries are mean profiles of guides, {counts.min()} to {counts.max()} a gene", *notes]
    said.append(unscored(np.count_nonzero(~scored), "guides"))
    if not scored.any():
        said.insert(0, "not applicable: no gene has two guides, or there is one gene")
    chance = (
        mean_of(metrics.chance_average_precision(ranked.n_pos[scored], ranked.n_neg[scored]))
        if scored.any()
        else np.nan
    )
    rows = []
    for metric, value, by_chance in (
        ("guide_map", ranked.value[scored], chance),
        ("guide_auroc", maps.group_auroc(profiles, code)[scored], 0.5),
    ):
        mean = mean_of(value) if len(value) else np.nan
        rows.append(score_row(use_rep, metric, mean, by_chance, len(value), dropped, said, of=(value, gene[scored])))
    return score_table(rows)


def correct_arms(
    adata: ad.AnnData,
    positions: PathLike | pd.DataFrame,
    *,
    unexpressed: Sequence[str] | None = None,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    min_genes: int = MIN_GENES,
    key_added: str = ARMS,
) -> None:
    """Take from each gene the mean profile of its chromosome arm.

    A cut by a nuclease can lose the rest of a chromosome arm, and genes then look like their neighbours (Lazar et al., Nature
    Genetics 2024). The mean over the genes of an arm is taken for what they share by that; the definition is ours.

    Parameters
    ----------
    positions
        Table (CSV) with columns ``gene`` and ``arm`` (as "1p"; with a column ``chromosome`` too, "p" or "q" is enough), or ``gene``,
        ``chromosome``, ``start`` and ``centromere``.
    unexpressed
        Genes whose mean is taken on each arm, as their knock-out should do nothing else. Without them, or on arms with fewer than
        ``min_genes`` of them, the mean of all genes of the arm.
    label_key, controls, use_rep
        As in `replicate_retrieval`. Rows may be genes or wells: an arm's mean is that of its genes' mean profiles.
    min_genes
        Genes on arms with fewer genes stay as they are.

    Returns
    -------
    None. With K = ``key_added`` writes ``obsm["X_K"]`` (n x d, float32), where controls and genes that have no position stay as
    they are, and ``uns["cellica"]["K"]``: ``auroc_before`` and ``auroc_after`` (`arm_bias`), ``n_changed`` genes, ``notes``.

    Raises
    ------
    MissingFileError, InputError
        The table is not there, lacks a column or contradicts itself, or none of its genes is on the map.
    """
    profiles, names, arms, notes = _located(adata, positions, label_key, controls, use_rep)
    code = label_codes(arms)
    basis = None if unexpressed is None else np.isin(names, list(map(str, unexpressed)))
    corrected, changed = maps.without_arm_means(profiles, code, basis, min_genes=min_genes)
    if basis is not None:  # arms with too few of them
        rest = maps.without_arm_means(profiles, np.where(changed, -1, code), min_genes=min_genes)
        fallback = sorted(set(arms[rest[1]]))
        notes += [
            f"mean of all genes on {len(fallback)} arms with few unexpressed ones ({first_few(fallback)})"
        ] * bool(fallback)
        corrected, changed = np.where(rest[1][:, None], rest[0], corrected), changed | rest[1]
    small = sorted({str(arm) for arm in arms[(code >= 0) & ~changed]})
    notes += [f"{len(small)} arms have fewer than {min_genes} genes and stay as they are ({first_few(small)})"] * bool(
        small
    )
    offset = pd.DataFrame(profiles - corrected, index=names)
    label, treated = labels(adata.obs, label_key), treated_mask(adata.obs, controls, label_key)
    at = np.where(treated, offset.index.get_indexer(pd.Index(label)), -1)
    x = embedding_of(adata, use_rep).astype(np.float64)
    x[at >= 0] -= offset.to_numpy()[at[at >= 0]]
    adata.obsm[f"X_{key_added}"] = x.astype(np.float32)
    before, after = (mean_of(maps.group_auroc(one, code)) for one in (profiles, corrected))
    account = {"auroc_before": before, "auroc_after": after, "n_changed": int(changed.sum())}
    said = {"method": ARMS, "use_rep": use_rep or "X", "min_genes": min_genes, "notes": np.array(notes, dtype=object)}
    adata.uns.setdefault(UNS, {})[key_added] = {**account, **said}


def recall_without_arms(
    adata: ad.AnnData,
    truth: PathLike,
    positions: PathLike | pd.DataFrame,
    *,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    random_state: int = 0,
) -> pd.DataFrame:
    """`relationship_recall` after `correct_arms`, and `arm_bias` before and after (group ``corrected``). Keywords are theirs.

    Returns
    -------
    Score table; rows of recall say in their notes that the means of arms were taken off.
    """
    keys: dict[str, Any] = {"label_key": label_key, "controls": controls}
    work = ad.AnnData(obs=adata.obs.copy(), obsm={"X_raw": embedding_of(adata, use_rep)})
    correct_arms(work, positions, use_rep="X_raw", **keys)
    said = "means of chromosome arms taken off before"
    recall = relationship_recall(work, truth, use_rep=f"X_{ARMS}", random_state=random_state, **keys)
    recall["note"] = [join_notes([note, said]) for note in recall["note"]]
    before, after = (arm_bias(work, positions, use_rep=rep, **keys) for rep in ("X_raw", f"X_{ARMS}"))
    return pd.concat([recall, before, after.assign(group="corrected")], ignore_index=True).assign(rep=use_rep or "X")


def arm_bias(
    adata: ad.AnnData,
    positions: PathLike | pd.DataFrame,
    *,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
) -> pd.DataFrame:
    """Do genes look like the others of their chromosome arm? Keywords are those of `correct_arms`.

    Returns
    -------
    Score table of one row, ``arm_auroc``: the chance that a gene is more similar to a gene of its arm than to one of another. .5
    without a bias, above it with one; below it where more was taken off than the bias. Queries are genes, units arms.

    Raises
    ------
    MissingFileError, InputError
        As in `correct_arms`.

    Notes
    -----
    AUROC of a gene's cosines to its arm against those to others. Nearer .5 is less bias. Chance: .5. Source: cellica, after Lazar et al., 2024.
    """
    profiles, _, arms, notes = _located(adata, positions, label_key, controls, use_rep)
    value = maps.group_auroc(profiles, label_codes(arms))
    known = ~np.isnan(value)
    said = [f"queries are genes on {len(set(arms[known]))} arms", *notes]
    if not known.any():
        said.insert(0, "not applicable: no arm has two genes, or there is one arm")
    mean, n = mean_of(value), int(known.sum())
    return score_table(
        [score_row(use_rep, "arm_auroc", mean, 0.5, n, 0, said, of=(value[known], arms[known].astype(str)))]
    )


def _guides(
    adata: ad.AnnData, guide_key: str, controls: Sequence[str] | None, use_rep: str | None
) -> tuple[np.ndarray, pd.DataFrame, int, list[str]]:
    """Mean profile of each guide, a table of their genes and numbers of wells, wells left out, and why."""
    require_columns(adata.obs, [guide_key], "obs")
    is_guide = adata.obs[guide_key].astype(str).str.match(GUIDE_NAME).to_numpy()
    treated = treated_mask(adata.obs, controls, PERTURBATION if PERTURBATION in adata.obs else guide_key)
    if not (treated & is_guide).any():
        raise InputError(
            f"obs[{guide_key!r}] names no guide (GENE_guide_n); it holds {first_few(adata.obs[guide_key].dropna().unique())}"
        )
    profiles, table, dropped, notes = mean_profiles(adata, treated & is_guide, [guide_key], use_rep)
    others = int(np.count_nonzero(treated & ~is_guide))
    notes += [f"{others} treated wells are of no guide"] * bool(others)
    return profiles, table.assign(gene=table[guide_key].str.extract(GUIDE_NAME)[0]), dropped, notes


def _located(
    adata: ad.AnnData,
    positions: PathLike | pd.DataFrame,
    label_key: str,
    controls: Sequence[str] | None,
    use_rep: str | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Mean profile, name and chromosome arm (None where unknown) of each gene, and what was left out."""
    arm_of = read_positions(positions)
    profiles, table, _, notes = mean_profiles(adata, treated_mask(adata.obs, controls, label_key), [label_key], use_rep)
    names = table[label_key].to_numpy(dtype=object)
    arms = np.array([arm_of.get(name) for name in names], dtype=object)
    without = names[[arm is None for arm in arms]]
    if len(without) == len(names):
        raise InputError(
            f"none of the {len(names)} perturbations ({first_few(names, 3)}) has a position; the table holds {first_few(arm_of, 3)}"
        )
    if len(without):
        notes.append(
            f"{len(without)} of {len(names)} genes have no position and stay as they are ({first_few(without, 3)})"
        )
    return profiles, names, arms, notes


def read_positions(positions: PathLike | pd.DataFrame) -> dict[str, str]:
    """Chromosome arm of each gene; see `correct_arms`.

    >>> read_positions(pd.DataFrame({"gene": ["A", "B"], "chromosome": ["1", "X"], "start": [5, 9], "centromere": [7, 7]}))
    {'A': '1p', 'B': 'Xq'}
    """
    given = isinstance(positions, pd.DataFrame)
    what = "the table of positions" if given else str(positions)
    table: pd.DataFrame = positions if given else read_csv(positions, "table of positions")  # type: ignore[arg-type,assignment]
    require_columns(table, ["gene"], what)
    if "arm" not in table:
        require_columns(table, ["chromosome", "start", "centromere"], what)
        place = numbers(table, ["start", "centromere"])
        side = np.where(place["start"] < place["centromere"], "p", "q")
        arm = pd.Series(side, table.index, dtype=object).where(place.notna().all(axis=1))
    else:
        arm = table["arm"]
    if "chromosome" in table and arm.dropna().isin(["p", "q"]).all():
        arm = (
            table["chromosome"].astype(str).str.cat(arm.astype(object)).where(table["chromosome"].notna() & arm.notna())
        )
    odd = sorted({name for name in arm.dropna().astype(str) if not re.fullmatch(ARM, name)})
    if odd:
        raise InputError(
            f"{what} names arms {first_few(odd)}: write chromosome and arm as 1p or Xq, or p and q beside a column 'chromosome', and "
            "leave what is not known empty"
        )
    known = pd.DataFrame({"gene": table["gene"].astype(str), "arm": arm})[table["gene"].notna() & arm.notna()]
    known = known.drop_duplicates()
    twice = known.loc[known["gene"].duplicated(), "gene"].unique()
    if len(twice):
        raise InputError(f"{what} puts {len(twice)} genes on several arms: {first_few(twice)}; leave one row for each")
    return dict(zip(known["gene"], known["arm"].astype(str)))
