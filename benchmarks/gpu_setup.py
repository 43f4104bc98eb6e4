"""Makes the repository importable on a bare GPU machine: torch, triton, numpy, safetensors, transformers, pytest.

Import this before anything of Lamina, and before triton. As a pytest plugin (`-p gpu_setup`) it serves tests as well.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

__all__ = ["DEVICE", "MISSING", "ON_GPU", "ROOT"]

ROOT = Path(__file__).resolve().parent.parent
ON_GPU = torch.cuda.is_available()  # ROCm's devices too
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels then run on CPU tensors

for _folder in ("benchmarks", "tests", "kernels", "kvtier", "lora", "platform"):
    if str(ROOT / _folder) not in sys.path:
        sys.path.insert(0, str(ROOT / _folder))


class _Blake2(ModuleType):
    """Identities made with it are consistent within this process, which is all that a check needs."""

    @staticmethod
    def blake3(data: bytes = b"") -> object:
        return hashlib.blake2b(data, digest_size=32)


class _Psutil(ModuleType):
    @staticmethod
    def cpu_count(logical: bool = True) -> int:
        return os.cpu_count() or 1


class _Platformdirs(ModuleType):
    @staticmethod
    def user_cache_dir(name: str) -> str:
        return str(Path(tempfile.gettempdir()) / f"{name}-cache-{os.getuid()}")


_STAND_INS = {"blake3": _Blake2, "psutil": _Psutil, "platformdirs": _Platformdirs}

MISSING = tuple(name for name in _STAND_INS if importlib.util.find_spec(name) is None)
for _name in MISSING:
    sys.modules[_name] = _STAND_INS[_name](_name)
