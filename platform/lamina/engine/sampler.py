"""From logits to tokens: one call per step, for all rows of the step.

Rows that only need their most likely token share one argmax. Every other row goes through its rules alone
(`sampling_edits`, `sampling_draw`, `sampling_logprobs`): at this vocabulary size the work inside of a row
outweighs the loop around it, a row that fits the core's cache costs no memory traffic, and its outcome cannot
depend on the rows next to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.engine.sampling_draw import RowBuffers, draw
from lamina.engine.sampling_edits import edit_logits
from lamina.engine.sampling_logprobs import token_logprob
from lamina.engine.sampling_random import uniforms
from lamina.engine.sampling_state import SamplingState
from lamina.types import TokenLogprob

__all__ = ["Drawn", "Draws", "Sampled", "Sampler", "StepSampler"]

_NOT_FINITE = "The model returned logits that are not finite numbers."
_ALL_MASKED = "No token is left to choose: min_tokens forbids every token that the model allows."


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome of one row. If there is no token, `failed` says why and `token_id` is -1."""

    token_id: int
    logprob: TokenLogprob | None  # only if the choice asked for it
    failed: str | None = None


class Draws(Protocol):
    """One step's draws, under way."""

    def collect(self) -> list[Sampled]:
        """Waits for them; one outcome per row, in order."""
        ...


class StepSampler(Protocol):
    """Draws the next tokens of a step's choices."""

    runs_ahead: bool
    """Whether a next step may be launched before this one's draws are collected."""

    def launch(self, logits: Tensor, states: Sequence[SamplingState]) -> Draws:
        """Starts one draw per row of logits [R, V] float32, which may be modified. ValueError for shapes amiss.

        A state is advanced by its owner (`SamplingState.append`) when the draw is collected, at most one step late.
        """
        ...

    def placeholder(self, state: SamplingState) -> int:
        """A negative number that stands in a batch's token ids for the token that was last launched for `state`."""
        ...

    def warm_up(self) -> None:
        """Compiles what draws will need."""
        ...

    def leave(self, state: SamplingState) -> None:
        """Forgets what it keeps for a choice that ended or lost its place; it may come back."""
        ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """`Draws` that are there already."""

    outcomes: list[Sampled]

    def collect(self) -> list[Sampled]:
        return self.outcomes


class Sampler:
    """A `StepSampler` on the CPU; logits on another device are copied over. Not safe for use from two threads."""

    runs_ahead = False

    def __init__(self) -> None:
        self._buffers = RowBuffers(0)

    def launch(self, logits: Tensor, states: Sequence[SamplingState]) -> Drawn:
        return Drawn(self.sample(logits, states))

    def placeholder(self, state: SamplingState) -> int:
        raise RuntimeError("this sampler's tokens are known at once")

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def leave(self, state: SamplingState) -> None:
        """Keeps nothing between steps."""

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
        """One outcome per row, in order. `logits` is [R, V] float32 and may be modified in place.

        A logit of -inf means "never". A row with NaN, with +inf, or with no finite logit fails alone (see
        `Sampled.failed`). The caller appends accepted tokens to the states. Raises ValueError if shapes do
        not match the states.
        """
        rows = _as_rows(logits, states)
        if not states:
            return []
        best = rows.argmax(axis=1)  # the first NaN if there is one, else the lowest of the best ids
        peaks = rows[np.arange(len(states)), best]
        sampled = [Sampled(token, None) for token in best.tolist()]
        special = [row for row, state in enumerate(states) if not state.plain]
        if special:
            self._sample_special(rows, peaks, states, special, sampled)
        for row in np.flatnonzero(~np.isfinite(peaks)).tolist():
            sampled[row] = Sampled(-1, None, _NOT_FINITE)
        return sampled

    def _sample_special(
        self,
        rows: NDArray[np.float32],
        peaks: NDArray[np.float32],
        states: Sequence[SamplingState],
        special: Sequence[int],
        sampled: list[Sampled],
    ) -> None:
        if self._buffers.vocab_size != rows.shape[1]:
            self._buffers = RowBuffers(rows.shape[1])
        chosen = [states[row] for row in special]
        numbers = uniforms(
            [state.seed for state in chosen],
            [state.index for state in chosen],
            [state.position for state in chosen],
        ).tolist()
        # Infinities are legal here: a mask, or a small temperature. NaN is caught by the peaks.
        with torch.inference_mode(), np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for row, state, uniform in zip(special, chosen, numbers, strict=True):
                if np.isfinite(peaks[row]):
                    sampled[row] = self._sample_row(rows[row], sampled[row].token_id, state, uniform)

    def _sample_row(self, row: NDArray[np.float32], best: int, state: SamplingState, uniform: float) -> Sampled:
        original = row
        if state.edits:
            if state.params.logprobs is not None:
                np.copyto(self._buffers.original, row)
                original = self._buffers.original
            edit_logits(row, state)
            best = int(row.argmax())
        peak = float(row[best])
        if not np.isfinite(peak):
            return Sampled(-1, None, _ALL_MASKED)
        token = best if state.greedy else draw(row, peak, state.params, uniform, self._buffers)
        if state.params.logprobs is None:
            return Sampled(token, None)
        return Sampled(token, token_logprob(original, token, state.params.logprobs, self._buffers))


def _as_rows(logits: Tensor, states: Sequence[SamplingState]) -> NDArray[np.float32]:
    if logits.dim() != 2 or logits.shape[0] != len(states):
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not match {len(states)} states")
    for state in states:
        if state.vocab_size != logits.shape[1]:
            raise ValueError(f"a state for {state.vocab_size} tokens met logits of {logits.shape[1]}")
    rows: NDArray[np.float32] = logits.detach().to("cpu", torch.float32).contiguous().numpy()
    return rows
