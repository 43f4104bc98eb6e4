"""Archives from strangers: the two files come out, and nothing else ever does."""

from __future__ import annotations

import gzip
import io
import random
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.gateway import PEFT, tarred, zipped
from lamina.errors import InvalidAdapter, LaminaError, TooLarge
from lamina.gateway.archive import MAX_CONFIG_BYTES, MAX_MEMBERS, unpack

CONFIG, WEIGHTS = PEFT


def unpacked(data: bytes, tmp_path: Path, *, max_bytes: int = 1 << 20) -> dict[str, bytes]:
    archive, folder = tmp_path / "archive", tmp_path / "out"
    archive.write_bytes(data)
    folder.mkdir()
    unpack(archive, folder, max_bytes=max_bytes)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(data: bytes, tmp_path: Path, *, max_bytes: int = 1 << 20) -> str:
    with pytest.raises(InvalidAdapter) as info:
        unpacked(data, tmp_path, max_bytes=max_bytes)
    assert info.value.param == "file"
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "out"]
    assert [path.name for path in outside] == ["archive"]
    return info.value.message


def tar_with(info: tarfile.TarInfo, data: bytes = b"", *, mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
        for name, content in PEFT.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(zipped(), id="zip"),
        pytest.param(tarred(), id="tar"),
        pytest.param(tarred(mode="w:gz"), id="tar.gz"),
        pytest.param(tarred(format=tarfile.PAX_FORMAT), id="pax"),
        pytest.param(tarred(format=tarfile.GNU_FORMAT), id="gnu"),
        pytest.param(tarred(format=tarfile.USTAR_FORMAT), id="ustar"),
    ],
)
def test_every_format_gives_the_two_files(data: bytes, tmp_path: Path) -> None:
    """What kind of archive it is, is read from its content."""
    assert unpacked(data, tmp_path) == PEFT


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_folders_are_looked_into_and_other_files_ignored(pack: object, tmp_path: Path) -> None:
    """Only base names count; a README and macOS's shadow files stay out."""
    members = {f"my adapter/v1/{name}": data for name, data in PEFT.items()}
    members |= {"my adapter/README.md": b"hello", "__MACOSX/._adapter_config.json": b"?"}
    assert unpacked(pack(members), tmp_path) == PEFT  # type: ignore[operator]


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_are_understood(tar_format: int, tmp_path: Path) -> None:
    """A path of over 255 characters takes extended headers."""
    deep = "/".join(["folder" * 6] * 9)
    members = {f"{deep}/{name}": data for name, data in PEFT.items()}
    assert unpacked(tarred(members, format=tar_format), tmp_path) == PEFT


def test_ustar_prefix_is_understood(tmp_path: Path) -> None:
    members = {f"{'d' * 90}/{'e' * 40}/{name}": data for name, data in PEFT.items()}
    assert unpacked(tarred(members, format=tarfile.USTAR_FORMAT), tmp_path) == PEFT


@pytest.mark.parametrize(
    "name", ["../adapter_config.json", "a/../../adapter_model.safetensors", "/etc/cron.d/x", "..\\x", "C:\\x"]
)
@pytest.mark.parametrize("pack", [zipped, tarred])
def test_names_that_lead_out_are_refused(name: str, pack: object, tmp_path: Path) -> None:
    """`../`, absolute and drive names: refused by name, and nothing is written anywhere."""
    message = refused(pack({**PEFT, name: b"evil"}), tmp_path)  # type: ignore[operator]
    assert "leads out of the archive" in message


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"S"]
)
def test_tar_links_and_devices_are_refused(kind: bytes, tmp_path: Path) -> None:
    info = tarfile.TarInfo("innocent")
    info.type, info.linkname = kind, "/etc/passwd"
    assert "link, a device or a sparse file" in refused(tar_with(info), tmp_path)


def test_zip_symlink_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo(CONFIG)
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
        archive.writestr(WEIGHTS, PEFT[WEIGHTS])
    assert "is a link or a device" in refused(buffer.getvalue(), tmp_path)


def test_encrypted_zip_is_refused(tmp_path: Path) -> None:
    data = bytearray(zipped())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    assert "is encrypted" in refused(bytes(data), tmp_path)


def test_zip_bomb_is_stopped_while_unpacking(tmp_path: Path) -> None:
    """A thousandfold compression runs into the cap, whatever the headers claim."""
    bomb = zipped({CONFIG: PEFT[CONFIG], WEIGHTS: bytes(50 << 20)})
    assert len(bomb) < 100_000
    with pytest.raises(TooLarge) as info:
        unpacked(bomb, tmp_path, max_bytes=1 << 20)
    assert info.value.limit_bytes == 1 << 20
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) <= 1 << 20


