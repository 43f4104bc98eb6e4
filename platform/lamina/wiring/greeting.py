"""What `lamina serve` prints when it is ready."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import lamina
from lamina.types import EngineInfo
from lamina.wiring.demo import DemoAccess

__all__ = ["greeting"]


def greeting(url: str, info: EngineInfo, access: Sequence[DemoAccess], *, seconds: float) -> str:
    """`url`: without /v1. With demo tenants, lines to paste into a shell."""
    head = (
        f"\nLamina {lamina.__version__} is ready after {seconds:.1f} s: {url}/v1\n"
        f"Model {info.model}, {info.dtype} on {info.device}, {info.num_blocks} KV blocks of "
        f"{info.block_size} tokens, context {info.max_context} tokens.\n"
    )
    return head + (_demo(url, access) if access else _FIRST_STEPS) + "\nCtrl-C stops everything.\n"


_FIRST_STEPS = """
Make a tenant and a key in another shell:

    lamina tenants create NAME
    lamina keys create --tenant NAME
"""


def _demo(url: str, access: Sequence[DemoAccess]) -> str:
    width = max(len(entry.tenant) for entry in access)
    rows = "\n".join(f"  tenant {entry.tenant:{width}}  model {entry.adapter}, key {entry.key}" for entry in access)
    first, second = access[0], access[-1]
    return f"""
{rows}

With curl:

    curl -s {url}/v1/chat/completions \\
      -H "Authorization: Bearer {first.key}" -H "Content-Type: application/json" \\
      -d '{{"model": "{first.adapter}", "max_tokens": 64, "temperature": 0,
           "messages": [{{"role": "user", "content": "The ferry to Oslo leaves at nine."}}]}}'

With the official Python client (`pip install openai`):

{_python(url, second)}
"""


def _python(url: str, entry: DemoAccess) -> str:
    return f"""\
{_interpreter()} - <<'END'
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{entry.key}")
question = [{{"role": "user", "content": "How was your day?"}}]
for chunk in client.chat.completions.create(
    model="{entry.adapter}", messages=question, max_tokens=64, temperature=0, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
END"""


def _interpreter() -> str:
    path = Path(sys.executable)
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
