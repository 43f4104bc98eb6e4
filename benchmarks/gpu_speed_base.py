"""What this device reaches without adapters: copies, launches, a step's linear layers, the kernels between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from chips import Chip
from costs import Work, linear_work, seconds
from gpu_case import noise
from gpu_clock import copy_gb_s, graph_of, measure
from gpu_report import Figure, Item
from gpu_scale import Scale
from gpu_setup import DEVICE, ON_GPU

__all__ = ["Linears", "items"]


class Linears:
    """Base weights of some layers, and one step's inputs and outputs per site."""

    def __init__(self, scale: Scale, layers: int) -> None:
        self.sites = scale.shape.sites
        self.layers = layers
        self.dtype = scale.dtype
        self.weights = [
            [torch.empty(s.outputs, s.inputs, dtype=scale.dtype, device=DEVICE).normal_(0, 0.02) for s in self.sites]
            for _ in range(layers)
        ]

    def activations(self, rows: int) -> tuple[list[Tensor], list[Tensor]]:
        """x and y of each site."""
        x = [noise(rows, s.inputs, dtype=self.dtype) for s in self.sites]
        return x, [torch.zeros(rows, s.outputs, dtype=self.dtype, device=DEVICE) for s in self.sites]

    def works(self, rows: int, chip: Chip) -> list[Work]:
        """Their roofline."""
        return [
            linear_work(s.name, rows, s.inputs, s.outputs, self.dtype.itemsize, chip) for s in self.sites
        ] * self.layers


def items(scale: Scale, chip: Chip) -> Iterator[Item]:
    yield "copy", partial(_copy, scale, chip)
    yield "launches", partial(_launches, chip)
    linears: list[Linears] = []

    def weights() -> None:
        linears.append(Linears(scale, scale.shape.layers))

    yield "base weights", weights
    for rows in (*scale.decode, *scale.prefill[:2]):
        yield f"linear layers, {rows} rows", lambda rows=rows: _linears(linears[0], rows, chip)
    yield "head", partial(_head, scale, chip)
    linears.clear()
    for rows in scale.rows:
        yield f"row kernels, {rows} rows", partial(_row_kernels, scale, rows, chip)


def _copy(scale: Scale, chip: Chip) -> list[Figure]:
    rate = copy_gb_s(scale.copy_mib << 20)
    return [Figure.of_rate(f"copy {scale.copy_mib} MiB, read + written", rate, chip.memory_gb_s)]


def _launches(chip: Chip) -> list[Figure]:
    """A chain of dependent kernels that do nothing: what a launch and a graph node cost here."""
    if not ON_GPU:
        return []
    x, count = torch.zeros(1, device=DEVICE), 500

    def chain() -> None:
        for _ in range(count):
            x.add_(1)

    eager, graph = measure(chain) / count, measure(graph_of(chain)) / count
    return [
        Figure.of_time("a launch from Python (torch add_)", eager, chip.launch_us * 1e-6, "predicted: assumption"),
        Figure.of_time("a graph node", graph, chip.node_us * 1e-6, "predicted: assumption"),
    ]


def _linears(linears: Linears, rows: int, chip: Chip) -> list[Figure]:
    x, y = linears.activations(rows)

    def run() -> None:
        for weights in linears.weights:
            for x_site, y_site, weight in zip(x, y, weights, strict=True):
                torch.mm(x_site, weight.t(), out=y_site)

    taken = measure(graph_of(run), repetitions=8 if ON_GPU else 1)
    return [Figure.of_time(f"linear layers, {rows} rows", taken, seconds(linears.works(rows, chip), chip))]


def _head(scale: Scale, chip: Chip) -> list[Figure]:
    shape, size = scale.shape, scale.dtype.itemsize
    weight, figures = noise(shape.vocab, shape.hidden, dtype=scale.dtype, scale=0.02), []
    for rows in scale.rows:
        x = noise(rows, shape.hidden, dtype=scale.dtype)
        taken = measure(partial(torch.nn.functional.linear, x, weight), cold=True)
        work = linear_work("head", rows, shape.hidden, shape.vocab, size, chip)
        figures.append(Figure.of_time(f"head, {rows} rows", taken, work.seconds(chip)))
    return figures


def _row_kernels(scale: Scale, rows: int, chip: Chip) -> list[Figure]:
    """Out of the cache (cold), so the roofline is memory for all bytes."""
    from lamina_kernels.gpu.gated import gated
    from lamina_kernels.gpu.norm import add_rms_norm
    from lamina_kernels.gpu.rotate_write import rotate_write

    shape, size = scale.shape, scale.dtype.itemsize
    h, delta = (noise(rows, shape.hidden, dtype=scale.dtype, seed=seed) for seed in (0, 1))
    weight = noise(shape.hidden, dtype=torch.float32)
    gate_up = noise(rows, 2 * shape.inner, dtype=scale.dtype)
    heads = shape.heads + 2 * shape.kv_heads
    qkv = noise(rows, heads, shape.head_dim, dtype=scale.dtype)
    q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    angle = noise(rows, 1, shape.head_dim, dtype=scale.dtype)
    pool = torch.zeros(-(-rows // 16), 2, 1, 16, shape.kv_heads, shape.head_dim, dtype=scale.dtype, device=DEVICE)
    slots = torch.arange(rows, device=DEVICE)
    moved = (shape.heads * 2 + shape.kv_heads * 4) * shape.head_dim + 2 * shape.head_dim
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "add_rms_norm": (lambda: add_rms_norm(h, delta, weight, 1e-5), 4 * shape.hidden),
        "gated": (lambda: gated(gate_up, "silu"), 3 * shape.inner),
        "rotate_write": (lambda: rotate_write(q, k, v, angle, angle, pool, 0, slots, None), moved),
    }
    return [
        Figure.of_time(f"{name}, {rows} rows", measure(run, cold=True), rows * width * size / chip.bytes_per_s)
        for name, (run, width) in runs.items()
    ]