def test_zip_that_lies_about_its_sizes_is_damaged(tmp_path: Path) -> None:
    """A small declared size does not let more through."""
    data = bytearray(zipped({CONFIG: PEFT[CONFIG], WEIGHTS: bytes(1 << 16)}))
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = struct.pack("<I", 10)
    assert "damaged" in refused(bytes(data), tmp_path)


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_tar_bomb_is_stopped_by_its_headers(mode: str, tmp_path: Path) -> None:
    """Even in a member that would be skipped: skipping a compressed member means inflating it."""
    bomb = tar_with(tarfile.TarInfo("ignored.bin"), bytes(5 << 20), mode=mode)
    with pytest.raises(TooLarge):
        unpacked(bomb, tmp_path, max_bytes=1 << 20)


def test_nested_archives_are_not_opened(tmp_path: Path) -> None:
    assert "is missing" in refused(zipped({"inner.zip": zipped()}), tmp_path)


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_too_many_members_are_refused(pack: object, tmp_path: Path) -> None:
    crowd = {f"file-{number}": b"" for number in range(MAX_MEMBERS)}
    message = refused(pack({**crowd, **PEFT}), tmp_path)  # type: ignore[operator]
    assert f"more than {MAX_MEMBERS} members" in message


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_the_same_file_twice_is_refused(pack: object, tmp_path: Path) -> None:
    """Which of two checkpoints is meant can't be guessed."""
    twice = {f"{folder}/{name}": data for folder in ("a", "b") for name, data in PEFT.items()}
    assert "more than once" in refused(pack(twice), tmp_path)  # type: ignore[operator]


def test_pickle_is_refused_by_name(tmp_path: Path) -> None:
    message = refused(zipped({CONFIG: PEFT[CONFIG], "adapter_model.bin": b"\x80\x04."}), tmp_path)
    assert "adapter_model.safetensors is missing" in message
    assert "is a pickle, which is never loaded" in message


def test_everything_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapter) as info:
        unpacked(zipped({"README.md": b"hello"}), tmp_path)
    assert len(info.value.violations) == 2


def test_oversized_config_is_refused(tmp_path: Path) -> None:
    big = {CONFIG: b" " * (MAX_CONFIG_BYTES + 1), WEIGHTS: b""}
    assert f"exceeds {MAX_CONFIG_BYTES} bytes" in refused(zipped(big), tmp_path, max_bytes=1 << 24)


@pytest.mark.parametrize("data", [b"", b"PK", b"hello", b"\x1f\x8b", random.Random(7).randbytes(2000), b"\0" * 100])
def test_what_is_no_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    assert "archive" in refused(data, tmp_path)


def test_zip_with_comment_is_refused(tmp_path: Path) -> None:
    """A comment could hide a second end record."""
    buffer = io.BytesIO(zipped())
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = b"hi"
    assert "pack it again" in refused(buffer.getvalue(), tmp_path)


def test_zip_with_a_huge_directory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    data = bytearray(zipped())
    data[-12:-10] = struct.pack("<H", 0xFFFF)
    assert "members" in refused(bytes(data), tmp_path)


def test_zip64_is_refused(tmp_path: Path) -> None:
    data = zipped()
    locator = b"PK\x06\x07" + bytes(16)
    assert "ZIP64" in refused(data[:-22] + locator + data[-22:], tmp_path)


@pytest.mark.parametrize("key", ["size", "GNU.sparse.major"])
def test_pax_headers_that_change_the_content_are_refused(key: str, tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.pax_headers = {key: "1"}
    assert key in refused(tar_with(info), tmp_path)


def test_huge_extended_header_is_refused(tmp_path: Path) -> None:
    """The standard library would read it into memory."""
    info = tarfile.TarInfo("x")
    info.pax_headers = {"comment": "c" * 70_000}
    assert "extended header exceeds" in refused(tar_with(info), tmp_path)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pack=st.sampled_from([zipped(), tarred(), tarred(mode="w:gz")]),
    position=st.integers(0, 10_000),
    junk=st.binary(min_size=1, max_size=8),
    cut=st.one_of(st.none(), st.integers(0, 10_000)),
)
def test_damage_never_escapes_as_another_error(
    pack: bytes, position: int, junk: bytes, cut: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A flipped byte or a cut end: the two files, or a typed refusal."""
    position %= len(pack)
    data = pack[:position] + junk + pack[position + len(junk) :]
    data = data if cut is None else data[: cut % len(data)]
    try:
        found = unpacked(data, tmp_path_factory.mktemp("damaged"))
    except LaminaError:
        return
    assert found.keys() == PEFT.keys()


def test_endless_empty_headers_are_refused(tmp_path: Path) -> None:
    """Extended headers without content are no members and cost no bytes, but each costs time."""
    info = tarfile.TarInfo("comment")
    info.type = b"g"
    empty = info.tobuf(tarfile.USTAR_FORMAT)
    data = gzip.compress(empty * 5000 + tarred())
    assert "more than 1024 headers" in refused(data, tmp_path)


def test_zip_names_that_are_not_what_they_claim_are_damage(tmp_path: Path) -> None:
    """A member name flagged as UTF-8 that is none."""
    data = zipped({"é.txt": b"x", **PEFT})
    assert "damaged" in refused(data.replace("é".encode(), b"\xc3\x28"), tmp_path)
