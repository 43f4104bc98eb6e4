"""The example in docs/lora.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from support.lora_folders import TINY, write_plain

DOCS = Path(__file__).parents[3] / "docs" / "lora.md"


def test_the_example_serves_an_adapter(tmp_path: Path) -> None:
    """As printed, it changes the first four rows and leaves the fifth."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCS), "exec"), names)
    x, y = torch.randn(5, 24), torch.zeros(5, 48)
    names["serve"](write_plain(tmp_path / "adapter"), tmp_path / "home", TINY, x, y)
    assert (y[:4] != 0).all()
    assert (y[4] == 0).all()
