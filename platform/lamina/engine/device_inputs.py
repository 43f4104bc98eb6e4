"""One step's inputs as device tensors: everything that the kernels read beside weights, cache and activations.

The numbers travel in two packed copies (64-bit and 32-bit) and one for the block tables, from pinned memory, so that a
step costs three transfers and no wait. The same layout is made anew for a step that runs eagerly, or refilled in place
for one that a CUDA graph has captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.engine.batch import Batch, Span
from lamina_kernels.gpu.attention_prefill import build_prefill_tiles
from lamina_kernels.gpu.lora_tiles import DECODE_ROWS, PREFILL_ROWS, LoraTiles, build_tiles

Integer = TypeVar("Integer", np.int64, np.int32)

__all__ = ["FixedInputs", "HostInputs", "StepInputs", "StepShape", "padding_inputs", "upload"]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T rows, of which the first D are decode rows with sequences of the same number; S sequences in all."""

    decode_rows: int
    token_ids: Tensor  # [T] int64; negative: the device knows (`StepSampler.placeholder`)
    positions: Tensor  # [T] int64
    kv_slots: Tensor  # [T] int64: block * block size + offset; -1: a padding row, nothing is written
    logit_rows: Tensor  # [R] int64
    contexts: Tensor  # [S] int32: keys to attend to, new ones included; 0: a padding row
    tables: Tensor  # [S, >= blocks of the longest] int32
    prefill_tiles: Tensor  # [n, 4] int32 of `build_prefill_tiles`
    lora: LoraTiles | None  # None: base rows only


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the host must know to lay a step out."""

    block_size: int
    prefill_rows: int  # `prefill_tile_rows` of the model's attention


def upload(array: NDArray[Integer], device: torch.device) -> Tensor:
    """A tensor on the device, without waiting for it."""
    host = torch.from_numpy(array)
    if device.type == "cuda":  # CUDA only: a copy from pageable memory would wait
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class HostInputs:
    """`StepInputs` on the host, for `rows` rows: the batch's own, or more, which are padding."""

    def __init__(self, batch: Batch, shape: StepShape, rows: int | None = None) -> None:
        tokens = batch.num_tokens
        pad = 0 if rows is None else rows - tokens
        self.decode_rows = batch.decode_rows + pad
        self.longs = (
            _padded(batch.token_ids, pad, 0),
            _padded(batch.positions, pad, 0),
            _padded(np.concatenate([_kv_slots(span, shape.block_size) for span in batch.spans]), pad, -1),
            _padded(batch.logit_rows, pad, 0),
        )
        contexts = np.array([span.context for span in batch.spans], dtype=np.int32)
        spans = [
            (number, span.row, span.count, span.start)
            for number, span in enumerate(batch.spans)
            if span.row >= batch.decode_rows
        ]
        split = [segment for segment in batch.segments if segment.start < batch.decode_rows]
        self.slots = frozenset(segment.slot for segment in batch.segments)
        capacity = None if rows is None else rows
        self.ints = (
            _padded(contexts, pad, 0),
            build_prefill_tiles(spans, shape.prefill_rows),
            build_tiles(split, DECODE_ROWS, capacity),
            build_tiles(batch.segments[len(split) :], PREFILL_ROWS),
        )
        self.tables = _tables(batch.spans)

    def to_device(self, device: torch.device) -> StepInputs:
        """New tensors, exactly as large as the step."""
        longs = _split(upload(_pack(self.longs), device), self.longs)
        ints = _split(upload(_pack(self.ints), device), self.ints)
        return _inputs(self.decode_rows, longs, ints, upload(self.tables, device), bool(self.slots))


