"""How adapters lie in device memory, as the LoRA kernels read them.

One flat *pool* holds every adapter's A and B in the computing type, each row padded to 16 bytes; a *table* says, per
site and slot, where they are. Kernels read the table at run time, so a captured CUDA graph stays valid when an adapter
comes, goes or moves: only the table's numbers change.

    table[site, slot] = | A | R | B0 r0 h0 g0 | B1 r1 h1 g1 | B2 r2 h2 g2 | . . |      int64, FIELDS of them

A: offset of A [R, in]; R: its rows, 0 if the slot changes nothing here. For each slice s of the fused site: Bs, offset
of B_s [r_s, width_s]; r_s, its rank (0: slice unchanged); h_s, the first of A's rows that belong to it; g_s, offset of
its DoRA gains [width_s] float32 in the same pool seen as float32, or -1. Offsets count elements; A's and B's are
multiples of ALIGN.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALIGN", "FIELDS", "MAX_SLICES", "SLICE_FIELDS", "SLICE_START", "SiteShape", "padded"]

ALIGN = 8  # elements: 16 bytes of a 2-byte type, so that every row starts at a vector load's boundary
MAX_SLICES = 3  # q, k, v
SLICE_START = 2  # first field of slice 0
SLICE_FIELDS = 4  # B, r, h, g
FIELDS = 16  # 2 + 3 * 4, rounded up to whole 128-byte lines


@dataclass(frozen=True, slots=True)
class SiteShape:
    """One fused linear site: the width of its input, and its slices of the output, left to right without gaps."""

    in_features: int
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.widths) <= MAX_SLICES or min(self.in_features, *self.widths) < 1:
            raise ValueError(f"a site has 1 to {MAX_SLICES} slices, all sizes above 0, not {self}")

    @property
    def columns(self) -> tuple[int, ...]:
        """First output column of each slice."""
        return tuple(sum(self.widths[:i]) for i in range(len(self.widths)))

    @property
    def out_features(self) -> int:
        return sum(self.widths)


def padded(width: int) -> int:
    """Elements from one row of A or B to the next."""
    return -(-width // ALIGN) * ALIGN
