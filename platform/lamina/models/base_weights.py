"""A model's plain weights, one projection at a time, for adapters that are measured against them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lamina.models.checkpoint import open_checkpoint
from lamina_lora.geometry import BaseGeometry

__all__ = ["StoredWeights"]


class StoredWeights:
    """`lamina_lora.dora.BaseWeights` of a model folder.

    Read when asked for: memory holds them packed for the CPU's products, or on a GPU.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """`dtype`: that of the loaded model."""
        self._folder, self._dtype = folder, dtype

    def rows(self, layer: int, target: str) -> Tensor:
        """[out, in] on the CPU. Raises ConfigurationInvalid if the folder holds no sound safetensors any more."""
        with open_checkpoint(self._folder) as checkpoint:
            weight: Tensor = checkpoint.tensor(f"{BaseGeometry.module_name(layer, target)}.weight")
            return weight.to(self._dtype)
