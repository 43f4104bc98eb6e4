"""Greedy and seeded answers of the demo model are the same with tiers on, off and failing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fixtures.engines import drive, request
from lamina.config import EngineConfig
from lamina.models.interface import CausalLM
from lamina.models.loader import load_model
from lamina.models.tokenizer import Tokenizer
from lamina.types import EngineStats, GenerationRequest
from lamina.wiring.backends import TorchBackend
from lamina.wiring.core import assemble
from lamina.wiring.tiers import MakeTiers, build_tiers
from lamina_kvtier.memory_tier import MemoryStore
from support.below import Below

pytestmark = pytest.mark.model

TEXTS = ("The ferry to Oslo leaves at nine, and the harbour is still dark. ", "A lighthouse keeper counts the ships. ")
SEEDED = {"temperature": 0.8, "seed": 5}


def test_answers_are_the_same_with_tiers_on_off_and_failing(demo_model: Path) -> None:
    """Two long prefixes take turns in a pool that holds one: each comes back from below, or is computed again."""
    model = load_model(demo_model, dtype=torch.float32, device=torch.device("cpu"), ops=TorchBackend.ops)
    tokenizer = Tokenizer.from_folder(demo_model)
    prefixes = [tokenizer.encode(text * 12)[:81] for text in TEXTS]
    requests = [
        request(f"{turn}-{at}", [*prefix, 100 + turn], max_tokens=5, **(SEEDED if at else {}))
        for turn in range(2)
        for at, prefix in enumerate(prefixes)
    ]
    expected, _ = answers(model, demo_model, build_tiers, requests)
    said, stats = answers(model, demo_model, Below(host=24), requests)
    assert said == expected
    assert stats.promoted_blocks > 0
    store = MemoryStore()
    assert answers(model, demo_model, Below(host=6, store=store), requests)[0] == expected
    said, stats = answers(model, demo_model, Below(host=6, store=store), requests)
    assert said == expected
    assert stats.loaded_blocks > 0
    said, stats = answers(model, demo_model, Below(host=6, store=store, seed=1), requests)
    assert said == expected
    assert stats.failed_blocks > 0


def answers(
    model: CausalLM, folder: Path, tiers: MakeTiers, requests: list[GenerationRequest]
) -> tuple[list[list[int]], EngineStats]:
    """Of an engine with a small pool, one request after the other."""
    config = EngineConfig(
        model=folder, adapters=folder / "none", num_blocks=8, max_batch_tokens=128, max_running=4, max_context=128
    )
    device = torch.device("cpu")
    core = assemble(
        model, config, digest="demo", dtype=torch.float32, device=device, backend=TorchBackend(), tiers=tiers
    )
    said = [drive(core, [item])[0][item.request_id, 0] for item in requests]
    stats = core.stats()
    core.close()
    return said, stats
