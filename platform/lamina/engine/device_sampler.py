"""The sampler whose steps do not wait for the device: same meaning as `engine.sampler`, state kept by seat.

`launch` only enqueues; `Pending.collect` is the one place that waits. Between the two the next step can be launched:
its input tokens are read on the device by `feed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from lamina.engine.sampler import Sampled
from lamina.engine.sampling_state import SamplingState
from lamina.types import TokenLogprob
from lamina_kernels.gpu.sampling import SampledRows, sample
from lamina_kernels.gpu.sampling_rows import ALL_MASKED, NOT_FINITE
from lamina_kernels.gpu.sampling_seats import MAX_TOP, SamplingNeeds, SeatParams, SeatState

__all__ = ["DeviceSampler", "Pending"]

_TOPS = (-1, 0, 1, 8, 20, MAX_TOP)  # alternatives that kernels are compiled for; the host takes what was asked for
_FAILURES = {
    NOT_FINITE: "The model returned logits that are not finite numbers.",
    ALL_MASKED: "No token is left to choose: min_tokens forbids every token that the model allows.",
}


@dataclass(slots=True)
class _Seat:
    state: SamplingState
    params: SeatParams
    position: int  # of the seat on the device, once all that is launched has run

    @property
    def needs(self) -> SamplingNeeds:
        """Once min_tokens are out, a seat that had nothing else to edit spares the launch the edits."""
        early = self.position < self.params.min_tokens
        return self.params.needs if early else replace(self.params, forbidden=()).needs


class Pending:
    """The rows of one launch, perhaps still being computed."""

    def __init__(self, rows: SampledRows, logprobs: Sequence[int | None]) -> None:
        """Starts the copy to the host. `logprobs` is what each row's choice asked for."""
        self._logprobs = logprobs
        self._rows = SampledRows(*(_to_host(part) for part in _parts(rows)))
        self._done: torch.cuda.Event | None = None
        if rows.tokens.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def collect(self) -> list[Sampled]:
        """Waits, then one outcome per row, in order. A row without a choice has token -1 and no failure."""
        if self._done is not None:
            self._done.synchronize()
        rows = self._rows
        statuses = rows.statuses.tolist()
        return [
            Sampled(token, self._logprob(row, token), _FAILURES.get(statuses[row]))
            for row, token in enumerate(rows.tokens.tolist())
        ]

    def _logprob(self, row: int, token: int) -> TokenLogprob | None:
        count, rows = self._logprobs[row], self._rows
        if count is None or token < 0:
            return None
        ids, values = rows.top_ids[row, :count].tolist(), rows.top_logprobs[row, :count].tolist()
        top = tuple((other, value) for other, value in zip(ids, values, strict=True) if other >= 0)
        return TokenLogprob(token, float(rows.logprobs[row]), int(rows.ranks[row]), top)


class DeviceSampler:
    """A `StepSampler` where the logits are. Not safe for use from two threads.

    Each choice has a seat from its first launch until it leaves; the device advances it. All calls must come on one
    stream: a seat is filled, read and moved in the order of the calls.
    """

    runs_ahead = True

    def __init__(self, max_seats: int, vocab_size: int, device: torch.device | str) -> None:
        """Takes 4 * max_seats * vocab_size bytes of the device. Raises ValueError for sizes that kernels cannot."""
        self._state = SeatState.create(max_seats, vocab_size, torch.device(device))
        self._free = list(range(max_seats))[::-1]
        self._seats: dict[int, _Seat] = {}
        self._by_state: dict[SamplingState, int] = {}

    @property
    def device(self) -> torch.device:
        return self._state.fields.device

    @torch.inference_mode()
    def launch(self, logits: Tensor, states: Sequence[SamplingState]) -> Pending:
        """Enqueues one token for each row of logits [R, V], on this device.

        Raises ValueError for shapes that do not match, a state that comes twice or does not fit a seat, and for more
        choices than seats.
        """
        self._check(logits, states)
        seats = [self._seat_of(state) for state in states]
        needs = reduce(or_, (self._seats[seat].needs for seat in seats), SamplingNeeds())
        needs = replace(needs, top=next(top for top in _TOPS if top >= needs.top))
        there = torch.tensor(seats, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        there = there.to(self.device, non_blocking=True)
        rows = sample(logits.detach().float().contiguous(), there, self._state, needs)
        for seat in seats:
            self._seats[seat].position += 1
        return Pending(rows, [state.params.logprobs for state in states])

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Launches every kind of draw once, for nobody."""
        logits = torch.zeros(1, self._state.vocab_size, device=self.device)
        nobody = torch.full((1,), -1, dtype=torch.int32, device=self.device)
        for top in _TOPS:
            needs = SamplingNeeds(edits=True, draws=True, filters=True, wide_top_k=True, nucleus=True, top=top)
            sample(logits, nobody, self._state, needs)
        sample(logits, nobody, self._state, SamplingNeeds())

    def placeholder(self, state: SamplingState) -> int:
        """See `StepSampler`; for a state that was launched and has not left."""
        return -1 - self._by_state[state]

    def leave(self, state: SamplingState) -> None:
        """Frees the seat. Launches that still run may finish with it: it is filled anew behind them on the stream."""
        seat = self._by_state.pop(state, None)
        if seat is not None:
            del self._seats[seat]
            self._free.append(seat)

    def feed(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] int64 with each placeholder replaced by the token that its choice got last."""
        seats = (-1 - token_ids).clamp_(min=0)
        drawn = self._state.last_token.index_select(0, seats).clamp_(min=0)  # -1 where the draw failed
        return torch.where(token_ids < 0, drawn, token_ids)

    def _check(self, logits: Tensor, states: Sequence[SamplingState]) -> None:
        if logits.dim() != 2 or logits.shape[0] != len(states):
            raise ValueError(f"logits of shape {tuple(logits.shape)} do not match {len(states)} states")
        for state in states:
            if state.vocab_size != logits.shape[1]:
                raise ValueError(f"a state for {state.vocab_size} tokens met logits of {logits.shape[1]}")
        if len(set(states)) != len(states):
            raise ValueError("a state comes twice")

    def _seat_of(self, state: SamplingState) -> int:
        if state not in self._by_state:
            if not self._free:
                raise ValueError(f"all {self._state.max_seats} seats are taken")
            self._fill(self._free[-1], state)
            self._by_state[state] = self._free.pop()
        return self._by_state[state]

    def _fill(self, seat: int, state: SamplingState) -> None:
        params = _seat_params(state)
        history = state.history
        # A token that is only in the prompt is listed with a count of 0; only repetition looks at the prompt.
        ids = history.ids.tolist() if history is not None else []
        counts = history.counts.tolist() if history is not None else []
        self._state.fill(
            seat,
            params,
            position=state.position,
            prompt=ids,
            output_counts=[(token, int(count)) for token, count in zip(ids, counts, strict=True) if count],
        )
        self._seats[seat] = _Seat(state, params, state.position)


def _seat_params(state: SamplingState) -> SeatParams:
    params = state.params
    return SeatParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=state.seed,
        index=state.index,
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
        bias=params.logit_bias,
        forbidden=tuple(state.forbidden.tolist()) if state.forbidden is not None else (),
    )


def _parts(rows: SampledRows) -> tuple[Tensor, ...]:
    return rows.tokens, rows.statuses, rows.logprobs, rows.ranks, rows.top_ids, rows.top_logprobs


def _to_host(part: Tensor) -> Tensor:
    if not part.is_cuda:
        return part
    pinned = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    return pinned.copy_(part, non_blocking=True)
