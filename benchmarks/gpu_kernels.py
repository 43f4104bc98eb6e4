"""Every kernel against its oracle on this device: the registry of cases, and the section that runs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial

import torch

from chips import Chip
from gpu_case import DTYPES, Call, check, short
from gpu_report import Item
from gpu_scale import Scale

__all__ = ["GROUPS", "items"]

GROUPS = ("gpu_cases_rows", "gpu_cases_lora", "gpu_cases_table", "gpu_cases_attention", "gpu_cases_sampling")
"""Modules with `calls(dtype)`: an iterator of `gpu_case.Call`."""


def items(scale: Scale, chip: Chip) -> Iterator[Item]:
    """One item per call; a group that cannot be set up is one failed item."""
    for group in GROUPS:
        for dtype in DTYPES:
            yield from _group(group, dtype)


def _group(group: str, dtype: torch.dtype) -> Iterator[Item]:
    try:
        source: Callable[[torch.dtype], Iterator[Call]] = importlib.import_module(group).calls
        for call in source(dtype):
            yield call.name, partial(check, call)
    except Exception as error:  # noqa: BLE001 - the other groups still run
        yield f"{group}/{short(dtype)}", partial(_raise, error)


def _raise(error: Exception) -> None:
    raise error
