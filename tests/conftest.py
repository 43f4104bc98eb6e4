"""Fixtures that several folders of tests share live in tests/fixtures, one topic a file."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels then run on CPU tensors

pytest_plugins = ["fixtures.model", "fixtures.postgres", "fixtures.redis", "fixtures.tenancy"]
