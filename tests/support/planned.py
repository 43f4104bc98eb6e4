"""A scheduler without a model or a clock: each plan is carried out by drawing made-up tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from lamina.engine.plan import StepPlan
from lamina.engine.request import Choice, ChoiceStatus, RequestState
from lamina.engine.scheduler import Scheduler
from lamina.engine.tier_protocol import TierGate
from lamina.types import GenerationRequest, SamplingParams
from lamina_kvtier import IdentityChain, KvManager, Quota, QuotaBook

__all__ = ["BLOCK", "Adapters", "Planned", "prompt"]

BLOCK = 16


def prompt(seed: int, blocks: float) -> list[int]:
    return random.Random(seed).choices(range(3, 211), k=int(blocks * BLOCK))


@dataclass
class Adapters:
    """As `AdapterLoads`: those in `cold` take some calls to load, and so many seconds."""

    cold: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def try_acquire(self, digest: str) -> int | None:
        if self.cold.get(digest, 0) > 0:
            self.cold[digest] -= 1
            return None
        return 1

    def release(self, digest: str) -> None:
        """Nothing is counted."""

    def load_seconds(self, digest: str) -> float:
        return self.seconds.pop(digest, 0.0)


class Planned:
    """`blocks` with an eighth of them as headroom; `step()` plans, computes and draws."""

    def __init__(
        self,
        blocks: int = 64,
        *,
        quotas: dict[str, Quota] | None = None,
        adapters: Adapters | None = None,
        tiers: TierGate | None = None,
        caching: bool = True,
        **limits: Any,
    ) -> None:
        """`quotas` None: policy was never loaded. `limits` are the scheduler's."""
        sizes = {"max_batch_tokens": 256, "max_running": 8} | limits
        book = QuotaBook(blocks, min(sizes["max_running"], blocks // 8))
        self.kv = KvManager(blocks, BLOCK, prefix_caching=caching, quotas=book)
        if quotas is not None:
            book.load(quotas)
        self.scheduler = Scheduler(self.kv, adapters or Adapters(), tiers, **sizes)
        self.started: dict[str, int] = {}  # step of the first start, by request
        self.ended: dict[str, int] = {}
        self.preempted: list[str] = []
        self.failed: list[str] = []
        self.drawn = 0
        self.steps = 0
        self.cached: dict[str, int] = {}  # prompt tokens found at the start
        self._arrivals = 0
        self._ends_after: dict[str, int] = {}

    def submit(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        max_tokens: int = 16,
        ends_after: int | None = None,
        adapter: str | None = None,
        weight: float = 1.0,
        n: int = 1,
    ) -> Choice:
        """Of the tenant that is the name's letters ("a12" is of "a"); it ends after so many tokens of max_tokens."""
        tenant = name.rstrip("0123456789")
        self._arrivals += 1
        self._ends_after[name] = ends_after or max_tokens
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(tokens),
            sampling=SamplingParams(max_tokens=max_tokens, n=n),
            tenant=tenant,
            namespace=tenant,
            adapter=adapter,
            weight=weight,
        )
        state = RequestState(request, self._arrivals, 0)
        chain = IdentityChain(tenant.encode().ljust(32, b"."), BLOCK)
        chain.extend(tokens)
        sampling = cast(Any, SimpleNamespace(append=lambda token: None))
        choice = Choice(state, 0, list(tokens), chain, sampling, limit=len(tokens) + max_tokens)
        state.choices[0] = choice
        self.scheduler.queue.push(choice)
        return choice

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.steps += 1
        self.preempted += [_name(choice) for choice in plan.preempted]
        self.failed += [_name(choice) for choice, _ in plan.failures]
        for chunk in plan.chunks:
            name = _name(chunk.choice)
            self.started.setdefault(name, self.steps)
            self.cached.setdefault(name, chunk.choice.request.cached_tokens or 0)
            self.scheduler.computed(chunk)
            if chunk.samples:
                self._draw(chunk.choice)
        self.scheduler.check_integrity()
        return plan

    def run(self, most: int = 5000) -> None:
        """To the end of everything."""
        while len(self.scheduler.queue) or self.scheduler.running:
            self.step()
            assert self.steps < most, "no progress"

    def running(self) -> dict[str, int]:
        """Choices by tenant."""
        found: dict[str, int] = {}
        for choice in self.scheduler.running:
            found[choice.request.tenant] = found.get(choice.request.tenant, 0) + 1
        return found

    def _draw(self, choice: Choice) -> None:
        for index in range(1, 1 + choice.unborn):
            born = Choice(
                choice.request, index, list(choice.tokens), choice.chain.copy(), choice.sampling, limit=choice.limit
            )
            self.scheduler.fork(choice, born)
            self._append(born)
        self._append(choice)

    def _append(self, choice: Choice) -> None:
        seed = f"{_name(choice)} {choice.index} {len(choice.tokens)}"
        choice.append(random.Random(seed).randrange(3, 211))
        self.scheduler.publish(choice)
        self.drawn += 1
        if choice.output_len >= self._ends_after[_name(choice)]:
            self.scheduler.finish(choice)
            self.ended[_name(choice)] = self.steps
            assert choice.status is ChoiceStatus.FINISHED


def _name(choice: Choice) -> str:
    return choice.request.request.request_id
