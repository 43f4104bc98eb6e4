"""The engine's in-memory twin, for tests of everything above it: no model, no torch, no other process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import cycle, islice, takewhile
from typing import TypeVar

from lamina.engine.commons import Commons
from lamina.engine.errands import Errand
from lamina.engine.explain import Explainer
from lamina.engine.host_commons import HostCommons
from lamina.engine.inspector import Inspector
from lamina.engine.request import BlockTable, Choice, RequestState
from lamina.engine.sampling_state import SamplingState
from lamina.engine.tier_quotas import PoolOnly
from lamina.errors import ContextLengthExceeded, EngineUnavailable, LaminaError
from lamina.types import (
    AdapterRunning,
    CachedTokens,
    CommonsReport,
    EngineFailure,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    PinAnswer,
    PinOrder,
    PinRecord,
    PinState,
    PrefixExplanation,
    PrefixOrder,
    PrefixReport,
    QuotaPolicy,
    TokenEvent,
    TokenLogprob,
    VerifyOrder,
    VerifyReport,
)
from lamina_kvtier.errors import OutOfBlocks
from lamina_kvtier.ghosts import Ghosts, segments_for
from lamina_kvtier.identity import IdentityChain, Layout, root_id
from lamina_kvtier.manager import KvManager
from lamina_kvtier.quota import QuotaBook
from lamina_kvtier.tier import adapter_bytes

__all__ = ["InMemoryEngine", "Script", "echo", "saying"]

Script = Callable[[GenerationRequest, int], Sequence[int]]  # (request, choice) -> its tokens

_T = TypeVar("_T")
_ENDLESS = 1 << 20
_BLOCKS = 64
_BLOCK_BYTES = 1024
_MODEL_DIGEST = "7e57" * 16


def echo(request: GenerationRequest, index: int) -> Sequence[int]:
    """The prompt again and again; choice `index` starts at its token `index`."""
    prompt = request.prompt_token_ids
    start = index % len(prompt)
    return list(islice(cycle(prompt[start:] + prompt[:start]), min(request.sampling.max_tokens, _ENDLESS)))


def saying(*token_ids: int) -> Script:
    """Always these tokens, then the end of the sequence."""
    return lambda request, index: token_ids


class InMemoryEngine:
    """Says what its script says, one token per event, choices in turn; keeps every promise of `EngineClient`.

    Steer it: `ready`, `delay_s` before each event, `refusal` (raised by every `submit`), `failure` (an error
    event after `fail_after` events of a request), `pause()`, `resume()` and `restart()`. Prompts go into a pool of
    64 blocks, whose quotas and pins are real, as are those of host memory, of which nothing is ever used;
    `quotas_set` counts policies. Look at `submitted`, `cancelled` (request id and choice, None for all of it) and
    `unloaded`. Log-probabilities are made up: -0.5 for the token itself, one less for each of its neighbours.
    """

    def __init__(
        self,
        *,
        script: Script = echo,
        eos_ids: Sequence[int] = (),
        vocab_size: int = 257,
        max_context: int = 1024,
        block_size: int = 16,
        host_blocks: int = 0,
    ) -> None:
        """host_blocks: below the pool; 0: there is no such tier."""
        self.script = script
        self.ready = True
        self.delay_s = 0.0
        self.refusal: LaminaError | None = None
        self.failure: EngineFailure | None = None
        self.fail_after = 0
        self.submitted: list[GenerationRequest] = []
        self.cancelled: list[tuple[str, int | None]] = []
        self.unloaded: list[str] = []
        self._eos_ids = frozenset(eos_ids)
        self._running: dict[str, _Request] = {}
        self._prompts: dict[tuple[str, str | None], set[tuple[int, ...]]] = {}
        self._going = asyncio.Event()
        self._going.set()
        self._finished = self._generated = self._prompt_tokens = self._hits = 0
        self.generation = 0
        self.quotas_set = 0
        self._block_size = block_size
        self._host_blocks = host_blocks
        self.restart()
        self._info = EngineInfo(
            model="twin",
            model_digest=_MODEL_DIGEST,
            max_context=max_context,
            vocab_size=vocab_size,
            block_size=block_size,
            num_blocks=_BLOCKS,
            max_batch_tokens=2048,
            max_running=64,
            max_lora_rank=256,
            dtype="float32",
            device="memory",
            block_bytes=_BLOCK_BYTES,
            host_blocks=host_blocks,
        )

    def restart(self) -> None:
        """A new core took over: an empty pool, neither quotas nor pins."""
        self.generation += 1
        ghosts = Ghosts(segments_for(_BLOCKS))
        self._kv = KvManager(_BLOCKS, self._block_size, quotas=QuotaBook(_BLOCKS), ghosts=ghosts)
        self._commons = Commons(self._kv, self._root, _Below(self._kv, self._host_blocks))
        self._explainer = Explainer(self._kv, None, block_bytes=_BLOCK_BYTES)
        self._inspector = Inspector(
            self._kv,
            None,
            self._explainer,
            self._commons,
            self._root,
            block_bytes=_BLOCK_BYTES,
            check_integrity=self._kv.check_integrity,
        )

    @property
    def info(self) -> EngineInfo:
        if not self.ready:
            raise EngineUnavailable(retry_after_s=2.0)
        return self._info

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests under way: none must be left when all clients have gone."""
        return tuple(self._running)

    def pause(self) -> None:
        """Holds all events back."""
        self._going.clear()

    def resume(self) -> None:
        self._going.set()

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self.submitted.append(request)
        self._check(request)
        state = self._running[request.request_id] = _Request(request, self)
        cached = self._remember(request)
        try:
            for count, event in enumerate(state.events(cached)):
                await asyncio.sleep(self.delay_s)
                await self._going.wait()
                if self.failure is not None and count == self.fail_after:
                    yield self._failed(request)
                    return
                self._generated += len(event.token_ids)
                yield event
        finally:
            if not state.done and self.failure is None:
                self.cancelled.append((request.request_id, None))
            del self._running[request.request_id]
            self._clear_deleted()
            self._finished += 1

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        state = self._running.get(request_id)
        if state is not None:
            state.cancel(index)
            self.cancelled.append((request_id, index))

    async def stats(self) -> EngineStats:
        if not self.ready:
            raise EngineUnavailable(retry_after_s=2.0)
        active = len(self._running)
        running = [state.request.adapter for state in self._running.values() if state.request.adapter]
        blocks = {adapter.hex(): count for adapter, count in self._kv.blocks_by_adapter().items()}
        return EngineStats(
            running=active,
            blocks_total=64,
            blocks_free=64 - active,
            blocks_active=active,
            prompt_tokens=self._prompt_tokens,
            prefix_hit_tokens=self._hits,
            generation_tokens=self._generated,
            finished=self._finished,
            cancelled=len(self.cancelled),
            adapters=tuple(
                AdapterRunning(digest, running.count(digest), 0, digest in running, blocks.get(digest, 0))
                for digest in sorted({*running, *blocks})
            ),
        )

    async def set_quotas(self, policies: Sequence[QuotaPolicy]) -> None:
        self._shared().set_quotas(policies)
        self.quotas_set += 1

    async def commons(self) -> CommonsReport:
        return self._shared().report()

    async def pin(self, order: PinOrder) -> PinAnswer:
        return self._shared().pin(order)

    async def renew_pin(self, namespace: str, pin_id: str, ttl_s: float) -> PinState:
        return self._shared().renew(namespace, pin_id, ttl_s)

    async def unpin(self, namespace: str, pin_id: str) -> None:
        self._shared().unpin(namespace, pin_id)

    async def restore_pins(self, records: Sequence[PinRecord]) -> tuple[PinState, ...]:
        return self._shared().restore(records)

    async def prefixes(self) -> PrefixReport:
        return self._inspected().prefixes()

    async def explain_prefix(self, order: PrefixOrder) -> PrefixExplanation:
        return _answer(self._inspected().explain(order))

    async def verify(self, order: VerifyOrder) -> VerifyReport:
        return _answer(self._inspected().verify(order))

    def _inspected(self) -> Inspector:
        if not self.ready:
            raise EngineUnavailable(retry_after_s=2.0)
        return self._inspector

    def _shared(self) -> Commons:
        if not self.ready:
            raise EngineUnavailable(retry_after_s=2.0)
        return self._commons

    def _root(self, adapter: str | None, namespace: str) -> bytes:
        layout = Layout(1, 1, 1, "float32", self._block_size, "none")
        return root_id(model_digest=_MODEL_DIGEST, layout=layout, adapter=adapter, namespace=namespace)

    async def unload_adapter(self, digest: str) -> None:
        self.unloaded.append(digest)
        self._commons.erasure.erase_adapter(digest)
        self._clear_deleted()

    async def erase_namespace(self, namespace: str) -> None:
        self._shared().erase(namespace)
        self._clear_deleted()

    def _clear_deleted(self) -> None:
        requests = [state.request for state in self._running.values()]
        self._commons.erasure.go_on({r.namespace for r in requests}, {adapter_bytes(r.adapter) for r in requests})

    async def close(self) -> None:
        self.ready = False

    def ends(self, request: GenerationRequest, token_id: int) -> bool:
        """Whether `token_id` ends a choice of `request`."""
        if token_id in request.sampling.stop_token_ids:
            return True
        return token_id in self._eos_ids and not request.sampling.ignore_eos

    def _check(self, request: GenerationRequest) -> None:
        if not self.ready:
            raise EngineUnavailable(retry_after_s=2.0)
        if self.refusal is not None:
            raise self.refusal
        if len(request.prompt_token_ids) >= self._info.max_context:
            raise ContextLengthExceeded(limit=self._info.max_context, prompt=len(request.prompt_token_ids))

    def _remember(self, request: GenerationRequest) -> int:
        """Tokens of whole blocks that an earlier prompt of this namespace and adapter began with, too."""
        prompts = self._prompts.setdefault((request.namespace, request.adapter), set())
        mine, size = request.prompt_token_ids, self._info.block_size
        longest = max((_common(mine, other) for other in prompts), default=0)
        hits = min(longest, len(mine) - 1) // size * size  # the last token is always computed
        prompts.add(mine)
        self._keep(request)
        self._prompt_tokens += len(mine)
        self._hits += hits
        return hits

    def _keep(self, request: GenerationRequest) -> None:
        """Puts the prompt's full blocks into the pool, as far as there is room."""
        chain = IdentityChain(self._root(request.adapter, request.namespace), self._block_size)
        chain.extend(request.prompt_token_ids)
        table = self._kv.acquire(chain.ids)
        self._commons.hit(request.namespace, chain.ids[: len(table)])
        self._explain(request, chain, table)
        try:
            table += self._kv.allocate(len(chain.ids) - len(table), owner=request.namespace)
        except OutOfBlocks:
            pass
        else:
            for block, identity in zip(table, chain.ids, strict=True):
                self._kv.publish(block, identity, adapter=adapter_bytes(request.adapter))
        self._kv.release(table)

    def _explain(self, request: GenerationRequest, chain: IdentityChain, table: Sequence[int]) -> None:
        sampling = SamplingState(
            request.sampling,
            seed=0,
            index=0,
            prompt_token_ids=request.prompt_token_ids,
            eos_token_ids=self._eos_ids,
            vocab_size=self._info.vocab_size,
        )
        state = RequestState(request, 0, 0)
        choice = Choice(state, 0, list(request.prompt_token_ids), chain, sampling, limit=self._info.max_context)
        choice.table = BlockTable(table[: len(choice.known_ids(self._block_size))])
        self._explainer.began(choice)
        self._explainer.settle(state)

    def _failed(self, request: GenerationRequest) -> TokenEvent:
        return TokenEvent(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=self.failure)


