"""The sampler whose steps do not wait for the device: same meaning as `engine.sampler`, state kept by seat.

`launch` only enqueues; `Pending.collect` is the one place that waits. Between the two the next step can be launched,
its input tokens read on the device by `last_tokens`. `sample` does both at once and takes `SamplingState`s as the
host's sampler does, so that it fits into `EngineCore` in its place.
"""

from __future__ import annotations

from collections import OrderedDict
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
from lamina_kernels.gpu.sampling_seats import SamplingNeeds, SeatParams, SeatState

__all__ = ["DeviceSampler", "Pending"]

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
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
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
    """Samples where the logits are. Owns the seats of the running choices; not safe for use from two threads.

    All calls must come on one stream: a seat is filled, read and moved in the order of the calls.
    """

    def __init__(self, max_seats: int, vocab_size: int, device: torch.device | str) -> None:
        """Takes 4 * max_seats * vocab_size bytes of the device. Raises ValueError for sizes that kernels cannot."""
        self._state = SeatState.create(max_seats, vocab_size, torch.device(device))
        self._free = list(range(max_seats))[::-1]
        self._seats: dict[int, _Seat] = {}
        self._by_state: OrderedDict[int, int] = OrderedDict()  # id(state) of `sample` -> seat, oldest use first

    @property
    def device(self) -> torch.device:
        return self._state.fields.device

    @torch.inference_mode()
    def seat(self, state: SamplingState) -> int:
        """A seat for a choice, filled from its state as it is now; from here on the device advances by itself.

        Raises ValueError if no seat is free, or if the state does not fit one.
        """
        if not self._free:
            raise ValueError(f"all {self._state.max_seats} seats are taken")
        self._fill(self._free[-1], state)
        return self._free.pop()

    def leave(self, seat: int) -> None:
        """Frees a seat. Launches that still run may finish with it: it is filled anew behind them on the stream."""
        del self._seats[seat]
        self._free.append(seat)

    @torch.inference_mode()
    def launch(self, logits: Tensor, seats: Sequence[int]) -> Pending:
        """Enqueues one token for each row and advances its seat. No seat may come twice; -1 is a row without a choice.

        logits: [R, V] on this device. Raises ValueError for a seat that nobody has, or shapes that do not match.
        """
        taken = [seat for seat in seats if seat >= 0]
        if len(set(taken)) != len(taken) or not self._seats.keys() >= set(taken):
            raise ValueError(f"seats {seats} are not all taken, or one comes twice")
        needs = reduce(or_, (self._seats[seat].needs for seat in taken), SamplingNeeds())
        there = torch.tensor(seats, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        there = there.to(self.device, non_blocking=True)
        rows = sample(logits.detach().float().contiguous(), there, self._state, needs)
        for seat in taken:
            self._seats[seat].position += 1
        return Pending(rows, [self._seats[seat].state.params.logprobs if seat >= 0 else None for seat in seats])

    def last_tokens(self, seats: Tensor) -> Tensor:
        """The tokens int64 that the seats got last, -1 if none yet. seats: int32 or int64 on this device."""
        return self._state.last_token.index_select(0, seats)

    # --- in the host sampler's place --------------------------------------------------------------------------------

    @torch.inference_mode()
    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
        """As `engine.sampler.Sampler.sample`, but a state may come only once. Seats are kept between calls.

        A state whose position is not its seat's is seated anew, so a caller that drops a token or asks twice is served
        right. What cannot be seen is a caller that appends another token than it got.
        """
        if logits.dim() != 2 or logits.shape[0] != len(states):
            raise ValueError(f"logits of shape {tuple(logits.shape)} do not match {len(states)} states")
        for state in states:
            if state.vocab_size != logits.shape[1]:
                raise ValueError(f"a state for {state.vocab_size} tokens met logits of {logits.shape[1]}")
        if len({id(state) for state in states}) != len(states):
            raise ValueError("a state comes twice")
        size = len(self._free) + len(self._by_state)  # the others belong to callers of `seat`
        if states and not size:
            raise ValueError(f"all {self._state.max_seats} seats are taken")
        sampled: list[Sampled] = []
        for first in range(0, len(states), max(size, 1)):
            seats = self._seats_of(states[first : first + size])
            outcomes = self.launch(logits[first : first + size], seats).collect()
            self._note_failures(seats, outcomes)
            sampled += outcomes
        return sampled

    def _seats_of(self, states: Sequence[SamplingState]) -> list[int]:
        """Seats for states that are all different and not more than there are seats."""
        for state in states:
            if id(state) in self._by_state:
                self._by_state.move_to_end(id(state))  # no new seat shall be theirs
        for state in states:
            if id(state) not in self._by_state:
                self._by_state[id(state)] = self._new_seat(state)
            elif self._seats[self._by_state[id(state)]].position != state.position:
                self._fill(self._by_state[id(state)], state)
        return [self._by_state[id(state)] for state in states]

    def _new_seat(self, state: SamplingState) -> int:
        """A free seat, or that of the state that was not asked for longest."""
        if not self._free and self._by_state:
            _, oldest = self._by_state.popitem(last=False)
            self.leave(oldest)
        return self.seat(state)

    def _note_failures(self, seats: Sequence[int], sampled: Sequence[Sampled]) -> None:
        for seat, outcome in zip(seats, sampled, strict=True):
            if outcome.failed is not None:
                self._seats[seat].position -= 1  # a failed row does not move its seat

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
