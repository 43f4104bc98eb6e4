"""A run of verifying, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lamina.engine.tier_protocol import Below
from lamina.engine.verify import Verifier
from lamina.engine.verify_runs import Runs
from lamina.errors import InvalidRequest
from lamina.types import VerifyOrder
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.manager import KvManager
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey


class Tier:
    """Counts how often it is listed."""

    def __init__(self, count: int) -> None:
        self.blocks, self.listings = list(range(count)), 0

    def listing(self) -> Sequence[int]:
        self.listings += 1
        return list(self.blocks)


def rest(runs: Runs[int], start: int | None, count: int = 3) -> list[int]:
    found: list[int] = []
    while start is not None:
        batch = runs.batch(VerifyOrder(tier="host", start=start), count)
        found += batch.wanted
        start = batch.following
    return found


def test_a_run_lists_once() -> None:
    """However many batches: what comes and goes meanwhile moves nothing."""
    tier = Tier(1000)
    runs = Runs(tier.listing)
    first = runs.batch(VerifyOrder(tier="host"), 3)
    assert (first.total, first.wanted) == (1000, [0, 1, 2])
    del tier.blocks[:500]
    assert rest(runs, first.following) == list(range(3, 1000))
    assert tier.listings == 1
    assert runs._open == {}


def test_runs_do_not_disturb_each_other() -> None:
    """Each goes through all of what there was when it began; the oldest of too many is told to begin again."""
    tier = Tier(10)
    runs = Runs(tier.listing)
    starts = []
    for _ in range(5):
        starts.append(runs.batch(VerifyOrder(tier="host"), 3).following)
        tier.blocks = [block + 1 for block in tier.blocks]
    with pytest.raises(InvalidRequest, match="Start it again"):
        rest(runs, starts[0])
    for late, start in enumerate(starts[1:], start=1):
        assert rest(runs, start) == [block + late for block in range(3, 10)]
    with pytest.raises(InvalidRequest):
        rest(runs, starts[1])  # it has ended


def test_nothing_is_kept_of_what_fits_one_batch() -> None:
    """Nor of a sample."""
    runs = Runs(Tier(3).listing)
    assert runs.batch(VerifyOrder(tier="host"), 3).following is None
    assert sorted(runs.batch(VerifyOrder(tier="host", seed=1), 5).wanted) == [0, 1, 2]
    assert Runs(Tier(0).listing).batch(VerifyOrder(tier="host"), 3).following is None
    assert runs._open == {}


def test_what_left_host_memory_meanwhile_is_absent() -> None:
    """And its slot is not taken for it, whoever has that now."""
    host = HostTier(5, 64, seal=lambda slot: slot)

    def store(number: int) -> bytes:
        (reservation,) = host.reserve([BlockKey(bytes([number]) * 32, "ann")])
        assert reservation is not None
        host.commit([reservation])
        return bytes([number]) * 32

    ids = [store(number) for number in range(5)]
    lower = Below(host, None, None)  # type: ignore[arg-type]
    verifier = Verifier(KvManager(8, 4), lower, lambda: None, list)
    first = verifier.verify(VerifyOrder(tier="host", count=2)).advance()
    assert first is not None
    assert first.following is not None
    host.forget(ids[4:], Reason.DELETED)
    store(9)
    second = verifier.verify(VerifyOrder(tier="host", start=first.following, count=64)).advance()
    assert second is not None
    assert (second.total, second.checked, second.absent, second.following) == (5, 2, 1, None)
