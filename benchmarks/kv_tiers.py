"""Time to first token of a long prompt: computed, promoted from host memory, loaded from a store.

    python benchmarks/kv_tiers.py                  # 4096 + 32 tokens on the demo model
    python benchmarks/kv_tiers.py --tokens 1024    # a shorter look

One engine computes the prompt (cold), then others until the device pool has lost it, then meets it again: host memory
answers. A second engine with empty memory and the same store meets it for the first time: the store answers. The first
tokens are compared: a tier that is fast and wrong does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from harness import environment
from lamina.config import EngineConfig
from lamina.engine.core import EngineCore
from lamina.models.hub import resolve
from lamina.types import GenerationRequest, SamplingParams
from lamina.wiring.core import build_core
from lamina.wiring.paths import default_cache
from lamina.wiring.valkey import EmbeddedValkey, ValkeyConfig

RESULTS = Path(__file__).parent / "results"
BLOCK = 16


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


def measure(model: Path, tokens: int, url: str) -> dict[str, Any]:
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
    core = build_core(config)
    cold = first_token(core, "cold", prompt + tail)
    first_token(core, "other", other)  # takes the pool
    settle(core)
    host = first_token(core, "host", prompt + tail)
    stats = core.stats()
    core.close()
    fresh = build_core(config)
    stored = first_token(fresh, "store", prompt + tail)
    loaded = fresh.stats().loaded_blocks
    fresh.close()
    if not cold.token == host.token == stored.token:
        raise SystemExit(f"the tiers are wrong: first tokens {cold.token}, {host.token}, {stored.token}")
    return {
        "tokens": tokens,
        "cold_s": round(cold.seconds, 3),
        "host_s": round(host.seconds, 3),
        "store_s": round(stored.seconds, 3),
        "host_speedup": round(cold.seconds / host.seconds, 1),
        "store_speedup": round(cold.seconds / stored.seconds, 1),
        "host_cached_tokens": host.cached_tokens,
        "store_cached_tokens": stored.cached_tokens,
        "spilled_blocks": stats.spilled_blocks,
        "stored_blocks": stats.stored_blocks,
        "loaded_blocks": loaded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of the shared prefix; a multiple of 16")
    parser.add_argument("--out", type=Path, default=RESULTS / "kv-tiers.json")
    arguments = parser.parse_args()
    valkey = EmbeddedValkey(ValkeyConfig(maxmemory_bytes=4 << 30)).start()
    try:
        figures = measure(resolve("smollm2-135m-instruct", default_cache()), arguments.tokens, str(valkey.address))
    finally:
        valkey.stop()
    figures |= {"environment": environment(torch.get_num_threads())}
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
