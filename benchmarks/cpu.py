"""Lamina against transformers + PEFT on this machine's CPU, in one run: agreement, throughput, prefix TTFT.

    python benchmarks/cpu.py                          # everything, 20 to 40 minutes on two cores
    python benchmarks/cpu.py --quick                  # one repetition: a short look
    python benchmarks/cpu.py --parts throughput ttft  # only these; each part has its own results file

Agreement is the correctness gate and comes first: the run ends there unless Lamina's float32 output agrees with the
oracle's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import add_quick, environment, save, table

HERE = Path(__file__).parent
COLUMNS = ["what", "lamina", "transformers+peft", "ratio", "must reach"]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    add_quick(parser, repetitions=1)
    options = parser.parse_args()

    from lamina.models.hub import resolve
    from lamina.wiring.paths import default_cache

    model = resolve("smollm2-135m-instruct", default_cache())
    with tempfile.TemporaryDirectory() as scratch:
        runner = _Runner(model, Path(scratch), options.threads, options.repetitions)
        for part in options.parts:
            env = environment(options.threads)
            rows = PARTS[part](runner)
            path = save(f"cpu-{part}{'-quick' if options.quick else ''}", rows, env)
            print(f"\n{table(rows, COLUMNS)}\n\n{json.dumps(env)}\nsaved to {path}", flush=True)


class _Runner:
    """Each part in a process of its own, one after the other, so that thread pools never compete."""

    def __init__(self, model: Path, adapters: Path, threads: int, repetitions: int) -> None:
        self._common = ["--model", str(model), "--adapters", str(adapters), "--threads", str(threads)]
        self._common += ["--repetitions", str(repetitions)]

    def __call__(self, script: str, part: str, dtype: str) -> list[Row]:
        print(f"running {script} {part} {dtype} ...", file=sys.stderr, flush=True)
        command = [sys.executable, str(HERE / script), *self._common, "--part", part, "--dtype", dtype]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _agreement(run: _Runner) -> list[Row]:
    """Exits unless fp32 agrees token for token."""
    oracle = run("peer_hf.py", "agreement", "float32")[0]["tokens"]
    exact = run("ours.py", "agreement", "float32")[0]["tokens"]
    same, prefix = _agree(exact, oracle)
    if same < 0.97:  # a flip needs two logits within rounding; parity proper is tests/acceptance/test_parity.py
        sys.exit(f"correctness gate: only {same:.0%} of the greedy outputs agree with the float32 oracle")
    rows = [_agreement_row("float32 outputs equal to the fp32 oracle's", (same, prefix), None)]
    peer = _agree(run("peer_hf.py", "agreement", "bfloat16")[0]["tokens"], oracle)
    ours = run("ours.py", "agreement", "auto")[0]
    mine = _agree(ours["tokens"], oracle)
    return [*rows, _agreement_row(f"served dtype ({ours['dtype']}) against the fp32 oracle", mine, peer)]


def _agree(tokens: dict[str, list[list[int]]], oracle: dict[str, list[list[int]]]) -> tuple[float, float]:
    """(share of equal outputs, mean common prefix in tokens)."""
    pairs = [(a, b) for name in oracle for a, b in zip(tokens[name], oracle[name], strict=True)]
    prefixes = [next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b)) for a, b in pairs]
    return sum(a == b for a, b in pairs) / len(pairs), sum(prefixes) / len(prefixes)


def _agreement_row(what: str, mine: tuple[float, float], peer: tuple[float, float] | None) -> Row:
    def show(pair: tuple[float, float]) -> str:
        return f"{pair[0]:.0%}, {pair[1]:.1f} of 32 tokens"

    theirs = f"{show(peer)} (bfloat16)" if peer else ""
    return {
        "what": what,
        "lamina": show(mine),
        "transformers+peft": theirs,
        "must reach": "at least the peer's",
    }


def _throughput(run: _Runner) -> list[Row]:
    ours = run("ours.py", "throughput", "auto")[0]
    base = run("ours.py", "base", "auto")[0]
    rows = []
    for dtype in ("bfloat16", "float32"):
        peer = run("peer_hf.py", "throughput", dtype)[0]
        mine, theirs = ours["tokens"] / ours["median_s"], peer["tokens"] / peer["median_s"]
        rows.append(
            {
                "what": f"output tokens/s, 32 x (128 + 64), 8 adapters; peer in {dtype}",
                "lamina": f"{mine:.1f} ({ours['dtype']})",
                "transformers+peft": f"{theirs:.1f}",
                "ratio": f"{mine / theirs:.2f}x",
                "must reach": "4x" if dtype == "bfloat16" else "",
            }
        )
    share = base["median_s"] / ours["median_s"]
    rows.append(
        {
            "what": "the same without adapters, output tokens/s",
            "lamina": f"{base['tokens'] / base['median_s']:.1f}",
            "ratio": f"adapters keep {share:.0%}",
        }
    )
    return rows


def _ttft(run: _Runner) -> list[Row]:
    rows = []
    for row in run("ours.py", "ttft", "auto"):
        cold, warm = row["cold"]["median_s"], row["warm"]["median_s"]
        rows.append(
            {
                "what": f"TTFT, 1024 + 32 tokens, {row['adapter'] or 'base'}: cold -> prefix cached",
                "lamina": f"{1e3 * cold:.0f} -> {1e3 * warm:.0f} ms",
                "ratio": f"{cold / warm:.1f}x",
                "must reach": "10x",
            }
        )
    peer = run("peer_hf.py", "ttft", "float32")[0]
    rows[0]["transformers+peft"] = f"{1e3 * peer['median_s']:.0f} ms, no prefix cache (float32)"
    return rows


PARTS: dict[str, Callable[[_Runner], list[Row]]] = {
    "agreement": _agreement,
    "throughput": _throughput,
    "ttft": _ttft,
}

if __name__ == "__main__":
    main()
