"""Tile sizes and launch shapes, per kernel. The only place for such numbers.

Beside each constant stands the measurement that chose it. None of these was measured on a GPU yet: where it says
"reasoned", the value follows from shapes and the chip's published figures alone.
"""

from __future__ import annotations

from dataclasses import dataclass

# --- LoRA: lora_tiles, lora_shrink, lora_expand, lora_embed ---------------------------------------------------------

DECODE_ROWS = 16  # reasoned: the least that a matrix instruction takes; a decode segment rarely has more
PREFILL_ROWS = 64  # reasoned: the least that wgmma takes; more would waste rows at the end of each segment


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkShape:
    """How x [rows, in] times A^T [in, R] is cut: tiles of rows, blocks of ranks, splits of `in`."""

    rows: int  # of a tile
    block_rank: int
    block_k: int
    rank_programs: int  # per tile and split; they stride over the rank blocks
    split_k: int  # a split covers at least so much of `in`, a multiple of block_k
    max_splits: int
    num_warps: int
    num_stages: int

    def chunk(self, in_features: int) -> int:
        """Columns of x per split, a multiple of block_k. Depends on the site alone: batch invariance needs that."""
        splits = max(1, min(self.max_splits, in_features // self.split_k))
        return -(-in_features // (splits * self.block_k)) * self.block_k

    def splits(self, in_features: int) -> int:
        """Planes that `shrink` writes, none of them over an empty range."""
        return -(-in_features // self.chunk(in_features))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandShape:
    """How h [rows, r] times B [r, width] is cut."""

    rows: int  # of a tile
    block_rank: int
    block_columns: int
    num_warps: int
    num_stages: int = 1  # sm_90 with fp32 input needs 1: ptxas before 13.3 miscompiles more (triton issue 9433)


# Reasoned, not measured. Decode: many small programs, because A is read once and its bytes are the cost; a rank block of
# 16 keeps rank 8 and 16 from computing much air. Two warps: 16 x 16 results are two m16n8 instructions.
LORA_SHRINK_DECODE = ShrinkShape(
    rows=DECODE_ROWS,
    block_rank=16,
    block_k=256,
    rank_programs=4,
    split_k=512,
    max_splits=16,
    num_warps=2,
    num_stages=3,
)
# Reasoned, not measured. Prefill: x is the cost, so a block of 64 ranks (q, k and v of rank 16 fit) reads it once; few
# splits, because expand reads every plane again for each tile of columns.
LORA_SHRINK_PREFILL = ShrinkShape(
    rows=PREFILL_ROWS,
    block_rank=64,
    block_k=64,
    rank_programs=2,
    split_k=1024,
    max_splits=8,
    num_warps=4,
    num_stages=3,
)
# Reasoned, not measured. 128 columns: 16 bytes a lane for half of B's rows at once, and still 32 programs per tile of
# rows at 4096 columns.
LORA_EXPAND_DECODE = ExpandShape(rows=DECODE_ROWS, block_rank=16, block_columns=128, num_warps=4)
LORA_EXPAND_PREFILL = ExpandShape(rows=PREFILL_ROWS, block_rank=32, block_columns=128, num_warps=4)
LORA_EMBED_RANK = 64  # reasoned: one gathered row is 16 to 512 bytes
LORA_EMBED_WARPS = 4  # reasoned

# --- The rest of a step: norm, gated, rotate_write, blocks. All of it reasoned, not measured. ------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NormTile:
    """What one program of `rms_norm` and `add_rms_norm` owns."""

    rows: int
    block: int  # columns: the next power of two above D
    warps: int


def norm_tile(dim: int) -> NormTile:
    """8 elements a lane up to 1024 (16 bytes of a 2-byte type), then 16, at 16384 32: a row stays in registers, and a
    lone decode row has as many loads in flight as it can use."""
    block = 1 << (dim - 1).bit_length()
    return NormTile(rows=max(1, 1024 // block), block=block, warps=min(16, max(4, block // 512)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTile:
    """Elements and warps of one program that goes over its data without meeting itself."""

    block: int
    warps: int


GATED = FlatTile(block=1024, warps=4)  # 8 elements a lane and half; 14 programs for one row of Llama-3-8B
ROTATE_WRITE = FlatTile(block=512, warps=2)  # half heads: 8 elements a lane; 5 programs a token of Llama-3-8B
BLOCKS = FlatTile(block=4096, warps=4)  # words of 4 bytes: 8 loads of 16 bytes a lane before the first store
BLOCK_PROGRAMS = 32  # that share one block: 64 KiB each of 2 MiB, so that unused entries of a launch cost little
