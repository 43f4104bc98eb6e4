"""Prometheus metrics: what the gateway measures itself, and the engine's snapshot taken at scrape time.

Labels stay few: routes are templates, adapters are digests (tenants' names for them are not public). The
endpoint picker of the Gateway API inference extension is to be configured with the names that end in
`num_requests_waiting`, `num_requests_running`, `kv_cache_usage_perc` (0 to 1), `cache_config_info` and
`lora_requests_info`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lamina.engine.choice_text import ChoiceDelta
from lamina.gateway.kv_metrics import kv_metrics
from lamina.gateway.shares import Shares
from lamina.types import EngineInfo, EngineStats

__all__ = ["GatewayMetrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ITL_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)

_GAUGES = {
    "num_requests_running": ("running", "Choices in the running batch."),
    "num_requests_waiting": ("waiting", "Requests in the engine's queue."),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens admitted, including cached ones.",
    "prefix_hit_tokens": "Prompt tokens served from the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "preemptions": "Choices pushed out of the batch for want of blocks.",
    "steps": "Engine steps.",
    "step_seconds": "Time spent inside engine steps, in seconds.",
    "finished": "Choices finished.",
    "cancelled": "Choices cancelled.",
    "spilled_blocks": "KV blocks copied from the device to host memory.",
    "promoted_blocks": "KV blocks copied from host memory to the device.",
    "stored_blocks": "KV blocks written to the store.",
    "loaded_blocks": "KV blocks read from the store.",
    "declined_blocks": "KV blocks found in the store, but cheaper to compute.",
    "failed_blocks": "KV blocks lost on the way between tiers.",
}


class GatewayMetrics:
    """One registry per gateway, so that two gateways in one process don't mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self.registry.register(self._engine)
        self.requests = Counter(
            "lamina_http_requests",
            "Requests by route and status; 499: the client went away.",
            ("route", "status"),
            registry=self.registry,
        )
        self.stream_errors = Counter(
            "lamina_stream_errors", "Streams that ended in an error event.", ("code",), registry=self.registry
        )
        self.in_flight = Gauge("lamina_http_requests_in_flight", "Open requests.", registry=self.registry)
        self.ttft = self._histogram("time_to_first_token", "Arrival to first token.", SECONDS)
        self.queue_wait = Histogram(
            "lamina_queue_wait_seconds",
            "Arrival in the engine to start, by tenant.",
            ("tenant",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.itl = self._histogram("inter_token_latency", "Gap between tokens of one choice.", ITL_SECONDS)
        self.e2e = self._histogram("e2e_request_latency", "Arrival to last token.", SECONDS)

    async def timed(
        self, deltas: AsyncGenerator[ChoiceDelta, None], arrived: float
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Passes `deltas` through and observes TTFT, ITL and, unless it breaks off, E2E.

        `arrived` is the `time.perf_counter()` of the request.
        """
        last: dict[int, float] = {}
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.token_ids:
                    now = time.perf_counter()
                    if not last:
                        self.ttft.observe(now - arrived)
                    if delta.index in last:
                        self.itl.observe((now - last[delta.index]) / len(delta.token_ids))
                    last[delta.index] = now
                yield delta
        self.e2e.observe(time.perf_counter() - arrived)

    def render(self, info: EngineInfo | None, stats: EngineStats | None, shares: Shares | None = None) -> bytes:
        """The exposition text; None while there is no engine (`lamina_engine_up` is 0 then), or no database."""
        self._engine.info, self._engine.stats, self._engine.shares = info, stats, shares
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"lamina_{name}_seconds", text, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    info: EngineInfo | None = None
    stats: EngineStats | None = None
    shares: Shares | None = None

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing to ask at registration: there may be no engine yet

    def collect(self) -> Iterable[Metric]:
        up = self.info is not None and self.stats is not None
        yield GaugeMetricFamily("lamina_engine_up", "1 if the engine core answers.", float(up))
        if self.info is not None and self.stats is not None:
            yield from _totals(self.stats)
            yield from _blocks(self.info, self.stats)
            yield from _adapters(self.stats)
            if self.shares is not None:
                yield from kv_metrics(self.shares, self.info.block_bytes)


def _totals(stats: EngineStats) -> Iterable[Metric]:
    for name, (attribute, text) in _GAUGES.items():
        yield GaugeMetricFamily(f"lamina_{name}", text, getattr(stats, attribute))
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"lamina_engine_{name}", text, getattr(stats, name))


def _blocks(info: EngineInfo, stats: EngineStats) -> Iterable[Metric]:
    blocks = GaugeMetricFamily("lamina_kv_blocks", "Blocks of the pool by state.", labels=["state"])
    for state in ("free", "active", "cached"):
        blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
    yield blocks
    used = stats.blocks_active / stats.blocks_total if stats.blocks_total else 0.0
    yield GaugeMetricFamily("lamina_kv_cache_usage_perc", "Active share of the block pool, 0 to 1.", used)
    config = GaugeMetricFamily(
        "lamina_cache_config_info", "Constants of the block pool.", labels=["block_size", "num_gpu_blocks"]
    )
    config.add_metric([str(info.block_size), str(info.num_blocks)], 1)
    yield config


def _adapters(stats: EngineStats) -> Iterable[Metric]:
    requests = GaugeMetricFamily(
        "lamina_adapter_requests",
        "Choices running and requests waiting by adapter.",
        labels=["adapter", "state"],
    )
    loaded = GaugeMetricFamily(
        "lamina_lora_adapter_loaded",
        "1 if the adapter is resident.",
        labels=["adapter_name", "level", "pinned"],
    )
    for adapter in stats.adapters:
        requests.add_metric([adapter.digest, "running"], adapter.running)
        requests.add_metric([adapter.digest, "waiting"], adapter.waiting)
        loaded.add_metric([adapter.digest, "device", "false"], float(adapter.loaded))
    yield requests
    yield loaded
    yield _lora_requests_info(stats)


def _lora_requests_info(stats: EngineStats) -> Metric:
    info = GaugeMetricFamily(
        "lamina_lora_requests_info",
        "Adapters in use; the value is the time of the snapshot, in Unix seconds.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    running = ",".join(sorted(a.digest for a in stats.adapters if a.running))
    waiting = ",".join(sorted(a.digest for a in stats.adapters if a.waiting))
    # Adapters are bounded by bytes, not by number: report what is loaded now.
    info.add_metric([str(sum(a.loaded for a in stats.adapters)), running, waiting], time.time())
    return info
