"""Time to first token of a long prompt: computed, promoted from host memory, loaded from a store.

    python benchmarks/kv_tiers.py                  # 4096 + 32 tokens on the demo model
    python benchmarks/kv_tiers.py --quick          # 1024 tokens

One engine computes the prompt (cold), then others until the device pool has lost it, then meets it again: host memory
answers, and at once again the device pool, which shows what promoting costs. A second engine with empty memory and the
same store meets it for the first time: the store answers. The first tokens are compared: a tier that is fast and wrong
does not count.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

from harness import Goal, Progress, add_quick, finish
from lamina.config import EngineConfig
from lamina.engine.core import EngineCore
from lamina.models.hub import resolve
from lamina.types import GenerationRequest, SamplingParams
from lamina.wiring.core import build_core
from lamina.wiring.paths import default_cache
from lamina.wiring.valkey import EmbeddedValkey, ValkeyConfig

COLUMNS = ["from", "seconds", "speedup", "cached tokens"]
BLOCK = 16
GOAL = 5.0  # times faster than computing


@dataclass(frozen=True, slots=True)
class First:
    """The first token of a request."""

    token: int
    seconds: float
    cached_tokens: int


def first_token(core: EngineCore, name: str, prompt: list[int]) -> First:
    """Of a request that is alone in the engine."""
    request = GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        adapter=None,
        tenant="bench",
        namespace="bench",
    )
    started = time.perf_counter()
    core.submit(request)
    while True:
        for event in core.step():
            if event.token_ids:
                seconds = time.perf_counter() - started
                while core.has_work():
                    core.step()
                return First(event.token_ids[0], seconds, event.cached_tokens)


def settle(core: EngineCore) -> None:
    """Lets puts to the store end."""
    for _ in range(200):
        core.step()
        time.sleep(0.01)


def measure(model: Path, tokens: int, url: str) -> tuple[dict[str, First], dict[str, int]]:
    """First tokens by where the prefix came from, and what moved. Exits if they differ."""
    blocks = tokens // BLOCK
    config = EngineConfig(
        model=model,
        adapters=Path("/nonexistent"),
        num_blocks=blocks + blocks // 4 + 8,
        host_kv_bytes=4 << 30,
        kv_store_url=url,
    )
    rng = random.Random(7)
    prompt, other = ([rng.randrange(1000, 40000) for _ in range(tokens)] for _ in range(2))
    tail = [rng.randrange(1000, 40000) for _ in range(32)]
    progress = Progress(f"first token of {tokens} + 32 tokens", 5)
    core = build_core(config)
    found = {"computed": first_token(core, "cold", prompt + tail)}
    progress.step("computed")
    first_token(core, "other", other)  # takes the pool
    settle(core)
    progress.step("another prompt has taken the pool")
    found["host memory"] = first_token(core, "host", prompt + tail)
    progress.step("from host memory")
    found["device pool"] = first_token(core, "pool", prompt + tail)
    progress.step("from the device pool")
    stats = core.stats()
    core.close()
    fresh = build_core(config)
    found["store"] = first_token(fresh, "store", prompt + tail)
    progress.step("from the store")
    moved = {"spilled_blocks": stats.spilled_blocks, "stored_blocks": stats.stored_blocks}
    moved["loaded_blocks"] = fresh.stats().loaded_blocks
    fresh.close()
    if len({first.token for first in found.values()}) != 1:
        raise SystemExit(f"correctness gate: first tokens differ: { {at: first.token for at, first in found.items()} }")
    return found, moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of the shared prefix; a multiple of 16")
    add_quick(parser, tokens=1024)
    options = parser.parse_args()
    valkey = EmbeddedValkey(ValkeyConfig(maxmemory_bytes=4 << 30)).start()
    try:
        model = resolve("smollm2-135m-instruct", default_cache())
        found, moved = measure(model, options.tokens, str(valkey.address))
    finally:
        valkey.stop()
    cold = found["computed"].seconds
    rows = [
        {
            "from": source,
            "seconds": round(first.seconds, 3),
            "speedup": round(cold / first.seconds, 1),
            "cached tokens": first.cached_tokens,
        }
        for source, first in found.items()
    ]
    goals = [
        Goal.at_least(f"TTFT of {options.tokens} tokens from {source}", cold / first.seconds, GOAL, "x computing")
        for source, first in found.items()
        if source in ("host memory", "store")
    ]
    finish("kv-tiers", rows, COLUMNS, goals, options, {"tokens": options.tokens, **moved})


if __name__ == "__main__":
    main()
