"""Reads what a Hugging Face folder says about its tokenizer, beyond tokenizer.json itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamina.errors import UnsupportedModel

__all__ = ["TokenizerFiles", "read_tokenizer_files"]

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    special_tokens: Mapping[str, str]  # role (bos_token, ...) -> text
    templates: Mapping[str, str]  # name -> source; "default" and perhaps "tool_use"
    eos_ids: frozenset[int]  # from generation_config.json and config.json; there may be several


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Raises UnsupportedModel, naming the file, if one is not valid JSON."""
    config = _read_json(folder / "tokenizer_config.json")
    special = {**_read_json(folder / "special_tokens_map.json"), **config}
    return TokenizerFiles(
        special_tokens={role: text for role in _ROLES if (text := _token_text(special.get(role))) is not None},
        templates=_templates(folder, config),
        eos_ids=_eos_ids(folder),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise UnsupportedModel(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} must hold a JSON object.")
    return value


def _token_text(token: Any) -> str | None:
    """A token is written as its text, or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files win over the entry in tokenizer_config.json, as in transformers."""
    found: dict[str, str] = {}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        found["default"] = entry
    elif isinstance(entry, list):
        found.update({part["name"]: part["template"] for part in entry})
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    if (path := folder / "chat_template.jinja").is_file():
        found["default"] = path.read_text(encoding="utf-8")
    return found


def _eos_ids(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()
