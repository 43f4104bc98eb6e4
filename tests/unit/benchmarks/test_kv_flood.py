"""The flood benchmark measures what it says, on a tiny engine: no times, but hits, answers and the flood itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.engines import tiny_core
from kv_flood import Load, measure, quantile

TINY = Load(
    prefixes=2,
    prefix=64,
    new=24,
    output=3,
    flood=80,
    flood_output=2,
    flood_waiting=6,
    reserved=24,
    blocks=48,
    vocabulary=(3, 211),
)


def test_a_tenant_within_its_reservation_keeps_its_hits_beside_a_flood(tmp_path: Path):
    cores = [tiny_core(tmp_path, num_blocks=TINY.blocks, max_batch_tokens=32, max_running=8) for _ in range(2)]
    alone, flooded = measure(cores, TINY, rounds=2, each=4)
    assert len(alone.seen) == len(flooded.seen) == 8
    assert alone.hit_rate() == flooded.hit_rate() == 64 / 88
    assert [a.tokens for a in alone.seen] == [b.tokens for b in flooded.seen]
    assert flooded.flooded_tokens > 0 == alone.flooded_tokens
    assert all(seconds > 0 for seconds in [*alone.times(), *flooded.times()])
    for core in cores:
        core.close()


def test_a_quantile_lies_between_its_neighbours():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert quantile([7.0], 0.99) == 7.0
