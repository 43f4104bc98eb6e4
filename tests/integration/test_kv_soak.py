"""Crowded engines with poisoned memory, late copies and bad stores: nobody ever reads what is not theirs.

After each run every request is replayed alone on a fresh engine without tiers, and must have said the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.engines import publish_adapter, tiny_core, write_adapter
from lamina.wiring.backends import TorchBackend
from lamina_kvtier.fault_tier import Faults
from lamina_kvtier.memory_tier import MemoryStore
from support.ahead import AheadBackend
from support.poison import PoisonedBelow
from support.replay import Replay
from support.soak import Crowd

BACKENDS = {"plain": TorchBackend(), "ahead": AheadBackend()}
FAULTS = Faults(
    vanished=0.05,
    truncated=0.05,
    flipped=0.05,
    wrong_layout=0.05,
    disconnected=0.1,
    slow=0.2,
    slow_s=9.0,
    deadline_s=4.0,
)
_STORED = 12_500  # bytes, about a block with its header
SMALL: dict[str, Any] = {"num_blocks": 14, "max_batch_tokens": 48, "max_running": 6, "max_waiting": 200}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("soak")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> list[str | None]:
    ranks = (3, 8)
    return [None, *(publish_adapter(folder, write_adapter(folder / f"peft{r}", rank=r, seed=r)) for r in ranks)]


@pytest.fixture(scope="module")
def replay(folder: Path) -> Replay:
    return Replay(lambda: tiny_core(folder, prefix_caching=False, max_batch_tokens=512))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("faults", [None, FAULTS], ids=["late", "failing"])
def test_a_crowd_says_what_each_says_alone(
    folder: Path, adapters: list[str | None], replay: Replay, seed: int, backend: str, faults: Faults | None
) -> None:
    """Many tenants, adapters, shared prefixes, preemption, cancellation, and blocks that go down and come up."""
    below = PoisonedBelow(host=12, store=MemoryStore(limit=24 * _STORED), seed=seed, faults=faults)
    core = tiny_core(folder, backend=BACKENDS[backend], tiers=below, **SMALL)
    crowd = Crowd(seed, adapters)
    crowd.run(core, below.tick)
    stats = core.stats()
    assert replay.differences(crowd.requests.values(), crowd.tokens, crowd.endings, crowd.cancelled) == []
    assert stats.blocks_active == 0
    assert min(below.poison.blocks, below.poison.slots, stats.preemptions, stats.promoted_blocks) > 0
    core.close()
