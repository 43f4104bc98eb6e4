"""The multi-adapter workload: eight PEFT adapters of ranks 8 to 64 on all seven projections, seeded prompts."""

from __future__ import annotations

import math
import random
from pathlib import Path

__all__ = ["OUTPUT_TOKENS", "PROMPT_TOKENS", "RANKS", "adapters", "prompts"]

RANKS = (8, 16, 32, 64, 8, 16, 32, 64)
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_SUBJECTS = [
    "A quiet engineer",
    "The harbour master",
    "Our research team",
    "The night train",
    "Every customer",
]
_VERBS = ["repairs", "describes", "measures", "forgets", "collects", "compares", "rebuilds", "explains"]
_OBJECTS = ["several broken clocks", "the price of bread", "a map of the coast", "old letters", "rare birds"]
_PLACES = [
    "in the morning",
    "before the meeting",
    "while it rains",
    "near the station",
    "with great patience",
]


def prompts(count: int, tokens: int, *, seed: int, model: Path) -> list[list[int]]:
    """`count` distinct prompts of exactly `tokens` token ids."""
    from lamina.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(model)
    return [tokenizer.encode(_text(random.Random(seed + i), tokens))[:tokens] for i in range(count)]


def _text(source: random.Random, words: int) -> str:
    parts = (_SUBJECTS, _VERBS, _OBJECTS, _PLACES)
    return " ".join(" ".join(source.choice(part) for part in parts) + "." for _ in range(words))


def adapters(model: Path, root: Path) -> dict[str, Path]:
    """Writes the eight adapters (bf16, B drawn with 0.4 / sqrt(r)) unless they are there; by name."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    made = {}
    for i, rank in enumerate(RANKS):
        folder = root / f"a{i}"
        made[f"a{i}"] = folder
        if (folder / "adapter_model.safetensors").exists():
            continue
        torch.manual_seed(1000 + i)
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_TARGETS, task_type="CAUSAL_LM")
        peft_model = get_peft_model(base, config)
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.4 / math.sqrt(rank))
        peft_model.to(torch.bfloat16).save_pretrained(folder)
    return made
