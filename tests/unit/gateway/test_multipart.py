"""Forms go to disk piece by piece, under caps."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.gateway import in_pieces
from lamina.errors import InvalidRequest, TooLarge
from lamina.gateway.multipart import MAX_FIELD_BYTES, MAX_FRAMING_BYTES, Form, receive_form


def form(files: dict[str, tuple[str, bytes]], fields: dict[str, str]) -> tuple[str, bytes]:
    request = httpx.Request("POST", "http://x", files=files, data=fields)
    return request.headers["content-type"], request.read()


async def received(
    content_type: str, pieces: Iterable[bytes], folder: Path, *, max_bytes: int = 1 << 20, declared: int | None = None
) -> Form:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return await receive_form(chunks(), content_type, folder, max_bytes=max_bytes, declared=declared)


@settings(deadline=None, max_examples=40)
@given(data=st.binary(max_size=3000), size=st.integers(1, 700), name=st.text("abc/.é", min_size=1, max_size=9))
async def test_pieces_do_not_matter(
    data: bytes, size: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However the body is cut, the same file and fields arrive."""
    kind, body = form({"file": (name, data)}, {"purpose": "adapter"})
    got = await received(kind, in_pieces(body, size), tmp_path_factory.mktemp("form"))
    assert got.fields == {"purpose": "adapter"}
    assert got.files["file"].path.read_bytes() == data
    assert got.files["file"].size == len(data)


async def test_files_land_under_names_of_our_own(tmp_path: Path) -> None:
    """The client's file name is never a path."""
    kind, body = form({"file": ("../../evil", b"x")}, {})
    got = await received(kind, [body], tmp_path)
    assert os.listdir(tmp_path) == ["part-1"]
    assert got.files["file"].filename == "../../evil"


async def test_declared_size_is_refused_before_a_byte_is_read(tmp_path: Path) -> None:
    def unread() -> Iterable[bytes]:
        raise AssertionError("the body was read")
        yield b""

    kind, _ = form({"file": ("a", b"x")}, {})
    with pytest.raises(TooLarge) as info:
        await received(kind, unread(), tmp_path, max_bytes=1000, declared=1001 + MAX_FRAMING_BYTES)
    assert info.value.limit_bytes == 1000


async def test_size_is_capped_while_receiving(tmp_path: Path) -> None:
    """An undeclared body runs into the cap, and hardly more than it reaches the disk."""
    kind, body = form({"file": ("a", bytes(5 << 20))}, {})
    with pytest.raises(TooLarge):
        await received(kind, in_pieces(body, 1 << 16), tmp_path, max_bytes=1 << 20)
    assert (tmp_path / "part-1").stat().st_size <= (1 << 20) + MAX_FRAMING_BYTES


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=" + "x" * 71,
    ],
)
async def test_bad_content_types_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="boundary"):
        await received(kind, [b"--x--\r\n"], tmp_path)


async def test_truncated_body_is_refused(tmp_path: Path) -> None:
    kind, body = form({"file": ("a", b"x" * 100)}, {})
    with pytest.raises(InvalidRequest, match="closing boundary"):
        await received(kind, [body[:-50]], tmp_path)


async def test_garbage_is_refused(tmp_path: Path) -> None:
    kind, _ = form({"file": ("a", b"x")}, {})
    with pytest.raises(InvalidRequest, match="not valid multipart"):
        await received(kind, [b"this is no form"], tmp_path)


async def test_repeated_names_are_refused(tmp_path: Path) -> None:
    request = httpx.Request("POST", "http://x", files=[("file", ("a", b"1")), ("file", ("b", b"2"))])
    with pytest.raises(InvalidRequest, match="repeated"):
        await received(request.headers["content-type"], [request.read()], tmp_path)


async def test_many_parts_are_refused(tmp_path: Path) -> None:
    kind, body = form({f"f{number}": ("a", b"1") for number in range(17)}, {})
    with pytest.raises(InvalidRequest, match="more than 16 parts"):
        await received(kind, [body], tmp_path)


async def test_long_fields_are_refused(tmp_path: Path) -> None:
    """A field lives in memory, so it is short."""
    kind, body = form({"file": ("a", b"1")}, {"name": "x" * (MAX_FIELD_BYTES + 1)})
    with pytest.raises(InvalidRequest, match="exceeds 4096 bytes") as info:
        await received(kind, [body], tmp_path)
    assert info.value.param == "name"
