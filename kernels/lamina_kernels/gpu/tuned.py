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
    block_k_fp32: int  # divides block_k; small, because products without matrix instructions are unrolled in registers
    rank_programs: int  # per tile and split; they stride over the rank blocks
    split_k: int  # a split covers at least so much of `in`
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
    block_rank_fp32: int
    block_columns_fp32: int
    num_warps: int
    num_stages: int = 1  # sm_90 with fp32 input needs 1: ptxas before 13.3 miscompiles more (triton issue 9433)

    def blocks(self, element_size: int) -> tuple[int, int]:
        """(ranks, columns) of a block, by the bytes of an element."""
        if element_size == 4:
            return self.block_rank_fp32, self.block_columns_fp32
        return self.block_rank, self.block_columns


# Reasoned, not measured. Many small programs, because A is read once and its bytes are the cost; a rank block of 16
# keeps rank 8 and 16 from computing much air; two warps, as 16 x 16 results are two m16n8 instructions.
LORA_SHRINK_DECODE = ShrinkShape(
    rows=DECODE_ROWS,
    block_rank=16,
    block_k=256,
    block_k_fp32=32,
    rank_programs=4,
    split_k=512,
    max_splits=16,
    num_warps=2,
    num_stages=3,
)
# Reasoned, not measured. A chunk of 512 tokens is 8 tiles, so splits and rank blocks of 32 must fill the chip; the rank
# blocks share x in L2.
LORA_SHRINK_PREFILL = ShrinkShape(
    rows=PREFILL_ROWS,
    block_rank=32,
    block_k=128,
    block_k_fp32=32,
    rank_programs=4,
    split_k=512,
    max_splits=8,
    num_warps=4,
    num_stages=3,
)
# Reasoned, not measured. 32 programs per tile of rows at 4096 columns.
LORA_EXPAND_DECODE = ExpandShape(
    rows=DECODE_ROWS,
    block_rank=16,
    block_columns=128,
    block_rank_fp32=16,
    block_columns_fp32=128,
    num_warps=4,
)
# Reasoned, not measured. Each block of columns reads every plane of its ranks again, so blocks should be wide; at 8
# warps and 128 columns two programs still fit into a multiprocessor's registers (128 each), at 256 only one (238).
LORA_EXPAND_PREFILL = ExpandShape(
    rows=PREFILL_ROWS,
    block_rank=32,
    block_columns=128,
    block_rank_fp32=16,
    block_columns_fp32=64,
    num_warps=8,
)
LORA_EMBED_RANK = 64  # reasoned: one gathered row is 16 to 512 bytes


def lora_embed_warps(tile_rows: int) -> int:
    """Reasoned: a decode tile is 16 rows of 64 ranks, which 4 wide waves of gfx942 would load 8 bytes at a time."""
    return 2 if tile_rows == DECODE_ROWS else 4


# --- The rest of a step: norm, gated, rotate_write, blocks. All of it reasoned, not measured. ------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NormTile:
    """What one program of `rms_norm` and `add_rms_norm` owns."""

    rows: int
    block: int  # columns: the next power of two above D
    warps: int


def norm_tile(dim: int) -> NormTile:
    """16 elements a lane, at 16384 32 (half of it on gfx942): two loads of 16 bytes in a 2-byte type, and the whole row
    stays in registers."""
    block = 1 << (dim - 1).bit_length()
    return NormTile(rows=max(1, 1024 // block), block=block, warps=min(16, max(2, block // 512)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTile:
    """Elements and warps of one program that goes over its data without meeting itself."""

    block: int
    warps: int


GATED = FlatTile(block=1024, warps=2)  # 16 elements a lane and half; 14 programs for one row of Llama-3-8B
ROTATE_WRITE = FlatTile(block=512, warps=1)  # half heads: 16 elements a lane; 5 programs a token of Llama-3-8B
BLOCKS = FlatTile(block=4096, warps=4)  # words of 4 bytes: 8 loads of 16 bytes a lane before the first store
BLOCK_PROGRAMS = 32  # that share one block: 64 KiB each of 2 MiB, so that unused entries of a launch cost little


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How a decode row's keys are cut. `keys` and `min_tiles` also fix the order of its sums."""

    keys: int  # of a tile
    min_tiles: int  # of a part
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """How prefill attention is cut. `keys` also fixes the order of a row's sums."""

    height: int  # query rows times the heads that share a KV head
    keys: int  # of a tile
    num_warps: int
    num_stages: int


# Reasoned, not measured. 16 parts x 8 KV heads are 128 programs for one row, about one per processor of an H100 (132);
# at 256 rows and 32 heads of 128 the scratch is 67 MB. A part is at least 256 keys, so that writing and reading its
# 128 floats per head stays below 5 % of its keys and values (group of 4, dim 128, 2 bytes).
DECODE_SPLITS = 16
MERGE_WARPS = 4  # reasoned


def decode_tile(head_dim: int, element_size: int) -> DecodeTile:
    """Reasoned, not measured: a tile of keys is 16 to 32 KiB in shared memory, so that two programs fit beside each
    other with their loads in flight. float32 is multiplied without tensor cores: with 4 warps its tiles spill."""
    if element_size == 4:
        keys = 16 if head_dim > 128 else 32
        return DecodeTile(keys=keys, min_tiles=256 // keys, num_warps=8, num_stages=2)
    if head_dim > 128:
        return DecodeTile(keys=32, min_tiles=8, num_warps=4, num_stages=2)
    return DecodeTile(keys=64, min_tiles=4, num_warps=4, num_stages=2)


def prefill_tile(head_dim: int, element_size: int, *, fp8_by_hand: bool = False) -> PrefillTile:
    """Reasoned, not measured, but for spills: 16 rows a warp, the least of an mma, and 64 for four of them, a wgmma.
    float32 has no tensor cores and keeps its operands in registers, as do bytes that are widened by hand. The height
    must not depend on the latter: the host cuts tiles by it."""
    if element_size == 4:
        narrow = head_dim > 128
        return PrefillTile(height=32, keys=16 if narrow else 32, num_warps=8 if narrow else 4, num_stages=2)
    if head_dim > 128:
        return PrefillTile(height=64, keys=32, num_warps=8, num_stages=1 if fp8_by_hand else 2)
    if fp8_by_hand:
        return PrefillTile(height=128, keys=32, num_warps=8, num_stages=1)
    return PrefillTile(height=128, keys=64, num_warps=8, num_stages=2)


# --- sampling_* ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingShape:
    """How a row of logits is cut. Tokens do not depend on it (sums are integers), log-probabilities' last bits do."""

    chunk: int  # tokens of one program, a power of two
    num_warps: int
    listed: int  # biased or forbidden tokens of one program, a power of two
    small_warps: int  # of programs over one row's few candidates

    def chunks(self, vocab_size: int) -> int:
        return -(-vocab_size // self.chunk)


# Reasoned, not measured. 4096 tokens: 32 programs share a row of Llama 3's vocabulary, so that one row alone still
# spreads over 32 multiprocessors, and 8 warps hold a chunk's logits, keys and 64-bit weights in 64 of their registers.
SAMPLING = SamplingShape(chunk=4096, num_warps=8, listed=256, small_warps=4)
