"""How many negatives lie above each positive, on a GPU: what `metrics.average_precision` counts on CPUs, by torch."""

from collections.abc import Callable

import numpy as np
import torch

from cellica.metrics import TIE, Counts, Pairs

PAIRS_AT_ONCE = 2**27  # similarities at a time: 1 GB, and a few times that


def counter(
    units: np.ndarray, positive: Pairs, negative: Pairs, candidates: np.ndarray, device: str
) -> tuple[Callable[[np.ndarray], Counts], int]:
    """A function of queries that counts, and how many queries to give it at a time.

    Parameters
    ----------
    units
        Rows of length 1, float64 (n x d).
    positive, negative
        Which pairs are positives and negatives.
    candidates
        Indices of rows.
    device
        Of torch, ``"cuda"`` or ``"cpu"``.

    Notes
    -----
    Similarities are float64 and sorted, so that ranks and ties are those of `metrics.average_precision`.
    """
    rows = torch.as_tensor(units, device=device)
    columns = torch.as_tensor(candidates, device=device)
    targets = rows[columns]
    codes = [
        [torch.as_tensor(code.astype(np.int64), device=device) for code in part] for part in (*positive, *negative)
    ]

    def mask(queries: torch.Tensor, same: list[torch.Tensor], diff: list[torch.Tensor]) -> torch.Tensor:
        paired = queries[:, None] != columns
        for code, equal in [*((one, True) for one in same), *((one, False) for one in diff)]:
            mine, theirs = code[queries][:, None], code[columns]
            paired &= ((mine == theirs) == equal) & (mine >= 0) & (theirs >= 0)
        return paired

    def count(at: np.ndarray) -> Counts:
        queries = torch.as_tensor(at, device=device)
        pos, neg = mask(queries, *codes[:2]), mask(queries, *codes[2:])
        similarity = rows[queries] @ targets.T
        row, column = torch.nonzero(pos, as_tuple=True)
        score = similarity[row, column]
        below = torch.where(neg, similarity, -2.0).sort(dim=1).values
        keys = (below + 4.0 * torch.arange(len(at), device=device)[:, None]).flatten()  # rows cannot overlap
        end = (row + 1) * below.shape[1]
        above = end - torch.searchsorted(keys, score + TIE + 4.0 * row, right=True)
        reach = end - torch.searchsorted(keys, score - TIE + 4.0 * row)
        counted = (row, score, above, reach - above, neg.sum(dim=1))
        return Counts(*(value.cpu().numpy() for value in counted))

    return count, max(1, PAIRS_AT_ONCE // max(1, len(candidates)))
