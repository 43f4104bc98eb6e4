"""Builds an engine core from its configuration: the one place that chooses device, dtype and collaborators."""

from __future__ import annotations

import platform as host
from collections.abc import Callable
from dataclasses import replace

import torch

from lamina.config import EngineConfig
from lamina.engine.adapters import AdapterLoads
from lamina.engine.core import EngineCore
from lamina.engine.explain import Explainer
from lamina.engine.intake import CoreLimits
from lamina.engine.pool import BlockPool
from lamina.engine.scheduler import Scheduler
from lamina.errors import ConfigurationInvalid
from lamina.models.base_weights import StoredWeights
from lamina.models.config import ModelConfig
from lamina.models.digest import model_digest
from lamina.models.interface import CausalLM
from lamina.models.loader import load_model
from lamina.types import EngineInfo
from lamina.wiring.backends import Backend, choose_backend
from lamina.wiring.cores import compute_threads
from lamina.wiring.tiers import MakeTiers, build_tiers
from lamina_kernels.lora import SlotTable
from lamina_kvtier.ghosts import Ghosts, segments_for
from lamina_kvtier.identity import Layout
from lamina_kvtier.manager import KvManager
from lamina_kvtier.quota import QuotaBook
from lamina_lora.dora import BaseWeights
from lamina_lora.store import AdapterStore
from lamina_lora.weights import PreparedAdapter, load_adapter, prepare_adapter

