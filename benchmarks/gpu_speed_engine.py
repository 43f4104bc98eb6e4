"""Steps of the whole engine, host work included: decode with and without adapters. The target is 95 % of the base."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from chips import Chip
from costs import base_works, decode, seconds
from gpu_model import Workshop, device_backend, model_config, prompt
from gpu_report import Figure, Item
from gpu_scale import Scale
from gpu_setup import DEVICE, ON_GPU

__all__ = ["items"]

RANK, ADAPTERS = (16, 8) if ON_GPU else (3, 1)
BATCHES = (1, 8, 64) if ON_GPU else (2,)
PROMPT, NEW, SKIPPED = (128, 48, 16) if ON_GPU else (2, 4, 0)  # decode steps at the ends see other batches: not timed


def items(scale: Scale, chip: Chip) -> Iterator[Item]:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        bench = _Bench(scale, chip, Path(scratch))
        yield "model and adapters", bench.prepare
        for batch in BATCHES:
            yield f"decode {batch}", partial(bench.decode, batch)


class _Bench:
    def __init__(self, scale: Scale, chip: Chip, scratch: Path) -> None:
        self._scale, self._chip = scale, chip
        self._workshop = Workshop(model_config(scale.shape, scale.shape.layers), scratch, dtype=scale.dtype)
        self._adapters: list[str] = []

    def prepare(self) -> None:
        self._workshop.draw()
        self._adapters = [self._workshop.adapter(RANK, seed) for seed in range(ADAPTERS)]
        self._backend = device_backend()
        self._model = self._workshop.model(self._scale.dtype, DEVICE, self._backend)

    def decode(self, batch: int) -> list[Figure]:
        """Median wall time of a step in the middle of the generation."""
        shape, chip = self._scale.shape, self._chip
        base = self._step_seconds(batch, [None])
        mixed = self._step_seconds(batch, self._adapters)
        context = PROMPT + NEW // 2
        floor = seconds(
            base_works(shape, decode(batch, context, itemsize=self._scale.dtype.itemsize), chip), chip, "graph"
        )
        note = f"{base / mixed:.1%} of the base's throughput"
        return [
            Figure.of_time(f"engine, decode {batch} x {context}, base", base, floor, f"{batch / base:.0f} tokens/s"),
            Figure.of_time(f"engine, decode {batch} x {context}, {ADAPTERS} adapters of r{RANK}", mixed, floor, note),
        ]

    def _step_seconds(self, batch: int, adapters: Sequence[str | None]) -> float:
        blocks = batch * -(-(PROMPT + NEW + 16) // 16) + 8
        core = self._workshop.core(
            self._model,
            self._scale.dtype,
            DEVICE,
            self._backend,
            num_blocks=blocks,
            max_running=batch,
            max_batch_tokens=max(batch * PROMPT, 64),
            adapter_bytes=(2 << 30) if ON_GPU else 64 << 20,
            prefix_caching=False,
        )
        try:
            for number, adapter in enumerate(adapters if ON_GPU else ()):  # loaded, compiled, before anything is timed
                core.submit(prompt(self._workshop.config, batch + number, PROMPT, 2, [adapter]))
            while core.has_work():
                core.step()
            for number in range(batch):
                core.submit(prompt(self._workshop.config, number, PROMPT, NEW, adapters))
            taken = []
            while core.has_work():
                start = time.perf_counter()
                events = core.step()
                if len(events) == batch:
                    taken.append(time.perf_counter() - start)
            if ON_GPU:
                torch.cuda.synchronize()
        finally:
            core.close()
        assert len(taken) > SKIPPED + 1, f"only {len(taken)} steps with all {batch} sequences"
        return statistics.median(taken[SKIPPED:-1])
