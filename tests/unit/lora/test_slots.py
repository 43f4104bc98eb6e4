"""Slots: who is in memory, for how long, and under which number."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lamina_kernels.lora import LoraSegments, LoraWeights, PreparedLora, TorchLoraTable
from lamina_lora.batch import Segment
from lamina_lora.errors import AdapterMissing, OutOfAdapterMemory, OutOfAdapterSlots, SlotEmpty, SlotsCorrupt
from lamina_lora.slots import AdapterSlots
from lamina_lora.weights import AdapterWeights, prepare_adapter

SIZES = {"a": 1, "b": 1, "c": 2, "d": 3, "huge": 100}
UNIT = 4 * 2 * 4  # bytes of rank 1 at one site, 4 wide each way, float32


def weights(digest: str) -> AdapterWeights:
    rank = SIZES[digest]
    value = float(ord(digest[0]))
    lora = LoraWeights(torch.ones(rank, 4), (torch.full((rank, 4), value),), (0,))
    return AdapterWeights(digest, (lora, None, None, None), torch.float32, torch.device("cpu"))


def loader(digest: str) -> AdapterWeights:
    if digest not in SIZES:
        raise AdapterMissing(digest)
    return weights(digest)


@pytest.fixture
def slots() -> AdapterSlots:
    return AdapterSlots(4 * UNIT, loader, make_table=lambda sites, dtype, device: TorchLoraTable(sites))


def test_loads_once(slots: AdapterSlots) -> None:
    """A second user shares the first one's slot."""
    assert slots.acquire("a") == slots.acquire("a") == 0
    assert slots.acquire("b") == 1
    assert (slots.counters.loads, slots.counters.hits) == (2, 1)
    assert (slots.references("a"), slots.references("b"), slots.references("c")) == (2, 1, 0)
    assert slots.used_bytes == 2 * UNIT
    slots.check_integrity()


def test_stays_until_the_room_is_needed(slots: AdapterSlots) -> None:
    """Released adapters stay loaded; the least recently used leave first."""
    for digest in ("a", "b", "c"):
        slots.acquire(digest)
        slots.release(digest)
    slots.acquire("a")
    slots.release("a")
    assert slots.loaded == ("b", "c", "a")
    slots.acquire("d")
    assert slots.loaded == ("a", "d")
    assert slots.counters.evictions == 2
    slots.check_integrity()


def test_adapters_in_use_are_never_evicted(slots: AdapterSlots) -> None:
    """What does not fit beside them is refused with the numbers, and nothing changes."""
    slots.acquire("c")
    slots.acquire("a")
    slots.release("a")
    before = slots.loaded
    with pytest.raises(OutOfAdapterMemory) as caught:
        slots.acquire("d")
    assert (caught.value.need, caught.value.have, caught.value.limit) == (3 * UNIT, 2 * UNIT, 4 * UNIT)
    assert slots.loaded == before
    assert slots.counters.refusals == 1
    slots.check_integrity()


def test_what_can_never_fit_is_refused(slots: AdapterSlots) -> None:
    """Nothing is evicted for it."""
    slots.acquire("a")
    slots.release("a")
    with pytest.raises(OutOfAdapterMemory):
        slots.acquire("huge")
    assert slots.loaded == ("a",)


def test_a_missing_adapter_changes_nothing(slots: AdapterSlots) -> None:
    """The loader's error passes through."""
    with pytest.raises(AdapterMissing):
        slots.acquire("nope")
    assert slots.loaded == ()
    slots.check_integrity()


def test_unload_drains_then_frees(slots: AdapterSlots) -> None:
    """Running requests finish; the last release frees the slot for the next adapter."""
    slots.acquire("a")
    slots.acquire("a")
    assert slots.unload("a")
    slots.release("a")
    assert slots.loaded == ("a",)
    slots.check_integrity()
    slots.release("a")
    assert slots.loaded == ()
    assert slots.counters.unloads == 1
    assert slots.acquire("b") == 0
    slots.check_integrity()


def test_unload_of_an_idle_or_unknown_adapter(slots: AdapterSlots) -> None:
    """Idle: at once. Unknown: False."""
    slots.acquire("a")
    slots.release("a")
    assert slots.unload("a")
    assert slots.loaded == ()
    assert not slots.unload("a")


def test_an_unloading_adapter_still_serves_accepted_requests(slots: AdapterSlots) -> None:
    """It can be acquired again while it drains, and goes when the last one is done."""
    slots.acquire("a")
    slots.unload("a")
    assert slots.acquire("a") == 0
    slots.release("a")
    slots.release("a")
    assert slots.loaded == ()


def test_release_without_acquire(slots: AdapterSlots) -> None:
    """A programming error, not a silent underflow."""
    with pytest.raises(KeyError):
        slots.release("a")
    slots.acquire("a")
    slots.release("a")
    with pytest.raises(KeyError):
        slots.release("a")
    slots.check_integrity()


def test_add_takes_weights_loaded_elsewhere(slots: AdapterSlots) -> None:
    """Twice is once; acquiring does not load again."""
    slots.add(weights("a"))
    slots.add(weights("a"))
    assert slots.references("a") == 0
    slots.acquire("a")
    assert (slots.counters.loads, slots.counters.hits) == (1, 1)
    slots.check_integrity()


