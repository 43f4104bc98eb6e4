"""What a user can set, in one documented place: `LAMINA_*` variables, overridden by the command line.

`load_settings` reads them once; all else gets frozen configs (`lamina.config`) and reads no environment.
`docs/configuration.md` is made from this file: `python -m lamina.wiring.settings --markdown`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from lamina.config import HALF_OF_WHAT_IS_LEFT, EngineConfig, GatewayConfig, TenancyConfig
from lamina.errors import ConfigurationInvalid
from lamina.wiring.paths import default_cache, default_home

__all__ = ["PREFIX", "Settings", "default_cache", "default_home", "load_settings", "unknown_variables"]

PREFIX = "LAMINA_"


def _field(config: Any, name: str, description: str, **limits: Any) -> Any:
    """A setting with the default of the config field of the same name, so that the two cannot differ."""
    default = config.__dataclass_fields__[name].default
    assert default is not MISSING
    return Field(default, description=description, validate_default=False, **limits)


def _engine(name: str, description: str, **limits: Any) -> Any:
    return _field(EngineConfig, name, description, json_schema_extra={"section": "Engine"}, **limits)


def _gateway(name: str, description: str, **limits: Any) -> Any:
    return _field(GatewayConfig, name, description, json_schema_extra={"section": "Gateway"}, **limits)


def _tenancy(name: str, description: str, **limits: Any) -> Any:
    return _field(TenancyConfig, name, description, json_schema_extra={"section": "Tenants"}, **limits)


class Settings(BaseSettings):
    """Every field is the environment variable `LAMINA_` + its name in capitals."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    # Files
    home: Path = Field(
        default_factory=default_home,
        description="Database, server secret, adapters and uploads.",
        json_schema_extra={"section": "Files", "default": "`~/.local/share/lamina`"},
    )
    cache: Path = Field(
        default_factory=default_cache,
        description="Fetched models.",
        json_schema_extra={
            "section": "Files",
            "default": "`~/.cache/lamina/models`",
        },
    )
    database_url: str | None = Field(
        None,
        description="`sqlite+aiosqlite:///path` or `postgresql+psycopg://user:password@host/name`.",
        repr=False,
        json_schema_extra={"section": "Files", "default": "SQLite in `LAMINA_HOME/lamina.db`"},
    )
    # Model and engine
    model: str = Field(
        "smollm2-135m-instruct",
        min_length=1,
        description="The base model: a name of `lamina models list`, a Hugging Face folder, or a hub id.",
        json_schema_extra={"section": "Engine"},
    )
    served_name: str = Field(
        "",
        max_length=200,
        description="The base model's public name in the API.",
        json_schema_extra={"section": "Engine", "default": "the model folder's name"},
    )
    device: Literal["auto", "cpu", "cuda"] = _engine("device", "Where the model runs.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _engine(
        "dtype", "Weights and KV; `auto` takes the fastest that the device computes well."
    )
    kernels: Literal["auto", "triton", "torch"] = _engine(
        "kernels", "`auto`, `triton` or `torch`; auto: Triton's on a GPU, torch's elsewhere."
    )
    block_size: int = _engine("block_size", "Tokens in a KV block.", ge=1, le=256)
    kv_bytes: ByteSize = _engine(
        "kv_bytes", "Memory for KV blocks, for example `4GiB`; unused if `LAMINA_NUM_BLOCKS` is set.", ge=1
    )
    num_blocks: int | None = _engine("num_blocks", "KV blocks, instead of a size in bytes.", ge=1)
    host_kv_bytes: Annotated[ByteSize, Field(ge=0)] | Literal["auto"] = _engine(
        "host_kv_bytes",
        "Host memory for KV blocks that the pool has no room for; 0: none; `auto`: half of what is left.",
    )
    kv_store_url: str = _engine(
        "kv_store_url",
        "Where KV blocks are kept: `redis://`, `rediss://`, `unix://`, `lmcache+` and one of these, or `embedded`.",
    )
    kv_store_bytes: Annotated[ByteSize, Field(ge=16 << 20)] | None = _engine(
        "kv_store_bytes",
        "Memory of the embedded store, unset: 1 GiB; of another one, what quotas may give out, unset: its maxmemory.",
    )
    kv_store_codec: Literal["raw", "zstd", "fp8"] = _engine(
        "kv_store_codec", "How blocks are kept there: `raw`, `zstd` (exact, smaller) or `fp8` (lossy, a quarter)."
    )
    kv_store_ttl_s: float | None = _engine(
        "kv_store_ttl_s", "Seconds after its last use when a stored block expires; unset: never.", gt=0
    )
    kv_store_drain_s: float = _engine(
        "kv_store_drain_s",
        "Seconds in which a server that is told to stop saves blocks to the store, after its last request; 0: none. "
        "`embedded` ends with the server: there nothing is saved.",
        ge=0,
        le=3600,
    )
    max_context: int | None = _engine(
        "max_context", "Tokens of prompt and completion together; unset: what the model allows.", ge=2
    )
    max_batch_tokens: int = _engine("max_batch_tokens", "Tokens in one step: decode first, then prefill.", ge=1)
    max_prefill_tokens: int | None = _engine(
        "max_prefill_tokens",
        "Tokens of prompts in one step, which decoding and new requests wait for; unset: 256 on a CPU, else what fits.",
        ge=1,
    )
    max_running: int = _engine("max_running", "Choices that generate at the same time.", ge=1)
    max_waiting: int = _engine("max_waiting", "Requests in the queue; more are answered 503.", ge=1)
    max_queue_s: float = _engine(
        "max_queue_s",
        "Seconds that a request may wait for its start, then 429; 0: no bound. A stream's status may come as late, so "
        "keep it below the read timeout of proxies (often 60 s).",
        ge=0,
    )
    max_choices: int = _engine("max_choices", "Upper bound of `n`.", ge=1, le=1024)
    max_logprobs: int = _engine("max_logprobs", "Upper bound of `top_logprobs`.", ge=0, le=1024)
    max_lora_rank: int = _engine("max_lora_rank", "Adapters of a higher rank are refused.", ge=1)
    adapter_bytes: ByteSize = _engine(
        "adapter_bytes", "Memory for loaded adapters; the least recently used leave first.", ge=1
    )
    max_adapters: int = _engine("max_adapters", "Adapters loaded at a time, however small.", ge=1, le=65536)
    lora_plan: Literal["overlapped", "two-launch", "fused"] = _engine(
        "lora_plan", "How a GPU decodes with adapters: `overlapped`, `two-launch` or `fused`; see docs/kernels.md."
    )
    fused_slots: int = _engine("fused_slots", "Adapters in the fused plan; others take the usual way.", ge=1, le=64)
    fused_rank: int = _engine("fused_rank", "Rank up to which the fused plan takes adapters.", ge=8, multiple_of=8)
    prefix_caching: bool = _engine("prefix_caching", "Reuse KV blocks of equal prompt beginnings.")
    threads: int | None = _engine(
        "threads", "CPU threads of the engine; unset: physical cores, or fewer if it may not use as many.", ge=1
    )
    # Gateway
    host: str = _gateway("host", "Address to listen on; `0.0.0.0` for all.", min_length=1)
    port: int = _gateway("port", "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    max_body_bytes: ByteSize = _gateway("max_body_bytes", "Largest JSON body.", ge=1024)
    max_upload_bytes: ByteSize = _gateway("max_upload_bytes", "Largest adapter, packed or unpacked.", ge=1024)
    default_max_tokens: int = _gateway(
        "default_max_tokens",
        "Completion tokens if the client sets none; less if the context leaves less.",
        ge=1,
    )
    max_stop_strings: int = _gateway("max_stop_strings", "Upper bound of `stop` strings.", ge=0, le=1024)
    max_prompts: int = _gateway("max_prompts", "Upper bound of prompts in one `/v1/completions` call.", ge=1)
    first_event_timeout_s: float = _gateway(
        "first_event_timeout_s", "Seconds that a request may wait for its first token; then 503.", gt=0
    )
    ping_interval_s: float = _gateway(
        "ping_interval_s", "Seconds of silence after which a stream sends a comment, so that proxies keep it.", gt=0
    )
    housekeeping_s: float = _gateway(
        "housekeeping_s",
        "Seconds between rounds that unload adapters which another process deleted, and remove left-over uploads.",
        gt=0,
    )
    policy_poll_s: float = _gateway(
        "policy_poll_s", "Seconds after which quotas and pins that another process changed hold here.", gt=0
    )
    pin_ttl_s: float = _gateway("pin_ttl_s", "Seconds without a hit that a pin lives, unless it says more.", ge=1)
    pin_hard_max_s: float = _gateway("pin_hard_max_s", "Seconds that a pin lives at most, hits or not.", ge=1)
    shutdown_grace_s: float = Field(
        5.0,
        ge=0,
        description="Seconds that running requests get to finish when the server is told to stop.",
        json_schema_extra={"section": "Gateway"},
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="How much is logged.", json_schema_extra={"section": "Gateway"}
    )
    # Tenants
    environment: str = _tenancy("environment", "The `<env>` part of API keys, `lamina_<env>_<id>_<secret>`.")
    max_adapters_per_tenant: int = _tenancy("max_adapters_per_tenant", "Adapter versions that a tenant may keep.", ge=1)
    max_pins_per_tenant: int = _tenancy("max_pins_per_tenant", "Pins that a tenant may have at a time.", ge=1)

    @field_validator("home", "cache", mode="after")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @field_validator("log_level", mode="before")
    @classmethod
    def _capitals(cls, level: object) -> object:
        return level.upper() if isinstance(level, str) else level

    def tenancy(self) -> TenancyConfig:
        url = self.database_url or f"sqlite+aiosqlite:///{self.home / 'lamina.db'}"
        return TenancyConfig(database_url=url, home=self.home, **self._shared_with(TenancyConfig))

    def engine(self, model: Path) -> EngineConfig:
        """`model`: the local folder that `self.model` was resolved to."""
        values = self._shared_with(EngineConfig) | {"model": model, "served_name": self.served_name}
        if values["host_kv_bytes"] == "auto":
            values["host_kv_bytes"] = HALF_OF_WHAT_IS_LEFT
        return EngineConfig(adapters=self.tenancy().adapters, **values)

    def gateway(self) -> GatewayConfig:
        return GatewayConfig(**self._shared_with(GatewayConfig))

    def _shared_with(self, config: Any) -> dict[str, Any]:
        names = config.__dataclass_fields__.keys() & type(self).model_fields.keys() - {"home", "database_url"}
        values = {name: getattr(self, name) for name in names}
        return {name: int(value) if isinstance(value, ByteSize) else value for name, value in values.items()}


def load_settings(**overrides: Any) -> Settings:
    """Environment, then `overrides` that are not None. Raises ConfigurationInvalid for all wrong values."""
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        problems = [f"{_name(problem, given)}: {_message(problem)}" for problem in error.errors()]
        raise ConfigurationInvalid("Wrong settings: " + "; ".join(problems) + ".") from None


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each `LAMINA_*` variable that means nothing here, with the likely spelling."""
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    return [
        _unknown(name, difflib.get_close_matches(name, known, 1, 0.8))
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in known
    ]


def _unknown(name: str, close: list[str]) -> str:
    return f"{name} is no setting and is ignored" + (f"; did you mean {close[0]}?" if close else ".")


def _name(problem: Any, given: Mapping[str, Any]) -> str:
    field = str(problem["loc"][0]) if problem["loc"] else "settings"
    return f"--{field.replace('_', '-')}" if field in given else PREFIX + field.upper()


def _message(problem: Any) -> str:
    text: str = problem["msg"]
    return text[:1].lower() + text[1:]


if __name__ == "__main__":
    from lamina.wiring.settings_table import main

    sys.exit(main(sys.argv[1:]))
