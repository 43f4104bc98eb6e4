"""What the engine and the model code expect of each other."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lamina.models.config import ModelConfig

__all__ = ["Attend", "CausalLM", "LoraApply"]


class Attend(Protocol):
    """Attention of one step over the KV cache; knows which tokens belong to which sequence."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Stores k and v, then attends causally.

        q [T, query heads, dim], k and v [T, KV heads, dim], rotated already. They are views with gaps between
        rows (slices of one fused projection), each row contiguous; the callee may overwrite them. `scale` is the
        factor on q·k; `window`: a token sees itself and the window - 1 tokens before; `softcap` c: scores become
        c * tanh(score / c) before the mask. Returns [T, query heads * dim] in q's dtype.
        """
        ...


class LoraApply(Protocol):
    """The adapters of one step."""

    def apply(self, layer: int, site: str, x: Tensor, y: Tensor) -> None:
        """Adds the adapters' share to `y` [T, fused out], in place; `x` [T, in] is the site's input and stays.

        `site` is a key of `lamina_lora.geometry.SITES`. Tokens without an adapter keep their rows of `y`.
        """
        ...


class CausalLM(Protocol):
    """A decoder-only language model with its weights. Holds no state between calls; not shared between threads."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, lora: LoraApply | None) -> Tensor:
        """token_ids and positions [T] int64, any mix of sequences -> final hidden states [T, hidden size]."""
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """rows [R, hidden size] of `forward`'s output -> [R, vocabulary] float32, a new tensor."""
        ...
