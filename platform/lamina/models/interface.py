"""What the engine and the model code expect of each other."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lamina.models.config import ModelConfig

__all__ = ["Attend", "CausalLM", "Linear", "LoraApply", "Rotation"]


class Linear(Protocol):
    """y = x Wᵀ + bias."""

    @property
    def bias(self) -> Tensor | None:
        """[out]"""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> a new tensor [T, out] that the caller may change in place."""
        ...


class Rotation(Protocol):
    """The rotary embedding of one step's tokens."""

    @property
    def cos(self) -> Tensor:
        """[T, 1, dim]"""
        ...

    @property
    def signed_sin(self) -> Tensor:
        """[T, 1, dim], its first half negated."""
        ...

    def __call__(self, heads: Tensor) -> None:
        """Rotates heads [T, any number, dim] in place."""
        ...


class Attend(Protocol):
    """Attention of one step over the KV cache; knows which tokens belong to which sequence."""

    def __call__(
        self,
        layer: int,
        qk: Tensor,
        v: Tensor,
        rotate: Rotation,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Rotates queries and keys, stores keys and values, then attends causally.

        qk [T, query heads + KV heads, dim], v [T, KV heads, dim]. They are views with gaps between rows (slices of
        one fused projection), each row contiguous; the callee may overwrite them. `scale` is the factor on q·k;
        `window`: a token sees itself and the window - 1 tokens before; `softcap` c: scores become
        c * tanh(score / c) before the mask. Returns [T, query heads * dim] in q's dtype.
        """
        ...


class LoraApply(Protocol):
    """The adapters of one step."""

    def project(self, layer: int, site: str, x: Tensor, linear: Linear) -> Tensor:
        """linear(x) plus the adapters' share: a new tensor [T, fused out]; `x` [T, in] stays.

        `site` is a key of `lamina_lora.geometry.SITES`. Tokens without an adapter get linear(x). The base projection
        is the callee's to run, so that it may run beside the adapters' first product, or compute that as well.
        """
        ...


class CausalLM(Protocol):
    """A decoder-only language model with its weights. Holds no state between calls; not shared between threads."""

    @property
    def config(self) -> ModelConfig: ...

    def linear(self, layer: int, site: str) -> Linear:
        """The base projection at a site, a key of `lamina_lora.geometry.SITES`."""
        ...

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, lora: LoraApply | None) -> Tensor:
        """token_ids and positions [T] int64, any mix of sequences -> final hidden states [T, hidden size]."""
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """rows [R, hidden size] of `forward`'s output -> [R, vocabulary] float32, a new tensor."""
        ...
