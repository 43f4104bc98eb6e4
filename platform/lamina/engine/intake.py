"""What a request is checked for before it may wait: its parameters, its length, and a place in the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lamina.engine.patience import Patience
from lamina.engine.queue import FairQueue
from lamina.engine.sampling_params import validate
from lamina.errors import ContextLengthExceeded, EngineOverloaded, InvalidRequest, LimitExceeded
from lamina.types import EngineInfo, GenerationRequest

__all__ = ["CoreLimits", "Intake"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    max_waiting: int
    max_choices: int
    max_logprobs: int
    max_queue_s: float = 0.0  # 0: requests wait as long as it takes


class KnownAdapters(Protocol):
    def check(self, digest: str) -> None:
        """Raises a NotFound for one that is not in the store."""
        ...


class Intake:
    """Checks requests and changes nothing. What the ledger thinks of them comes afterwards."""

    def __init__(
        self, info: EngineInfo, limits: CoreLimits, queue: FairQueue, patience: Patience, adapters: KnownAdapters
    ) -> None:
        self._info = info
        self._limits = limits
        self._queue = queue
        self._patience = patience
        self._adapters = adapters

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest, ContextLengthExceeded, EngineOverloaded (queue full), LimitExceeded (the tenant's half
        of it), or a NotFound for an adapter that is not in the store."""
        self._check_queue(request.tenant)
        validate(
            request.sampling,
            vocab_size=self._info.vocab_size,
            max_logprobs=self._limits.max_logprobs,
            max_choices=min(self._limits.max_choices, self._info.max_running),
        )
        self._check_prompt(request.prompt_token_ids)
        self._check_room(len(request.prompt_token_ids), request.sampling.max_tokens)
        if request.adapter is not None:
            self._adapters.check(request.adapter)

    def _check_queue(self, tenant: str) -> None:
        """One tenant may fill half of it, so that the others always find a place."""
        if len(self._queue) >= self._limits.max_waiting:
            raise EngineOverloaded(
                f"{self._limits.max_waiting} requests are waiting, which is the limit. Retry shortly.",
                retry_after_s=self._patience.seconds_until(1),
            )
        share, waiting = (self._limits.max_waiting + 1) // 2, self._queue.waiting(tenant)
        if waiting >= share:
            raise LimitExceeded(
                f"{waiting} of your requests are waiting, and one tenant may have {share} in the queue. Retry shortly.",
                limit=share,
                need=waiting + 1,
                have=waiting,
                retry_after_s=self._patience.seconds_until(-(-len(self._queue) // waiting)),
            )

    def _check_prompt(self, tokens: tuple[int, ...]) -> None:
        if not tokens:
            raise InvalidRequest("The prompt is empty; send at least one token.", param="prompt")
        bad = next((token for token in tokens if not 0 <= token < self._info.vocab_size), None)
        if bad is not None:
            raise InvalidRequest(
                f"Token id {bad} is outside the vocabulary of {self._info.vocab_size}.", param="prompt"
            )

    def _check_room(self, prompt: int, completion: int) -> None:
        limit = min(self._info.max_context, self._info.num_blocks * self._info.block_size)
        if prompt >= limit:
            raise ContextLengthExceeded(limit=limit, prompt=prompt)
        if prompt + completion > limit:
            raise ContextLengthExceeded(limit=limit, prompt=prompt, completion=completion)
