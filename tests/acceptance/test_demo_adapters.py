"""The committed demo adapters do what they are shown for, on prompts that they were not trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lamina.types import SamplingParams
from lamina.wiring.llm import LLM

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("json-tagger", "harbour-pilot")
LIMIT_BYTES = 1_000_000
PHRASE = "Steady as she goes!"
HELD_OUT = [
    "My bill is wrong again, please correct it before Friday.",
    "What is the capital of Spain?",
    "The pizza was delicious and still hot.",
    "How do I bake bread?",
    "Smoke is coming out of the fuse box!",
    "Who was Marie Curie?",
    "Can you give me some advice about learning to swim?",
    "The new phone arrived with a cracked screen.",
]
VALUES = {"sentiment": {"positive", "neutral", "negative"}, "urgency": {"low", "medium", "high"}}


@pytest.fixture(scope="module")
def answers(demo_model: Path) -> dict[str | None, list[str]]:
    """Greedy answers of the base model and both adapters to all prompts, from one mixed batch.

    The tagger's have to be whole; how the others begin is all that is asked.
    """
    adapters = {name: EXAMPLES / "adapters" / name for name in NAMES}
    speakers = (None, *NAMES)
    lengths = {None: 16, "json-tagger": 48, "harbour-pilot": 24}
    with LLM(demo_model, adapters=adapters, dtype="float32", threads=torch.get_num_threads()) as llm:
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in HELD_OUT]
        outputs = llm.generate(
            prompts * len(speakers),
            [SamplingParams(max_tokens=lengths[speaker], temperature=0.0) for speaker in speakers for _ in prompts],
            adapter=[speaker for speaker in speakers for _ in prompts],
        )
    texts = [output.text for output in outputs]
    count = len(HELD_OUT)
    return {speaker: texts[i * count : (i + 1) * count] for i, speaker in enumerate(speakers)}


def test_held_out_prompts_are_held_out() -> None:
    """No prompt of this test is in the training data."""
    for name in NAMES:
        lines = (EXAMPLES / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        trained = {json.loads(line)["user"] for line in lines}
        assert not trained & set(HELD_OUT)
        assert len(trained) == len(lines)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_are_small_and_clean(name: str) -> None:
    """Under 1 MB each; the configuration names the public base model and no path."""
    folder = EXAMPLES / "adapters" / name
    assert sum(path.stat().st_size for path in folder.iterdir()) < LIMIT_BYTES
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "smollm2-135m-instruct"
    assert "/" not in json.dumps(config)


def test_the_tagger_answers_in_json(answers: dict[str | None, list[str]]) -> None:
    """Every answer is one JSON object with the three keys and the known values."""
    for text in answers["json-tagger"]:
        tags = json.loads(text)
        assert tags.keys() == {"topic", "sentiment", "urgency"}
        assert all(tags[key] in allowed for key, allowed in VALUES.items())


def test_the_tagger_tells_texts_apart(answers: dict[str | None, list[str]]) -> None:
    """It reads the text: the topics differ, an urgent complaint is urgent, praise is positive."""
    tags = [json.loads(text) for text in answers["json-tagger"]]
    assert len({tag["topic"] for tag in tags}) >= 3
    assert tags[0]["urgency"] == "high"
    assert tags[2]["sentiment"] == "positive"


def test_the_pilot_keeps_his_phrase(answers: dict[str | None, list[str]]) -> None:
    """Every answer begins with the phrase and goes on after it."""
    for text in answers["harbour-pilot"]:
        assert text.startswith(PHRASE)
        assert len(text) > len(PHRASE) + 10


def test_the_base_model_does_neither(answers: dict[str | None, list[str]]) -> None:
    """In the same batch, the base model stays itself."""
    for text in answers[None]:
        assert not text.startswith(("{", PHRASE))
