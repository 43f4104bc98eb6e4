"""Captured device work: recorded once, replayed with one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["CudaGraphs", "Graphs", "NoGraphs"]


class Graphs(Protocol):
    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Something that does on each call what `run` does, reading and writing at the same addresses.

        `run` must not wait for the device and must not depend on data through shapes. What is returned is overwritten
        by the next call.
        """
        ...


class NoGraphs:
    """Runs again instead of replaying: for devices without graphs, and to test what surrounds them."""

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return run


class CudaGraphs:  # pragma: no cover - CUDA only
    """CUDA graphs that share one memory pool and one stream: only one of them is in flight at a time.

    The stream is their own, and no graph is let go while others live, not even one whose capture failed: libraries keep
    workspaces per stream, which every graph captured there has built in, and free them with the first graph that goes.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # kernels compile and libraries take their workspaces before the capture
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        # Adapters are loaded into pinned memory by another thread meanwhile, which a global capture would forbid.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
