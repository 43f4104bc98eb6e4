"""A step on Triton kernels: importing this imports triton."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamina.config import EngineConfig
from lamina.engine.adapter_stream import AdapterStream, Lane
from lamina.engine.device_attention import DeviceAttention
from lamina.engine.device_fused import FusedTable
from lamina.engine.device_inputs import StepShape
from lamina.engine.device_lora import DeviceLora, Overlapped, Projections, TwoLaunches
from lamina.engine.device_runner import DeviceRunner, decode_buckets
from lamina.engine.device_sampler import DeviceSampler
from lamina.engine.graphs import Graphs
from lamina.engine.pool import BlockPool
from lamina.errors import ConfigurationInvalid
from lamina.models.config import ModelConfig
from lamina.models.device_ops import DeviceOps
from lamina.models.interface import CausalLM
from lamina.models.layers import DenseLinear
from lamina.wiring.backends import StepParts
from lamina_kernels.gpu.attention_pool import BLOCK_SIZES, HEAD_DIMS
from lamina_kernels.gpu.attention_prefill import prefill_tile_rows
from lamina_kernels.gpu.lora_fused import FusedSite
from lamina_kernels.gpu.lora_layout import ALIGN, SiteShape
from lamina_kernels.gpu.lora_table import TritonLoraTable
from lamina_kernels.gpu.norm import MAX_DIM
from lamina_kernels.gpu.sampling_seats import MAX_TOP, MAX_VOCAB
from lamina_lora.geometry import SITES, BaseGeometry
from lamina_lora.slots import AdapterSlots

__all__ = ["TritonBackend"]


class TritonBackend:
    """A `Backend`. On a CPU it runs under Triton's interpreter (TRITON_INTERPRET=1), for tests."""

    ops = DeviceOps()

    def __init__(self, *, graphs: Graphs, copies: Lane, beside: Lane) -> None:
        """`copies` carries adapters to the device, `beside` what a step computes beside its main line."""
        self._graphs = graphs
        self._copies = copies
        self._beside = beside

    def parts(self, model: CausalLM, pool: BlockPool, config: EngineConfig) -> StepParts:
        _check(model.config, config)
        shape, device, dtype = model.config, pool.data.device, pool.data.dtype
        shapes = _site_shapes(shape.geometry())
        lora = _lora_table(shapes, config, dtype, device)
        fused = _fused_table(model, lora, shapes, config) if config.lora_plan == "fused" else None
        stream = AdapterStream(fused or lora, self._copies)
        plans: list[Projections] = [TwoLaunches(lora)]
        if config.lora_plan != "two-launch":
            plans.insert(0, Overlapped(lora, self._beside))
        if fused is not None:
            plans.insert(0, fused)
        sampler = DeviceSampler(config.max_running, shape.vocab_size, device)
        tile_rows = prefill_tile_rows(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype)
        longest = min(config.max_context or shape.max_context, shape.max_context)

        def runner(slots: AdapterSlots) -> DeviceRunner:
            return DeviceRunner(
                model,
                pool,
                DeviceAttention(pool, heads=shape.num_heads, max_decode_rows=config.max_running),
                DeviceLora(plans, stream, slots),
                self._graphs,
                StepShape(pool.block_size, tile_rows),
                feed=sampler.feed,
                buckets=decode_buckets(config.max_running),
                max_blocks=-(-longest // pool.block_size),
            )

        return StepParts(stream, sampler, runner)


def _check(shape: ModelConfig, config: EngineConfig) -> None:
    """Raises ConfigurationInvalid for what the kernels cannot do."""
    limits = {
        "head_dim": (shape.head_dim in HEAD_DIMS, f"heads of {shape.head_dim}; they know {HEAD_DIMS}"),
        "block_size": (config.block_size in BLOCK_SIZES, f"blocks of {config.block_size}; they know {BLOCK_SIZES}"),
        "max_logprobs": (config.max_logprobs <= MAX_TOP, f"max_logprobs {config.max_logprobs}; they give {MAX_TOP}"),
        "vocab_size": (shape.vocab_size <= MAX_VOCAB, f"a vocabulary of {shape.vocab_size}; they take {MAX_VOCAB}"),
        "hidden_size": (shape.hidden_size <= MAX_DIM, f"hidden states of {shape.hidden_size}; they take {MAX_DIM}"),
        "fused_rank": (
            config.fused_rank % ALIGN == 0,
            f"fused_rank {config.fused_rank}; a multiple of {ALIGN} is needed",
        ),
    }
    for param, (fits, what) in limits.items():
        if not fits:
            raise ConfigurationInvalid(f"Triton kernels cannot do {what}. Or set kernels to torch.", param=param)


def _site_shapes(geometry: BaseGeometry) -> list[SiteShape]:
    """By `site_index`."""
    shapes = [
        SiteShape(geometry.in_features(site), tuple(geometry.targets[target][1] for target in targets))
        for site, targets in SITES.items()
    ]
    return shapes * geometry.num_layers


def _lora_table(
    shapes: Sequence[SiteShape], config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> TritonLoraTable:
    return TritonLoraTable(
        shapes,
        dtype=dtype,
        device=device,
        capacity_bytes=config.adapter_bytes,
        max_slots=config.max_adapters,
        max_rank=config.max_lora_rank,
        max_tokens=config.max_batch_tokens,
        decode_rows=config.max_running,
    )


def _fused_table(
    model: CausalLM, table: TritonLoraTable, shapes: Sequence[SiteShape], config: EngineConfig
) -> FusedTable:
    """Moves every base projection of the model into a matrix with room for adapters, one after the other."""
    sites: list[FusedSite] = []
    for layer in range(model.config.num_layers):
        for name in SITES:
            shape, linear = shapes[len(sites)], model.linear(layer, name)
            if not isinstance(linear, DenseLinear):
                raise ConfigurationInvalid("The fused LoRA plan needs plain base weights.", param="lora_plan")
            site = FusedSite(
                shape,
                slots=config.fused_slots,
                ranks=config.fused_rank * len(shape.widths),
                dtype=linear.weight.dtype,
                device=linear.weight.device,
                bias=linear.bias is not None,
            )
            linear.move(site.weight, site.bias)
            sites.append(site)
    return FusedTable(table, sites)