def test_prepared_adapters_bring_their_table(slots: AdapterSlots) -> None:
    """A loader in another thread prepares for the table; the slots only take the result in."""
    table = TorchLoraTable(4)
    slots.add(prepare_adapter(weights("a"), table))
    slots.add(prepare_adapter(weights("b"), table))
    slot = slots.acquire("b")
    y = torch.zeros(1, 4)
    slots.batch([Segment(slot, 0, 1)], 1).apply(0, "qkv", torch.ones(1, 4), y)
    assert y[0].tolist() == [4.0 * ord("b")] * 4
    slots.check_integrity()


def test_batch_uses_the_right_adapter(slots: AdapterSlots) -> None:
    """Each segment's rows get their adapter's change; a slot that is reused serves its new adapter."""
    a, b = slots.acquire("a"), slots.acquire("b")
    x, y = torch.ones(4, 4), torch.zeros(4, 4)
    slots.batch([Segment(b, 0, 1), Segment(a, 2, 4)], 4).apply(0, "qkv", x, y)
    assert y[:, 0].tolist() == [4 * ord("b"), 0, 4 * ord("a"), 4 * ord("a")]
    slots.release("a")
    slots.unload("a")
    assert slots.acquire("c") == a
    y = torch.zeros(4, 4)
    slots.batch([Segment(a, 0, 4)], 4).apply(0, "qkv", x, y)
    assert y[:, 0].tolist() == [2 * 4 * ord("c")] * 4


def test_an_empty_batch_changes_nothing(slots: AdapterSlots) -> None:
    """With adapters loaded and without."""
    x, y = torch.ones(4, 4), torch.zeros(4, 4)
    slots.batch([], 4).apply(0, "qkv", x, y)
    slots.acquire("a")
    slots.batch([], 4).apply(0, "qkv", x, y)
    assert (y == 0).all()


@pytest.mark.parametrize("slot", [-1, 0, 1, 99])
def test_batch_refuses_slots_without_an_acquired_adapter(slots: AdapterSlots, slot: int) -> None:
    """Free, unknown and idle slots: a stale number never serves another tenant's weights."""
    slots.acquire("a")
    slots.release("a")
    with pytest.raises(SlotEmpty):
        slots.batch([Segment(slot, 0, 1)], 1)


@pytest.mark.parametrize("rows", [[(0, 0)], [(0, 5)], [(0, 2), (1, 3)]], ids=["empty", "too long", "overlap"])
def test_batch_refuses_bad_segments(slots: AdapterSlots, rows: Sequence[tuple[int, int]]) -> None:
    """Rows must be inside the step and belong to one adapter."""
    slot = slots.acquire("a")
    with pytest.raises(ValueError, match="segment"):
        slots.batch([Segment(slot, start, stop) for start, stop in rows], 4)


def test_integrity_check_can_fail(slots: AdapterSlots) -> None:
    """Each broken rule is noticed."""
    slots.acquire("a")
    slots.capacity_bytes = 0
    with pytest.raises(SlotsCorrupt, match="limit"):
        slots.check_integrity()
    slots.capacity_bytes = 4 * UNIT
    slots._residents["a"].references = -1
    with pytest.raises(SlotsCorrupt, match="references"):
        slots.check_integrity()
    slots._residents["a"].references = 1
    slots.counters.loads = 7
    with pytest.raises(SlotsCorrupt, match="add up"):
        slots.check_integrity()
    slots._digests[0] = None
    with pytest.raises(SlotsCorrupt, match="match"):
        slots.check_integrity()


def test_a_table_that_fails_leaves_the_slots_intact() -> None:
    """An adapter that cannot be placed is not half there."""

    class Broken(TorchLoraTable):
        def put(self, slot: int, prepared: PreparedLora) -> None:
            raise MemoryError

        def apply(self, site: int, segments: LoraSegments, x: Tensor, y: Tensor, bias: Tensor | None = None) -> None:
            raise AssertionError

    slots = AdapterSlots(4 * UNIT, loader, make_table=lambda sites, dtype, device: Broken(sites))
    with pytest.raises(MemoryError):
        slots.acquire("a")
    assert slots.loaded == ()
    slots.check_integrity()


def test_slots_may_be_the_limit() -> None:
    """However small adapters are, no more than `max_slots` are loaded; idle ones make room, those in use do not."""
    slots = AdapterSlots(100 * UNIT, loader, max_slots=2, make_table=lambda sites, dtype, device: TorchLoraTable(sites))
    for digest in ("a", "b"):
        slots.acquire(digest)
    with pytest.raises(OutOfAdapterSlots, match="All 2 adapter slots"):
        slots.acquire("c")
    slots.release("a")
    assert slots.acquire("c") == 0
    assert slots.loaded == ("b", "c")
    slots.check_integrity()
    with pytest.raises(ValueError, match="max_slots is 0"):
        AdapterSlots(1, loader, max_slots=0)


def test_negative_capacity_is_refused() -> None:
    """The limit is checked when it is set."""
    with pytest.raises(ValueError, match="capacity"):
        AdapterSlots(-1, loader)
