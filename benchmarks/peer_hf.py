"""transformers + PEFT on the shared workload. Prints one JSON line per measurement. Run by cpu.py."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from harness import measure, summary
from workload import OUTPUT_TOKENS, PROMPT_TOKENS, adapters, prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--part", choices=["throughput", "agreement", "ttft"], required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"throughput": _throughput, "agreement": _agreement, "ttft": _ttft}[options.part](options)


def _load(options: argparse.Namespace, *, with_adapters: bool = True):  # type: ignore[no-untyped-def]
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    if with_adapters:
        for name, folder in adapters(options.model, options.adapters).items():
            if isinstance(model, PeftModel):
                model.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
            else:
                model = PeftModel.from_pretrained(model, folder, adapter_name=name, autocast_adapter_dtype=False)
        model.eval().to(dtype)
    return model


@torch.inference_mode()
def _generate(model, batch: list[list[int]], count: int, **extra) -> list[list[int]]:  # type: ignore[no-untyped-def]
    ids = torch.tensor(batch)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **extra,
    )
    return out[:, ids.shape[1] :].tolist()


def _throughput(options: argparse.Namespace) -> None:
    model = _load(options)
    names = [f"a{i % 8}" for i in range(options.batch)]
    batch = prompts(options.batch, PROMPT_TOKENS, seed=0, model=options.model)
    warm = prompts(8, PROMPT_TOKENS, seed=5000, model=options.model)
    _generate(model, warm, 4, adapter_names=names[:8])
    seconds = measure(
        lambda: _generate(model, batch, OUTPUT_TOKENS, adapter_names=names),
        repetitions=options.repetitions,
        warmups=0,
    )
    _emit(options, part="throughput", tokens=options.batch * OUTPUT_TOKENS, **summary(seconds))


def _agreement(options: argparse.Namespace) -> None:
    """Greedy tokens of 8 prompts x (base + 8 adapters), 32 tokens each, one JSON line."""
    model = _load(options)
    batch = prompts(8, PROMPT_TOKENS, seed=0, model=options.model)
    tokens = {}
    for name in [None, *(f"a{i}" for i in range(8))]:
        if name is None:
            with model.disable_adapter():
                tokens["base"] = [_generate(model, [prompt], 32)[0] for prompt in batch]
        else:
            model.set_adapter(name)
            tokens[name] = [_generate(model, [prompt], 32)[0] for prompt in batch]
    _emit(options, part="agreement", tokens=tokens)


def _ttft(options: argparse.Namespace) -> None:
    model = _load(options, with_adapters=False)
    cold = []
    for i in range(5):
        prompt = prompts(1, 1056, seed=7000 + i, model=options.model)
        started = time.perf_counter()
        _generate(model, prompt, 1)
        cold.append(time.perf_counter() - started)
    _emit(options, part="ttft", **summary(cold[1:]))


def _emit(options: argparse.Namespace, **fields: object) -> None:
    print(json.dumps({"peer": "transformers+peft", "dtype": options.dtype, **fields}), flush=True)


if __name__ == "__main__":
    main()
