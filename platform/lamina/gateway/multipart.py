"""multipart/form-data to disk: no file is kept in memory, no byte written before its cap is checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from lamina.errors import InvalidRequest, TooLarge

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

__all__ = ["Form", "UploadedFile", "receive_form"]

MAX_PARTS = 16
MAX_FIELD_BYTES = 4096
MAX_FRAMING_BYTES = 64 * 1024  # boundaries and headers beside the files
WRITE_BYTES = 1 << 20  # one hop to a thread per MiB


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """`filename` is the client's, only ever shown; `path` is ours."""

    filename: str
    path: Path
    size: int


@dataclass(slots=True)
class Form:
    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, UploadedFile] = field(default_factory=dict)


async def receive_form(
    chunks: AsyncIterator[bytes], content_type: str, folder: Path, *, max_bytes: int, declared: int | None
) -> Form:
    """Reads a form; its files land in `folder` under names of our own.

    `declared` is the Content-Length, refused at once if too large. Raises InvalidRequest and TooLarge. If it
    raises, or if the client breaks off, what was written stays in `folder` for its owner to remove.
    """
    cap = max_bytes + MAX_FRAMING_BYTES
    if declared is not None and declared > cap:
        raise TooLarge(limit_bytes=max_bytes)
    receiver = _Receiver(folder)
    parser = MultipartParser(_boundary(content_type), receiver.callbacks())
    received = 0
    try:
        async for chunk in chunks:
            received += len(chunk)
            if received > cap:
                raise TooLarge(limit_bytes=max_bytes)
            parser.write(chunk)
            await receiver.drain(WRITE_BYTES)
        parser.finalize()
        await receiver.drain(0)
    except FormParserError as exc:
        raise InvalidRequest("The body is not valid multipart/form-data.") from exc
    finally:
        receiver.close()
    if not receiver.complete:
        raise InvalidRequest("The multipart body ends before its closing boundary. Send it again.")
    return receiver.form


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidRequest("Send the upload as multipart/form-data, with a boundary in the Content-Type header.")
    if len(options[b"boundary"]) > 70:  # RFC 2046
        raise InvalidRequest("The multipart boundary has more than 70 characters.")
    return options[b"boundary"]


class _Receiver:
    """Takes the parser's callbacks, which must not block; queues bytes for `drain` to write in a thread."""

    def __init__(self, folder: Path) -> None:
        self.form = Form()
        self.complete = False
        self._folder = folder
        self._headers: dict[bytes, bytes] = {}
        self._header_name = self._header_value = b""
        self._part = _Part("")
        self._parts = 0
        self._open: list[_Part] = []
        self._queued_bytes = 0

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_name,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header,
            "on_headers_finished": self._opened,
            "on_part_data": self._data,
            "on_part_end": self._finished,
            "on_end": self._end,
        }

    async def drain(self, threshold: int) -> None:
        """Writes what is queued if it is at least `threshold` bytes."""
        if self._queued_bytes >= threshold:
            await asyncio.to_thread(self._write_all)

    def close(self) -> None:
        for part in self._open:
            part.close()
        self._open.clear()

    def _write_all(self) -> None:
        for part in self._open:
            part.write()
        self._queued_bytes = 0

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidRequest(f"The form has more than {MAX_PARTS} parts.")
        self._headers = {}

    def _on_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name = self._header_value = b""

    def _opened(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if not name or name in self.form.fields or name in self.form.files:
            raise InvalidRequest(f"The form needs parts with different names; {name!r} is missing or repeated.")
        self._part = _Part(name)
        if b"filename" in options:
            filename = options[b"filename"].decode("utf-8", "replace")
            self._part.open(self._folder / f"part-{self._parts}", filename)
            self._open.append(self._part)

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._part.queue.append(data[start:end])
        self._part.size += end - start
        if self._part.file is not None:
            self._queued_bytes += end - start
        elif self._part.size > MAX_FIELD_BYTES:
            raise InvalidRequest(
                f"The form field {self._part.name!r} exceeds {MAX_FIELD_BYTES} bytes. Files need a filename.",
                param=self._part.name,
            )

    def _finished(self) -> None:
        part = self._part
        if part.file is None:
            self.form.fields[part.name] = b"".join(part.queue).decode("utf-8", "replace")
        else:
            self.form.files[part.name] = UploadedFile(part.filename, part.path, part.size)

    def _end(self) -> None:
        self.complete = True


class _Part:
    def __init__(self, name: str) -> None:
        self.name = name
        self.filename = ""
        self.path = Path()
        self.file: BinaryIO | None = None
        self.queue: list[bytes] = []
        self.size = 0

    def open(self, path: Path, filename: str) -> None:
        self.path, self.filename = path, filename
        self.file = path.open("xb")

    def write(self) -> None:
        if self.file is not None and self.queue:
            self.file.write(b"".join(self.queue))
            self.queue.clear()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
