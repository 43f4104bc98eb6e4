"""The launch order and the small pieces of supervision."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from lamina.config import EngineConfig
from lamina.errors import ConfigurationInvalid
from lamina.wiring.launch import Launch, new_identity
from lamina.wiring.process import EngineProcess
from lamina.wiring.runtime import runtime_directory
from lamina.wiring.supervisor import Backoff


def test_a_launch_order_round_trips() -> None:
    """Paths, optional limits and the identity come back as they were."""
    config = EngineConfig(model=Path("/models/a b"), adapters=Path("/x/adapters"), num_blocks=7, threads=2)
    launch = Launch(address="ipc:///x", identity=new_identity(), parent=42, config=config)
    assert Launch.from_json(launch.to_json()) == launch


@pytest.mark.parametrize("order", [b"", b"{}", b"[1]", b"\xff", b'{"address": 3}'])
def test_a_wrong_launch_order_is_refused(order: bytes) -> None:
    """Anything else on standard input says how to start it properly."""
    with pytest.raises(ConfigurationInvalid, match="lamina serve"):
        Launch.from_json(order)


def test_identities_differ() -> None:
    """No core can be taken for another."""
    assert len({new_identity() for _ in range(100)}) == 100


def test_the_runtime_directory_is_private_and_temporary() -> None:
    """Mode 0700, room for a socket's name, gone afterwards."""
    with runtime_directory() as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert len(os.fsencode(path / "engine")) < 100
        (path / "engine").touch()
    assert not path.exists()


def test_a_long_temporary_path_is_avoided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A unix socket's path is limited, so an overlong XDG_RUNTIME_DIR is not used."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with runtime_directory() as path:
        assert long not in path.parents


def test_backoff_doubles_up_to_its_limit() -> None:
    """0.5, 1, 2, ... seconds, never beyond the limit, for any number of failures."""
    backoff = Backoff(first_s=0.5, limit_s=30)
    assert [backoff.delay_s(n) for n in (1, 2, 3, 4)] == [0.5, 1, 2, 4]
    assert backoff.delay_s(10_000) == 30


_ECHO = """
import json, os, sys
sys.stdin.read()
print(json.dumps(dict(os.environ)), file=open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize("policy", [None, "ACTIVE"])
async def test_the_engine_learns_nothing_from_our_environment(tmp_path: Path, policy: str | None) -> None:
    """No LAMINA_ variable, which may hold a password, reaches it; OpenMP waits passively unless told otherwise."""
    environment = {"LAMINA_DATABASE_URL": "postgresql://u:secret@h/d", "PATH": os.environ["PATH"]}
    if policy:
        environment["OMP_WAIT_POLICY"] = policy
    config = EngineConfig(model=Path("/nowhere"), adapters=Path("/nowhere"))
    launch = Launch(address="ipc:///x", identity=b"x", parent=os.getpid(), config=config)
    process = EngineProcess(launch, [sys.executable, "-c", _ECHO, str(tmp_path / "out")], environment)
    assert await process.wait() == 0
    seen = json.loads((tmp_path / "out").read_text())
    assert not [name for name in seen if name.startswith("LAMINA_")]
    assert seen["OMP_WAIT_POLICY"] == (policy or "PASSIVE")
