"""Predicts step times and what LoRA costs from shapes and a chip's published figures alone. Needs no torch and no GPU.

    python benchmarks/roofline.py --chip h200 --model llama-3-8b --adapters 1 8 32 64 --rank 16 --batch 1 8 64
    python benchmarks/roofline.py --chip a100 --model qwen3-8b --rank mixed --batch 32 --prefill 512 8192
    python benchmarks/roofline.py --chip l40s --model path/to/model-folder

The model is in costs.py. `device` is time without launches, a floor that nothing measured should pass; `graph` adds one
node of a captured CUDA graph per kernel, `eager` one launch from the host.

LoRA has two plans. *two-launch*: shrink h = x Aᵀ, then expand y += h B, reading the adapters that have rows in the
batch. *fused*: [W; A of every slot] is one matrix, so the base GEMM computes the shrinks of all slots, used or not, in
no launch of their own; expand remains.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from chips import CHIPS, Chip, find
from costs import Batch, Lora, base_works, decode, fused_seconds, prefill, seconds, two_launch_seconds, two_launch_works
from harness import table
from shapes import MIXED, PRESETS, Shape, model_shape, ranks


def base_row(shape: Shape, batch: Batch, label: str, chip: Chip) -> dict[str, str]:
    """One line of the first table."""
    works = base_works(shape, batch, chip)

    def part(*names: str) -> str:
        return _ms(seconds([work for work in works if work.name in names], chip))

    return {
        "step": label,
        "linear ms": part("qkv", "o", "gate_up", "down", "head"),
        "attention ms": part("attention"),
        "pointwise ms": part("norm", "rotate + write", "gate", "embedding"),
        "sampling ms": part("sampling"),
        "device ms": _ms(seconds(works, chip)),
        "GB": f"{sum(work.bytes for work in works) / 1e9:.2f}",
        "TFLOP": f"{sum(work.flops for work in works) / 1e12:.3f}",
        "launches": str(sum(work.launches for work in works)),
        "graph ms": _ms(seconds(works, chip, "graph")),
        "eager ms": _ms(seconds(works, chip, "eager")),
    }


def lora_row(shape: Shape, batch: Batch, label: str, adapters: int, rank: str, chip: Chip) -> dict[str, str]:
    """One line of the second table: overhead over the same step without adapters, launched the same way."""
    lora = Lora(ranks(adapters, rank), batch.rows, batch.itemsize)
    works, base = two_launch_works(shape, lora, chip), base_works(shape, batch, chip)
    row = {
        "step": label,
        "adapters": str(adapters),
        "rank": rank,
        "MB": f"{sum(work.bytes for work in works) / 1e6:.1f}",
        "GFLOP": f"{sum(work.flops for work in works) / 1e9:.2f}",
        "launches": str(sum(work.launches for work in works)),
        "device us": f"{1e6 * two_launch_seconds(shape, lora, chip):.0f}",
    }
    for plan, cost in (("two-launch", two_launch_seconds), ("fused", fused_seconds)):
        for how in ("device", "graph", "eager"):
            row[f"{plan} {how}"] = f"{cost(shape, lora, chip, how) / seconds(base, chip, how):.1%}"
    return row


def _ms(value: float) -> str:
    return f"{1e3 * value:.3f}"


def report(shape: Shape, chip: Chip, options: argparse.Namespace) -> str:
    """Both tables and what they stand on."""
    sizes = {"itemsize": options.itemsize, "kv_itemsize": options.kv_itemsize or options.itemsize}
    steps = [(f"decode {b} x {options.context}", decode(b, options.context, **sizes)) for b in options.batch]
    steps += [(f"prefill {t}", prefill(t, options.prefix, **sizes)) for t in options.prefill]
    base = [base_row(shape, batch, label, chip) for label, batch in steps]
    lora = [
        lora_row(shape, batch, label, adapters, rank, chip)
        for label, batch in steps
        for rank in options.rank
        for adapters in options.adapters
    ]
    weights = shape.parameters * options.itemsize
    rate = chip.flops_per_s(options.itemsize) / 1e12
    lines = [
        f"{shape.name} on {chip.name}: {chip.memory_gb_s:.0f} GB/s, {rate:.3g} TFLOP/s",
        f"figures: {chip.source}; assumed: a launch {chip.launch_us} us, a graph node {chip.node_us} us",
        f"weights {weights / 1e9:.2f} GB, {1e3 * weights / chip.bytes_per_s:.2f} ms to read once",
        f"KV {shape.kv_bytes(sizes['kv_itemsize']) / 1024:.0f} KiB a token",
        f"LoRA {shape.per_rank / 1e6:.2f} M parameters per unit of rank",
        "",
        "Without adapters",
        table(base, list(base[0])) if base else "",
        "",
        "LoRA over the same step without adapters",
        table(lora, list(lora[0])) if lora else "",
    ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--chip", default="h200", choices=[*CHIPS, "cpu"], help="cpu measures this machine (default: h200)"
    )
    options.add_argument("--model", default="llama-3-8b", help=f"{', '.join(PRESETS)}, or a model folder")
    options.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32, 64], help="resident adapters")
    options.add_argument("--rank", nargs="+", default=["16"], help=f"1 to 256, or mixed: {MIXED} in turn")
    options.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64], help="sequences in a decode step")
    options.add_argument("--context", type=int, default=1024, help="tokens that each of them sees")
    options.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], help="new tokens in a prefill step")
    options.add_argument("--prefix", type=int, default=0, help="cached tokens before them")
    options.add_argument("--itemsize", type=int, default=2, choices=[1, 2, 4], help="bytes of a weight (default: 2)")
    options.add_argument("--kv-itemsize", type=int, choices=[1, 2, 4], help="bytes of a key's element")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    parsing = parser()
    options = parsing.parse_args(arguments)
    try:
        print(report(model_shape(options.model), find(options.chip), options))
    except ValueError as error:
        parsing.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
