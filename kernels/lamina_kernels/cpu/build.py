"""Builds a C source of this package into a shared library, once per machine and version.

Only GCC on Linux: its OpenMP runtime is the one that torch has loaded already (libgomp.so.1), so that kernels share
torch's threads. Anything else has no library here, and callers use plain torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

__all__ = ["BuildFailed", "build", "kernel_cache"]

_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-fPIC", "-shared")
_SECONDS = 120.0
_log = logging.getLogger(__name__)


class BuildFailed(Exception):
    """There is no library: the message says why and what would help."""


def kernel_cache() -> Path:
    """Where built libraries are kept: `$LAMINA_CACHE/kernels`, or the user's cache folder."""
    root = os.environ.get("LAMINA_CACHE") or platformdirs.user_cache_dir("lamina")
    return Path(root) / "kernels"


def build(source: Path, headers: tuple[Path, ...], cache: Path) -> Path:
    """The shared library of `source`, from `cache` or built now (seconds) and kept there. Raises BuildFailed."""
    compiler = _compiler()
    library = cache / f"{source.stem}-{_key(compiler, (source, *headers))}.so"
    if library.is_file():
        return library
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=cache) as folder:
            built = Path(folder) / library.name
            _run(compiler, source, built)
            built.replace(library)  # atomic: another process may build the same
    except OSError as error:
        raise BuildFailed(f"the kernel cache {cache} cannot be written ({error}); set LAMINA_CACHE") from error
    _log.info("built %s", library)
    return library


def _compiler() -> str:
    if sys.platform != "linux":
        raise BuildFailed(f"kernels in C are built on Linux only, not on {sys.platform}")
    for name in ("gcc", "cc"):
        found = shutil.which(name)
        if found and "Free Software Foundation" in _output([found, "--version"]):
            return found
    raise BuildFailed("no GCC is installed; install it (Debian: apt-get install gcc)")


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)  # noqa: S603 - fixed
    return done.stdout + done.stderr


def _run(compiler: str, source: Path, target: Path) -> None:
    command = [compiler, *_FLAGS, str(source), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{compiler} took longer than {_SECONDS:.0f} s") from error
    if done.returncode:
        raise BuildFailed(f"{compiler} failed: {done.stderr[-1000:]}")


def _key(compiler: str, files: tuple[Path, ...]) -> str:
    """What the library depends on: sources, flags, compiler, and the CPU, as caches may be shared between machines."""
    parts = [compiler, _output([compiler, "--version"]), *_FLAGS, platform.machine(), _cpu_features()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
