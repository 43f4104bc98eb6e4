"""The Triton LoRA table: loading, hot swaps, moves and limits, and that `apply` computes with what is loaded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lamina_kernels.gpu.lora_layout import ALIGN, SiteShape
from lamina_kernels.gpu.lora_pool import OutOfPool
from lamina_kernels.gpu.lora_table import TritonLoraTable
from lamina_kernels.lora import LoraWeights, TorchLoraTable
from support.triton_lora import EMBEDDING, HIDDEN, SITES, VOCAB, Segment, adapter, changed, tiles

TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-3}
DECODE_ROWS, MAX_TOKENS = 8, 80


def make(
    dtype: torch.dtype = torch.float32, *, capacity: int = 1 << 18, slots: int = 5, max_rank: int = 16
) -> TritonLoraTable:
    return TritonLoraTable(
        SITES,
        dtype=dtype,
        device=torch.device("cpu"),
        capacity_bytes=capacity,
        max_slots=slots,
        max_rank=max_rank,
        max_tokens=MAX_TOKENS,
        decode_rows=DECODE_ROWS,
        embedding=EMBEDDING,
        load_order=[range(4, 6), range(2), range(2, 4)],
    )


def rows(site: int, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    shape = SITES[site]
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, shape.in_features, generator=generator)
    return x.to(dtype), torch.randn(count, shape.out_features, generator=generator).to(dtype)


def result(table: TritonLoraTable, slot: int, site: int = 0) -> Tensor:
    """What the slot does to two rows at the site."""
    x, y = rows(site, 2, table.dtype)
    table.apply(site, tiles([(slot, 0, 2)]), x, y)
    return y


def check(
    table: TritonLoraTable,
    loaded: dict[int, list[LoraWeights | None]],
    site: int,
    decode: list[Segment],
    prefill: list[Segment],
    bias: Tensor | None = None,
) -> None:
    """Rows of segments match the oracle; other rows keep their bits, NaN included."""
    count = max(stop for _, _, stop in decode + prefill) + 1
    x, y = rows(site, count, table.dtype)
    base = torch.ones(count, dtype=torch.bool)
    for _, start, stop in decode + prefill:
        base[start:stop] = False
    x[base] = y[base] = torch.nan
    want = changed({slot: sites[site] for slot, sites in loaded.items()}, decode + prefill, x, y, bias)
    table.apply(site, tiles(decode, prefill), x, y, bias)
    tolerance = TOLERANCE[table.dtype]
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ranks_slices_and_kinds_of_row_together(dtype: torch.dtype) -> None:
    """Mixed ranks, an absent slice, DoRA, base rows and the last slot, decode and prefill rows in one call."""
    table = make(dtype)
    loaded = {
        0: adapter(0, (1, 7, 16)),
        2: adapter(2, (0, 2, 0), dora=True),
        3: adapter(3, (5, 5, 5), dora=True),
        4: adapter(4, (8, 0, 3)),
    }
    for slot, weights in loaded.items():
        table.put(slot, table.prepare(weights))
    bias = torch.randn(66).to(dtype)
    check(table, loaded, 0, [(4, 0, 1), (0, 2, 5), (3, 5, 6)], [(2, 8, 9), (3, 9, 76)], bias)
    check(table, loaded, 3, [(3, 0, 1), (1, 1, 2)], [(4, 3, 6)])


def test_dora_without_bias() -> None:
    table = make()
    loaded = {1: adapter(1, (2, 3, 1), dora=True)}
    table.put(1, table.prepare(loaded[1]))
    check(table, loaded, 2, [(1, 0, 3)], [])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_embedding_and_head(dtype: torch.dtype) -> None:
    table = make(dtype)
    loaded = {slot: adapter(slot, (rank,)) for slot, rank in enumerate((1, 9))}
    for slot, weights in loaded.items():
        table.put(slot, table.prepare(weights))
    tokens = torch.tensor([0, VOCAB - 1, 7, 7, 3])
    y = torch.randn(5, HIDDEN).to(dtype)
    decode, prefill = [(1, 0, 2), (0, 2, 3)], [(1, 4, 5)]
    onehot = torch.nn.functional.one_hot(tokens, VOCAB).to(dtype)
    want = changed({slot: sites[EMBEDDING] for slot, sites in loaded.items()}, decode + prefill, onehot, y)
    before = y.clone()
    table.apply_embedding(tiles(decode, prefill), tokens, y)
    torch.testing.assert_close(y.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(y[3], before[3])
    check(table, loaded, 5, [(1, 0, 2)], [(0, 2, 3)])


def test_a_slot_is_reused_without_a_trace() -> None:
    """After q, k and v of one adapter, one of k alone changes k alone, exactly as in a fresh table."""
    table, fresh = make(), make()
    table.put(2, table.prepare(adapter(1, (16, 16, 16), dora=True)))
    table.put(2, table.prepare(adapter(2, (0, 4, 0))))
    fresh.put(2, fresh.prepare(adapter(2, (0, 4, 0))))
    assert torch.equal(result(table, 2), result(fresh, 2))
    table.check_integrity()
    table.drop(2)
    assert torch.equal(result(table, 2), rows(0, 2)[1])
    table.drop(2)
    assert table.free_bytes == make().free_bytes


def test_moves_do_not_change_a_bit() -> None:
    """A load that fits only after moving the others leaves their results as they were; DoRA's gains move along."""
    table = make(torch.float16)
    sizes = [table.prepare(adapter(slot, (slot + 1,) * 3, dora=slot % 2 == 1)) for slot in range(4)]
    table = make(torch.float16, capacity=sum(packed.nbytes for packed in sizes))
    for slot, packed in enumerate(sizes):
        table.put(slot, packed)
    before = {slot: [result(table, slot, site) for site in (0, 1, 5)] for slot in (1, 3)}
    table.drop(0)
    table.drop(2)
    large = adapter(9, (4, 3, 4))
    table.put(4, table.prepare(large))
    table.check_integrity()
    assert table.free_bytes < sizes[2].nbytes  # thus it lies where both were
    for slot, results in before.items():
        assert all(torch.equal(result(table, slot, site), y) for site, y in zip((0, 1, 5), results, strict=True))
    check(table, {4: large}, 0, [(4, 0, 2)], [])


