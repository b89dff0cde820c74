"""Known relationships between perturbations: are they among the most similar and most opposed pairs of a map?"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control

from cellica import maps, metrics
from cellica.artifacts import PathLike, read_csv, require_file
from cellica.metrics import THRESHOLDS
from cellica.schema import PERTURBATION, InputError, first_few, require_columns, treated_mask
from cellica.scores import DETAILS, Detail, mean_profiles, score_row, score_table, spelling_hint

MIN_ENTITIES = 20  # fewest perturbations of a map on which known relationships are scored
MIN_MEMBERS = 10  # fewest perturbations of a cluster that is tested


def relationship_recall(
    adata: ad.AnnData,
    truth: PathLike,
    *,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    thresholds: Sequence[tuple[float, float]] = THRESHOLDS,
    n_bootstraps: int = 1000,
    random_state: int = 0,
) -> pd.DataFrame:
    """Recall of known relationships between perturbations among the extremes of all pairs' cosines.

    Parameters
    ----------
    truth
        Folder of ``{source}.txt`` files: comma-separated, columns ``entity1`` and ``entity2`` that hold perturbations.
    label_key, controls, use_rep
        As in `replicate_retrieval`. The map holds the mean profile of each perturbation's treated wells.
    thresholds
        Lower and upper ranks; see ``metrics.relationship_recall``.
    n_bootstraps, random_state
        Bootstraps over genes behind the interval (``maps.pair_interval``), and their seed.

    Returns
    -------
    Score table, a row for each source and pair of thresholds: metric ``recall_{low}_{high}``, group the source; queries
    are annotated pairs, units their genes. Higher is better, chance is low + 1 - high (source: Celik et al., 2024, EFAAR). Notes count the perturbations in no
    annotated pair, the annotated pairs that lost one member or both, and names that differ in case or spaces alone, which
    are not matched. Not applicable to maps of fewer than 20 perturbations.

    Raises
    ------
    MissingFileError, InputError
        The folder is not there, holds no ``.txt``, or one lacks the columns; thresholds are not 0 <= low < high <= 1.
    """
    wrong = [pair for pair in thresholds if not 0 <= pair[0] < pair[1] <= 1]
    if wrong:
        raise InputError(f"thresholds {first_few(wrong)} are not allowed: use pairs of ranks with 0 <= low < high <= 1")
    of_source = read_sources(truth)
    profiles, names, dropped, notes = _map(adata, label_key, controls, use_rep)
    enough = len(names) >= MIN_ENTITIES
    sources = list(of_source.values())
    asked = sources if enough else [pairs[:0] for pairs in sources]
    rows = []
    for name, pairs, recall in zip(
        of_source, sources, metrics.relationship_recalls(profiles, names, asked, thresholds=thresholds)
    ):
        said = [f"queries are annotated pairs of {len(names)} perturbations", *unmatched(names, pairs), *notes]
        if not enough:
            said = [f"not applicable: {len(names)} perturbations, and at least {MIN_ENTITIES} are needed", *notes]
        elif not recall.n_pairs:
            said[0] = f"not applicable: no pair of {name} is among the {len(names)} perturbations"
        low_end, high_end, n_genes = maps.pair_interval(
            recall.pairs, recall.recalled, n_bootstraps=n_bootstraps, random_state=random_state
        )
        for i, (low, high) in enumerate(thresholds):
            interval = float(low_end[i]), float(high_end[i]), n_genes
            known = use_rep, f"recall_{low}_{high}", recall.value[i], low + 1 - high, recall.n_pairs, dropped, said
            rows.append(score_row(*known, group=name, interval=interval))
    return score_table(rows)


def unmatched(names: Sequence[str], pairs: np.ndarray) -> list[str]:
    """Notes on the names of a map that are in no annotated pair, and on annotated pairs (n x 2) that are not on the map."""
    known, annotated = set(names), set(pairs.ravel().tolist())
    alone, strange = sorted(known - annotated), sorted(annotated - known)
    n_absent = np.array([(a not in known) + (b not in known) for a, b in pairs.tolist()], dtype=np.int64)
    notes = [f"{len(alone)} of them in no annotated pair ({first_few(alone, 3)})"] if alone else []
    if strange:
        notes.append(
            f"of {len(pairs)} annotated pairs {np.count_nonzero(n_absent == 1)} lost one member and "
            f"{np.count_nonzero(n_absent == 2)} both, which are not on the map ({first_few(strange, 3)})"
        )
    return [*notes, *spelling_hint(alone, strange)]


def cluster_test(
    adata: ad.AnnData,
    clusters: PathLike | Mapping[str, Sequence[str]],
    *,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    min_members: int = MIN_MEMBERS,
    threshold: float = 0.05,
) -> pd.DataFrame:
    """Which known clusters (complexes, pathways) are more similar within than to the rest of the map?

    Parameters
    ----------
    clusters
        Names to members, or a file of lines ``name<TAB>MEMBER MEMBER ...`` (such as CORUM_clusters.tsv).
    label_key, controls, use_rep
        As in `relationship_recall`.
    min_members
        Clusters with fewer members on the map are not tested; the notes count them.
    threshold
        Adjusted p below which, where the mean within is the greater, a cluster is ``similar``.

    Returns
    -------
    One row a cluster, index its name: mean cosines ``within`` and ``between``, ``n_within`` and ``n_between`` members,
    ``statistic`` (Kolmogorov-Smirnov, 0 to 1), ``p``, ``p_adjusted`` (Benjamini and Hochberg) and ``similar``.
    ``attrs["notes"]`` says what was left out. p takes cosines as independent, which they are not: see `cluster_scores`.

    Raises
    ------
    MissingFileError, InputError
        The file is not there or not such a file, or no cluster has enough members.
    """
    profiles, names, _, notes = _map(adata, label_key, controls, use_rep)
    members, said = _on_map(read_clusters(clusters), names, min_members)
    table = _tested(profiles, names, members, threshold)
    table.attrs["notes"] = [*said, *notes]
    return table


def cluster_scores(
    adata: ad.AnnData,
    clusters: PathLike | Mapping[str, Sequence[str]],
    *,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    min_members: int = MIN_MEMBERS,
    threshold: float = 0.05,
    n_permutations: int = 5,
    random_state: int = 0,
) -> pd.DataFrame:
    """`cluster_test` as scores, with chance by permuted names.

    Returns
    -------
    Score table of two rows, higher is better: ``cluster_share``, the share of clusters that are ``similar``, and
    ``cluster_statistic``, their mean Kolmogorov-Smirnov statistic. Chance is the mean over ``n_permutations`` maps whose names are
    permuted. Units of the interval are clusters; those with the same members on the map count as one.

    Raises
    ------
    MissingFileError, InputError
        As in `cluster_test`.

    Notes
    -----
    Kolmogorov-Smirnov distance of cosines within a cluster from those to the rest. Higher is better. Chance: permuted
    names. Source: Celik et al., 2024 (EFAAR).
    """
    profiles, names, dropped, notes = _map(adata, label_key, controls, use_rep)
    members, said = _on_map(read_clusters(clusters), names, min_members)
    table = _tested(profiles, names, members, threshold)
    rng = np.random.default_rng(random_state)
    null = [_tested(profiles[rng.permutation(len(names))], names, members, threshold) for _ in range(n_permutations)]
    unit = np.array([" ".join(map(str, rows)) for rows in members.values()], dtype=object)
    notes = ["queries are clusters", f"chance by {n_permutations} permutations of names", *said, *notes]
    rows = []
    for metric, column in (("cluster_share", "similar"), ("cluster_statistic", "statistic")):
        value = table[column].to_numpy(dtype=float)
        chance = float(np.mean([one[column].mean() for one in null])) if null else np.nan
        rows.append(score_row(use_rep, metric, value.mean(), chance, len(value), dropped, notes, of=(value, unit)))
    scores = score_table(rows)
    scores.attrs[DETAILS] = {"clusters": Detail(table)}
    return scores


def _map(
    adata: ad.AnnData, label_key: str, controls: Sequence[str] | None, use_rep: str | None
) -> tuple[np.ndarray, list[str], int, list[str]]:
    """Mean profile and name of each perturbation, wells left out, and why."""
    treated = treated_mask(adata.obs, controls, label_key)
    profiles, table, dropped, notes = mean_profiles(adata, treated, [label_key], use_rep)
    return profiles, table[label_key].tolist(), dropped, notes


def _tested(
    profiles: np.ndarray, names: Sequence[str], members: Mapping[str, np.ndarray], threshold: float
) -> pd.DataFrame:
    found = maps.cluster_test(profiles, list(members.values()))
    n = np.array([len(rows) for rows in members.values()])
    columns = {"within": found.within, "between": found.between, "n_within": n, "n_between": len(names) - n}
    table = pd.DataFrame(
        {**columns, "statistic": found.statistic, "p": found.p}, index=pd.Index(members, name="cluster")
    )
    table["p_adjusted"] = false_discovery_control(table["p"])
    table["similar"] = (table["p_adjusted"] < threshold) & (table["within"] > table["between"])
    return table


def _on_map(
    clusters: Mapping[str, Sequence[str]], names: Sequence[str], min_members: int
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Rows of the members of each cluster that has enough of them on the map, and what was left out."""
    place = {name: i for i, name in enumerate(names)}
    rows = {name: np.unique([place[one] for one in members if one in place]) for name, members in clusters.items()}
    enough = {name: found for name, found in rows.items() if min_members <= len(found) < len(names)}
    annotated = {one for members in clusters.values() for one in members}
    hint = spelling_hint(sorted(set(names) - annotated), sorted(annotated - set(names)))
    if not enough:
        raise InputError(
            f"not applicable: none of the {len(clusters)} clusters has {min_members} members among the {len(names)} perturbations"
            + "".join(f"; {note}" for note in hint)
        )
    note = f"{len(clusters) - len(enough)} of {len(clusters)} clusters have fewer than {min_members} members on the map"
    return enough, [note, *hint]


