"""Blocks between device and host: both ways of copying, faults, and the choice between the ways."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lamina_kernels.gpu import blocks
from lamina_kernels.gpu.block_mover import BlockKernels, BlockMover, HostBlocks, MoverCosts, WayCosts, calibrate
from lamina_kernels.gpu.mover_costs import Curve
from lamina_kernels.oracles import blocks as oracle
from support.kernel_numbers import DEVICE, noise

ON_GPU = DEVICE.type == "cuda"
BLOCKS, SLOTS = 9, 12
SHAPE = (BLOCKS, 2, 2, 16, 3, 8)
BLOCK_BYTES = 2 * 2 * 16 * 3 * 8 * 4

KERNEL = WayCosts(copy=Curve((1,), (1.0,)), stage=Curve((1,), (0.0,)))  # each copy costs a second, the kernel nothing
DMA = WayCosts(copy=Curve((1,), (0.0,)), stage=Curve((1,), (1.0,)))
PER_CALL = WayCosts(copy=Curve((1, 2), (1.0, 1.0)), stage=Curve((1,), (0.0,)))  # the same, however large


class Recorder:
    """Counts what the kernels are asked for; fails when told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.error: Exception | None = None

    def gather_blocks(self, pool: Tensor, ids: Tensor, out: Tensor) -> None:
        self._note("gather", ids)
        oracle.gather_blocks(pool, ids, out)

    def scatter_blocks(self, staged: Tensor, ids: Tensor, pool: Tensor) -> None:
        self._note("scatter", ids)
        oracle.scatter_blocks(staged, ids, pool)

    def _note(self, name: str, ids: Tensor) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append((name, len(ids)))


def arena(chunk_blocks: int = 5) -> HostBlocks:
    host = HostBlocks(SLOTS, BLOCK_BYTES, pin=ON_GPU, chunk_bytes=chunk_blocks * BLOCK_BYTES)
    for slot in range(SLOTS):
        host.slots(slot).fill_(slot)
    return host


def mover(
    pool: Tensor, host: HostBlocks, costs: WayCosts, kernels: BlockKernels = oracle, staging: int = 2**20
) -> BlockMover:
    return BlockMover(pool, host, costs=MoverCosts(costs, costs), kernels=kernels, staging_bytes=staging)


def content(host: HostBlocks, slot: int) -> Tensor:
    return host.slots(slot)[0].view(torch.float32)


ways = pytest.mark.parametrize("costs", [KERNEL, DMA, PER_CALL], ids=["kernel", "dma", "per call"])


@ways
@pytest.mark.parametrize("kernels", [blocks, oracle], ids=["triton", "torch"])
@pytest.mark.parametrize("staging", [1, 2 * BLOCK_BYTES, 2**20], ids=["one", "two", "all"])
def test_there_and_back(costs: WayCosts, kernels: BlockKernels, staging: int) -> None:
    """Scattered blocks to scattered slots, across chunks and batches; what was not named keeps its content."""
    pool, host = noise(*SHAPE), arena()
    original = pool.clone()
    moves = mover(pool, host, costs, kernels, staging)
    ids, slots = [8, 0, 3, 5, 1], [4, 11, 5, 0, 6]
    moves.spill(ids, slots).wait()
    for block, slot in zip(ids, slots, strict=True):
        assert torch.equal(content(host, slot), original[block].view(-1).cpu())
    assert bytes(host.bytes_of(7)) == bytes([7]) * BLOCK_BYTES
    pool.fill_(torch.nan)
    transfer = moves.promote(slots, ids)
    transfer.gate()
    transfer.wait()
    assert transfer.done()
    assert torch.equal(pool[ids], original[ids])
    assert pool[[2, 4, 6, 7]].isnan().all()


def test_the_kernel_takes_neighbours_in_one_copy() -> None:
    """Slots are sorted first; runs end at a chunk's end; batches at the end of staging memory."""
    recorder = Recorder()
    moves = mover(noise(*SHAPE), arena(), PER_CALL, recorder, staging=6 * BLOCK_BYTES)
    moves.spill([0, 1, 2, 3, 4, 5, 6], [3, 2, 1, 0, 7, 6, 5]).wait()
    assert recorder.calls == [("gather", 6)]  # and one block that is left, for which one copy is as good
    moves.promote([9, 8], [1, 2]).wait()
    assert recorder.calls[1:] == [("scatter", 2)]
    moves.promote([9, 7], [1, 2]).wait()
    assert len(recorder.calls) == 2


def test_no_kernel_where_its_vectors_do_not_fit() -> None:
    recorder = Recorder()
    moves = mover(noise(3, 5), HostBlocks(2, 20, pin=ON_GPU), KERNEL, recorder)
    moves.spill([2, 1], [0, 1]).wait()
    assert recorder.calls == []


def test_nothing_to_move() -> None:
    moves = mover(noise(*SHAPE), arena(), KERNEL)
    moves.spill([], []).wait()
    moves.promote([], []).wait()


