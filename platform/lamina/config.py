"""Frozen configuration values. Reading them from environment and command line is `lamina.wiring.settings`' job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["HALF_OF_WHAT_IS_LEFT", "EngineConfig", "GatewayConfig", "TenancyConfig"]

MIB = 1 << 20
HALF_OF_WHAT_IS_LEFT = -1  # a size: half of the memory that the process may still take when the engine starts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine core. Every limit that a request can hit is here."""

    model: Path  # a local Hugging Face folder
    adapters: Path  # root of the content-addressed adapter store: one folder per digest
    served_name: str = ""  # the base model's public name; "" = the folder's name
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16; auto: the fastest that this device computes well
    kernels: str = "auto"  # auto | triton | torch; auto: Triton's on a GPU, torch's operators elsewhere
    block_size: int = 16  # tokens
    kv_bytes: int = 1024 * MIB  # size of the block pool; ignored when num_blocks is set
    num_blocks: int | None = None
    host_kv_bytes: int = 0  # host memory for blocks that the pool has no room for; 0: none; or HALF_OF_WHAT_IS_LEFT
    kv_store_url: str = ""  # redis://, rediss:// or unix:// of a server that keeps blocks, or lmcache+ and that
    kv_store_bytes: int | None = None  # of the store's memory, what is ours under quotas; None: its maxmemory
    kv_store_codec: str = "raw"  # how blocks are written there: raw, zstd (exact, smaller) or fp8 (lossy, a quarter)
    kv_store_drain_s: float = 5.0  # that an engine which is closed goes on saving blocks there; 0: not at all
    kv_store_ttl_s: float | None = None  # a stored block expires so long after its last use; None: never
    max_context: int | None = None  # tokens; None: the model's
    max_batch_tokens: int = 2048  # one step's budget, decode first, prefill chunks in what is left
    max_prefill_tokens: int | None = None  # of prompts in one step, which all others wait for; None: 256 on a CPU
    max_running: int = 64  # choices in the running batch
    max_waiting: int = 1024  # queued requests, then 503
    max_queue_s: float = 50.0  # seconds without a start, then 429; 0: no bound
    max_choices: int = 16  # upper bound of n
    max_logprobs: int = 20
    max_lora_rank: int = 256
    adapter_bytes: int = 1024 * MIB  # loaded adapters, least recently used leave first
    max_adapters: int = 256  # loaded at a time, however small
    lora_plan: str = (
        "overlapped"  # how a GPU decodes: overlapped | two-launch | fused, each falling back to the one before
    )
    fused_slots: int = 8  # adapters in those products; the others are served by two launches
    fused_rank: int = 16  # per projection; a multiple of 8
    prefix_caching: bool = True
    threads: int | None = None  # None: all physical cores that the process may use

    @property
    def name(self) -> str:
        return self.served_name or self.model.name


@dataclass(frozen=True, slots=True, kw_only=True)
class TenancyConfig:
    """Tenants, keys and adapters."""

    database_url: str  # sqlite+aiosqlite:///... or postgresql+psycopg://...
    home: Path  # holds secret, adapters/, uploads/
    environment: str = "live"  # the <env> part of keys: lamina_<env>_<id>_<secret>
    max_adapters_per_tenant: int = 1000
    max_pins_per_tenant: int = 1000

    @property
    def adapters(self) -> Path:
        return self.home / "adapters"

    @property
    def uploads(self) -> Path:
        return self.home / "uploads"

    @property
    def secret_file(self) -> Path:
        return self.home / "secret"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The HTTP door."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 8 * MIB  # JSON bodies
    max_upload_bytes: int = 1024 * MIB  # adapter uploads, packed and unpacked alike
    default_max_tokens: int = 1024  # when the client sets none; clipped to what the context leaves
    max_choices: int = 16
    max_stop_strings: int = 16
    max_prompts: int = 128  # in one call of /v1/completions
    first_event_timeout_s: float = 600.0  # queueing included, then 503
    max_queue_s: float = 0.0  # the engine's: until then a stream's status is held back, so that it can be 429
    ping_interval_s: float = 15.0  # a stream that has nothing to say for so long says that it lives
    housekeeping_s: float = 30.0  # between rounds of `gateway.housekeeping`
    policy_poll_s: float = 2.0  # between looks at the database for changed quotas and pins
    pin_ttl_s: float = 3600.0  # of a pin that names none; each hit begins it anew
    pin_hard_max_s: float = 86400.0  # however often it is hit
