"""The shared vocabulary: plain, frozen values that every room may use. Imports nothing of Lamina."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "AdapterRunning",
    "BlockRun",
    "CachedTokens",
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
    "PrefixExplanation",
    "PrefixOrder",
    "PrefixReport",
    "QuotaPolicy",
    "SamplingParams",
    "TenantBlocks",
    "TenantPrefixes",
    "TierQuota",
    "TierSize",
    "TokenEvent",
    "TokenLogprob",
    "VerifyOrder",
    "VerifyReport",
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
    context: dict[str, str | int | float | bool | list[str] | None] = field(default_factory=dict)  # limit, need, ...


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that were not computed, by the tier that had them."""

    gpu: int = 0
    host: int = 0
    store: int = 0

    @property
    def total(self) -> int:
        return self.gpu + self.host + self.store


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """Progress of one choice of one request. The last event of a choice carries `finish_reason`."""

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # as many as token_ids, if asked for
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it; it is in token_ids, not in the text
    cached_by_tier: CachedTokens = CachedTokens()  # prompt tokens served from the prefix cache
    queued_s: float | None = None  # seconds from its arrival to its start, in the first event of the request
    error: EngineFailure | None = None

    @property
    def cached_tokens(self) -> int:
        return self.cached_by_tier.total


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
    host_blocks: int = 0  # that host memory holds below the pool; 0: no such tier


@dataclass(frozen=True, slots=True)
class AdapterRunning:
    digest: str
    running: int
    waiting: int
    loaded: bool
    blocks: int = 0  # that it computed, in the pool and in host memory; one that is in both counts twice


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
class TierQuota:
    """Rights in one tier: 0 <= pin_limit <= reserved <= limit. In blocks of the device pool, in bytes of the others."""

    reserved: int = 0
    limit: int | None = None  # None: the whole tier
    pin_limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaPolicy:
    """What a namespace is promised of each tier. Nothing can be pinned in the store."""

    namespace: str
    weight: float = 1.0
    gpu: TierQuota = TierQuota()  # blocks
    host: TierQuota = TierQuota()  # bytes
    store: TierQuota = TierQuota()  # bytes; its pin_limit is 0


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
    """A pin as the engine has it. `resident_blocks` of its `blocks` are kept, the others not computed (yet).

    With floor `gpu` that is: in the pool; with floor `host`: in the pool or in host memory.
    """

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
    """What a namespace has, tier by tier. Cached blocks may be evicted; pinned ones are held by a pin alone."""

    namespace: str
    active: int = 0
    cached: int = 0
    pinned: int = 0
    pending: int = 0  # promised to running choices
    pin_hits: int = 0  # only grows
    evictions: tuple[tuple[str, int], ...] = ()  # from the pool, by reason; only grow
    host_bytes: int = 0  # paid for in host memory, in whatever state
    host_pinned_bytes: int = 0  # of those: kept by a pin with floor `host`
    host_pending_bytes: int = 0  # of those: being written, on their way down or up
    host_evictions: tuple[tuple[str, int], ...] = ()  # blocks lost from host memory, by reason; only grow
    store_bytes: int | None = None  # None: there is no store, or it does not say


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier as quotas see it, in bytes: of `capacity`, `coverable` can be promised to all tenants together.

    None: nobody knows, because a store does not say.
    """

    capacity: int | None
    coverable: int | None
    limits: bool = True  # False: it can hold nobody to a limit, because it does not know who pays


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonsReport:
    """How the tiers are shared. Until `loaded`, quotas are not known and nobody is held to one."""

    loaded: bool
    capacity: int  # blocks of the pool
    coverable: int  # of those can be promised to all tenants together
    tenants: tuple[TenantBlocks, ...] = ()
    pins: tuple[PinState, ...] = ()
    host: TierSize | None = None  # None: host memory is no tier of its own
    store: TierSize | None = None  # None: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPrefixes:
    """How a namespace's prompts fared in the prefix cache, in full blocks. All counts only grow."""

    namespace: str
    hits: tuple[tuple[str, int], ...] = ()  # (tier, blocks)
    misses: tuple[tuple[str, str, int], ...] = ()  # (tier that lost it last or "none", reason, blocks)
    ghost_hits: tuple[tuple[str, int, int], ...] = ()  # (tier, bytes, blocks): misses that so much room would spare
    declined: tuple[tuple[str, str, int], ...] = ()  # (tier, reason, blocks): not kept, or not brought up
    store_evictions: tuple[tuple[str, int], ...] = ()  # (reason, blocks), as far as this engine's puts caused them


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    tenants: tuple[TenantPrefixes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOrder:
    """A prompt whose blocks somebody wants to know of."""

    namespace: str
    token_ids: tuple[int, ...]
    adapter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Neighbouring blocks of a prompt of which the same is known. In no tier: `lost_by` and `reason` say why."""

    first: int
    blocks: int
    tiers: tuple[str, ...] = ()  # where they are now: gpu, host, store
    pins: tuple[str, ...] = ()  # ids of the pins that keep them
    lost_by: str | None = None  # gpu | host | store | none
    reason: str | None = None
    room: tuple[tuple[str, int], ...] = ()  # (tier, bytes of more room with which it would have them)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixExplanation:
    """A prompt's full blocks, and how its namespace fares."""

    block_tokens: int
    block_bytes: int
    blocks: int
    runs: tuple[BlockRun, ...]
    store: str  # none | ok | unavailable: then what only the store has looks lost
    prefixes: TenantPrefixes
    rooms: tuple[tuple[str, int], ...]  # (tier, bytes of more room), as far as ghosts remember


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOrder:
    """Check `count` blocks of a tier, or with a `seed` as many at random.

    `start` 0 begins a run over what there is then; it goes on with the `following` of the report before.
    Tier `gpu` has no block to read: its books are checked, and those of all tiers with it.
    """

    tier: str  # gpu | host | store
    start: int = 0
    count: int = 64
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """`checked` blocks were compared, `absent` had left meanwhile or could not be read."""

    tier: str
    total: int  # blocks that there are to check
    checked: int = 0
    absent: int = 0
    violations: tuple[str, ...] = ()
    following: int | None = None  # `start` of the run's next batch; None: that was all