__all__ = ["assemble", "build_core", "choose_device", "choose_dtype"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of the pool no more than this part is kept out of all promises, for choices that decode; a block each is enough.
_HEADROOM_PART = 8
# Of prompts in one step on a CPU: more at once is no faster there, and holds up everybody who decodes or arrives.
# SmolLM2-135M, CPU time for 1024 tokens against one step of all: 256 tokens a step 0.96, 128 1.17, 64 1.42, 32 1.80.
_CPU_PREFILL_TOKENS = 256
_MAX_GHOSTS = 1 << 18  # evicted blocks that are remembered; some 300 bytes each
Progress = Callable[[int, int], None]


def choose_device(name: str) -> torch.device:
    """Raises ConfigurationInvalid for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ConfigurationInvalid(f"device must be auto, cpu or cuda, not {name!r}.", param="device")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationInvalid("device is cuda, but torch finds no CUDA device here.", param="device")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where the hardware multiplies it, else float32.

    On a CPU without AVX-512 BF16 or AMX (measured on Zen 3, 2 threads, [32, 576] x [576, 3072]) a bfloat16 GEMM
    reaches 16 GFLOP/s against 92 in float32, and float32 arithmetic on bfloat16 weights loses nothing.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _multiplies_bf16() else torch.float32
    if name not in _DTYPES:
        raise ConfigurationInvalid(f"dtype must be auto or one of {sorted(_DTYPES)}, not {name!r}.", param="dtype")
    return _DTYPES[name]


def _multiplies_bf16() -> bool:
    if host.machine() not in ("x86_64", "AMD64"):
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def build_core(config: EngineConfig, *, progress: Progress | None = None) -> EngineCore:
    """Loads the model and sets up pool, scheduler and adapters. Takes seconds; `progress(done, total)` in bytes.

    Raises ConfigurationInvalid and UnsupportedModel.
    """
    torch.set_num_threads(config.threads or compute_threads())
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    backend = choose_backend(device, config.kernels)
    model = load_model(config.model, dtype=dtype, device=device, ops=backend.ops, progress=progress)
    digest = model_digest(config.model)
    base = StoredWeights(config.model, dtype)
    core = assemble(model, config, digest=digest, dtype=dtype, device=device, backend=backend, base=base)
    core.warm_up()
    return core


def assemble(
    model: CausalLM,
    config: EngineConfig,
    *,
    digest: str,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend | None = None,
    base: BaseWeights | None = None,
    tiers: MakeTiers = build_tiers,
) -> EngineCore:
    """Puts an engine together around a loaded model, with the device's own backend unless another one is given.

    DoRA adapters are loaded with the model's weights in `base`; without it, requests for them fail. Raises
    ConfigurationInvalid for limits that cannot work.
    """
    shape = model.config
    layout = _layout(shape, dtype, config.block_size)
    num_blocks = config.num_blocks or config.kv_bytes // _block_bytes(shape, dtype, config.block_size)
    info = _info(config, shape, digest, num_blocks, dtype, device)
    _check(info)
    pool = _pool(shape, num_blocks, config.block_size, dtype, device)
    parts = (backend or choose_backend(device, config.kernels)).parts(model, pool, config)
    loads = _adapter_loads(config, shape, dtype, parts.table, base)
    kv = _kv_manager(config, num_blocks)
    below = tiers(config, pool, kv, layout)
    explainer = Explainer(
        kv,
        None if below.below is None else below.below.host,
        block_bytes=pool.block_bytes,
        store=below.store_memory,
        store_usage=below.store_usage,
    )
    below.report_to(explainer)
    scheduler = Scheduler(
        kv,
        loads,
        below,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_prefill_tokens=_prefill_tokens(config, device),
    )
    return EngineCore(
        info=replace(info, host_blocks=0 if below.commons_of_host is None else below.commons_of_host.tier.num_slots),
        layout=layout,
        eos_token_ids=frozenset(shape.eos_token_ids),
        limits=_limits(config),
        scheduler=scheduler,
        runner=parts.runner(loads.slots),
        sampler=parts.sampler,
        adapters=loads,
        tiers=below,
        explainer=explainer,
    )


def _pool(shape: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> BlockPool:
    return BlockPool(
        num_blocks,
        layers=shape.num_layers,
        block_size=block_size,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=device,
    )


def _adapter_loads(
    config: EngineConfig, shape: ModelConfig, dtype: torch.dtype, table: SlotTable, base: BaseWeights | None
) -> AdapterLoads:
    """Its loader holds the table and no other part: a closed engine lets go of its weights and its pool."""
    store, geometry = AdapterStore(config.adapters), shape.geometry()

    def load(digest: str) -> PreparedAdapter:
        folder = store.path(digest)
        weights = load_adapter(folder, geometry, dtype, max_rank=config.max_lora_rank, digest=digest, base=base)
        return prepare_adapter(weights, table)

    return AdapterLoads(store, load, table, capacity_bytes=config.adapter_bytes, max_adapters=config.max_adapters)


def _kv_manager(config: EngineConfig, num_blocks: int) -> KvManager:
    quotas = QuotaBook(num_blocks, headroom=min(config.max_running, num_blocks // _HEADROOM_PART))
    ghosts = Ghosts(segments_for(min(num_blocks, _MAX_GHOSTS)))
    return KvManager(num_blocks, config.block_size, prefix_caching=config.prefix_caching, quotas=quotas, ghosts=ghosts)


def _limits(config: EngineConfig) -> CoreLimits:
    return CoreLimits(
        max_waiting=config.max_waiting,
        max_choices=config.max_choices,
        max_logprobs=config.max_logprobs,
        max_queue_s=config.max_queue_s,
    )


def _prefill_tokens(config: EngineConfig, device: torch.device) -> int | None:
    if config.max_prefill_tokens is None and device.type == "cpu":
        return _CPU_PREFILL_TOKENS
    return config.max_prefill_tokens


def _layout(shape: ModelConfig, dtype: torch.dtype, block_size: int) -> Layout:
    return Layout(
        layers=shape.num_layers,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        block_size=block_size,
        rope=repr(shape.rope),
    )


def _block_bytes(shape: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    return 2 * shape.num_layers * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def _info(
    config: EngineConfig,
    shape: ModelConfig,
    digest: str,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> EngineInfo:
    return EngineInfo(
        model=config.name,
        model_digest=digest,
        max_context=min(config.max_context or shape.max_context, shape.max_context),
        vocab_size=shape.vocab_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_lora_rank=config.max_lora_rank,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        block_bytes=_block_bytes(shape, dtype, config.block_size),
    )


def _check(info: EngineInfo) -> None:
    if info.num_blocks < 1:
        raise ConfigurationInvalid("kv_bytes does not hold one block; raise it.", param="kv_bytes")
    if info.max_batch_tokens < info.max_running:
        raise ConfigurationInvalid(
            f"max_batch_tokens ({info.max_batch_tokens}) must be at least max_running ({info.max_running}): "
            "every running choice decodes one token a step.",
            param="max_batch_tokens",
        )
