"""The real demo model against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from fixtures.dense import logits_of
from lamina.models.catalog import default_cache_dir, is_present
from lamina.models.digest import model_digest
from lamina.models.loader import load_model

DEMO = "smollm2-135m-instruct"
PROMPT = torch.tensor([1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018])


@pytest.fixture(scope="module")
def folder() -> Path:
    if not is_present(DEMO, default_cache_dir()):
        pytest.skip(f"{DEMO} is not in the model cache; `lamina models pull {DEMO}` puts it there")
    return default_cache_dir() / DEMO


@pytest.mark.model
def test_real_weights_give_the_references_logits(folder: Path) -> None:
    """fp32 logits of SmolLM2 agree to 1e-3 (they span about 40), and so does every greedy choice."""
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(PROMPT[None]).logits[0]
        actual = logits_of(model, PROMPT, 7, 1)
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.model
def test_the_demo_model_is_one_model(folder: Path) -> None:
    """The conversion is deterministic, so its digest repeats."""
    assert model_digest(folder) == model_digest(folder)
