"""What the engine core knows of a request: its choices, their tokens, their blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from lamina.engine.prefix_lookup import PrefixLookup
from lamina.engine.sampling_state import SamplingState
from lamina.types import CachedTokens, GenerationRequest, SamplingParams
from lamina_kvtier.identity import BlockId, IdentityChain
from lamina_kvtier.tier import adapter_bytes

__all__ = ["BlockTable", "Choice", "ChoiceStatus", "RequestState"]


class ChoiceStatus(Enum):
    WAITING = auto()  # in the queue, holds no blocks
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class RequestState:
    """One submitted request and the choices it still has to finish."""

    request: GenerationRequest
    arrival: int  # sequence number: lower is older
    seed: int
    choices: dict[int, Choice] = field(default_factory=dict)  # unfinished ones, by index
    cancelled: set[int] = field(default_factory=set)  # indexes to end as soon as they are born
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache, at the first admission
    cached_by_tier: CachedTokens = field(default_factory=CachedTokens)  # those, and what came while it prefilled
    submitted_at: float = 0.0  # seconds of the engine's clock
    queued_s: float | None = None  # from then to its first start; None: it has not started
    is_wait_told: bool = False  # in an event
    lookup: PrefixLookup | None = None  # until its prompt is computed, if blocks of it were missing
    adapter: bytes = field(init=False)  # digest of the one that computes its blocks, as the tiers name it

    def __post_init__(self) -> None:
        self.adapter = adapter_bytes(self.request.adapter)

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling

    @property
    def tenant(self) -> str:
        return self.request.tenant


class BlockTable(list[int]):
    """A choice's blocks in order, with an array of the same numbers that is kept up as they come.

    Steps read all of it each time, and a long context has thousands: converting the list would cost more than planning.
    """

    __slots__ = ("_array", "_valid")

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        super().__init__(blocks)
        self._array = np.empty(max(16, len(self)), dtype=np.int64)
        self._valid = 0

    def replace(self, index: int, block: int) -> None:
        """Puts another block in one place."""
        self[index] = block
        self._valid = min(self._valid, index)

    def drop_last(self) -> int:
        """Takes the last block off, and returns it."""
        self._valid = min(self._valid, len(self) - 1)
        return self.pop()

    def array(self) -> NDArray[np.int64]:
        """[blocks]; a view that the next change may overwrite. Blocks are only appended, or changed by `replace`."""
        if len(self) > len(self._array):
            self._array = np.concatenate((self._array, np.empty(len(self), dtype=np.int64)))
        self._array[self._valid : len(self)] = self[self._valid :]
        self._valid = len(self)
        return self._array[: len(self)]


class Choice:
    """One sequence: prompt + output tokens and the table of blocks that holds the first `computed` of them.

    Invariant between steps: `computed < len(tokens)` (the last token has not been through the model), the table
    covers at least `computed` tokens, and its first `published` blocks are in the prefix index. While it waits,
    `computed == 0` and the table is empty: a preempted choice recomputes its own tokens, which is how it resumes
    with identical output.

    `tokens` may end in up to two *placeholders* (negative, see `StepSampler.placeholder`): tokens that launched steps
    are drawing. They count as tokens for planning; the first `known` are real, and only those have identities.
    """

    __slots__ = (
        "chain",
        "computed",
        "index",
        "known",
        "limit",
        "published",
        "request",
        "sampling",
        "status",
        "table",
        "tokens",
    )

    def __init__(
        self,
        request: RequestState,
        index: int,
        tokens: list[int],
        chain: IdentityChain,
        sampling: SamplingState,
        *,
        limit: int,
    ) -> None:
        """`limit`: tokens, the prompt's included, after which it ends in any case."""
        self.request = request
        self.index = index
        self.tokens = tokens
        self.known = len(tokens)
        self.limit = limit
        self.chain = chain
        self.sampling = sampling
        self.table = BlockTable()
        self.computed = 0
        self.published = 0
        self.status = ChoiceStatus.WAITING

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are not in blocks yet: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def prompt_len(self) -> int:
        return len(self.request.request.prompt_token_ids)

    @property
    def output_len(self) -> int:
        """Drawn tokens, those being drawn included."""
        return len(self.tokens) - self.prompt_len

    @property
    def is_drawn_out(self) -> bool:
        """Whether every token that it may have is drawn or being drawn: there is nothing left to compute."""
        return len(self.tokens) >= self.limit

    @property
    def unborn(self) -> int:
        """Sibling choices that will fork off when this one's prompt is complete."""
        return self.request.params.n - 1 if self.index == 0 and self.output_len == 0 else 0

    @property
    def order(self) -> tuple[int, int]:
        """Age: smaller is older."""
        return (self.request.arrival, self.index)

    def known_ids(self, block_size: int) -> list[BlockId]:
        """Identities that a prefix look-up may use: at least one token must be left to compute."""
        return self.chain.ids[: (len(self.tokens) - 1) // block_size]

    def expect(self, placeholder: int) -> None:
        """Notes that a launched step draws the next token."""
        self.tokens.append(placeholder)

    def append(self, token_id: int) -> None:
        """Takes the next drawn token, in place of its placeholder if there is one."""
        self.tokens[self.known : self.known + 1] = [token_id]
        self.known += 1
        self.chain.extend((token_id,))
        self.sampling.append(token_id)
