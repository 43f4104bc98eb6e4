"""One call for text: who asks which model for what, the stream of its deltas, and its usage."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from lamina.engine.choice_text import ChoiceDelta
from lamina.errors import EngineOverloaded
from lamina.gateway.completion import stream_choices
from lamina.gateway.deps import GatewayDeps
from lamina.gateway.merge import merge
from lamina.gateway.schemas.common import CachedTokensByTier, PromptTokensDetails, Usage
from lamina.tenancy.principal import Principal
from lamina.types import CachedTokens, GenerationRequest, SamplingParams

__all__ = ["Generation", "Job", "Target", "resolve_model"]


@dataclass(frozen=True, slots=True)
class Target:
    """A model name that this tenant may use. `digest` is None for the base model."""

    name: str
    digest: str | None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.digest is None else {"x-lamina-adapter-digest": self.digest}


async def resolve_model(deps: GatewayDeps, principal: Principal, name: str) -> Target:
    """Raises ModelNotFound, for another tenant's adapter too."""
    if name == deps.base_model:
        return Target(name, None)
    record = await deps.adapters.resolve(principal.tenant_id, name)
    return Target(name, record.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The engine requests of one call, one per prompt. Choice i of prompt p is choice p * n + i here."""

    id: str
    created: int  # Unix seconds
    target: Target
    fingerprint: str
    requests: tuple[GenerationRequest, ...]

    @property
    def n(self) -> int:
        return self.requests[0].sampling.n

    @property
    def num_choices(self) -> int:
        return self.n * len(self.requests)

    @classmethod
    def build(
        cls,
        deps: GatewayDeps,
        principal: Principal,
        target: Target,
        prefix: str,
        prompts: Sequence[tuple[Sequence[int], SamplingParams]],
    ) -> Job:
        """`prefix` begins the id ("chatcmpl"); `prompts` are token ids and how to sample after them."""
        job_id = f"{prefix}-{uuid.uuid4().hex}"
        requests = tuple(
            GenerationRequest(
                request_id=f"{job_id}-{number}",
                prompt_token_ids=tuple(token_ids),
                sampling=sampling,
                tenant=principal.tenant_id,
                namespace=principal.namespace,
                adapter=target.digest,
                weight=principal.weight,
            )
            for number, (token_ids, sampling) in enumerate(prompts)
        )
        return cls(
            id=job_id,
            created=int(time.time()),
            target=target,
            fingerprint=f"fp_{deps.engine.info.model_digest[:16]}",
            requests=requests,
        )


class Generation:
    """A job under way. `start()` it before the first byte is sent, read `deltas()`, close it in any case."""

    def __init__(self, deps: GatewayDeps, job: Job, arrived: float) -> None:
        self.job = job
        self._timeout_s = deps.config.first_event_timeout_s
        self._metrics = deps.metrics
        streams = [_renumbered(deps, job, position) for position in range(len(job.requests))]
        self._deltas = deps.metrics.timed(merge(streams), arrived)
        self._starting: asyncio.Task[ChoiceDelta] | None = None
        self._completion_tokens = 0
        self._cached = [CachedTokens()] * len(job.requests)

    async def start(self, *, patience_s: float | None = None) -> None:
        """Waits for the first delta, at most `patience_s` seconds: `deltas()` waits for it then.

        Raises the engine's refusal, or EngineOverloaded after the timeout.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._first())
        done, _ = await asyncio.wait((self._starting,), timeout=patience_s)
        for starting in done:
            starting.result()

    async def _first(self) -> ChoiceDelta:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await anext(self._deltas)
        except TimeoutError as exc:
            raise EngineOverloaded(
                f"The engine produced no token within {self._timeout_s:g} s. Retry later.", retry_after_s=5.0
            ) from exc

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """All deltas, the first one included; counts usage on the way. Raises as `start` does."""
        assert self._starting is not None
        async with aclosing(self._deltas):
            yield self._counted(await self._starting)
            async for delta in self._deltas:
                yield self._counted(delta)

    async def aclose(self) -> None:
        """Cancels what still runs. Does nothing if the job has ended."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._deltas.aclose()

    def usage(self) -> Usage:
        """What has been read so far. A prompt counts once, however many choices share it."""
        prompt = sum(len(request.prompt_token_ids) for request in self.job.requests)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt + self._completion_tokens,
            prompt_tokens_details=_details(self._cached),
        )

    def _counted(self, delta: ChoiceDelta) -> ChoiceDelta:
        prompt = delta.index // self.job.n
        self._completion_tokens += len(delta.token_ids)
        if delta.queued_s is not None:
            tenant = self.job.requests[prompt].tenant
            self._metrics.queue_wait.labels(tenant).observe(delta.queued_s)
        self._cached[prompt] = max(self._cached[prompt], delta.cached_by_tier, key=lambda cached: cached.total)
        return delta


def _details(cached: Sequence[CachedTokens]) -> PromptTokensDetails:
    by_tier = CachedTokensByTier(
        gpu=sum(each.gpu for each in cached),
        host=sum(each.host for each in cached),
        store=sum(each.store for each in cached),
    )
    total = sum(each.total for each in cached)
    return PromptTokensDetails(cached_tokens=total, cached_tokens_by_tier=by_tier)


async def _renumbered(deps: GatewayDeps, job: Job, position: int) -> AsyncGenerator[ChoiceDelta, None]:
    deltas = stream_choices(deps.engine, deps.tokenizer, job.requests[position])
    async with aclosing(deltas):
        async for delta in deltas:
            yield replace(delta, index=position * job.n + delta.index) if position else delta
