"""The chip's own float8 conversion, which the compile table cannot hold: sm_80 has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

_COMPILE = """
from lamina_kernels.gpu import attention_decode, attention_prefill
from lamina_kernels.gpu.aot_code import read_all
from lamina_kernels.gpu.aot_compile import compile_one
from lamina_kernels.gpu.aot_table import breaches
from lamina_kernels.gpu.aot_targets import TARGETS

for case in attention_decode.fp8_cases() + attention_prefill.fp8_cases():
    compiled = compile_one(case, TARGETS["sm_90"])
    assert not compiled.error, compiled.error
    (entry,) = read_all([compiled]).values()
    print(case.name, entry)
    assert not breaches(case, "sm_90", entry)
"""


def test_chips_that_convert_float8_compile_it(tmp_path: Path) -> None:
    """No spills, tensor cores, loads of 16 bytes, like every other case."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
