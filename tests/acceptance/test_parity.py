"""The whole engine against transformers + PEFT on the real model, in float32: token-identical greedy output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.oracle import Expected, Oracle, disagreement
from fixtures.peft_adapters import write_peft_adapter
from lamina import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "r4-qv": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "r8-all": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "r16-mlp": {"r": 16, "lora_alpha": 48, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "r32-rslora": {"r": 32, "lora_alpha": 8, "use_rslora": True, "target_modules": ALL},
    "r64-all": {"r": 64, "lora_alpha": 64, "target_modules": ALL},
    "patterns": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 12, "down_proj": 24},
        "alpha_pattern": {"v_proj": 32},
    },
    "dora-all": {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": ALL},
    "dora-rslora": {
        "r": 4,
        "lora_alpha": 2,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"down_proj": 16},
    },
}
EACH = 1 + len(ADAPTERS) + 2  # the base, the adapters above and the two examples
TEXTS = [
    "The harbour describes several broken clocks in the morning. A quiet engineer repairs the price of bread.",
    "Write a short poem about electricity and the northern coast.",
    "Question: what is 17 + 25? Answer:",
    "def fibonacci(n):\n    ",
    "Our research team measures a map of three kinds of memory while it rains outside, before the meeting.",
    "My neighbour's orange cat",
    "Once upon a time, in a valley of unusual patterns,",
    "List three rare birds:\n1.",
]
NEW_TOKENS = 20

Work = list[tuple[list[int], str | None]]  # prompts, and whom each asks


@pytest.fixture(scope="module")
def adapters(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("peft")
    random = {
        name: write_peft_adapter(demo_model, root / name, seed=i, **config)
        for i, (name, config) in enumerate(ADAPTERS.items())
    }
    examples = Path(__file__).parents[2] / "examples" / "adapters"
    return random | {name: examples / name for name in ("json-tagger", "harbour-pilot")}


@pytest.fixture(scope="module")
def work(demo_model: Path, adapters: dict[str, Path]) -> Work:
    """16 requests: every adapter and the base, short and long prompts, some with a common beginning."""
    from lamina.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(demo_model)
    long = tokenizer.encode(" ".join(TEXTS))
    names: list[str | None] = [None, *adapters]
    prompts = [tokenizer.encode(text) for text in TEXTS] + [long[: 40 + 11 * i] for i in range(8)]
    return [(prompt, names[i % len(names)]) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def oracle(demo_model: Path, adapters: dict[str, Path]) -> Oracle:
    return Oracle(demo_model, adapters)


@pytest.fixture(scope="module")
def plain(demo_model: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    with engine(demo_model, adapters, num_blocks=512, prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def mixed(plain: LLM, work: Work) -> list[list[int]]:
    """What the engine says when it is asked for all 16 together."""
    return said(plain, work)


@pytest.fixture(scope="module")
def expected(oracle: Oracle, work: Work, mixed: list[list[int]]) -> list[Expected]:
    return [
        oracle.greedy(prompt, NEW_TOKENS, adapter, guess=guess)
        for (prompt, adapter), guess in zip(work, mixed, strict=True)
    ]


def engine(model: Path, adapters: dict[str, Path], **options: Any) -> LLM:
    # As many threads as this process was given: an engine takes all cores, but other tests may run beside this one.
    return LLM(model, adapters=adapters, dtype="float32", threads=torch.get_num_threads(), **options)


def said(llm: LLM, work: Work) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [prompt for prompt, _ in work]
    outputs = llm.generate(prompts, sampling, adapter=[adapter for _, adapter in work])
    llm.core.check_integrity()
    assert llm.core.stats().blocks_active == 0
    return [output.token_ids for output in outputs]


def check(answers: list[list[int]], work: Work, expected: list[Expected]) -> None:
    wrong = {
        f"{i} ({adapter})": problem
        for i, (answer, theirs, (_, adapter)) in enumerate(zip(answers, expected, work, strict=True))
        if (problem := disagreement(answer, theirs))
    }
    assert not wrong


def test_the_adapters_matter(oracle: Oracle, expected: list[Expected], work: Work) -> None:
    """Guards the suite itself: under every random adapter the answer soon differs from the base model's."""
    same = [
        adapter
        for (prompt, adapter), theirs in list(zip(work, expected, strict=True))[:EACH]
        if adapter in ADAPTERS and oracle.along(prompt, theirs.tokens, None).tokens == theirs.tokens
    ]
    assert not same


def test_a_guess_changes_no_answer(oracle: Oracle, work: Work) -> None:
    """Guards the oracle: a guess that is right to the end, to the middle or not at all only saves steps."""
    prompt, count, adapter = work[0][0], 4, "dora-rslora"
    alone = oracle.greedy(prompt, count, adapter)
    for right in (count, 2, 0):
        guess = [*alone.tokens[:right], *(token + 1 for token in alone.tokens[right:])]
        helped = oracle.greedy(prompt, count, adapter, guess=guess)
        assert helped.tokens == alone.tokens
        assert helped.margins == pytest.approx(alone.margins, abs=1e-3)


def test_alone(plain: LLM, work: Work, expected: list[Expected]) -> None:
    """One request at a time: the base and every adapter."""
    for item, theirs in list(zip(work, expected, strict=True))[:EACH]:
        check(said(plain, [item]), [item], [theirs])


def test_mixed_in_one_batch(mixed: list[list[int]], work: Work, expected: list[Expected]) -> None:
    """All 16 together."""
    check(mixed, work, expected)


@pytest.mark.parametrize("chunk", [16, 128, 2048])
def test_chunked_and_cached(
    chunk: int,
    demo_model: Path,
    adapters: dict[str, Path],
    work: Work,
    expected: list[Expected],
) -> None:
    """Any chunk size, first with a cold and then with a warm prefix cache."""
    with engine(demo_model, adapters, num_blocks=512, max_batch_tokens=chunk, max_running=16) as llm:
        check(said(llm, work), work, expected)
        check(said(llm, work), work, expected)
        assert llm.core.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
def test_preempted(
    cache: bool,
    demo_model: Path,
    adapters: dict[str, Path],
    work: Work,
    expected: list[Expected],
) -> None:
    """A pool too small for the batch forces preemption by recompute; the output stays the same."""
    small = {"block_size": 4, "num_blocks": 48, "max_batch_tokens": 256, "max_running": 16}
    with engine(demo_model, adapters, prefix_caching=cache, **small) as llm:
        check(said(llm, work), work, expected)
        assert llm.core.stats().preemptions > 0
