"""Known relationships between perturbations: are they among the most similar and most opposed pairs of a map?"""

from collections.abc import Sequence
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd

from cellica import metrics
from cellica.artifacts import PathLike, require_file
from cellica.metrics import THRESHOLDS
from cellica.schema import PERTURBATION, InputError, labels, require_columns, treated_mask
from cellica.scores import scorable, score_row, score_table

MIN_ENTITIES = 20  # fewest perturbations of a map on which known relationships are scored


def relationship_recall(
    adata: ad.AnnData,
    truth: PathLike,
    *,
    label_key: str = PERTURBATION,
    controls: Sequence[str] | None = None,
    use_rep: str | None = None,
    thresholds: Sequence[tuple[float, float]] = THRESHOLDS,
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

    Returns
    -------
    Score table, a row for each source and pair of thresholds: metric ``recall_{low}_{high}``, group the source; queries
    are annotated pairs. Not applicable to maps of fewer than 20 perturbations.

    Raises
    ------
    MissingFileError, InputError
        The folder is not there, holds no ``.txt``, or one lacks the columns.
    """
    files = sorted(require_file(truth, "folder of known relationships").glob("*.txt"))
    if not files:
        raise InputError(f"{truth} holds no .txt file: give a folder of files such as CORUM.txt (entity1,entity2)")
    treated = treated_mask(adata.obs, controls, label_key)
    x, kept, dropped, notes = scorable(adata, treated, [label_key], use_rep)
    names, code = np.unique(labels(adata.obs[kept], label_key).astype(str), return_inverse=True)
    profiles = metrics.group_means(x[kept], code) if len(names) else x[:0]
    usable = metrics.usable_rows(profiles) if len(names) else np.zeros(0, dtype=bool)
    names, profiles = names[usable], profiles[usable]
    rows = []
    for file in files:
        pairs = _read_pairs(file)
        enough = len(names) >= MIN_ENTITIES
        recall = metrics.relationship_recall(profiles, names, pairs if enough else pairs[:0], thresholds=thresholds)
        said = [f"queries are annotated pairs of {len(names)} perturbations", *notes]
        if not enough:
            said = [f"not applicable: {len(names)} perturbations, and at least {MIN_ENTITIES} are needed", *notes]
        elif not recall.n_pairs:
            said = [f"not applicable: no pair of {file.name} is among the {len(names)} perturbations", *notes]
        for (low, high), value in zip(thresholds, recall.value):
            chance = low + 1 - high
            metric = f"recall_{low}_{high}"
            rows.append(score_row(use_rep, metric, value, chance, recall.n_pairs, dropped, said, group=file.stem))
    return score_table(rows)


def _read_pairs(file: Path) -> np.ndarray:
    pairs = pd.read_csv(file, dtype=str)
    require_columns(pairs, ["entity1", "entity2"], str(file))
    return pairs[["entity1", "entity2"]].dropna().to_numpy(dtype=object)
