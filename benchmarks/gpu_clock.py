"""Times on a device: CUDA events, warm-up, medians; on the CPU the wall clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from gpu_setup import DEVICE, ON_GPU

__all__ = ["copy_gb_s", "graph_of", "measure"]

_REPETITIONS = 20 if ON_GPU else 1
_WARMUPS = 3 if ON_GPU else 0


def measure(run: Callable[[], object], *, cold: bool = False, repetitions: int = _REPETITIONS) -> float:
    """Median seconds of one `run` on the device. `cold`: the L2 is swept in between, as a step's other layers do."""
    for _ in range(_WARMUPS):
        run()
    if not ON_GPU:
        return statistics.median(_wall(run) for _ in range(repetitions))
    sweep = _sweep() if cold else None
    pairs = []
    for _ in range(repetitions):
        if sweep is not None:
            sweep.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in pairs) / 1e3


def _wall(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _sweep() -> torch.Tensor:
    size: int = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return torch.empty(max(4 * size, 256 << 20), dtype=torch.uint8, device=DEVICE)


def graph_of(run: Callable[[], object]) -> Callable[[], object]:
    """`run` captured as a CUDA graph, to be replayed; on the CPU `run` itself."""
    if not ON_GPU:
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles kernels and fills caches: neither may happen during a capture
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, run: Callable[[], object]) -> None:
    """Holds `run` as well: the graph reads and writes the tensors that it closes over."""
    graph.replay()


def copy_gb_s(nbytes: int) -> float:
    """What a device-to-device copy reaches, bytes read and written together: what a kernel can hope for."""
    source = torch.zeros(nbytes // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return nbytes / measure(lambda: target.copy_(source)) / 1e9
