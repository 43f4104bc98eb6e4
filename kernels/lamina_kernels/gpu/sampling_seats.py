"""What a running choice leaves on the device, so that two decode steps need no word from the host between them.

A choice has a *seat*. The host fills a seat once, with one packed copy; from then on `sampling.sample` advances it: it
writes the token, counts it and moves the position. The next step reads its input tokens from `last_token[seats]`.

    fields [seats, FIELDS] int64    one number per field; floats as the 32 bits of a float32, sign-extended
    listed [seats, max_listed] int64    bias bits << 32 | token id << 1 | forbidden until min_tokens; each id once
    history [seats, V] int32    times in the output << 1 | is in the prompt; kept only where a penalty looks at it

The host knows what it has put where. `SamplingNeeds` carries that to the launcher, which then leaves whole kernels out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "COLDEST",
    "FIELDS",
    "HEAD",
    "MAX_TOP",
    "MAX_VOCAB",
    "UNIT",
    "SamplingNeeds",
    "SeatParams",
    "SeatState",
    "as_float",
]

UNIT_BITS = 44
UNIT = 1 << UNIT_BITS  # the weight of the most likely token, see `sampling_weights`
MAX_VOCAB = (1 << 19) - 1  # so many tokens of weight UNIT still fit an int64
HEAD = 64  # tokens at the top of a row that are looked at one by one: a power of two
MAX_TOP = HEAD  # alternatives whose log-probabilities can be asked for
COLDEST = 1e-20  # temperatures below act like this one, as on the host
DEFAULT_LISTED = 2048  # biased or forbidden tokens of one choice

FIELDS = 16  # a 128-byte line per seat
SCALE: tl.constexpr = tl.constexpr(0)  # float: log2(e) / temperature
GREEDY: tl.constexpr = tl.constexpr(1)
TOP_K: tl.constexpr = tl.constexpr(2)  # 0: off
TOP_P: tl.constexpr = tl.constexpr(3)  # unsigned fraction of 2**64; 0: off
MIN_P: tl.constexpr = tl.constexpr(4)  # in UNIT-ths; 0: off
REPETITION: tl.constexpr = tl.constexpr(5)  # float
PRESENCE: tl.constexpr = tl.constexpr(6)  # float
FREQUENCY: tl.constexpr = tl.constexpr(7)  # float
PENALIZED: tl.constexpr = tl.constexpr(8)
SEED: tl.constexpr = tl.constexpr(9)  # 64 bits
INDEX: tl.constexpr = tl.constexpr(10)
MIN_TOKENS: tl.constexpr = tl.constexpr(11)
LISTED: tl.constexpr = tl.constexpr(12)  # entries of `listed`
LOGPROBS: tl.constexpr = tl.constexpr(13)  # -1: none asked for
SEAT_STRIDE: tl.constexpr = tl.constexpr(FIELDS)

_PLACES = 2  # position and last token, behind the fields of a packed seat


@triton.jit
def as_float(word):
    """A field that holds a float32."""
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNeeds:
    """Which kernels the seats of a launch need. More than needed costs time; less gives wrong tokens."""

    edits: bool = False  # a bias, a penalty or a forbidden token
    draws: bool = False  # a seat that is not greedy
    filters: bool = False  # of those: one with top_k, top_p or min_p
    wide_top_k: bool = False  # of those: one with top_k above HEAD
    nucleus: bool = False  # of those: one with top_p and no top_k up to HEAD
    top: int = -1  # most alternatives that a seat wants to see; -1: no log-probabilities

    def __or__(self, other: SamplingNeeds) -> SamplingNeeds:
        return SamplingNeeds(
            edits=self.edits or other.edits,
            draws=self.draws or other.draws,
            filters=self.filters or other.filters,
            wide_top_k=self.wide_top_k or other.wide_top_k,
            nucleus=self.nucleus or other.nucleus,
            top=max(self.top, other.top),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatParams:
    """How one choice is sampled. Neutral values switch a rule off; ranges are the caller's to check."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # modulo 2**64
    index: int = 0
    min_tokens: int = 0
    logprobs: int | None = None
    bias: tuple[tuple[int, float], ...] = ()  # no token twice
    forbidden: tuple[int, ...] = ()  # until min_tokens are out

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def needs(self) -> SamplingNeeds:
        draws = self.temperature != 0
        return SamplingNeeds(
            edits=self.penalized or bool(self.bias or self.forbidden),
            draws=draws,
            filters=draws and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0),
            wide_top_k=draws and self.top_k > HEAD,
            nucleus=draws and self.top_p < 1 and not 0 < self.top_k <= HEAD,
            top=-1 if self.logprobs is None else self.logprobs,
        )

    def pack(self, vocab_size: int) -> list[int]:
        """The seat's `fields`, then its `listed`."""
        listed = dict.fromkeys(self.forbidden, 0.0) | dict(self.bias)
        forbidden = frozenset(self.forbidden)
        entries = [_float_bits(bias) << 32 | token << 1 | (token in forbidden) for token, bias in listed.items()]
        fields = [
            _float_bits(math.log2(math.e) / max(self.temperature, COLDEST)),
            int(self.temperature == 0),
            self.top_k if self.top_k < vocab_size else 0,
            _signed(max(1, int(self.top_p * 2.0**64))) if self.top_p < 1 else 0,
            int(self.min_p * UNIT),
            _float_bits(self.repetition_penalty),
            _float_bits(self.presence_penalty),
            _float_bits(self.frequency_penalty),
            int(self.penalized),
            _signed(self.seed & (1 << 64) - 1),
            self.index,
            self.min_tokens,
            len(entries),
            -1 if self.logprobs is None else self.logprobs,
        ]
        return [*fields, *[0] * (FIELDS - len(fields)), *entries]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _float_bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item())  # a CPU tensor: no device waits


