"""Lamina: one base model, many tenants' LoRA adapters.

The offline library is `lamina.LLM`; the server is `lamina serve`. Both run the same engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lamina.types import SamplingParams

if TYPE_CHECKING:
    from lamina.wiring.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Lazy and by name, so that `import lamina.types` in the gateway does not load torch, now or by accident.
    if name == "LLM":
        return import_module("lamina.wiring.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
