"""How a step is computed on a device: which layers, LoRA table, runner and sampler go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from lamina.config import EngineConfig
from lamina.engine.pool import BlockPool
from lamina.engine.runner import EagerRunner, Runner
from lamina.engine.sampler import Sampler, StepSampler
from lamina.errors import ConfigurationInvalid
from lamina.models.interface import CausalLM
from lamina.models.layers import LayerOps, TorchOps
from lamina_kernels.dispatch import lora_table
from lamina_kernels.lora import SlotTable
from lamina_lora.geometry import SITES
from lamina_lora.slots import AdapterSlots

__all__ = ["Backend", "StepParts", "TorchBackend", "choose_backend"]


@dataclass(frozen=True, slots=True)
class StepParts:
    """What belongs together."""

    table: SlotTable
    sampler: StepSampler
    runner: Callable[[AdapterSlots], Runner]


class Backend(Protocol):
    @property
    def ops(self) -> LayerOps:
        """For the model's layers."""
        ...

    def parts(self, model: CausalLM, pool: BlockPool, config: EngineConfig) -> StepParts:
        """For an engine on this model and pool. May compile and allocate: call it at start-up."""
        ...


class TorchBackend:
    """Torch operators, and the CPU's own LoRA kernel where it can be built."""

    ops = TorchOps()

    def parts(self, model: CausalLM, pool: BlockPool, config: EngineConfig) -> StepParts:
        sites = len(SITES) * model.config.num_layers
        table = lora_table(sites, dtype=pool.data.dtype, device=pool.data.device)
        return StepParts(table, Sampler(), partial(EagerRunner, model, pool))


def choose_backend(device: torch.device, kernels: str = "auto") -> Backend:
    """Triton kernels on a GPU and torch elsewhere, unless one is asked for.

    Raises ConfigurationInvalid for a name that is not known, and for Triton kernels without a GPU.
    """
    if kernels not in ("auto", "triton", "torch"):
        raise ConfigurationInvalid(f"kernels must be auto, triton or torch, not {kernels!r}.", param="kernels")
    if kernels == "triton" and device.type != "cuda":
        raise ConfigurationInvalid(f"kernels is triton, but the device is {device}: they need a GPU.", param="kernels")
    if device.type == "cuda" and kernels != "torch":  # pragma: no cover - CUDA only
        from lamina.engine.adapter_stream import CudaLane
        from lamina.engine.graphs import CudaGraphs
        from lamina.wiring.triton_backend import TritonBackend

        # Products that are split over the inner dimension add their parts in float32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        return TritonBackend(graphs=CudaGraphs(), copies=CudaLane(device), beside=CudaLane(device))
    return TorchBackend()
