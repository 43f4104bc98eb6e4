"""Spill and promote through host memory against memcpy of the same bytes, in the same run, by turns.

    python benchmarks/kv_copies.py            # half a minute
    python benchmarks/kv_copies.py --quick

Whole blocks of the pool go to slots of host memory and back, the way the engine asks for it: `BlockMover`, scattered
blocks, and slots once side by side (an empty tier) and once scattered (a tier that has been full for long). Beside it
one memcpy of as many bytes: `memmove` of the C library without a GPU, one copy of pinned memory with one. Goal: at
least 70 % of it. Rates are of the payload, once; the median of rounds in an order that changes, and the ratio is the
median of each round's. First the gate: blocks come back bit by bit, and nobody else's are touched.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from harness import MIB, Goal, Progress, add_quick, finish
from lamina_kernels.gpu.block_mover import BlockMover, HostBlocks, calibrate
from lamina_kernels.oracles import blocks as plain_kernels

SIZES = {"720 KiB (SmolLM2-135M, float32)": 720 << 10, "2 MiB (Llama-3-8B, bfloat16)": 2 * MIB}
COLUMNS = ["block", "slots", "way", "GB/s", "memcpy GB/s", "share"]
GOAL = 0.7


class Bench:
    """A pool of twice the blocks that move, an arena as large as the pool, and two plain buffers for memcpy."""

    def __init__(self, block_bytes: int, total_bytes: int, device: torch.device, *, neighbours: bool) -> None:
        self.device, count = device, max(2, total_bytes // block_bytes)
        self.moved = count * block_bytes
        pinned = device.type == "cuda"
        self.pool = torch.randint(0, 256, (2 * count, block_bytes), dtype=torch.uint8, device=device)
        self.arena = HostBlocks(2 * count, block_bytes, pin=pinned)
        kernels = _kernels(device)
        self.mover = BlockMover(self.pool, self.arena, costs=calibrate(device, kernels), kernels=kernels)
        chance = random.Random(block_bytes)
        self.blocks = chance.sample(range(2 * count), count)
        self.slots = list(range(count)) if neighbours else chance.sample(range(2 * count), count)
        self._near = torch.randint(0, 256, (self.moved,), dtype=torch.uint8, device=device)
        self._far = torch.zeros(self.moved, dtype=torch.uint8, pin_memory=pinned)

    def gate(self) -> None:
        """Exits unless a round trip is exact."""
        before = self.pool.clone()
        self.spill()
        self.pool[self.blocks] = 0
        self.promote()
        if not torch.equal(self.pool, before):
            raise SystemExit("correctness gate: blocks came back with other bytes")
        if any(not torch.equal(self.arena.slots(s)[0], before[b].cpu()) for b, s in self._pairs()):
            raise SystemExit("correctness gate: a slot has other bytes than its block")

    def spill(self) -> None:
        self.mover.spill(self.blocks, self.slots).wait()

    def promote(self) -> None:
        self.mover.promote(self.slots, self.blocks).wait()

    def memcpy_out(self) -> None:
        self._memcpy(self._far, self._near)

    def memcpy_in(self) -> None:
        self._memcpy(self._near, self._far)

    def _memcpy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.device.type == "cpu":
            ctypes.memmove(target.data_ptr(), source.data_ptr(), self.moved)
        else:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(self.device)

    def _pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.blocks, self.slots, strict=True))


def _kernels(device: torch.device) -> Any:
    if device.type == "cuda":
        from lamina_kernels.gpu import blocks

        return blocks
    return plain_kernels


def measure(bench: Bench, rounds: int) -> dict[str, tuple[float, float, float]]:
    """By way: GB/s, memcpy's GB/s, and the median share."""
    pairs: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "spill": (bench.spill, bench.memcpy_out),
        "promote": (bench.promote, bench.memcpy_in),
    }
    for ours, plain in pairs.values():  # touches every page
        ours()
        plain()
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in pairs}
    for round_ in range(rounds):
        for way, (ours, plain) in pairs.items():
            if round_ % 2:
                theirs, mine = _seconds(plain), _seconds(ours)
            else:
                mine, theirs = _seconds(ours), _seconds(plain)
            seconds[way].append((mine, theirs))
    return {way: _summary(bench.moved, found) for way, found in seconds.items()}


def _summary(moved: int, seconds: list[tuple[float, float]]) -> tuple[float, float, float]:
    mine = statistics.median(mine for mine, _ in seconds)
    theirs = statistics.median(theirs for _, theirs in seconds)
    return moved / mine / 1e9, moved / theirs / 1e9, statistics.median(theirs / mine for mine, theirs in seconds)


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--mib", type=int, default=128, help="bytes of one transfer")
    add_quick(parser, rounds=7, mib=64)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    progress = Progress("copies", 2 * len(SIZES))
    for name, size in SIZES.items():
        for neighbours in (True, False):
            bench = Bench(size, options.mib * MIB, torch.device(options.device), neighbours=neighbours)
            bench.gate()
            for way, (rate, memcpy, share) in measure(bench, options.rounds).items():
                slots = "side by side" if neighbours else "scattered"
                rows.append(
                    {
                        "block": name,
                        "slots": slots,
                        "way": way,
                        "GB/s": round(rate, 2),
                        "memcpy GB/s": round(memcpy, 2),
                        "share": f"{share:.0%}",
                    }
                )
                what = f"{way} through host memory, {name.split(' (')[0]}, slots {slots}"
                goals.append(Goal.at_least(what, share, GOAL, "of memcpy", percent=True))
            progress.step(name)
    finish("kv-copies", rows, COLUMNS, goals, options, extra={"device": options.device})


if __name__ == "__main__":
    main()
