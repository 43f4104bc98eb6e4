"""What batched LoRA costs beside the base model's own products, in one process and in turns.

    python benchmarks/lora_apply.py [--threads 2] [--dtype float32] [--rounds 9] [--layers 30] [--clock wall]

SmolLM2-135M's shapes; 8 adapters of ranks 8, 16, 32, 64, 8, 16, 32, 64 on all seven projections. A row of the table
is one step through all layers: the base products alone, then LoRA alone by each kernel. On a busy machine compare
with `--threads 1 --clock cpu`, which counts processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lamina_kernels.dispatch import lora_table
from lamina_kernels.lora import LoraTable, LoraWeights, TorchLoraTable
from lamina_lora.batch import LoraBatch, Segment
from lamina_lora.geometry import SITES, BaseGeometry
from lamina_lora.slots import AdapterSlots
from lamina_lora.weights import AdapterWeights

RANKS = (8, 16, 32, 64) * 2
HIDDEN, KV, INNER = 576, 192, 1536
CASES = {"decode 8 x 1": (1, 8), "decode 8 x 4": (4, 8), "prefill 8 x 256": (256, 8), "prefill 16 x 128": (128, 16)}


def geometry(layers: int) -> BaseGeometry:
    targets = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN, KV), "v_proj": (HIDDEN, KV), "o_proj": (HIDDEN, HIDDEN)}
    targets |= {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}
    return BaseGeometry(num_layers=layers, targets=targets, vocab_size=49152, hidden_size=HIDDEN)


def adapter(base: BaseGeometry, number: int, dtype: torch.dtype) -> AdapterWeights:
    rank = RANKS[number]

    def site(name: str) -> LoraWeights:
        slices = SITES[name]
        return LoraWeights(
            a=torch.randn(rank * len(slices), base.in_features(name)).to(dtype),
            b=tuple(torch.randn(rank, base.targets[target][1]).to(dtype) for target in slices),
            columns=tuple(base.column_of(target) for target in slices),
        )

    sites = tuple(site(name) for _ in range(base.num_layers) for name in SITES)
    return AdapterWeights(str(number), sites, dtype, torch.device("cpu"))


class Step:
    """Inputs, outputs and base weights of one step."""

    def __init__(self, base: BaseGeometry, tokens: int, dtype: torch.dtype) -> None:
        self.layers = base.num_layers
        self.x = {site: torch.randn(tokens, base.in_features(site)).to(dtype) for site in SITES}
        self.y = {site: torch.zeros(tokens, base.out_features(site), dtype=dtype) for site in SITES}
        self.w: dict[str, list[Tensor]] = {
            site: [
                torch.randn(base.out_features(site), base.in_features(site)).to(dtype) for _ in range(base.num_layers)
            ]
            for site in SITES
        }

    def products(self) -> None:
        for layer in range(self.layers):
            for site in SITES:
                torch.nn.functional.linear(self.x[site], self.w[site][layer])

    def lora(self, batch: LoraBatch) -> None:
        for layer in range(self.layers):
            for site in SITES:
                batch.apply(layer, site, self.x[site], self.y[site])


def in_turns(work: Sequence[Callable[[], None]], rounds: int, clock: Callable[[], float]) -> list[float]:
    """The median milliseconds of each, taking turns, so that a busy machine is unfair to all alike."""
    taken: list[list[float]] = [[] for _ in work]
    for _ in range(rounds + 1):
        for times, one in zip(taken, work, strict=True):
            start = clock()
            one()
            times.append((clock() - start) * 1e3)
    return [statistics.median(times[1:]) for times in taken]  # the first round warms up


def slots(base: BaseGeometry, dtype: torch.dtype, make: Callable[[int], LoraTable]) -> AdapterSlots:
    found = AdapterSlots(
        1 << 40, lambda digest: adapter(base, int(digest), dtype), make_table=lambda sites, dtype, device: make(sites)
    )
    for number in range(len(RANKS)):
        found.acquire(str(number))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--layers", type=int, default=30)
    options.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    dtype: torch.dtype = getattr(torch, chosen.dtype)
    clock = time.perf_counter if chosen.clock == "wall" else time.process_time
    base = geometry(chosen.layers)
    native = slots(base, dtype, lambda sites: lora_table(sites, dtype=dtype, device=torch.device("cpu")))
    plain = slots(base, dtype, TorchLoraTable)
    print(f"{chosen.dtype}, {chosen.threads} threads, {chosen.layers} layers, {chosen.clock} ms per step (median)")
    print(f"{'case':<18}{'base':>9}{'chosen':>9}{'torch':>9}{'chosen/base':>13}{'torch/base':>12}")
    with torch.inference_mode():
        for name, (rows, count) in CASES.items():
            segments = [Segment(i % len(RANKS), i * rows, (i + 1) * rows) for i in range(count)]
            step = Step(base, rows * count, dtype)
            batches = [one.batch(segments, rows * count) for one in (native, plain)]
            work = [step.products, *(partial(step.lora, batch) for batch in batches)]
            products, fast, slow = in_turns(work, chosen.rounds, clock)
            print(f"{name:<18}{products:>9.1f}{fast:>9.1f}{slow:>9.1f}{fast / products:>13.1%}{slow / products:>12.1%}")


if __name__ == "__main__":
    main()
