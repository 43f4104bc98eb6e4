"""`docs/configuration.md`, made from the settings themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from lamina.wiring.settings import PREFIX, Settings

__all__ = ["main", "markdown"]

_HEAD = """\
# Configuration

<!-- Made by `python -m lamina.wiring.settings --markdown`; a test compares. Do not edit. -->

Every setting is an environment variable. `lamina serve` takes most of them as options too (`--kv-bytes 4GiB`
for `LAMINA_KV_BYTES`); an option wins over the environment. Sizes are bytes or carry a unit (`512MiB`, `4GB`).
A value that cannot be used stops the start with a message that names the variable. The folders are those of
Linux; on macOS and Windows they are the user's data and cache folders there.
"""

_SECTIONS = ("Files", "Engine", "Gateway", "Tenants")


def markdown() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_section(title) for title in _SECTIONS)])


def main(arguments: Sequence[str]) -> int:
    if list(arguments) != ["--markdown"]:
        print("usage: python -m lamina.wiring.settings --markdown")
        return 2
    print(markdown(), end="")
    return 0


def _section(title: str) -> str:
    rows = "\n".join(_rows(title))
    return f"## {title}\n\n| variable | default | meaning |\n|---|---|---|\n{rows}\n"


def _rows(title: str) -> Iterator[str]:
    for name, field in Settings.model_fields.items():
        extra = _extra(field)
        if extra["section"] == title:
            yield f"| `{PREFIX}{name.upper()}` | {_default(field, extra)} | {field.description} |"


def _extra(field: FieldInfo) -> dict[str, Any]:
    assert isinstance(field.json_schema_extra, dict)
    return dict(field.json_schema_extra)


def _default(field: FieldInfo, extra: dict[str, Any]) -> str:
    if "default" in extra:
        return str(extra["default"])
    value = field.default
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if field.annotation is ByteSize:
        return f"`{value >> 20}MiB`"
    return f"`{value}`"
