"""What a result depends on besides the code: device, driver, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from chips import Chip
from gpu_setup import DEVICE, MISSING, ON_GPU, ROOT

__all__ = ["environment"]

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "transformers", "pytest")


def environment(chip: Chip) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD") or "unknown",
        "changed": bool(_output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")),
        **(_gpu() if ON_GPU else _cpu()),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "stand-ins": ", ".join(MISSING) or "none",
        "chip": asdict(chip),
    }


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(DEVICE)
    return {
        "device": torch.cuda.get_device_name(DEVICE),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(DEVICE))),
        "processors": properties.multi_processor_count,
        "memory GiB": round(properties.total_memory / 2**30, 1),
        "L2 MiB": round(properties.L2_cache_size / 2**20, 1),
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown",
        "clocks": _output(
            "nvidia-smi", "--query-gpu=clocks.max.sm,clocks.max.mem,power.limit", "--format=csv,noheader"
        ),
    }


def _cpu() -> dict[str, Any]:
    return {
        "device": "cpu",
        "note": "Triton's interpreter: shapes are tiny and times mean nothing",
        "cores": os.cpu_count(),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _output(*command: str) -> str:
    """Of a program that may not be there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