@pytest.mark.parametrize("error", [RuntimeError("device lost"), OSError("bus"), MemoryError()], ids=repr)
def test_a_fault_waits_for_who_waits(error: Exception) -> None:
    """Asking raises nothing; waiting does, each time, and gating too; the next transfer is a new one."""
    pool, recorder = noise(*SHAPE), Recorder()
    moves = mover(pool, arena(), PER_CALL, recorder)
    recorder.error = error
    failed = [moves.spill([0, 1], [0, 1]), moves.promote([0, 1], [2, 3])]
    while not all(transfer.done() for transfer in failed):
        time.sleep(0.001)
    recorder.error = None
    for transfer in failed:
        for finish in (transfer.wait, transfer.wait, transfer.gate):
            with pytest.raises(type(error)) as caught:
                finish()
            assert caught.value is error
        assert transfer.done()
    moves.spill([0, 1], [0, 1]).wait()


def test_a_failed_copy_of_a_single_block(monkeypatch: pytest.MonkeyPatch) -> None:
    host = arena()
    moves = mover(noise(*SHAPE), host, DMA)
    host._chunks[1] = torch.empty(0, BLOCK_BYTES, dtype=torch.uint8)
    transfer = moves.spill([0, 1], [0, 6])
    with pytest.raises(IndexError, match="not in one chunk"):
        transfer.wait()


@pytest.mark.parametrize(
    ("ids", "slots"), [([0], [0, 1]), ([BLOCKS], [0]), ([-1], [0]), ([0], [SLOTS]), ([0], [-1]), ([0, 0], [1, 1])]
)
def test_what_cannot_be_moved_is_refused_at_once(ids: list[int], slots: list[int]) -> None:
    """A negative index would silently be another block."""
    pool, host = noise(*SHAPE), arena()
    moves = mover(pool, host, DMA)
    with pytest.raises(ValueError, match=r"slots|blocks|twice"):
        moves.spill(ids, slots)
    with pytest.raises(ValueError, match=r"slots|blocks|twice"):
        moves.promote(slots, ids)
    assert bytes(host.bytes_of(0)) == bytes(BLOCK_BYTES)


def test_one_source_may_go_to_many_places() -> None:
    pool, host = noise(*SHAPE), arena()
    moves = mover(pool, host, DMA)
    moves.spill([3, 3], [1, 2]).wait()
    moves.promote([1, 1], [0, 4]).wait()
    assert torch.equal(pool[0], pool[3])
    assert torch.equal(pool[4], pool[3])


def test_pools_that_do_not_fit_their_arena() -> None:
    with pytest.raises(ValueError, match="for slots of"):
        mover(noise(3, 8), arena(), DMA)
    with pytest.raises(ValueError, match="contiguous"):
        mover(noise(3, 8).t(), arena(), DMA)
    with pytest.raises(ValueError, match="contiguous"):
        mover(noise(0, 8), arena(), DMA)


def test_an_arena_in_chunks() -> None:
    host = HostBlocks(7, 16, pin=ON_GPU, chunk_bytes=50)
    assert [len(chunk) for chunk in host._chunks] == [3, 3, 1]
    assert list(host.runs([0, 1, 2, 3, 4, 6, 5])) == [(0, 3), (3, 5), (5, 6), (6, 7)]
    assert list(host.runs([])) == []
    host.bytes_of(6)[:] = b"0123456789abcdef"
    assert bytes(host.slots(6)[0].numpy()) == b"0123456789abcdef"
    for first, count in [(2, 2), (7, 1), (-1, 1), (0, 0)]:
        with pytest.raises(IndexError):
            host.slots(first, count)
    assert len(HostBlocks(2, 100, pin=ON_GPU, chunk_bytes=50)._chunks) == 2  # a chunk holds one slot at least
    with pytest.raises(ValueError, match="no arena"):
        HostBlocks(-1, 16, pin=False)


def test_small_scattered_blocks_go_by_kernel_and_large_ones_by_dma() -> None:
    """Figures as published: 3 µs to submit a copy, 50 GB/s on the bus, 10 µs a launch, 2 TB/s in memory."""
    costs = WayCosts(copy=Curve((4096, 65536, 2**22), (3e-6, 3e-6, 84e-6)), stage=Curve((2**16, 2**24), (1e-5, 1.8e-5)))
    assert costs.choose(4096, 64) == "kernel"
    assert costs.choose(16384, 64, runs=4) == "kernel"
    assert costs.choose(4096, 64, runs=64) == "dma"  # each slot would need its own copy all the same
    assert costs.choose(4096, 1) == "dma"
    assert costs.choose(2**21, 16) == "dma"
    for pieces, runs in [(3, 4), (3, 0), (-1, 1)]:
        with pytest.raises(ValueError, match="pieces"):
            costs.choose(4096, pieces, runs)


def test_a_curve_between_and_beyond_its_points() -> None:
    curve = Curve((10, 20), (1.0, 3.0))
    assert [curve.at(size) for size in (0, 10, 15, 20, 30)] == [1.0, 1.0, 2.0, 3.0, 5.0]
    assert Curve((10, 20), (3.0, 1.0)).at(40) == 1.0  # noise must not make more bytes free
    assert Curve((10,), (1.0,)).at(40) == 4.0
    for sizes, seconds in [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((1, 1), (1.0, 1.0))]:
        with pytest.raises(ValueError, match="rising"):
            Curve(sizes, seconds)


def test_calibration_measures_at_least_one_point_of_each_curve() -> None:
    kernels = blocks if ON_GPU else oracle
    for budget in (0.0, 0.1):
        costs = calibrate(DEVICE, kernels, budget_seconds=budget)
        for curve in (costs.spill.copy, costs.spill.stage, costs.promote.copy, costs.promote.stage):
            assert min(curve.seconds) > 0
            assert budget or len(curve.sizes) <= 2
