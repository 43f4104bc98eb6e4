"""An engine process with a core that does no arithmetic: a prompt's first token id says how it behaves.

Run as a program it is what `EngineProcess` starts in tests; `harness` starts and ends it with its supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lamina.config import EngineConfig
from lamina.engine.client import ZmqEngineClient
from lamina.engine.commons import Commons
from lamina.engine.errands import Errand
from lamina.engine.explain import Explainer
from lamina.engine.inspector import Inspector
from lamina.errors import ConfigurationInvalid, ContextLengthExceeded
from lamina.types import (
    AdapterRunning,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    PrefixExplanation,
    PrefixOrder,
    SamplingParams,
    TokenEvent,
)
from lamina.wiring.engine import run_engine
from lamina.wiring.launch import Launch
from lamina.wiring.process import EngineProcess
from lamina.wiring.supervisor import Backoff, EngineSupervisor
from lamina_kvtier.manager import KvManager
from lamina_kvtier.quota import QuotaBook

NORMAL = 0
REFUSE, BUG, FATAL, SLOW_STEP, CORRUPT = range(60_000, 60_005)  # beyond any vocabulary

INFO = EngineInfo(
    model="fake",
    model_digest="0" * 64,
    max_context=1_000_000,
    vocab_size=50_000,
    block_size=16,
    num_blocks=100_000,
    max_batch_tokens=256,
    max_running=64,
    max_lora_rank=64,
    dtype="float32",
    device="cpu",
)


@dataclass
class _Choice:
    request: GenerationRequest
    index: int
    made: int = 0


def empty_commons() -> Commons:
    """Quotas and pins of an empty pool."""
    return Commons(KvManager(64, quotas=QuotaBook(64, 4)), lambda adapter, namespace: namespace.encode().ljust(32))


class _Waiting:
    """An errand that needs some looks; a broken one ends badly."""

    def __init__(self, errand: Errand[PrefixExplanation], *, broken: bool) -> None:
        self._errand, self._broken, self._looks = errand, broken, 3

    def advance(self) -> PrefixExplanation | None:
        self._looks -= 1
        if self._looks > 0:
            return None
        if self._broken:
            raise RuntimeError("a bug that one errand found")
        return self._errand.advance()


class _Inspector(Inspector):
    """Prompts of an adapter "slow" or "broken" are explained later."""

    def explain(self, order: PrefixOrder) -> Errand[PrefixExplanation]:
        errand = super().explain(order)
        return errand if order.adapter is None else _Waiting(errand, broken=order.adapter == "broken")


def empty_inspector() -> Inspector:
    """Of an empty pool."""
    kv = KvManager(64, quotas=QuotaBook(64, 4))
    return _Inspector(
        kv,
        None,
        Explainer(kv, None, block_bytes=1),
        empty_commons(),
        lambda adapter, namespace: namespace.encode().ljust(32),
        block_bytes=1,
        check_integrity=kv.check_integrity,
    )


@dataclass
class FakeCore:
    """Makes one token per open choice and step: 1000 * choice + position modulo 1000."""

    info: EngineInfo = INFO
    choices: list[_Choice] = field(default_factory=list)
    outbox: list[TokenEvent] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"steps": 0, "cancelled": 0, "finished": 0})
    corrupt: bool = False
    commons: Commons = field(default_factory=lambda: empty_commons())
    inspector: Inspector = field(default_factory=lambda: empty_inspector())

    def submit(self, request: GenerationRequest) -> None:
        kind = request.prompt_token_ids[0]
        if kind == REFUSE:
            raise ContextLengthExceeded(limit=4096, prompt=5000)
        if kind == BUG:
            raise RuntimeError("a bug that one request found")
        self.choices += [_Choice(request, index) for index in range(request.sampling.n)]

    def cancel(self, request_id: str, index: int | None = None) -> None:
        for choice in list(self.choices):
            if choice.request.request_id == request_id and index in (None, choice.index):
                self._finish(choice, FinishReason.CANCELLED)

    def unload_adapter(self, digest: str) -> None:
        self.unloaded.append(digest)

    def erase_namespace(self, namespace: str) -> None:
        self.commons.erase(namespace)

    def has_work(self) -> bool:
        return bool(self.choices or self.outbox)

    def step(self) -> list[TokenEvent]:
        self.counts["steps"] += 1
        time.sleep(0.001)  # the arithmetic
        for choice in list(self.choices):
            self._advance(choice)
        events, self.outbox = self.outbox, []
        return events

    def idle(self) -> float | None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.choices),
            adapters=tuple(AdapterRunning(digest, 0, 0, False) for digest in self.unloaded),
            **self.counts,
        )

    def check_integrity(self) -> None:
        if self.corrupt:
            raise AssertionError("the books do not balance")

    def close(self) -> None:
        self.choices.clear()

    def _advance(self, choice: _Choice) -> None:
        request = choice.request
        match request.prompt_token_ids[0]:
            case kind if kind == FATAL and choice.made == 2:
                raise RuntimeError("the core broke")
            case kind if kind == SLOW_STEP and choice.made == 1:
                time.sleep(request.prompt_token_ids[1] / 1000)
            case kind if kind == CORRUPT:
                self.corrupt = True
        token = 1000 * choice.index + choice.made % 1000
        choice.made += 1
        self._event(choice, (token,), None)
        if choice.made == request.sampling.max_tokens:
            self._finish(choice, FinishReason.LENGTH)

    def _finish(self, choice: _Choice, reason: FinishReason) -> None:
        self.choices.remove(choice)
        self.counts["cancelled" if reason is FinishReason.CANCELLED else "finished"] += 1
        self._event(choice, (), reason)

    def _event(self, choice: _Choice, tokens: tuple[int, ...], reason: FinishReason | None) -> None:
        self.outbox.append(
            TokenEvent(
                request_id=choice.request.request_id,
                index=choice.index,
                token_ids=tokens,
                finish_reason=reason,
            )
        )


def request(name: str, *, kind: int = NORMAL, tokens: int = 3, n: int = 1, detail: int = 0) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=(kind, detail),
        sampling=SamplingParams(max_tokens=tokens, n=n),
    )


ENDLESS = 10**9  # tokens


@dataclass
class Harness:
    client: ZmqEngineClient
    supervisor: EngineSupervisor
    watching: asyncio.Task[None]
    processes: list[EngineProcess]


@asynccontextmanager
async def harness(
    *arguments: str,
    heartbeat_timeout_s: float = 5.0,
    stall_timeout_s: float = 300.0,
    backoff: Backoff | None = None,
) -> AsyncIterator[Harness]:
    """A client and a supervised fake engine; both are gone at the end, whatever the test did."""
    with tempfile.TemporaryDirectory(prefix="lamina-") as folder:
        client = ZmqEngineClient(
            f"ipc://{folder}/engine", heartbeat_timeout_s=heartbeat_timeout_s, stall_timeout_s=stall_timeout_s
        )
        processes: list[EngineProcess] = []

        def spawn(identity: bytes) -> EngineProcess:
            processes.append(spawn_fake(client.address, identity, arguments))
            return processes[-1]

        await client.start()
        supervisor = EngineSupervisor(client, spawn, backoff=backoff or Backoff(first_s=0.05))
        watching = asyncio.create_task(supervisor.run())
        try:
            yield Harness(client, supervisor, watching, processes)
        finally:
            supervisor.kill()
            await asyncio.gather(watching, return_exceptions=True)
            await client.close()


def spawn_fake(address: str, identity: bytes, arguments: Sequence[str] = ()) -> EngineProcess:
    config = EngineConfig(model=Path("/nowhere"), adapters=Path("/nowhere"))
    launch = Launch(address=address, identity=identity, parent=os.getpid(), config=config, heartbeat_s=0.1)
    return EngineProcess(launch, [sys.executable, __file__, *arguments])


def _build(config: EngineConfig) -> FakeCore:
    if "--refuse" in sys.argv:
        raise ConfigurationInvalid("this configuration cannot work")
    if "--crash" in sys.argv:
        os._exit(3)
    return FakeCore()


if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="fake engine: %(message)s")
    sys.exit(run_engine(_build, Launch.from_json(sys.stdin.buffer.read())))