def read_clusters(clusters: PathLike | Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """Names of clusters to their members, from a file of lines ``name<TAB>MEMBER MEMBER ...``."""
    if isinstance(clusters, Mapping):
        return clusters
    file = require_file(clusters, "file of clusters")
    try:
        lines = [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise InputError(f"{file} is no text file of clusters in UTF-8 ({error})") from error
    wrong = ["\t".join(line) for line in lines if len(line) != 2]
    if wrong or not lines:
        raise InputError(
            f"{file} is no file of clusters, lines of name<TAB>MEMBER MEMBER ...: {first_few(wrong, 2) or 'it is empty'}"
        )
    repeated = pd.Index([name for name, _ in lines])
    if repeated.has_duplicates:
        raise InputError(f"{file} names clusters twice: {first_few(repeated[repeated.duplicated()])}")
    return {name: members.split() for name, members in lines}


def read_sources(truth: PathLike) -> dict[str, np.ndarray]:
    """Annotated pairs (n x 2) of each source, the name of its file; see `relationship_recall`."""
    files = sorted(
        file for file in require_file(truth, "folder of known relationships").glob("*.txt") if file.is_file()
    )
    if not files:
        raise InputError(f"{truth} holds no .txt file: give a folder of files such as CORUM.txt (entity1,entity2)")
    return {file.stem: _read_pairs(file) for file in files}


def _read_pairs(file: Path) -> np.ndarray:
    pairs = read_csv(file, "table of known relationships")
    require_columns(pairs, ["entity1", "entity2"], str(file))
    return pairs[["entity1", "entity2"]].dropna().to_numpy(dtype=object)
