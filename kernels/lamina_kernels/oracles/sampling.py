"""Sampling one row at a time in float64, with sorted lists: the meaning of `gpu.sampling.sample`, obviously."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lamina_kernels.gpu import sampling_seats as layout
from lamina_kernels.gpu.sampling import SampledRows, check_arguments
from lamina_kernels.gpu.sampling_rows import ALL_MASKED, NOT_FINITE, OK, UNUSED
from lamina_kernels.gpu.sampling_seats import UNIT, SamplingNeeds, SeatState

__all__ = ["distribution", "edited", "sample", "uniform"]

_WORD = 0xFFFFFFFF


def sample(logits: Tensor, seats: Tensor, state: SeatState, needs: SamplingNeeds) -> SampledRows:
    """As `gpu.sampling.sample`, whatever `needs` leaves out."""
    check_arguments(logits, seats, state, needs)
    rows, top = logits.shape[0], max(needs.top, 0)
    told = rows if needs.top >= 0 else 0
    out = SampledRows(
        torch.full((rows,), -1),
        torch.full((rows,), UNUSED, dtype=torch.int32),
        torch.full((told,), math.nan),
        torch.zeros(told, dtype=torch.int32),
        torch.full((told, top), -1, dtype=torch.int32),
        torch.full((told, top), -math.inf),
    )
    for row, seat in enumerate(seats.tolist()):
        if seat >= 0:
            _sample_row(logits[row], seat, state, row, out)
    return out


def _sample_row(x: Tensor, seat: int, state: SeatState, row: int, out: SampledRows) -> None:
    if x.isnan().any() or not math.isfinite(float(x.max())):
        out.statuses[row] = NOT_FINITE
        return
    y = edited(x, seat, state)
    if not math.isfinite(float(y.max())):
        out.statuses[row] = ALL_MASKED
        return
    token = _choose(y, seat, state)
    out.tokens[row], out.statuses[row] = token, OK
    if out.logprobs.numel() and _field(state, seat, layout.LOGPROBS) >= 0:
        _report(x, token, row, out)
    state.last_token[seat] = token
    state.position[seat] += 1
    if _field(state, seat, layout.PENALIZED):
        state.history[seat, token] += 2


def edited(x: Tensor, seat: int, state: SeatState) -> Tensor:
    """Bias, penalties, mask: float32 [V], each operation rounded."""
    y = x.clone()
    entries = state.listed[seat, : _field(state, seat, layout.LISTED)].tolist()
    for entry in entries:
        y[(entry & _WORD) >> 1] += _as_float(entry >> 32)
    if _field(state, seat, layout.PENALIZED):
        seen, count = state.history[seat] != 0, (state.history[seat] >> 1).float()
        repetition = _float(state, seat, layout.REPETITION)
        y = torch.where(seen, torch.where(y > 0, y / repetition, y * repetition), y)
        y = y - count * _float(state, seat, layout.FREQUENCY)
        y = y - (count > 0).float() * _float(state, seat, layout.PRESENCE)
    if int(state.position[seat]) < _field(state, seat, layout.MIN_TOKENS):
        for entry in entries:
            if entry & 1:
                y[(entry & _WORD) >> 1] = -math.inf
    return y


def _choose(y: Tensor, seat: int, state: SeatState) -> int:
    if _field(state, seat, layout.GREEDY):
        return int(y.argmax())
    kept = distribution(y, seat, state)
    place, passed = uniform(seat, state) * math.fsum(kept.values()), 0.0
    for token in sorted(kept):
        passed += kept[token]
        if passed > place:
            return token
    return max(kept)


def distribution(y: Tensor, seat: int, state: SeatState) -> dict[int, float]:
    """Kept tokens with their weights, that of the most likely being 1."""
    logits = y.double().tolist()
    scale = _float(state, seat, layout.SCALE)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weights = {token: 2.0 ** ((logits[token] - logits[order[0]]) * scale) for token in order}
    kept = order[: _field(state, seat, layout.TOP_K) or len(order)]
    top_p = (_field(state, seat, layout.TOP_P) % (1 << 64)) / 2.0**64
    if top_p:
        mass, covered, nucleus = top_p * math.fsum(weights[token] for token in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            covered += weights[token]
            if covered >= mass:
                break
        kept = nucleus
    least = max(_field(state, seat, layout.MIN_P), 1) / UNIT  # less than 1 / UNIT is impossible
    return {token: weights[token] for token in kept if weights[token] >= least}


def _report(x: Tensor, token: int, row: int, out: SampledRows) -> None:
    logprobs = x.double().log_softmax(0)
    order = sorted(range(x.numel()), key=lambda other: (-float(x[other]), other))
    out.logprobs[row] = logprobs[token]
    out.ranks[row] = 1 + order.index(token)
    possible = [other for other in order if x[other] > -math.inf][: out.top_ids.shape[1]]
    for place, other in enumerate(possible):
        out.top_ids[row, place] = other
        out.top_logprobs[row, place] = logprobs[other]


def uniform(seat: int, state: SeatState) -> float:
    """Philox-4x32-10 word by word."""
    seed, position = _field(state, seat, layout.SEED), int(state.position[seat])
    counter = [position & _WORD, position >> 32, _field(state, seat, layout.INDEX), 0]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [second >> 32 ^ counter[1] ^ key[0], second & _WORD, first >> 32 ^ counter[3] ^ key[1], first & _WORD]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return ((counter[0] >> 5) * 2**26 + (counter[1] >> 6)) / 2**53


def _field(state: SeatState, seat: int, field: int) -> int:
    return int(state.fields[seat, int(field)])


def _float(state: SeatState, seat: int, field: int) -> float:
    return _as_float(_field(state, seat, field))


def _as_float(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
