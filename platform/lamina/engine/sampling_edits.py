"""Rules that change a row of logits before anything is drawn: bias, penalties, forbidden tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lamina.engine.sampling_state import SamplingState, TokenHistory
from lamina.types import SamplingParams

__all__ = ["edit_logits"]


def edit_logits(row: NDArray[np.float32], state: SamplingState) -> None:
    """Applies logit_bias, then the penalties, then the min_tokens mask, in place. `row` is [V]."""
    if state.bias_ids.size:
        row[state.bias_ids] += state.bias_values
    if state.history is not None:
        _penalize(row, state.history, state.params)
    if state.forbidden is not None:
        row[state.forbidden] = -np.inf


def _penalize(row: NDArray[np.float32], history: TokenHistory, params: SamplingParams) -> None:
    """Repetition divides positive logits and multiplies negative ones: above 1, a repeat is less likely."""
    ids, counts = history.ids, history.counts
    values = row[ids]
    if params.repetition_penalty != 1:
        penalty = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty != 0:
        values -= counts * np.float32(params.frequency_penalty)
    if params.presence_penalty != 0:
        values -= (counts > 0) * np.float32(params.presence_penalty)
    row[ids] = values