class _Below(PoolOnly):
    """Host memory, if there is any."""

    def __init__(self, kv: KvManager, blocks: int) -> None:
        self._host = HostCommons.of_slots(kv, blocks, _BLOCK_BYTES) if blocks else None

    @property
    def commons_of_host(self) -> HostCommons | None:
        return self._host


class _Request:
    def __init__(self, request: GenerationRequest, engine: InMemoryEngine) -> None:
        self.request = request
        self._engine = engine
        count = range(request.sampling.n)
        self._tokens = [list(engine.script(request, index)) for index in count]
        self._said = [0 for _ in count]
        self._open = set(count)
        self._dropped: set[int] = set()

    @property
    def done(self) -> bool:
        return not self._open

    def cancel(self, index: int | None) -> None:
        self._dropped |= self._open if index is None else {index} & self._open

    def events(self, cached: int) -> Iterator[TokenEvent]:
        while self._open:
            for index in sorted(self._open):
                event = self._next(index, cached)
                if event.finish_reason is not None:
                    self._open.discard(index)
                yield event

    def _next(self, index: int, cached: int) -> TokenEvent:
        said, tokens = self._said[index], self._tokens[index]
        token_ids = tuple(tokens[said : said + 1])
        if index in self._dropped:
            return TokenEvent(request_id=self.request.request_id, index=index, finish_reason=FinishReason.CANCELLED)
        self._said[index] += 1
        ended = bool(token_ids) and self._engine.ends(self.request, token_ids[0])
        return TokenEvent(
            request_id=self.request.request_id,
            index=index,
            token_ids=token_ids,
            logprobs=tuple(self._logprob(token_id) for token_id in token_ids)
            if self.request.sampling.logprobs is not None
            else (),
            finish_reason=self._reason(said, token_ids, ended),
            stop_token_id=token_ids[0] if ended else None,
            cached_by_tier=CachedTokens(gpu=cached) if said == 0 else CachedTokens(),
            queued_s=0.0 if said == index == 0 else None,
        )

    def _reason(self, said: int, token_ids: tuple[int, ...], ended: bool) -> FinishReason | None:
        if ended or not token_ids:
            return FinishReason.STOP
        full = len(self.request.prompt_token_ids) + said + 1 >= self._engine.info.max_context
        return FinishReason.LENGTH if full or said + 1 >= self.request.sampling.max_tokens else None

    def _logprob(self, token_id: int) -> TokenLogprob:
        neighbours = range(token_id, token_id + (self.request.sampling.logprobs or 0))
        size = self._engine.info.vocab_size
        top = tuple((other % size, -0.5 - rank) for rank, other in enumerate(neighbours))
        return TokenLogprob(token_id, -0.5, 1, top)


def _answer(errand: Errand[_T]) -> _T:
    """Of an errand that waits for nothing, since there is no store."""
    answer = errand.advance()
    assert answer is not None
    return answer


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
