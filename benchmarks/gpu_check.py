"""Proves the kernels on this machine's GPU and times them against their roofline: one script, under 8 minutes.

    python benchmarks/gpu_check.py                     # writes benchmarks/results/gpu-<device>-<date>.json
    python benchmarks/gpu_check.py --only kernels graph  # some sections
    python benchmarks/gpu_check.py --out /tmp/x.json     # elsewhere

It needs torch, triton, numpy, safetensors, transformers and pytest, and a checkout of this repository; nothing is
installed. Without a GPU the same sections run shrunken through Triton's interpreter and write to a temporary folder, so
that it cannot rot. The exit code is 0 only if nothing failed; what did not fit into the time is listed as skipped.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_setup import DEVICE, ON_GPU  # isort: skip - prepares imports and the interpreter

import torch

import gpu_environment
from chips import Chip, detect, find, measure_here
from gpu_report import Item, Report, line
from gpu_scale import Scale, chosen
from harness import RESULTS

TOTAL_S = 410.0 if ON_GPU else 300.0
HANG_S = TOTAL_S + 68.0  # a kernel that never returns ends here, with a traceback
EXPLAIN = 80.0  # percent; what is below needs an explanation beside the results

SECTIONS: dict[str, tuple[str, float]] = {
    "kernels": ("gpu_kernels", 130),
    "graph": ("gpu_graph", 40),
    "engine": ("gpu_engine", 70),
    "base": ("gpu_speed_base", 50),
    "lora": ("gpu_speed_lora", 90),
    "attention": ("gpu_speed_attention", 25),
    "sampling": ("gpu_speed_sampling", 15),
    "tiers": ("gpu_speed_tiers", 15),
    "serving": ("gpu_speed_engine", 60),
    "pytest": ("gpu_pytest", 60),
}
"""Name -> module with `items(scale, chip)`, and its budget in seconds on a GPU. Correctness first: timings of wrong
kernels are worth nothing."""


def _items(module: str, scale: Scale, chip: Chip) -> Iterator[Item]:
    """Imported when its turn comes, so that a module that cannot be imported fails alone."""
    found: Iterator[Item] = importlib.import_module(module).items(scale, chip)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    scale = chosen(quick=options.quick or not ON_GPU)
    chip = _chip(options.chip)
    found = gpu_environment.environment(chip)
    for name, value in found.items():
        print(f"{name:>14}: {value}")
    report = Report(found, _path(options.out, str(found["device"])), total_s=TOTAL_S)
    for name, (module, budget_s) in SECTIONS.items():
        if name in options.only:
            report.run(name, budget_s if ON_GPU else TOTAL_S, partial(_items, module, scale, chip))
    if ON_GPU:
        print(f"\nBelow {EXPLAIN} % of the roofline:")
        for figure in report.below(EXPLAIN):
            print(f"   {line(figure)}")
    print(f"\n{report.failures} failures; written to {report.save()}")
    return 1 if report.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer points of each sweep; always so without a GPU")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="run these sections")
    parser.add_argument("--out", type=Path, help="the JSON file")
    parser.add_argument("--chip", help="the chip whose roofline to compare with, if torch's name is not recognised")
    return parser


def _chip(key: str | None) -> Chip:
    """A device that is not in the list is measured, and compared with itself."""
    if key:
        return find(key)
    if not ON_GPU:
        return measure_here()
    return detect(torch.cuda.get_device_name(DEVICE)) or measure_here("cuda")


def _path(out: Path | None, device: str) -> Path:
    if out is not None:
        return out
    folder = RESULTS if ON_GPU else Path(tempfile.mkdtemp(prefix="gpu-check-"))
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / f"gpu-{name}-{datetime.now(UTC).date().isoformat()}.json"


if __name__ == "__main__":
    sys.exit(main())
