"""Adapter upload with the official client's Files API, unchanged."""

from __future__ import annotations

import io
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from fixtures.gateway import PEFT, Kit, build, serve, tarred, zipped

PURPOSE: Any = "adapter"


@pytest.fixture
async def kit(tmp_path: Path) -> Kit:
    return build(tmp_path, max_upload_bytes=4 << 20)


@pytest.fixture
async def client(kit: Kit) -> AsyncIterator[AsyncOpenAI]:
    async with serve(kit.app) as url, AsyncOpenAI(api_key=kit.key, base_url=f"{url}/v1", max_retries=0) as made:
        yield made


@pytest.mark.parametrize(("name", "data"), [("poet.zip", zipped()), ("poet.tar.gz", tarred(mode="w:gz"))])
async def test_upload_then_chat(kit: Kit, client: AsyncOpenAI, name: str, data: bytes) -> None:
    """The file's stem is the model's name at once."""
    file = await client.files.create(file=(name, data), purpose=PURPOSE)
    assert (file.object, file.filename, file.status) == ("file", "poet", "processed")
    answer = await client.chat.completions.create(
        model="poet", messages=[{"role": "user", "content": "hi"}], max_tokens=2
    )
    assert answer.model == "poet"
    assert kit.staged() == []


async def test_upload_from_a_path(client: AsyncOpenAI, tmp_path: Path) -> None:
    path = tmp_path / "from-disk.zip"
    path.write_bytes(zipped())
    assert (await client.files.create(file=path, purpose=PURPOSE)).filename == "from-disk"


async def test_retrieve_list_and_delete(client: AsyncOpenAI) -> None:
    made = [await client.files.create(file=(f"a{number}.zip", zipped()), purpose=PURPOSE) for number in range(3)]
    assert (await client.files.retrieve(made[0].id)).id == made[0].id
    listed = [file.id async for file in client.files.list(limit=2)]  # the client turns the pages
    assert listed == [file.id for file in reversed(made)]
    assert (await client.files.delete(made[0].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made[0].id)


async def test_wrong_purpose(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as info:
        await client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    assert info.value.param == "purpose"


async def test_an_invalid_adapter_is_unprocessable(kit: Kit, client: AsyncOpenAI) -> None:
    only_weights = zipped({"adapter_model.safetensors": PEFT["adapter_model.safetensors"]})
    with pytest.raises(openai.UnprocessableEntityError, match=r"adapter_config\.json is missing") as info:
        await client.files.create(file=("a.zip", only_weights), purpose=PURPOSE)
    assert info.value.code == "invalid_adapter"
    assert kit.staged() == []


async def test_an_oversized_upload_is_told_so(kit: Kit, client: AsyncOpenAI) -> None:
    """The answer arrives although the client is still sending."""
    with pytest.raises(openai.APIStatusError) as info:
        await client.files.create(file=("a.zip", io.BytesIO(bytes(64 << 20))), purpose=PURPOSE)
    assert info.value.status_code == 413
    assert kit.staged() == []


async def test_upload_in_parts(kit: Kit, client: AsyncOpenAI, tmp_path: Path) -> None:
    """The client's own helper for big files cuts, sends and completes."""
    path = tmp_path / "big-poet.zip"
    path.write_bytes(zipped({**PEFT, "notes.bin": os.urandom(300_000)}))
    upload = await client.uploads.upload_file_chunked(
        file=path, mime_type="application/zip", purpose=PURPOSE, part_size=100_000
    )
    assert upload.status == "completed"
    assert upload.file is not None
    assert (await client.files.retrieve(upload.file.id)).filename == "big-poet"
    assert (await client.models.retrieve("big-poet")).id == "big-poet"
    assert kit.staged() == []
