"""A crowd: many tenants, adapters and shared prefixes on an engine that is much too small for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from fixtures.engines import Outputs, collect, request
from lamina.engine.core import EngineCore
from lamina.errors import ExceedsQuota
from lamina.types import FinishReason, GenerationRequest
from support.replay import Replay

__all__ = ["SMALL", "Crowd"]

SMALL: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 48, "max_running": 6, "max_waiting": 200}  # its engine

TENANTS = {"a": 4, "b": 2, "c": 1, "d": 1}  # and how often each one asks


class Crowd:
    """Submits, steps and cancels by dice. Afterwards `requests`, `tokens`, `endings` and `cancelled` say what was."""

    def __init__(self, seed: int, adapters: Sequence[str | None], *, count: int = 50) -> None:
        self.dice = random.Random(seed)
        self.count = count
        self.requests: dict[str, GenerationRequest] = {}
        self.cancelled: set[str] = set()
        self.tokens: Outputs = {}
        self.endings: dict[tuple[str, int], FinishReason] = {}
        self.refused = 0  # requests that could never fit
        self._submitted = 0
        self._adapters = adapters
        self.prefixes = [self.dice.choices(range(3, 211), k=16 * blocks) for blocks in (2, 3, 5)]

    def run(self, core: EngineCore, tick: Callable[[], None], *, max_steps: int = 20_000) -> None:
        """Steps until everybody has ended; `tick` is called after each step."""
        for _ in range(max_steps):
            if self._submitted < self.count and self.dice.random() < 0.7:
                self._submit(core)
            if self.requests and self.dice.random() < 0.03:
                self._cancel(core)
            collect(core.step(), self.tokens, self.endings)
            core.check_integrity()
            tick()
            if self._submitted == self.count and not core.has_work():
                return
        raise AssertionError("the engine made no progress")

    def differences(self, replay: Replay) -> list[str]:
        """From what each of its requests says alone; see `Replay`."""
        return replay.differences(self.requests.values(), self.tokens, self.endings, self.cancelled)

    def _submit(self, core: EngineCore) -> None:
        dice = self.dice
        prefix = dice.choice(self.prefixes)
        tail = [dice.randrange(3, 7) for _ in range(dice.choice((0, 1, 16)))]
        drawn = {"temperature": 1.0, "seed": dice.randrange(3)} if dice.random() < 0.5 else {}
        item = request(
            f"r{self._submitted}",
            [*prefix, *tail],
            adapter=dice.choice(self._adapters[: dice.randint(1, len(self._adapters))]),
            tenant=dice.choices([*TENANTS], [*TENANTS.values()])[0],
            n=dice.choice((1, 1, 1, 2, 3)),
            max_tokens=dice.choice((1, 5, 12, 48)),
            **drawn,
        )
        self._submitted += 1
        try:
            core.submit(item)
        except ExceedsQuota:
            self.refused += 1
        else:
            self.requests[item.request_id] = item

    def _cancel(self, core: EngineCore) -> None:
        name = self.dice.choice(sorted(self.requests))
        core.cancel(name)
        self.cancelled.add(name)
