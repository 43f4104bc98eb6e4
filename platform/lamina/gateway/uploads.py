"""From an upload request to an adapter that is taken in, with nothing left behind on any way out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from fastapi import Request

from lamina.errors import InvalidAdapter, InvalidRequest, UnsupportedParameter
from lamina.gateway.archive import CONFIG, MAX_CONFIG_BYTES, WEIGHTS, unpack
from lamina.gateway.deps import GatewayDeps
from lamina.gateway.multipart import Form, UploadedFile, receive_form
from lamina.gateway.staging import staged
from lamina.tenancy.records import AdapterRecord

__all__ = [
    "adapter_name_of",
    "adapter_name_of_file",
    "adapter_name_of_form",
    "declared_size",
    "take_in",
    "take_in_archive",
]

_SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")


async def take_in(request: Request, deps: GatewayDeps, tenant_id: str, name_of: Callable[[Form], str]) -> AdapterRecord:
    """Receives a form with an adapter, hands it to the adapter service. `name_of` checks the form's fields.

    Raises InvalidRequest, TooLarge, InvalidAdapter, and ClientDisconnect if the client breaks off.
    """
    async with staged(deps.uploads) as folder:
        form = await receive_form(
            request.stream(),
            request.headers.get("content-type", ""),
            folder,
            max_bytes=deps.config.max_upload_bytes,
            declared=declared_size(request),
        )
        name = name_of(form)
        peft = folder / "peft"
        peft.mkdir()
        await asyncio.to_thread(_arrange, form, peft, deps.config.max_upload_bytes)
        return await deps.adapters.intake(tenant_id, name=name, folder=peft)


async def take_in_archive(deps: GatewayDeps, tenant_id: str, name: str, archive: Path, folder: Path) -> AdapterRecord:
    """Unpacks `archive`, which is complete, within the staging `folder`. Raises TooLarge, InvalidAdapter."""
    peft = folder / "peft"
    peft.mkdir()
    await asyncio.to_thread(unpack, archive, peft, max_bytes=deps.config.max_upload_bytes)
    return await deps.adapters.intake(tenant_id, name=name, folder=peft)


def adapter_name_of_form(form: Form) -> str:
    """The field `name` of POST /v1/adapters. Raises for missing or unknown fields."""
    _refuse_unknown(form, fields={"name"}, files={"file", "adapter_config", "adapter_model"})
    if not form.fields.get("name"):
        raise InvalidRequest("The form field 'name' is missing: what shall the adapter be called?", param="name")
    return form.fields["name"]


def adapter_name_of_file(form: Form) -> str:
    """The file name's stem, for OpenAI's Files API. Raises for another purpose."""
    if any(field.startswith("expires_after") for field in form.fields):
        raise UnsupportedParameter(
            "expires_after is not supported: adapters stay until deleted.", param="expires_after"
        )
    _refuse_unknown(form, fields={"purpose"}, files={"file"})
    if form.fields.get("purpose") != "adapter":
        raise InvalidRequest("Only purpose='adapter' is supported.", param="purpose")
    if "file" not in form.files:
        raise InvalidRequest("The form has no file 'file'.", param="file")
    return adapter_name_of(form.files["file"].filename)


def adapter_name_of(filename: str) -> str:
    """The file's name without folders and without the ending of an archive."""
    base = PurePosixPath(filename.replace("\\", "/")).name
    suffix = next((suffix for suffix in _SUFFIXES if base.lower().endswith(suffix)), "")
    return base[: len(base) - len(suffix)]


def declared_size(request: Request) -> int | None:
    """The Content-Length, if there is a sensible one."""
    value = request.headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 20 else None


def _refuse_unknown(form: Form, *, fields: set[str], files: set[str]) -> None:
    for name in form.fields.keys() - fields:
        kind = "needs a filename" if name in files else "is unknown"
        raise InvalidRequest(f"The form field {name[:100]!r} {kind}.", param=name[:100])
    for name in form.files.keys() - files:
        known = ", ".join(sorted(files))
        raise InvalidRequest(f"The form has the file {name[:100]!r}, but only {known} are known.", param=name[:100])


def _arrange(form: Form, folder: Path, max_bytes: int) -> None:
    archive, config, weights = (form.files.get(key) for key in ("file", "adapter_config", "adapter_model"))
    if archive is not None and config is None and weights is None:
        unpack(archive.path, folder, max_bytes=max_bytes)
    elif archive is None and config is not None and weights is not None:
        _place(config, weights, folder)
    else:
        raise InvalidRequest(
            "Send either one archive as 'file', or both 'adapter_config' (adapter_config.json) and "
            "'adapter_model' (adapter_model.safetensors).",
            param="file",
        )


def _place(config: UploadedFile, weights: UploadedFile, folder: Path) -> None:
    if config.size > MAX_CONFIG_BYTES:
        raise InvalidAdapter([f"{CONFIG} exceeds {MAX_CONFIG_BYTES} bytes"], param="adapter_config")
    config.path.rename(folder / CONFIG)
    weights.path.rename(folder / WEIGHTS)
