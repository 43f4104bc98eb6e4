"""The engine on the best device there is. Without a GPU it runs on the CPU, so that this file cannot rot."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from fixtures.engines import DEVICE as FIELDS
from fixtures.engines import drive, publish_adapter, request, tiny_config, tiny_core, write_adapter
from lamina.config import EngineConfig
from lamina.models.loader import random_model
from lamina.wiring.backends import choose_backend
from lamina.wiring.core import assemble, choose_device

DEVICE = choose_device("auto")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mixed_batches_run_and_agree_with_the_cpu(dtype: torch.dtype, tmp_path: Path) -> None:
    """float32 gives the CPU engine's tokens; every dtype finishes with the books balanced."""
    folders = [write_adapter(tmp_path / str(i), rank=8 * i, seed=i, fields=FIELDS) for i in (1, 2)]
    digests = [publish_adapter(tmp_path / "store", folder, fields=FIELDS) for folder in folders]
    items = [
        request(f"r{i}", random.Random(i).choices(range(3, 211), k=9 + 8 * i), adapter=[None, *digests][i % 3])
        for i in range(7)
    ]
    expected, _ = drive(tiny_core(tmp_path / "store", fields=FIELDS), items)
    config = EngineConfig(
        model=Path("tiny"), adapters=tmp_path / "store", num_blocks=64, max_batch_tokens=64, max_running=8
    )
    backend = choose_backend(DEVICE)
    model = random_model(tiny_config(FIELDS), seed=7, dtype=dtype, device=DEVICE, ops=backend.ops)
    core = assemble(model, config, digest="tiny-7", dtype=dtype, device=DEVICE, backend=backend)
    tokens, endings = drive(core, items)
    core.close()
    assert len(endings) == len(items)
    if dtype is torch.float32:
        assert tokens == expected
