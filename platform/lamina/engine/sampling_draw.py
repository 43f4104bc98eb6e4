"""Draws one token from one row: temperature, top_k, top_p, min_p, then the inverse of the distribution.

A row is processed alone and always in the same buffers, so what it yields cannot depend on its batch, not
even through the rounding of a reduction that is split differently. Weights over the whole vocabulary are
float32, those of a filtered set may be float64; every sum is float64.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.engine.sampling_filters import cut_nucleus, nucleus, top_ids
from lamina.types import SamplingParams

__all__ = ["RowBuffers", "draw"]

_BLOCK = 256  # tokens whose weights are summed before the search descends into one block
_COLDEST = 1e-20  # temperatures below act like this one: any difference of logits decides


class RowBuffers:
    """Scratch memory for one row of `vocab_size` logits, reused so that no step pays for fresh pages."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._scaled, self._weights = torch.empty(vocab_size), torch.empty(vocab_size)
        self.scaled: NDArray[np.float32] = self._scaled.numpy()
        self.weights: NDArray[np.float32] = self._weights.numpy()
        self.original: NDArray[np.float32] = np.empty(vocab_size, dtype=np.float32)
        blocks = -(-vocab_size // _BLOCK)
        self.blocks: NDArray[np.float64] = np.zeros((blocks, _BLOCK))  # the tail stays zero

    def softmax(self, row: NDArray[np.float32], peak: float, temperature: float) -> NDArray[np.float32]:
        """Probabilities [V] up to a common factor, valid until the next call."""
        np.subtract(row, np.float32(peak), out=self.scaled)
        if temperature != 1:
            np.divide(self.scaled, np.float32(max(temperature, _COLDEST)), out=self.scaled)
        torch.softmax(self._scaled, dim=-1, out=self._weights)
        return self.weights

    def log_softmax(self, row: NDArray[np.float32]) -> NDArray[np.float32]:
        """Log-probabilities [V], valid until the next call."""
        np.copyto(self.scaled, row)
        torch.log_softmax(self._scaled, dim=-1, out=self._weights)
        return self.weights


def draw(row: NDArray[np.float32], peak: float, params: SamplingParams, uniform: float, buffers: RowBuffers) -> int:
    """The token at `uniform` in [0, 1) of the filtered distribution, tokens in the order of their ids.

    `row` [V] holds edited logits whose largest value `peak` is finite; temperature is > 0. Tokens with a
    logit of -inf never come.
    """
    if 0 < params.top_k < row.size:
        ids, weights = _top_k(row, peak, params)
    elif params.top_p < 1:
        everything = buffers.softmax(row, peak, params.temperature)
        ids = nucleus(row, everything, params.top_p)
        weights = everything[ids].astype(np.float64)
    elif params.min_p > 0:
        slack = max(params.temperature, _COLDEST) * np.log(params.min_p) * (1 + 1e-6)
        ids = np.flatnonzero(row >= np.float32(peak + slack - 1e-6 * abs(peak)))
        weights = _weigh(row[ids], peak, params.temperature)
    else:
        return _invert_all(buffers.softmax(row, peak, params.temperature), uniform, buffers)
    if params.min_p > 0:
        likely = weights >= params.min_p * weights.max()
        ids, weights = ids[likely], weights[likely]
    return int(ids[_invert(np.cumsum(weights), uniform)])


def _top_k(
    row: NDArray[np.float32], peak: float, params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids = top_ids(row, params.top_k)
    weights = _weigh(row[ids], peak, params.temperature)
    if params.top_p < 1:
        kept = cut_nucleus(ids, row[ids], weights, params.top_p * float(weights.sum()))
        weights = weights[np.searchsorted(ids, kept)]
        ids = kept
    return ids, weights


def _weigh(logits: NDArray[np.float32], peak: float, temperature: float) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp((logits.astype(np.float64) - peak) / max(temperature, _COLDEST))
    return weights


def _invert_all(weights: NDArray[np.float32], uniform: float, buffers: RowBuffers) -> int:
    """`_invert` over the whole vocabulary in two levels, so that only one block needs a running sum."""
    blocks = buffers.blocks
    blocks.reshape(-1)[: weights.size] = weights
    ends = np.cumsum(np.add.reduce(blocks, axis=1))
    block = _invert(ends, uniform)
    before = ends[block - 1] if block else 0.0
    running = before + np.cumsum(blocks[block])
    # The block's running sum may end an ulp below its own total: the last token with any weight takes that.
    inside = min(int(np.searchsorted(running, _target(ends, uniform), side="right")), _last(running))
    return block * _BLOCK + inside


def _last(running: NDArray[np.float64]) -> int:
    """The place of the last token with any weight."""
    return int(np.searchsorted(running, running[-1]))


def _invert(running: NDArray[np.float64], uniform: float) -> int:
    """First place whose running sum exceeds the target; its own weight is therefore not zero."""
    return int(np.searchsorted(running, _target(running, uniform), side="right"))


def _target(running: NDArray[np.float64], uniform: float) -> float:
    total = float(running[-1])
    return min(uniform * total, float(np.nextafter(total, 0.0)))