def padding_inputs(rows: int, max_blocks: int, *, lora: bool, device: torch.device) -> StepInputs:
    """A prefill step whose rows and tiles are all padding: it launches everything and computes nothing."""
    inputs = FixedInputs(rows, max_blocks, lora=lora, device=device).inputs
    unused = torch.full((1, 4), -1, dtype=torch.int32, device=device)
    tiles = None if inputs.lora is None else LoraTiles(decode=inputs.lora.decode, prefill=unused[:, :3].contiguous())
    return replace(inputs, prefill_tiles=unused, lora=tiles)


class FixedInputs:
    """`StepInputs` at fixed addresses, for `rows` decode rows: what a captured graph reads."""

    def __init__(self, rows: int, max_blocks: int, *, lora: bool, device: torch.device) -> None:
        longs, ints = _empty_fields(rows)
        self._longs = upload(_pack(longs), device)
        self._ints = upload(_pack(ints), device)
        self._tables = torch.zeros((rows, max_blocks), dtype=torch.int32, device=device)
        self.inputs = _inputs(rows, _split(self._longs, longs), _split(self._ints, ints), self._tables, lora)

    def fill(self, host: HostInputs) -> None:
        """Takes in the next step, padded to the same rows."""
        device = self._tables.device
        self._longs.copy_(upload(_pack(host.longs), device))
        self._ints.copy_(upload(_pack(host.ints), device))
        sequences, blocks = host.tables.shape
        self._tables[:sequences, :blocks].copy_(upload(host.tables, device))


def _empty_fields(rows: int) -> tuple[tuple[NDArray[np.int64], ...], tuple[NDArray[np.int32], ...]]:
    zeros, unused = np.zeros(rows, dtype=np.int64), np.full(rows, -1, dtype=np.int64)
    longs = (zeros, zeros, unused, zeros)
    ints = (
        np.zeros(rows, dtype=np.int32),
        build_prefill_tiles((), 1),
        build_tiles((), DECODE_ROWS, rows),
        build_tiles((), PREFILL_ROWS),
    )
    return longs, ints


def _inputs(
    decode_rows: int, longs: Sequence[Tensor], ints: Sequence[Tensor], tables: Tensor, lora: bool
) -> StepInputs:
    token_ids, positions, kv_slots, logit_rows = longs
    contexts, prefill_tiles, lora_decode, lora_prefill = ints
    tiles = LoraTiles(decode=lora_decode, prefill=lora_prefill) if lora else None
    return StepInputs(decode_rows, token_ids, positions, kv_slots, logit_rows, contexts, tables, prefill_tiles, tiles)


def _padded(array: NDArray[Integer], rows: int, value: int) -> NDArray[Integer]:
    return np.concatenate((array, np.full(rows, value, dtype=array.dtype))) if rows else array


def _kv_slots(span: Span, block_size: int) -> NDArray[np.int64]:
    positions = np.arange(span.start, span.context)
    return span.table[positions // block_size] * block_size + positions % block_size


def _tables(spans: Sequence[Span]) -> NDArray[np.int32]:
    """[S, blocks of the longest]; the rest of a shorter table repeats nothing that is ever read."""
    tables = np.zeros((len(spans), max(len(span.table) for span in spans)), dtype=np.int32)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.table)] = span.table
    return tables


_ALIGN = 16  # bytes: kernels are compiled for pointers that are multiples of it, and anew for one that is not


def _pack(fields: Sequence[NDArray[Integer]]) -> NDArray[Integer]:
    pieces: list[NDArray[Integer]] = []
    for field in fields:
        pieces += [field.reshape(-1), np.zeros(_gap(field), dtype=field.dtype)]
    return np.concatenate(pieces)


def _gap(field: NDArray[Integer]) -> int:
    """Elements that follow a field so that the next one is aligned."""
    return -field.size % (_ALIGN // field.itemsize)


def _split(packed: Tensor, fields: Sequence[NDArray[Integer]]) -> list[Tensor]:
    pieces = packed.split([field.size + _gap(field) for field in fields])
    return [piece[: field.size].view(field.shape) for piece, field in zip(pieces, fields, strict=True)]
