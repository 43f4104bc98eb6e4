"""Tile sizes and launch shapes, per kernel. The only place for such numbers.

Beside each constant stands the measurement that chose it. None of these was measured on a GPU yet: where it says
"reasoned", the value follows from shapes and the chip's published figures alone.
"""

from __future__ import annotations
