"""Exact top-k and nucleus sets of one row without sorting the vocabulary.

Tokens are ordered by (logit descending, id ascending) everywhere, so sets are unique even among ties, which
are common: logits computed in bfloat16 have 8 significant bits. Returned ids are int64 and ascending.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["cut_nucleus", "nucleus", "top_ids", "upper_set"]

_NUCLEUS_GUESS = 256  # tokens; most nuclei of a language model are smaller
_SORT_LIMIT = 4096  # tokens; above, a stable argsort costs more than the search for the threshold


def upper_set(row: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of all tokens whose logit reaches some bound; at least the `count` most likely ones. `row` is [V].

    The vocabulary is cut into columns; at least `count` tokens reach the count-th largest of the column
    maxima, since each of those columns holds one. Only these columns are looked at again.
    """
    lanes = next((lanes for lanes in (64, 16) if row.size >= 2 * lanes * count), 0)
    if not lanes:
        return np.arange(row.size)
    columns = row.size // lanes
    grid = row[: lanes * columns].reshape(lanes, columns)
    maxima = grid.max(axis=0)
    bound = np.partition(maxima, columns - count)[columns - count]
    hot = np.flatnonzero(maxima >= bound)
    lane, column = np.nonzero(grid[:, hot] >= bound)
    rest = np.flatnonzero(row[lanes * columns :] >= bound)
    return np.concatenate((lane * columns + hot[column], lanes * columns + rest))


def top_ids(row: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The `count` most likely tokens; all of them if there are not more. Among ties the lowest ids win."""
    if count >= row.size:
        return np.arange(row.size)
    ids = upper_set(row, count)
    values = row[ids]
    bound = np.partition(values, values.size - count)[values.size - count]
    keep = values > bound
    keep[np.flatnonzero(values == bound)[: count - np.count_nonzero(keep)]] = True
    kept: NDArray[np.int64] = ids[keep]
    return kept


def cut_nucleus(
    ids: NDArray[np.int64], logits: NDArray[np.float32], weights: NDArray[np.floating], mass: float
) -> NDArray[np.int64]:
    """The shortest run of `ids` from the most likely on whose weights sum to `mass`; at least one token.

    `ids` are ascending; `logits` and `weights` belong to them.
    """
    order = np.argsort(-logits, kind="stable")
    covered = np.cumsum(weights[order], dtype=np.float64)
    length = int(np.searchsorted(covered, mass)) + 1
    return np.sort(ids[order[:length]])


def nucleus(row: NDArray[np.float32], weights: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
    """The smallest set of most likely tokens that holds the share `top_p` < 1 of the weights [V]."""
    total = float(np.sum(weights, dtype=np.float64))
    ids = upper_set(row, _NUCLEUS_GUESS)
    guess = weights[ids]
    if ids.size <= _SORT_LIMIT and np.sum(guess, dtype=np.float64) >= top_p * total:
        return cut_nucleus(ids, row[ids], guess, top_p * total)
    return _wide_nucleus(row, weights, total, top_p)


def _wide_nucleus(
    row: NDArray[np.float32], weights: NDArray[np.float32], total: float, top_p: float
) -> NDArray[np.int64]:
    """For flat rows: sorts weights only, to find the one at the edge, then settles ties at the edge."""
    # All tokens below (1 - top_p) / V of the total together weigh less than what may be left out.
    ids = np.flatnonzero(weights >= 0.999 * (1 - top_p) * total / row.size)
    values = weights[ids]
    descending = np.sort(values)[::-1]
    covered = np.cumsum(descending, dtype=np.float64)
    length = min(int(np.searchsorted(covered, top_p * total)) + 1, values.size)
    edge = descending[length - 1]
    above, ties = ids[values > edge], ids[values == edge]
    ties = ties[np.argsort(-row[ties], kind="stable")[: length - above.size]]
    return np.sort(np.concatenate((above, ties)))
