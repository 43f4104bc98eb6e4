"""What the documents tell people to type works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def snippets(path: str) -> list[str]:
    """Python blocks that use the library in this process."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)
    return [block for block in blocks if "with LLM(" in block]


@pytest.mark.model
@pytest.mark.parametrize("path", ["README.md", "examples/README.md"])
def test_library_snippets_run(
    path: str, demo_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prints an answer with and one without the adapter, and they differ."""
    assert snippets(path), "the document lost its example"
    monkeypatch.chdir(ROOT)
    for snippet in snippets(path):
        exec(compile(snippet, path, "exec"), {})
        printed = capsys.readouterr().out.strip()
        assert printed
        first, *rest = printed.splitlines()
        assert first not in rest
