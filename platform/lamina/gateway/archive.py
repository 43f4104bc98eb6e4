"""The two PEFT files out of a zip, tar or tar.gz, taking nothing else from it, and no path at all.

What kind of archive it is, its first bytes say, not its name. Members are matched by base name and written
under fixed names. Refused, with all that is known about why: links and devices, absolute and `..` names,
encryption, the same file twice, more members or more unpacked bytes than allowed (counted while unpacking,
whatever the headers claim), pickled weights.
"""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from lamina.errors import InvalidAdapter, TooLarge
from lamina.gateway.tar import BadTar, Readable, TarMember, tar_members

__all__ = ["CONFIG", "MAX_CONFIG_BYTES", "MAX_MEMBERS", "WEIGHTS", "unpack"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_MEMBERS = 64
MAX_CONFIG_BYTES = 1 << 20
MAX_DIRECTORY_BYTES = 1 << 20  # of a zip's central directory, which zipfile reads whole
CHUNK = 1 << 20

_END_OF_DIRECTORY = struct.Struct("<4s4H2LH")
_ZIP64_LOCATOR_BYTES = 20
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle")


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    refusal: str | None  # why this member must not be in an archive


def unpack(archive: Path, folder: Path, *, max_bytes: int) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` into `folder`. Blocking.

    `max_bytes` bounds what is unpacked. Raises InvalidAdapter or TooLarge; files may then stay in `folder`.
    """
    with archive.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        with _readable_errors():
            if magic == b"PK\x03\x04":
                seen = _unpack_zip(file, folder, max_bytes)
            elif magic[:2] == b"\x1f\x8b":
                seen = _unpack_tar(_Inflated(file), folder, max_bytes)
            else:
                seen = _unpack_tar(file, folder, max_bytes)
    _check_complete(seen)


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except BadTar as exc:
        raise InvalidAdapter([f"the file is no readable zip, tar or tar.gz archive: {exc}"], param="file") from exc
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        struct.error,
        UnicodeDecodeError,  # a name that is not what its flag says
    ) as exc:
        raise InvalidAdapter(["the archive is damaged or truncated; pack and send it again"], param="file") from exc


def _unpack_zip(file: BinaryIO, folder: Path, max_bytes: int) -> list[str]:
    _check_directory(file)
    budget = _Budget(max_bytes)
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        _check_members([_Member(info.filename, _zip_refusal(info)) for info in infos])
        for info in infos:
            if (target := _target(info.filename)) is not None:
                with archive.open(info) as member:
                    _copy(member, folder / target, budget)
        return [info.filename for info in infos]


def _check_directory(file: BinaryIO) -> None:
    """Looks at the end record before zipfile, which reads the directory whole and makes an object per entry.

    Only plain end records are let through (no comment, no zip64), so that zipfile can't find another one.
    """
    size = file.seek(0, 2)
    tail_bytes = min(size, _END_OF_DIRECTORY.size + _ZIP64_LOCATOR_BYTES)
    file.seek(size - tail_bytes)
    tail = file.read(tail_bytes)
    file.seek(0)
    end = tail[-_END_OF_DIRECTORY.size :]
    if len(end) < _END_OF_DIRECTORY.size or end[:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":
        raise _refused("the zip archive is truncated, or has a comment or other bytes behind its end; pack it again")
    if tail[: -_END_OF_DIRECTORY.size].startswith(b"PK\x06\x07"):
        raise _refused("ZIP64 archives are not accepted; an adapter needs none")
    *_, entries, directory_bytes, _offset, _comment = _END_OF_DIRECTORY.unpack(end)
    if entries > MAX_MEMBERS or directory_bytes > MAX_DIRECTORY_BYTES:
        raise _too_many()


def _zip_refusal(info: zipfile.ZipInfo) -> str | None:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a device"
    if info.flag_bits & 0x1:
        return "is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is compressed by another method than deflate"
    return None


def _unpack_tar(file: Readable, folder: Path, max_bytes: int) -> list[str]:
    budget = _Budget(max_bytes)
    names: list[str] = []
    for member in tar_members(file, max_bytes=max_bytes):
        names.append(member.name)
        if len(names) > MAX_MEMBERS:
            raise _too_many()
        _check_members([_Member(member.name, _tar_refusal(member))])
        if member.is_file and (target := _target(member.name)) is not None:
            if (folder / target).exists():
                raise _refused(f"{target} is in the archive more than once")
            _copy(member, folder / target, budget)
    return names


def _tar_refusal(member: TarMember) -> str | None:
    return None if member.is_file or member.is_folder else "is a link, a device or a sparse file"


def _check_members(members: list[_Member]) -> None:
    violations = [f"{m.name[:100]!r} {m.refusal}" for m in members if m.refusal]
    violations += [f"{m.name[:100]!r} leads out of the archive" for m in members if _leads_out(m.name)]
    targets = [target for m in members if (target := _target(m.name))]
    violations += [f"{name} is in the archive more than once" for name in (CONFIG, WEIGHTS) if targets.count(name) > 1]
    if violations:
        raise InvalidAdapter(violations, param="file")


def _leads_out(name: str) -> bool:
    parts = name.replace("\\", "/").split("/")
    return name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in name


def _target(name: str) -> str | None:
    base = PurePosixPath(name).name if not name.endswith("/") else ""
    return base if base in (CONFIG, WEIGHTS) else None


class _Inflated:
    """A gzip file's content. zlib parses the header, which gzip.GzipFile reads byte by byte."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._zlib = zlib.decompressobj(wbits=31)

    def read(self, size: int, /) -> bytes:
        if size <= 0:
            return b""  # zlib takes 0 for "no limit"
        while not self._zlib.eof:
            packed = self._zlib.unconsumed_tail or self._file.read(CHUNK)
            if found := self._zlib.decompress(packed, size):
                return found
            if not packed:
                raise EOFError
        return b""


class _Budget:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = self.left = max_bytes

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise TooLarge(
                f"The archive unpacks to more than the limit of {self.max_bytes} bytes.",
                limit_bytes=self.max_bytes,
            )


def _copy(source: Readable, target: Path, budget: _Budget) -> None:
    written = 0
    with target.open("xb") as out:
        while chunk := source.read(CHUNK):
            written += len(chunk)
            budget.spend(len(chunk))
            if target.name == CONFIG and written > MAX_CONFIG_BYTES:
                raise _refused(f"{CONFIG} exceeds {MAX_CONFIG_BYTES} bytes")
            out.write(chunk)


def _check_complete(names: list[str]) -> None:
    found = {_target(name) for name in names}
    violations = [f"{name} is missing from the archive" for name in (CONFIG, WEIGHTS) if name not in found]
    pickles = [name for name in names if name.lower().endswith(_PICKLES)]
    if WEIGHTS not in found and pickles:
        violations.append(f"{pickles[0][:100]!r} is a pickle, which is never loaded; save with safe_serialization=True")
    if violations:
        raise InvalidAdapter(violations, param="file")


def _refused(violation: str) -> InvalidAdapter:
    return InvalidAdapter([violation], param="file")


def _too_many() -> InvalidAdapter:
    return _refused(f"the archive has more than {MAX_MEMBERS} members")
