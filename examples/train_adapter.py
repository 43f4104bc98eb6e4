"""Trains a small LoRA adapter for the demo model with PEFT, on the CPU, in a few minutes.

    python examples/train_adapter.py json-tagger
    python examples/train_adapter.py harbour-pilot

Reads `examples/data/NAME.jsonl` (one conversation a line: {"user": ..., "assistant": ...}) and writes
`examples/adapters/NAME/`. The loss counts the assistant's tokens only. The same seed, library versions and number of
threads give the same adapter. Needs the dev extra: pip install -e '.[dev]'.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from lamina.models.catalog import default_cache_dir, pull
from lamina.models.tokenizer import Tokenizer

BASE = "smollm2-135m-instruct"
HERE = Path(__file__).parent
IGNORED = -100  # the label that the loss skips


@dataclass(frozen=True)
class Recipe:
    """What differs between the adapters; both fit into 1 MB."""

    rank: int
    targets: tuple[str, ...]
    epochs: int
    learning_rate: float = 2e-3
    batch: int = 8
    seed: int = 7


RECIPES = {
    "json-tagger": Recipe(rank=8, targets=("q_proj", "v_proj"), epochs=3),
    "harbour-pilot": Recipe(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj"), epochs=3),
}


@dataclass(frozen=True)
class Example:
    """`ids` are the whole conversation; the loss counts those from `answer_at` on."""

    ids: list[int]
    answer_at: int


def read_examples(path: Path, tokenizer: Tokenizer) -> list[Example]:
    """Each line as the server would see it: the rendered prompt, then the answer and the end-of-turn token."""
    examples = []
    for line in path.read_text(encoding="utf-8").splitlines():
        turn = json.loads(line)
        prompt = tokenizer.encode_chat([{"role": "user", "content": turn["user"]}])
        answer = tokenizer.encode(turn["assistant"], add_special_tokens=False)
        assert tokenizer.eos_id is not None
        examples.append(Example([*prompt, *answer, tokenizer.eos_id], len(prompt)))
    return examples


def batches(examples: list[Example], size: int, shuffle: random.Random) -> Iterator[dict[str, torch.Tensor]]:
    """One epoch in random order, padded on the right."""
    order = shuffle.sample(examples, len(examples))
    for start in range(0, len(order), size):
        group = order[start : start + size]
        shape = (len(group), max(len(example.ids) for example in group))
        ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORED)
        for row, example in enumerate(group):
            length = len(example.ids)
            ids[row, :length] = torch.tensor(example.ids)
            mask[row, :length] = 1
            labels[row, example.answer_at : length] = ids[row, example.answer_at : length]
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(model: PeftModel, examples: list[Example], recipe: Recipe) -> None:
    """AdamW, with a short warm-up and a linear way down to zero."""
    shuffle = random.Random(recipe.seed)
    steps = recipe.epochs * -(-len(examples) // recipe.batch)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, (steps - step) / steps))
    step, started = 0, monotonic()
    for epoch in range(recipe.epochs):
        for batch in batches(examples, recipe.batch, shuffle):
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            step += 1
            took = monotonic() - started
            print(f"epoch {epoch + 1}, step {step}/{steps}, loss {loss.item():.3f}, {took:.0f} s", flush=True)


def save(model: PeftModel, recipe: Recipe, folder: Path) -> None:
    """PEFT's two files, with the base model's public name and half-precision weights."""
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model)
    tensors = {name: weight.detach().to(torch.float16).contiguous() for name, weight in sorted(state.items())}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE,
        "r": recipe.rank,
        "lora_alpha": 2 * recipe.rank,
        "lora_dropout": 0.0,
        "target_modules": sorted(recipe.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    size = (folder / "adapter_model.safetensors").stat().st_size
    print(f"wrote {folder} ({size / 1e6:.2f} MB)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, help="folder to write (default: examples/adapters/NAME)")
    # One thread, so that sums, and so the adapter, do not depend on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    recipe = RECIPES[args.name]
    torch.set_num_threads(args.threads)
    torch.manual_seed(recipe.seed)

    base = pull(BASE, default_cache_dir())
    examples = read_examples(HERE / "data" / f"{args.name}.jsonl", Tokenizer.from_folder(base))
    lora = LoraConfig(
        r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=list(recipe.targets), task_type="CAUSAL_LM"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    train(model, examples, recipe)
    save(model, recipe, args.out or HERE / "adapters" / args.name)


if __name__ == "__main__":
    main()
