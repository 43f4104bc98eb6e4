"""Chooses the kernel for a device and dtype. The only place that does."""

from __future__ import annotations

import logging

import torch

from lamina_kernels.cpu.build import BuildFailed
from lamina_kernels.cpu.lora import NativeLoraTable
from lamina_kernels.lora import LoraTable, TorchLoraTable

__all__ = ["lora_table"]

_log = logging.getLogger(__name__)


def lora_table(sites: int, *, dtype: torch.dtype, device: torch.device) -> LoraTable:
    """The fastest LoRA table that works here: C on the CPU, else plain torch, saying so in the log.

    The first call on a machine builds the C kernel, which takes seconds: make the table at start-up.
    """
    if device.type == "cpu":
        try:
            return NativeLoraTable(sites, dtype)
        except TypeError as error:
            _log.info("LoRA in plain torch: %s", error)
        except (BuildFailed, OSError) as error:
            _log.warning("LoRA in plain torch, which is slower: %s", error)
    return TorchLoraTable(sites, device)
