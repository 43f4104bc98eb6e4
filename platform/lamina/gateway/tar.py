"""A small reader of tar archives from strangers.

The standard library's reads extended headers of any size into memory and follows sparse maps; this one knows
ustar, GNU long names and the `path` of pax headers, bounds each of them, and only ever moves forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from lamina.errors import TooLarge

__all__ = ["BadTar", "Readable", "TarMember", "tar_members"]

BLOCK = 512
MAX_HEADERS = 1024  # of any kind; `archive` allows far fewer members
MAX_NAME_BYTES = 64 * 1024  # of a header that only carries names and times
SKIP_BYTES = 1 << 20


class Readable(Protocol):
    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none only at the end."""
        ...


class BadTar(Exception):
    """Not a tar archive, or not an intact one."""


class TarMember:
    """A member; read it before going on to the next. `name` is the archive's word: never use it as a path."""

    def __init__(self, name: str, kind: bytes, size: int, source: _Source) -> None:
        self.name = name
        self.is_file = kind in (b"0", b"\0", b"7")
        self.is_folder = kind == b"5"
        self.left = size  # unread bytes
        self._source = source

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, empty at the end."""
        data = self._source.exactly(min(size, self.left))
        self.left -= len(data)
        return data


def tar_members(file: Readable, *, max_bytes: int) -> Iterator[TarMember]:
    """The members in order. Raises BadTar; TooLarge once more than `max_bytes` of content are declared."""
    source = _Source(file)
    left = max_bytes
    long_name: str | None = None
    headers = 0
    while (header := _next_header(source)) is not None:
        headers += 1
        if headers > MAX_HEADERS:  # empty ones cost no bytes, pack well, and would keep a thread busy for hours
            raise BadTar(f"it has more than {MAX_HEADERS} headers")
        left -= header.size
        if left < 0:
            raise TooLarge(f"The archive unpacks to more than the limit of {max_bytes} bytes.", limit_bytes=max_bytes)
        if header.kind in (b"x", b"g", b"L", b"K"):
            found = _extended_name(header, source)
            long_name = found if found is not None else long_name
            continue
        member = TarMember(long_name or header.name, header.kind, header.size, source)
        long_name = None
        yield member
        source.skip(member.left + -header.size % BLOCK)


@dataclass(frozen=True, slots=True)
class _Header:
    name: str
    kind: bytes
    size: int


class _Source:
    """Reads exactly as much as asked for, or fails."""

    def __init__(self, file: Readable) -> None:
        self._file = file

    def exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        while len(data) < count:
            more = self._file.read(count - len(data))
            if not more:
                raise BadTar("it ends too early")
            data += more
        return data

    def skip(self, count: int) -> None:
        while count > 0:
            count -= len(self.exactly(min(count, SKIP_BYTES)))


def _next_header(source: _Source) -> _Header | None:
    block = source.exactly(BLOCK)
    if not any(block):
        return None  # the end marker
    _check_sum(block)
    name = _text(block[:100])
    if block[257:262] == b"ustar" and block[257:265] != b"ustar  \0" and block[345] != 0:
        name = f"{_text(block[345:500])}/{name}"
    return _Header(name, block[156:157], _octal(block[124:136]))


def _check_sum(block: bytes) -> None:
    # The checksum field itself counts as eight spaces.
    if _octal(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * 0x20:
        raise BadTar("a header's checksum is wrong")


def _octal(field: bytes) -> int:
    digits = field.strip(b" \0")
    if not digits or any(digit not in b"01234567" for digit in digits):
        raise BadTar("a header's number is not octal")
    return int(digits, 8)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "replace")


def _extended_name(header: _Header, source: _Source) -> str | None:
    """The name that an extended header gives to the next member, if it does."""
    if header.size > MAX_NAME_BYTES:
        raise BadTar(f"an extended header exceeds {MAX_NAME_BYTES} bytes")
    data = source.exactly(header.size)
    source.skip(-header.size % BLOCK)
    if header.kind == b"L":
        return _text(data)
    if header.kind == b"x":
        return _pax_path(data)
    return None  # K: a link's target; g: defaults, of which none matters here


def _pax_path(data: bytes) -> str | None:
    """Records are "<length> <key>=<value>\\n", the length counting itself."""
    path = None
    while data:
        digits, space, _ = data.partition(b" ")
        if not space or not digits.isdigit() or len(digits) > 5 or not len(digits) + 1 < int(digits) <= len(data):
            raise BadTar("a pax header is malformed")
        key, _, value = data[len(digits) + 1 : int(digits)].rstrip(b"\n").partition(b"=")
        if key == b"size" or key.startswith(b"GNU.sparse"):
            raise BadTar(f"pax header {key.decode('ascii', 'replace')!r} is not accepted")
        if key == b"path":
            path = value.decode("utf-8", "replace")
        data = data[int(digits) :]
    return path
