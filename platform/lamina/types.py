"""The shared vocabulary: plain, frozen values that every room may use. Imports nothing of Lamina."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "AdapterRunning",
    "CommonsReport",
    "EngineFailure",
    "EngineInfo",
    "EngineStats",
    "FinishReason",
    "GenerationRequest",
    "PinAnswer",
    "PinOrder",
    "PinRecord",
    "PinState",
    "QuotaPolicy",
    "SamplingParams",
    "TenantBlocks",
    "TokenEvent",
    "TokenLogprob",
]


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context window was reached
    CANCELLED = "cancelled"  # the client went away or cancelled
    ERROR = "error"  # see TokenEvent.error


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens. Neutral values switch a rule off.

    Order of application: logit_bias, repetition/presence/frequency penalties, temperature, top_k, top_p,
    min_p. `temperature == 0` is greedy (ties go to the lowest token id). Sampling is a pure function of
    (seed, choice index, position): the same seed gives the same output whoever shares the batch.
    """

    max_tokens: int = 16
    min_tokens: int = 0  # end-of-sequence and stop tokens are masked until then
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    repetition_penalty: float = 1.0  # > 0; over prompt and output, as in CTRL (Keskar et al., 2019)
    presence_penalty: float = 0.0  # [-2, 2]; over output, as OpenAI defines it
    frequency_penalty: float = 0.0  # [-2, 2]; over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None  # None: the engine draws one
    n: int = 1  # choices, sharing the prompt's blocks
    stop: tuple[str, ...] = ()  # matched on text by the client side (`engine.detokenize`), not by the core
    include_stop_str: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k >= 0: the chosen token's and the top k


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What the engine core gets: no text, no tenant secrets.

    `tenant` is an opaque id for fairness and metrics. `namespace` separates prefix caches: two requests share
    KV blocks only if namespace, adapter and token ids agree.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = "local"
    namespace: str = "public"
    adapter: str | None = None  # digest of the adapter; None: the base model
    weight: float = 1.0  # the tenant's share


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural log, of the unmodified distribution) of one sampled token."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """An error that crosses the process border. `code` is one of `lamina.errors` codes."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """Progress of one choice of one request. The last event of a choice carries `finish_reason`."""

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # as many as token_ids, if asked for
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it; it is in token_ids, not in the text
    cached_tokens: int = 0  # prompt tokens served from the prefix cache
    error: EngineFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine serves; constant while it runs."""

    model: str
    model_digest: str  # content identity of the base weights
    max_context: int  # tokens, prompt + output
    vocab_size: int
    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_running: int
    max_lora_rank: int
    dtype: str
    device: str
    block_bytes: int = 0  # keys and values of one block


@dataclass(frozen=True, slots=True)
class AdapterRunning:
    digest: str
    running: int
    waiting: int
    loaded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot; counters only grow while one engine process lives."""

    running: int = 0  # choices in the running batch
    waiting: int = 0  # requests queued
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_active: int = 0
    blocks_cached: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # admitted, including cached ones
    prefix_hit_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0
    step_seconds: float = 0.0  # time spent inside steps
    host_blocks_total: int = 0  # of the host tier; 0: there is none
    host_blocks_used: int = 0
    spilled_blocks: int = 0  # device to host
    promoted_blocks: int = 0  # host to device
    stored_blocks: int = 0  # host to store
    loaded_blocks: int = 0  # store to host
    declined_blocks: int = 0  # found below, but computing was cheaper
    failed_blocks: int = 0  # lost on the way up or down
    adapters: tuple[AdapterRunning, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaPolicy:
    """What a namespace is promised of the block pool: 0 <= pin_limit <= reserved <= limit, in blocks."""

    namespace: str
    reserved_blocks: int = 0
    limit_blocks: int | None = None  # None: the whole pool
    pin_limit_blocks: int = 0
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOrder:
    """A wish to keep the full blocks of a prompt's beginning. Times in seconds."""

    namespace: str
    token_ids: tuple[int, ...]
    adapter: str | None = None
    floor: str = "gpu"  # the lowest tier that it may sink to
    ttl_s: float = 3600.0  # refreshed by each hit ...
    hard_max_s: float = 86400.0  # ... up to so long after it was granted


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRecord:
    """A pin that was granted, as it is kept for a restart. `order.token_ids` are those of the granted blocks."""

    pin_id: str
    order: PinOrder
    created_at: float  # Unix seconds
    expires_at: float
    hits: int = 0
    last_hit_at: float | None = None
    clipped_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    """A pin as the engine has it. `resident_blocks` of its `blocks` are in the pool, the others not computed (yet)."""

    pin_id: str
    namespace: str
    floor: str
    blocks: int
    resident_blocks: int
    clipped_blocks: int
    ttl_s: float
    hard_max_s: float
    created_at: float  # Unix seconds
    expires_at: float
    hits: int = 0
    last_hit_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinAnswer:
    """`need` blocks were wanted beyond what is pinned already, `have` were left of the pin `limit`."""

    status: str  # granted | clipped | denied
    reason: str | None  # why not, or not all of it
    pin: PinState | None  # None: denied
    limit: int
    need: int
    have: int
    decision: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBlocks:
    """A namespace's blocks in the pool. Cached ones may be evicted; pinned ones are held by a pin alone."""

    namespace: str
    active: int = 0
    cached: int = 0
    pinned: int = 0
    pending: int = 0  # promised to running choices
    pin_hits: int = 0  # only grows
    evictions: tuple[tuple[str, int], ...] = ()  # by reason; only grow


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonsReport:
    """How the pool is shared. Until `loaded`, quotas are not known and nobody is held to one."""

    loaded: bool
    capacity: int  # blocks
    coverable: int  # of those can be promised to all tenants together
    tenants: tuple[TenantBlocks, ...] = ()
    pins: tuple[PinState, ...] = ()
