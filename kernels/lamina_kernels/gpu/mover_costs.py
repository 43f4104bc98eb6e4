"""What moving blocks costs on this machine, measured at start-up, and the choice that follows.

    dma      one asynchronous copy per block:                  blocks * copy(block bytes)
    kernel   blocks gathered in device memory by one launch,
             then one copy per run of neighbouring host slots:  gather(all bytes) + runs * copy(bytes of a run)

Small copies cost their submission, whatever their size; so below some size, which differs between machines, the kernel
wins. Above it, DMA engines work beside the step for nothing, where a kernel takes SMs and memory bandwidth from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lamina_kernels.gpu.lanes import copy_beside, lane_for

__all__ = ["BlockKernels", "Curve", "MoverCosts", "Way", "WayCosts", "calibrate"]

Way = Literal["kernel", "dma"]

_KERNEL_ADVANTAGE = 0.8  # of DMA's time: less is no reason to slow a step down
_STEP = 4  # from one measured size to the next
_COPY_BYTES = tuple(2**12 * _STEP**n for n in range(6))  # 4 KiB to 4 MiB
_GATHER_BYTES = tuple(2**16 * _STEP**n for n in range(5))  # 64 KiB to 16 MiB, in pieces of _GATHER_PIECE
_GATHER_PIECE = 2**14
_ARENA_BYTES = 2**24
_TRAIN = 64  # copies in a row, so that submission overlaps copying as it will in use
_REPEATS = 3


class BlockKernels(Protocol):
    """`lamina_kernels.gpu.blocks`, or its oracle, which serves as well where there is no GPU."""

    def gather_blocks(self, pool: Tensor, ids: Tensor, out: Tensor) -> None: ...

    def scatter_blocks(self, staged: Tensor, ids: Tensor, pool: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by bytes: lines between measured points, flat below the first, the last line's slope beyond the last."""

    sizes: tuple[int, ...]  # rising
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"a curve needs rising sizes and a time for each, not {self}")

    def at(self, size: float) -> float:
        if size <= self.sizes[-1]:
            return float(np.interp(size, self.sizes, self.seconds))
        if len(self.sizes) == 1:
            return self.seconds[-1] * size / self.sizes[-1]
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        return self.seconds[-1] + max(slope, 0.0) * (size - self.sizes[-1])


@dataclass(frozen=True, slots=True)
class WayCosts:
    """Of one direction."""

    copy: Curve  # one of many copies between device and host, by its size
    stage: Curve  # one launch that gathers or scatters, by all its bytes

    def choose(self, piece_bytes: int, pieces: int, runs: int = 1) -> Way:
        """For `pieces` blocks whose host slots form `runs` stretches of neighbours (1: all side by side)."""
        if piece_bytes < 1 or pieces < 0 or not 1 <= runs <= max(pieces, 1):
            raise ValueError(f"{pieces} pieces of {piece_bytes} bytes in {runs} runs")
        dma = pieces * self.copy.at(piece_bytes)
        total = pieces * piece_bytes
        kernel = self.stage.at(total) + runs * self.copy.at(total / runs)
        return "kernel" if kernel < _KERNEL_ADVANTAGE * dma else "dma"


@dataclass(frozen=True, slots=True)
class MoverCosts:
    spill: WayCosts  # device to host
    promote: WayCosts  # host to device


def calibrate(device: torch.device, kernels: BlockKernels, *, budget_seconds: float = 0.4) -> MoverCosts:
    """Measures in about `budget_seconds`, beside compiling two kernels and pinning 16 MiB. Waits for the device: for
    start-up only. What no time was left for is extrapolated; the first size of each curve is always measured.
    """
    bench = _Bench(device, kernels, budget_seconds / 4)
    return MoverCosts(
        spill=WayCosts(copy=bench.copies(to_host=True), stage=bench.stages(kernels.gather_blocks)),
        promote=WayCosts(
            copy=bench.copies(to_host=False),
            stage=bench.stages(lambda pool, ids, staged: kernels.scatter_blocks(staged, ids, pool)),
        ),
    )


class _Bench:
    def __init__(self, device: torch.device, kernels: BlockKernels, curve_seconds: float) -> None:
        self._lane = lane_for(device)
        self._device = device
        self._curve_seconds = curve_seconds
        self._host = torch.zeros(_ARENA_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._pool = torch.zeros(_ARENA_BYTES, dtype=torch.uint8, device=device)
        self._staging = torch.zeros_like(self._pool)

    def copies(self, *, to_host: bool) -> Curve:
        target, source = (self._host, self._pool) if to_host else (self._pool, self._host)

        def seconds(size: int) -> float:
            pieces = [slice(start, start + size) for start in range(0, _ARENA_BYTES, size)][:_TRAIN]

            def train() -> None:
                for piece in pieces:
                    copy_beside(target[piece], source[piece])

            return self._seconds(train) / len(pieces)

        return self._curve(_COPY_BYTES, seconds)

    def stages(self, move: Callable[[Tensor, Tensor, Tensor], None]) -> Curve:
        pool, staging = self._pool.view(-1, _GATHER_PIECE), self._staging.view(-1, _GATHER_PIECE)

        def seconds(size: int) -> float:
            pieces = size // _GATHER_PIECE
            ids = torch.randperm(len(pool), device=self._device, dtype=torch.int32)[:pieces]
            return self._seconds(lambda: move(pool, ids, staging[:pieces]))

        return self._curve(_GATHER_BYTES, seconds)

    def _curve(self, sizes: tuple[int, ...], seconds: Callable[[int], float]) -> Curve:
        points = {sizes[0]: seconds(sizes[0])}  # may compile the kernel: the time counts from after it
        now = time.perf_counter()
        deadline, spent = now + self._curve_seconds, 0.0
        for size in sizes[1:]:
            if now + _STEP * spent > deadline:  # a point takes at most so many times the one before
                break
            points[size] = seconds(size)
            spent, now = time.perf_counter() - now, time.perf_counter()
        return Curve(tuple(points), tuple(points.values()))

    def _seconds(self, work: Callable[[], None]) -> float:
        """The best of a few runs, after one that pays for compiling and first touch."""
        self._lane.submit(work).wait()
        best = float("inf")
        for _ in range(_REPEATS):
            start = time.perf_counter()
            self._lane.submit(work).wait()
            best = min(best, time.perf_counter() - start)
        return best
