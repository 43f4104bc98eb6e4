"""Crowded engines with poisoned memory, late copies and bad stores: nobody ever reads what is not theirs.

After each run every request is replayed alone on a fresh engine without tiers, and must have said the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.engines import publish_adapter, tiny_core, write_adapter
from lamina.types import PinOrder, QuotaPolicy, TierQuota
from lamina.wiring.backends import TorchBackend
from lamina_kvtier.fault_tier import Faults
from lamina_kvtier.memory_tier import MemoryStore
from support.ahead import AheadBackend
from support.poison import PoisonedBelow
from support.replay import Replay
from support.soak import SMALL, Crowd

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
    assert crowd.differences(replay) == []
    assert stats.blocks_active == 0
    assert min(below.poison.blocks, below.poison.slots, stats.preemptions, stats.promoted_blocks) > 0
    core.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_crowd_with_quotas_and_pins_says_the_same(
    folder: Path, adapters: list[str | None], replay: Replay, backend: str
) -> None:
    """Reservations, weights, a limit and pins on the device: other blocks move, or none; the same tokens."""
    below = PoisonedBelow(host=12, store=MemoryStore(limit=24 * _STORED), seed=3, faults=FAULTS)
    core = tiny_core(folder, backend=BACKENDS[backend], tiers=below, **SMALL | {"num_blocks": 22})
    core.commons.set_quotas(
        [
            QuotaPolicy(namespace="a", gpu=TierQuota(reserved=4, pin_limit=3), weight=2.0),
            QuotaPolicy(namespace="b", gpu=TierQuota(reserved=3, limit=14, pin_limit=2)),
        ]
    )
    crowd = Crowd(3, adapters)
    for tenant, prefix in zip("ab", crowd.prefixes, strict=False):
        order = PinOrder(namespace=tenant, token_ids=tuple(prefix), ttl_s=1e6, hard_max_s=1e6)
        assert core.commons.pin(order).status in ("granted", "clipped")
    crowd.run(core, below.tick)
    assert crowd.differences(replay) == []
    report = core.commons.report()
    assert all(pin.resident_blocks == pin.blocks for pin in report.pins)
    assert sum(pin.hits for pin in report.pins) > 0
    assert core.stats().blocks_active == 0
    core.close()
