"""Reads PEFT's `adapter_config.json` strictly: every key is used, known to be harmless, or refused. Torch-free.

Written against PEFT 0.21.2. A key that would change the adapter's meaning and is not supported here is refused,
never ignored, and so is a key this version does not know, unless it is switched off (null, false, [] or {}).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lamina_lora.errors import AdapterRejected
from lamina_lora.patterns import check_pattern, is_plain
from lamina_lora.report import Report, quoted
from lamina_lora.strict_json import parse_object

__all__ = ["CONFIG_NAME", "MAX_CONFIG_BYTES", "PeftConfig", "parse_peft_config", "read_peft_config"]

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_ENTRIES = 4096
"""Bound on every list and mapping in the file."""
MAX_EXPRESSIONS = 64
"""Bound on patterns that are more than a module's name; tools that tune every module write names."""
MAX_NUMBER = 1e6
"""Bound on ranks and alphas, so that no scaling overflows; real ones are far below."""

_USED = frozenset(
    [
        "peft_type",
        "task_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "bias",
    ]
)

_HARMLESS = frozenset(
    {
        "auto_mapping",  # how to find the base model's class
        "base_model_name_or_path",  # a hint; shapes are checked instead
        "revision",
        "peft_version",
        "inference_mode",
        "runtime_config",  # PEFT ignores it in files too
        "lora_dropout",  # training only
        "eva_config",  # initialises A; the base stays as it is
        "ensure_weight_tying",  # concerns only embeddings and modules_to_save, which are refused
        "qalora_group_size",  # read only with use_qalora
        "megatron_core",  # read only with megatron_config
    }
)

_UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "use_qalora": "QA-LoRA pools the input",
        "use_bdlora": "block-diagonal LoRA has other shapes",
        "fan_in_fan_out": "it stores weights transposed",
        "modules_to_save": "it replaces whole modules of the base model",
        "lora_bias": "it adds a bias to B",
        "layer_replication": "it changes the base model's layers",
        "alora_invocation_tokens": "activated LoRA switches on in mid-sequence",
        "trainable_token_indices": "it changes the base model's embeddings",
        "target_parameters": "only linear modules can be targets",
        "megatron_config": "Megatron's parallel layers are not served",
        "loftq_config": "LoftQ changes the base weights",
        "corda_config": "CorDA changes the base weights",
        "lora_ga_config": "LoRA-GA changes the base weights",
        "kasa_config": "KaSA changes the base weights",
        "arrow_config": "Arrow routes between adapters",
        "velora_config": "VeLoRA is a LoRA variant",
        "monteclora_config": "MonteCLoRA samples its weights",
    }
)

_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # the base weights stay as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """The part of an adapter's configuration that has an effect; patterns in the file's order, as PEFT tries them."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    target_modules: tuple[str, ...] | str = ()  # names, or one regular expression, or "all-linear"
    exclude_modules: tuple[str, ...] | str = ()
    layers: tuple[int, ...] | None = None  # None: every layer
    layers_pattern: tuple[str, ...] = ()

    def scaling(self, rank: int, alpha: float) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_peft_config(folder: Path) -> PeftConfig:
    """Parses `folder/adapter_config.json`; AdapterRejected if it is missing, over 1 MiB or invalid."""
    path = folder / CONFIG_NAME
    try:
        if not path.is_file():
            raise AdapterRejected([f"{CONFIG_NAME} is missing"])
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterRejected([f"{CONFIG_NAME} cannot be read ({error.strerror})"]) from error
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterRejected([f"{CONFIG_NAME} is larger than the limit of {MAX_CONFIG_BYTES} bytes"])
    return parse_peft_config(data)


def parse_peft_config(data: bytes) -> PeftConfig:
    """Parses the file's bytes; AdapterRejected lists every violation."""
    try:
        raw = parse_object(data)
    except ValueError as error:
        raise AdapterRejected([f"{CONFIG_NAME} is invalid: {error}"]) from error
    report = Report()
    _check_kind(raw, report)
    _check_unsupported(raw, report)
    fields = _Fields(raw, report)
    config = PeftConfig(
        r=fields.number("r", _RANK),
        lora_alpha=float(fields.number("lora_alpha", _ALPHA)),
        use_rslora=fields.flag("use_rslora"),
        use_dora=fields.flag("use_dora"),
        rank_pattern=tuple((key, int(value)) for key, value in fields.pattern("rank_pattern", _RANK)),
        alpha_pattern=tuple((key, float(value)) for key, value in fields.pattern("alpha_pattern", _ALPHA)),
        target_modules=fields.modules("target_modules"),
        exclude_modules=fields.modules("exclude_modules"),
        layers=fields.layers("layers_to_transform"),
        layers_pattern=fields.names("layers_pattern"),
    )
    _check_consistency(config, report)
    report.raise_if_any()
    return config


