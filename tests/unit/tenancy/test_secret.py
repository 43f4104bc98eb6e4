"""The server's secret file."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lamina.errors import ConfigurationInvalid
from lamina.tenancy.secret import SECRET_BYTES, kv_namespace, load_or_create_secret


def test_it_is_made_once_and_private(tmp_path: Path) -> None:
    """The first call makes 32 bytes for the owner only, later calls read them; no draft stays behind."""
    path = tmp_path / "home" / "secret"
    secret = load_or_create_secret(path)
    assert len(secret) == SECRET_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_secret(path) == secret
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_a_race_has_one_winner(tmp_path: Path) -> None:
    """Many that start at once all end up with the same secret."""
    path = tmp_path / "secret"
    with ThreadPoolExecutor(16) as pool:
        secrets = set(pool.map(lambda _: load_or_create_secret(path), range(64)))
    assert len(secrets) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """The message says how to repair it."""
    path = tmp_path / "secret"
    load_or_create_secret(path)
    path.chmod(mode)
    with pytest.raises(ConfigurationInvalid, match="chmod 600"):
        load_or_create_secret(path)


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)], ids=["empty", "short", "long"])
def test_a_damaged_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    """A wrong length is never repaired silently: that would void every key."""
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationInvalid, match="32 bytes"):
        load_or_create_secret(path)
    assert path.read_bytes() == content


def test_namespaces_differ_by_tenant_and_by_secret() -> None:
    """A namespace is stable, opaque, and unlike any other tenant's or server's."""
    one, two = bytes(32), bytes([1]) * 32
    found = {kv_namespace(secret, tenant) for secret in (one, two) for tenant in ("ten_a", "ten_b")}
    assert len(found) == 4
    assert all(len(namespace) == 64 and int(namespace, 16) >= 0 for namespace in found)
    assert kv_namespace(one, "ten_a") == kv_namespace(one, "ten_a")