def test_overlapping_moves_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extent longer than the distance that it moves, and than the memory it is moved through."""
    monkeypatch.setattr("lamina_kernels.gpu.lora_pool._BOUNCE_BYTES", 40 * ALIGN)
    table = make()
    small, large = table.prepare([None, adapter(1, (1,))[1], *[None] * 4]), table.prepare(adapter(2, (16, 16, 16)))
    table.put(0, small)
    table.put(1, large)
    before = result(table, 1)
    table.drop(0)
    table.compact()
    table.check_integrity()
    assert torch.equal(result(table, 1), before)


def test_no_room() -> None:
    """The error names the bytes; slots, results and free memory are as before."""
    table = make()
    packed = table.prepare(adapter(1))
    table = make(capacity=packed.nbytes + 64)
    table.put(1, packed)
    before = result(table, 1)
    with pytest.raises(OutOfPool, match=f"needs {packed.nbytes} bytes; 64 of") as refused:
        table.put(0, packed)
    assert (refused.value.need, refused.value.have, refused.value.limit) == (packed.nbytes, 64, packed.nbytes + 64)
    with pytest.raises(OutOfPool) as refused:
        table.put(1, make().prepare(adapter(2, (16, 16, 16))))
    assert refused.value.have == packed.nbytes + 64  # what it would replace counts as free
    assert torch.equal(result(table, 1), before)
    assert torch.equal(result(table, 0), rows(0, 2)[1])
    table.check_integrity()
    table.put(1, table.prepare(adapter(2)))  # the same size: fits in place of the old one


def test_misuse() -> None:
    table = make()
    packed = table.prepare(adapter(1))
    for slot in (-1, 5):
        with pytest.raises(ValueError, match=f"no slot {slot}"):
            table.put(slot, packed)
        with pytest.raises(ValueError, match=f"no slot {slot}"):
            table.drop(slot)
    with pytest.raises(TypeError, match="TorchLora was prepared"):
        table.put(0, TorchLoraTable(6).prepare(adapter(1)))
    for other in (make(torch.float16), make(max_rank=8)):
        with pytest.raises(TypeError, match="packed for other"):
            other.put(0, packed)
    with pytest.raises(ValueError, match="rank at column 0 is 17"):
        table.prepare(adapter(1, (17,)))
    table.check_integrity()


def test_what_apply_refuses() -> None:
    table = make()
    x, y = rows(0, 3)
    with pytest.raises(ValueError, match="takes x"):
        table.apply(0, tiles([(0, 0, 1)]), x[:, :36], y)
    with pytest.raises(ValueError, match="unless it is the embedding"):
        table.apply(EMBEDDING, tiles([(0, 0, 1)]), *rows(EMBEDDING, 3))
    with pytest.raises(ValueError, match="3 rows in, 2 out"):
        table.apply(0, tiles([(0, 0, 1)]), x, y[:2])
    with pytest.raises(ValueError, match="at most 80"):
        table.apply(0, tiles([(0, 0, 1)]), *rows(0, 81))
    with pytest.raises(ValueError, match="y has 40 columns"):
        table.apply(0, tiles([(0, 0, 1)]), x, y[:, :40])
    with pytest.raises(TypeError, match="share one of"):
        table.apply(0, tiles([(0, 0, 1)]), x.half(), y)
    with pytest.raises(ValueError, match="without an embedding"):
        small().apply_embedding(tiles([]), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 8))


def test_load_orders() -> None:
    """By default four sites at a time, after those that are left over; a given order has each site once."""
    table = small(sites=6)
    assert list(table.load_layers(0, table.prepare([None] * 6))) == [range(4, 6), range(4)]
    for wrong in ([range(5)], [range(4), range(3, 6)], [range(0, 6, 2), range(1, 6, 2)]):
        with pytest.raises(ValueError, match="each of 6 sites once"):
            small(sites=6, load_order=wrong)


def small(*, sites: int = 1, load_order: list[range] | None = None) -> TritonLoraTable:
    return TritonLoraTable(
        [SiteShape(8, (8,))] * sites,
        dtype=torch.float32,
        device=torch.device("cpu"),
        capacity_bytes=0,
        max_slots=1,
        max_rank=1,
        max_tokens=1,
        decode_rows=1,
        load_order=load_order,
    )


def test_no_tiles_launch_nothing() -> None:
    """A step of base rows alone does not look at x."""
    table = make()
    y = torch.full((4, 66), torch.nan)
    table.apply(0, tiles([]), torch.full((4, HIDDEN), torch.nan), y)
    assert y.isnan().all()


def test_layers_arrive_one_by_one() -> None:
    """Embedding and head first, then layer 0; a site whose copy is to come still has rank 0."""
    table, weights = make(), adapter(7)
    steps = table.load_layers(1, table.prepare(weights))
    assert torch.equal(result(table, 1), rows(0, 2)[1])
    assert next(steps) == range(4, 6)
    assert torch.equal(result(table, 1), rows(0, 2)[1])
    assert next(steps) == range(2)
    check(table, {1: weights}, 0, [(1, 0, 1)], [])
    assert torch.equal(result(table, 1, 2), rows(2, 2)[1])
    table.check_integrity()
    assert next(steps) == range(2, 4)
    assert next(steps, None) is None
    check(table, {1: weights}, 2, [(1, 0, 1)], [])


def test_an_adapter_moves_while_it_is_loaded() -> None:
    table, weights = make(), adapter(7)
    table.put(0, table.prepare(adapter(1)))
    steps = table.load_layers(1, table.prepare(weights))
    next(steps), next(steps)
    table.drop(0)
    table.compact()
    table.check_integrity()
    assert list(steps) == [range(2, 4)]
    table.check_integrity()
    check(table, {1: weights}, 0, [(1, 0, 1)], [])
    check(table, {1: weights}, 2, [(1, 0, 1)], [])


def test_a_load_ends_with_its_slot() -> None:
    """Dropped, or filled by somebody else: the rest of the adapter is not written over what is there now."""
    table = make()
    steps = table.load_layers(1, table.prepare(adapter(7)))
    next(steps)
    table.put(1, table.prepare(adapter(8)))
    before = result(table, 1)
    with pytest.raises(LookupError, match="slot 1"):
        next(steps)
    assert torch.equal(result(table, 1), before)
    steps = table.load_layers(1, table.prepare(adapter(7)))
    table.drop(1)
    with pytest.raises(LookupError, match="slot 1"):
        next(steps)
    table.check_integrity()


def test_threads_prepare_while_the_table_works() -> None:
    table = make()
    with ThreadPoolExecutor(4) as pool:
        packed = list(pool.map(lambda seed: table.prepare(adapter(seed, (seed % 5 + 1,) * 3)), range(16)))
    for seed, one in enumerate(packed):
        again = table.prepare(adapter(seed, (seed % 5 + 1,) * 3))
        assert torch.equal(one.host, again.host)
        assert torch.equal(one.placement.rows, again.placement.rows)


def test_a_row_does_not_depend_on_its_company() -> None:
    """Alone, at another position, or among other adapters' rows: the same bits, for both kinds of row."""
    table = make(torch.float16)
    for slot in range(3):
        table.put(slot, table.prepare(adapter(slot, (slot + 2,) * 3)))
    x, y = rows(0, 78, torch.float16)
    together = y.clone()
    table.apply(0, tiles([(1, 0, 2), (0, 2, 6)], [(2, 8, 9), (1, 9, 77)]), x, together)
    alone = y[4:5].clone()
    table.apply(0, tiles([(0, 0, 1)]), x[4:5], alone)
    assert torch.equal(alone, together[4:5])
    alone = y[70:71].clone()
    table.apply(0, tiles([], [(1, 0, 1)]), x[70:71], alone)
    assert torch.equal(alone, together[70:71])