def _check_kind(raw: dict[str, Any], report: Report) -> None:
    if raw.get("peft_type") != "LORA":
        report.add(f"peft_type is {quoted(raw.get('peft_type'))}; only 'LORA' is served")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        report.add(f"task_type is {quoted(raw['task_type'])}; only 'CAUSAL_LM' is served")
    if raw.get("bias", "none") not in ("none", None):
        report.add(f"bias is {quoted(raw['bias'])}; only 'none' is served")
    init = raw.get("init_lora_weights", True)
    if not any(init is known or (isinstance(init, str) and init == known) for known in _HARMLESS_INITS):
        report.add(
            f"init_lora_weights is {quoted(init)}, which may change the base weights; convert the adapter to plain "
            "LoRA (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _check_unsupported(raw: dict[str, Any], report: Report) -> None:
    for key, value in raw.items():
        if key in _USED or key in _HARMLESS or _is_off(value):
            continue
        if key in _UNSUPPORTED:
            report.add(f"{key} is not supported: {_UNSUPPORTED[key]}")
        else:
            report.add(f"{quoted(key)} = {quoted(value)} is not a known key; remove it if it has no effect")


def _is_off(value: object) -> bool:
    return value is None or value is False or value == [] or value == {}


def _check_consistency(config: PeftConfig, report: Report) -> None:
    if not config.target_modules:
        report.add("target_modules is missing or empty; name the projections that the adapter changes")
    if isinstance(config.target_modules, str) and (config.layers is not None or config.layers_pattern):
        report.add("layers_to_transform and layers_pattern need target_modules to be a list of names")
    elif config.layers_pattern and config.layers is None:
        report.add("layers_pattern needs layers_to_transform")


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_NUMBER


def _is_alpha(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < abs(value) <= MAX_NUMBER


@dataclass(frozen=True, slots=True)
class _Number:
    valid: Callable[[object], bool]
    wanted: str


_RANK = _Number(_is_rank, f"a whole number from 1 to {MAX_NUMBER:.0f}")
_ALPHA = _Number(_is_alpha, f"a number other than 0, within ±{MAX_NUMBER:.0f},")


class _Fields:
    """Typed access to the raw object; what has the wrong type is reported and replaced by a neutral value."""

    def __init__(self, raw: dict[str, Any], report: Report) -> None:
        self._raw, self._report = raw, report
        self._expressions = 0

    def number(self, key: str, kind: _Number) -> Any:
        value = self._raw.get(key)
        if kind.valid(value):
            return value
        self._report.add(f"{key} is {quoted(value)}; {kind.wanted} is needed")
        return 1

    def flag(self, key: str) -> bool:
        value = self._raw.get(key, False)
        if value is not None and not isinstance(value, bool):
            self._report.add(f"{key} is {quoted(value)}; true or false is needed")
        return value is True

    def pattern(self, key: str, kind: _Number) -> list[tuple[str, Any]]:
        value = self._raw.get(key) or {}
        if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
            self._report.add(f"{key} must map module patterns to numbers, {MAX_ENTRIES} at most")
            return []
        for name, number in value.items():
            self._check(name, key)
            if not kind.valid(number):
                self._report.add(f"{key}[{quoted(name)}] is {quoted(number)}; {kind.wanted} is needed")
        return [(name, number) for name, number in value.items() if kind.valid(number)]

    def modules(self, key: str) -> tuple[str, ...] | str:
        value = self._raw.get(key)
        if isinstance(value, str):
            self._check(value, key)
            return value
        return self.names(key, patterns=False)

    def names(self, key: str, *, patterns: bool = True) -> tuple[str, ...]:
        value = self._raw.get(key)
        items = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            self._report.add(f"{key} is {quoted(value)}; names are needed")
            return ()
        if len(items) > MAX_ENTRIES:
            self._report.add(f"{key} has {len(items)} entries; the limit is {MAX_ENTRIES}")
            return ()
        if patterns:
            for item in items:
                self._check(item, key)
        return tuple(items)

    def layers(self, key: str) -> tuple[int, ...] | None:
        value = self._raw.get(key)
        if value is None or value == []:
            return None
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_ENTRIES or not all(type(item) is int and item >= 0 for item in items):
            self._report.add(f"{key} is {quoted(value)}; layer numbers from 0 are needed, {MAX_ENTRIES} at most")
            return None
        return tuple(items)

    def _check(self, pattern: str, key: str) -> None:
        self._expressions += not is_plain(pattern)
        if self._expressions > MAX_EXPRESSIONS:
            if self._expressions == MAX_EXPRESSIONS + 1:
                self._report.add(f"more than {MAX_EXPRESSIONS} patterns are regular expressions; use plain names")
            return
        problem = check_pattern(pattern)
        if problem:
            self._report.add(f"{key}: {quoted(pattern)} {problem}")
