"""Lamina on the shared workload. Prints one JSON line per measurement. Run by cpu.py."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from harness import measure, summary
from lamina import LLM, SamplingParams
from workload import OUTPUT_TOKENS, PROMPT_TOKENS, adapters, prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--part", choices=["throughput", "base", "agreement", "ttft"], required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    parts = {"throughput": _throughput, "base": _throughput, "agreement": _agreement, "ttft": _ttft}
    parts[options.part](options)


def _engine(options: argparse.Namespace, **extra: object) -> LLM:
    folders = adapters(options.model, options.adapters)
    return LLM(options.model, adapters=folders, dtype=options.dtype, threads=options.threads, **extra)


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


def _throughput(options: argparse.Namespace) -> None:
    """The prefix cache is off: every repetition computes every prompt."""
    with _engine(options, prefix_caching=False) as llm:
        mixed = options.part == "throughput"
        names = [f"a{i % 8}" if mixed else None for i in range(options.batch)]
        batch = prompts(options.batch, PROMPT_TOKENS, seed=0, model=options.model)
        warm = prompts(8, PROMPT_TOKENS, seed=5000, model=options.model)
        llm.generate(warm, _greedy(4), adapter=names[:8])
        seconds = measure(
            lambda: llm.generate(batch, _greedy(OUTPUT_TOKENS), adapter=names),
            repetitions=options.repetitions,
            warmups=0,
        )
        _emit(llm, part=options.part, tokens=options.batch * OUTPUT_TOKENS, **summary(seconds))


def _agreement(options: argparse.Namespace) -> None:
    with _engine(options) as llm:
        batch = prompts(8, PROMPT_TOKENS, seed=0, model=options.model)
        tokens = {}
        for name in [None, *(f"a{i}" for i in range(8))]:
            outputs = llm.generate(batch, _greedy(32), adapter=name)
            tokens[name or "base"] = [output.token_ids for output in outputs]
        _emit(llm, part="agreement", tokens=tokens)


def _ttft(options: argparse.Namespace) -> None:
    """Time to the first token of 1024 + 32 prompt tokens: nothing cached, then the first 1024 cached."""
    for adapter in (None, "a0"):
        with _engine(options) as llm:
            llm.generate(prompts(1, 64, seed=6000, model=options.model), _greedy(2), adapter=adapter)
            cold, warm = [], []
            for i in range(5):
                prefix = prompts(1, 1024, seed=7000 + i, model=options.model)[0]
                for times, suffix in ((cold, 0), (warm, 1), (warm, 2)):
                    ending = prompts(1, 32, seed=8000 + 10 * i + suffix, model=options.model)[0]
                    started = time.perf_counter()
                    llm.generate([prefix + ending], _greedy(1), adapter=adapter)
                    times.append(time.perf_counter() - started)
            _emit(llm, part="ttft", adapter=adapter, cold=summary(cold[1:]), warm=summary(warm[2:]))


def _emit(llm: LLM, **fields: object) -> None:
    print(json.dumps({"peer": "lamina", "dtype": llm.core.info.dtype, **fields}), flush=True)


if __name__ == "__main__":
    main()