@dataclass(frozen=True, slots=True)
class SeatState:
    """The tensors. Only kernels of one stream, and `fill` on that stream, may touch them."""

    fields: Tensor  # [seats, FIELDS] int64
    listed: Tensor  # [seats, max_listed] int64
    history: Tensor  # [seats, V] int32
    position: Tensor  # [seats] int64: tokens accepted so far, the counter of the random stream
    last_token: Tensor  # [seats] int64; -1 until the first token

    @classmethod
    def create(
        cls, max_seats: int, vocab_size: int, device: torch.device, *, max_listed: int = DEFAULT_LISTED
    ) -> SeatState:
        """Empty seats: 4 * max_seats * vocab_size bytes and a little more. Raises ValueError for sizes out of range."""
        if max_seats < 1 or not 1 <= vocab_size <= MAX_VOCAB or max_listed < 1:
            raise ValueError(f"{max_seats} seats, {vocab_size} tokens (at most {MAX_VOCAB}), {max_listed} listed")
        return cls(
            torch.zeros(max_seats, FIELDS, dtype=torch.int64, device=device),
            torch.zeros(max_seats, max_listed, dtype=torch.int64, device=device),
            torch.zeros(max_seats, vocab_size, dtype=torch.int32, device=device),
            torch.zeros(max_seats, dtype=torch.int64, device=device),
            torch.full((max_seats,), -1, dtype=torch.int64, device=device),
        )

    @property
    def max_seats(self) -> int:
        return self.fields.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.history.shape[1]

    def fill(
        self,
        seat: int,
        params: SeatParams,
        *,
        position: int = 0,
        last_token: int = -1,
        prompt: Iterable[int] = (),
        output_counts: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Seats a choice: one copy from pinned memory, then copies within the device; nothing waits.

        `prompt` and `output_counts` (token, times) matter only to penalties. Raises ValueError for a seat or token out
        of range, for more listed tokens than the seat holds, and for more than MAX_TOP log-probabilities.
        """
        packed = params.pack(self.vocab_size)
        listed = len(packed) - FIELDS
        self._check(seat, params, listed)
        packed[FIELDS:FIELDS] = [position, last_token]
        entries = self._history_entries(prompt, output_counts) if params.penalized else []
        pinned = torch.tensor(packed + entries, dtype=torch.int64, pin_memory=self.fields.is_cuda)
        there = pinned.to(self.fields.device, non_blocking=True)
        self.fields[seat].copy_(there[:FIELDS])
        self.position[seat : seat + 1].copy_(there[FIELDS : FIELDS + 1])
        self.last_token[seat : seat + 1].copy_(there[FIELDS + 1 : FIELDS + _PLACES])
        self.listed[seat, :listed].copy_(there[FIELDS + _PLACES : FIELDS + _PLACES + listed])
        if params.penalized:
            # The library's scatter: its length is the host's, its ids differ, and it runs once per choice.
            self.history[seat].zero_()
            words = there[FIELDS + _PLACES + listed :]
            self.history[seat].scatter_(0, words >> 32, (words & 0xFFFFFFFF).to(torch.int32))

    def _check(self, seat: int, params: SeatParams, listed: int) -> None:
        if not 0 <= seat < self.max_seats:
            raise ValueError(f"seat {seat} of {self.max_seats}")
        if listed > self.listed.shape[1]:
            raise ValueError(f"{listed} biased or forbidden tokens, but a seat holds {self.listed.shape[1]}")
        if params.logprobs is not None and not 0 <= params.logprobs <= MAX_TOP:
            raise ValueError(f"{params.logprobs} log-probabilities, but the device gives 0 to {MAX_TOP}")
        tokens = [token for token, _ in params.bias] + list(params.forbidden)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise ValueError(f"a biased or forbidden token is outside of the vocabulary of {self.vocab_size}")

    def _history_entries(self, prompt: Iterable[int], output_counts: Sequence[tuple[int, int]]) -> list[int]:
        seen = dict.fromkeys(prompt, 1)
        for token, count in output_counts:
            seen[token] = seen.get(token, 0) + 2 * count
        if seen and not 0 <= min(seen) <= max(seen) < self.vocab_size:
            raise ValueError(f"a token of the history is outside of the vocabulary of {self.vocab_size}")
        return [token << 32 | value for token, value in seen.items()]
