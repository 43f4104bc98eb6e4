"""What chat and completions share: sampling parameters, usage, and the refusal of what is not supported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lamina.errors import UnsupportedParameter

__all__ = [
    "Body",
    "CachedTokensByTier",
    "GenerationBody",
    "PromptTokensDetails",
    "RefusingBody",
    "StreamOptions",
    "Text",
    "Usage",
]

MAX_LOGPROBS = 20

# Parameters that change the meaning of the answer -> the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "cache_salt": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "moderation": (),
    "priority": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("Input holds half of a UTF-16 surrogate pair; send valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_unicode)]  # JSON can spell strings that no tokenizer takes


MAX_PAIRS = 1024


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_PAIRS:  # pydantic looks at every pair before it counts
        raise ValueError(f"Dictionary should have at most {MAX_PAIRS} items, not {len(value)}")
    return value


Few = BeforeValidator(_few)


class Body(BaseModel):
    """A request body: exact types, finite numbers, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, data: Any) -> Any:
        """One is enough to refuse the body; a hundred thousand would each cost an error that nobody reads."""
        if not isinstance(data, dict) or data.keys() <= cls.model_fields.keys():
            return data
        unknown = next(name for name in data if name not in cls.model_fields)
        return {name: value for name, value in data.items() if name in cls.model_fields or name == unknown}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted; there is no obfuscation to leave out


class RefusingBody(Body):
    """Refuses with UnsupportedParameter, by name, what would change the meaning of the answer if ignored."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in UNSUPPORTED.keys() & data.keys() - cls.model_fields.keys():
            if data[name] is not None and data[name] not in UNSUPPORTED[name]:
                raise UnsupportedParameter(_refusal(name), param=name)
        return {name: value for name, value in data.items() if name not in UNSUPPORTED or name in cls.model_fields}


class GenerationBody(RefusingBody):
    """Sampling and bookkeeping. None means "the default", as OpenAI's clients send it."""

    model: Annotated[str, Field(min_length=1, max_length=256, description="Base model or adapter.")]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=256, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_PAIRS), Few] | None = None

    # Lamina's own
    top_k: Annotated[int, Field(ge=-1, description="-1 and 0: off")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64, fail_fast=True)] | None = None

    # Accepted and ignored: they don't change the answer.
    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_PAIRS), Few] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CachedTokensByTier(BaseModel):
    """Where the KV blocks of cached tokens were. Lamina's own; they add up to `cached_tokens`."""

    gpu: int
    host: int
    store: int


class PromptTokensDetails(BaseModel):
    cached_tokens: int
    cached_tokens_by_tier: CachedTokensByTier


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def _refusal(name: str) -> str:
    allowed = ", ".join(repr(value) for value in UNSUPPORTED[name])
    hint = f" or set it to {allowed}" if allowed else ""
    return (
        f"The parameter {name!r} is not supported here, and would change the meaning of the answer. Leave it out{hint}."
    )
