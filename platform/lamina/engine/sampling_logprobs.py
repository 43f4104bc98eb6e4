"""Log-probabilities of the unmodified distribution, as clients ask for them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lamina.engine.sampling_draw import RowBuffers
from lamina.engine.sampling_filters import top_ids
from lamina.types import TokenLogprob

__all__ = ["token_logprob"]


def token_logprob(row: NDArray[np.float32], token_id: int, count: int, buffers: RowBuffers) -> TokenLogprob:
    """Logprob (natural log) and rank of `token_id` and the `count` most likely tokens in `row` [V].

    Rank and list share one order, (logit descending, id ascending): a token of rank r <= count is the r-th of
    the list. Impossible tokens (logit -inf) are not listed.
    """
    logprobs = buffers.log_softmax(row)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        ids = top_ids(row, count)
        ids = ids[np.argsort(-row[ids], kind="stable")]
        ids = ids[row[ids] > -np.inf]
        top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]), _rank(row, token_id), top)


def _rank(row: NDArray[np.float32], token_id: int) -> int:
    value = row[token_id]
    return 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token_id] == value))
