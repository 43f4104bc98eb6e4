"""What machine code says of itself: registers, spills, matrix instructions, widths of loads.

NVIDIA: registers and stack come from the cubin's attributes, instructions from nvdisasm. It takes half a second to
start and next to nothing to run, so the code of all kernels goes through it at once, as one raw binary.
AMD: everything stands in the assembly that LLVM wrote.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from triton import knobs

from lamina_kernels.gpu.aot_compile import Compiled
from lamina_kernels.gpu.aot_targets import TARGETS, Target

__all__ = ["Entry", "read_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the table: one case on one target."""

    registers: int  # a thread (NVIDIA), or a lane's vector registers (AMD)
    spill_bytes: int  # a thread, in memory
    scalar_spills: int  # AMD: scalar registers kept in lanes of vector registers
    shared_bytes: int
    tensor_memory_columns: int
    tensor_cores: tuple[str, ...]  # families of matrix instructions
    load_bytes: int  # the widest load from global memory by one thread
    code_bytes: int
    source: str  # of what this was compiled from (`aot_compile.fingerprint`)


def read_all(compiled: list[Compiled]) -> dict[tuple[str, str], Entry]:
    """The entry of each (case, target) that did compile."""
    entries: dict[tuple[str, str], Entry] = {}
    for target in TARGETS.values():
        built = [one for one in compiled if one.target == target.name and not one.error]
        read = _read_nvidia if target.backend == "cuda" else _read_amd
        entries |= {(one.case, one.target): entry for one, entry in zip(built, read(built, target), strict=True)}
    return entries


# NVIDIA


def _read_nvidia(built: list[Compiled], target: Target) -> Iterator[Entry]:
    codes = [_code(one.cubin) for one in built]
    for one, code, instructions in zip(built, codes, _disassemble(codes, target), strict=True):
        registers, stack = _resources(one.cubin)
        yield Entry(
            registers=registers,
            spill_bytes=stack,  # Triton's kernels have no arrays of their own: a stack holds spilled registers
            scalar_spills=0,
            shared_bytes=one.shared_bytes,
            tensor_memory_columns=one.tensor_memory_columns,
            tensor_cores=tuple(sorted({family for text in instructions for family in _nvidia_tensor(text)})),
            load_bytes=max((_nvidia_load(text) for text in instructions), default=0),
            code_bytes=len(code),
            source=one.source,
        )


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    count, names_at = struct.unpack_from("<HH", elf, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + 64 * i) for i in range(count)]
    names = headers[names_at][4]
    for name, kind, _, _, offset, size in headers:
        start = names + name
        yield elf[start : elf.index(b"\0", start)].decode(), b"" if kind == 8 else elf[offset : offset + size]


def _code(cubin: bytes) -> bytes:
    return b"".join(content for name, content in _sections(cubin) if name.startswith(".text."))


_INFO_SIZED = 4  # format of an entry of .nv.info whose 16-bit value counts the bytes that follow
_INFO_REGISTERS = 0x2F  # of a function: (symbol, registers a thread)
_INFO_FRAME = 0x11  # of a function: (symbol, bytes of stack a thread)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack, of the hungriest function in the file."""
    info = dict(_sections(cubin))[".nv.info"]
    most = {_INFO_REGISTERS: 0, _INFO_FRAME: 0}
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _INFO_SIZED:
            if attribute in most:
                most[attribute] = max(most[attribute], struct.unpack_from("<II", info, at)[1])
            at += size
    return most[_INFO_REGISTERS], most[_INFO_FRAME]


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([^;]+);")


def _disassemble(codes: list[bytes], target: Target) -> list[list[str]]:
    """The instructions of each code, without addresses and predicates."""
    if not codes:
        return []
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "code.bin"
        raw.write_bytes(b"".join(codes))
        command = [knobs.nvidia.nvdisasm.path, "--binary", target.disassembler, str(raw)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - fixed
    listings: list[list[str]] = [[] for _ in codes]
    current, end = 0, len(codes[0])
    for found in _INSTRUCTION.finditer(text):
        while int(found[1], 16) >= end:
            current += 1
            end += len(codes[current])
        listings[current].append(found[2].strip())
    return listings


_MATRIX = re.compile(r"(?:UTC)?[A-Z]{0,2}MMA$")  # HMMA: mma.sync; HGMMA: wgmma; UTCHMMA: tcgen05


def _nvidia_tensor(instruction: str) -> Iterator[str]:
    opcode, *suffixes = instruction.split(maxsplit=1)[0].split(".")
    if _MATRIX.match(opcode):
        yield f"{opcode}.TF32" if "TF32" in suffixes else opcode


_NARROW = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_BULK = 16  # smallest piece that the copy engine (TMA) moves


def _nvidia_load(instruction: str) -> int:
    opcode, *suffixes = instruction.split(maxsplit=1)[0].split(".")
    if opcode in ("UBLKCP", "UTMALDG"):
        return _BULK
    if opcode in ("LDG", "LDGSTS"):
        return next((_NARROW[suffix] for suffix in suffixes if suffix in _NARROW), 4)
    return 0


# AMD


def _read_amd(built: list[Compiled], target: Target) -> Iterator[Entry]:
    for one in built:
        yield Entry(
            registers=_number(one.assembly, r"\.vgpr_count:"),
            spill_bytes=_number(one.assembly, r"\.private_segment_fixed_size:"),
            scalar_spills=_number(one.assembly, r"\.sgpr_spill_count:"),
            shared_bytes=one.shared_bytes,
            tensor_memory_columns=0,
            tensor_cores=tuple(sorted({_amd_tensor(found) for found in _AMD_MATRIX.finditer(one.assembly)})),
            load_bytes=max((_AMD_WIDTHS.get(width, 2) for width in _AMD_LOAD.findall(one.assembly)), default=0),
            code_bytes=_number(one.assembly, r"; codeLenInByte ="),
            source=one.source,
        )


def _number(assembly: str, label: str) -> int:
    found = re.search(rf"{label}\s*(\d+)", assembly)
    if found is None:
        raise ValueError(f"LLVM's assembly says nothing of {label!r}: its format has changed")
    return int(found[1])


_AMD_MATRIX = re.compile(r"^\s+v_(s?mfmac?)_(\w+)", re.MULTILINE)
_AMD_LOAD = re.compile(r"^\s+(?:global|buffer|flat)_load_(?:lds_)?(\w+)", re.MULTILINE)
_AMD_WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "sbyte": 1}


def _amd_tensor(found: re.Match[str]) -> str:
    return f"{found[1]}.tf32" if "xf32" in found[2] else found[1]
