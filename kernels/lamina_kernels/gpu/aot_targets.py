"""The chips that kernels are compiled for, and what one program may use there."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One architecture, and the limits at which Triton refuses a launch."""

    name: str
    backend: str  # as triton's GPUTarget says it
    arch: int | str
    warp_size: int
    shared_bytes: int  # most that one program may use
    tensor_memory_columns: int = 0  # 512-byte columns (128 lanes x 4 bytes) beside shared memory, where a chip has them
    disassembler: str = ""  # nvdisasm's name of the architecture


# Shared memory: CUDA C++ programming guide, appendix "Compute capabilities", row "maximum amount of shared memory per
# thread block" (163 KiB for 8.0, 227 KiB for 9.0 and 10.0). Tensor memory: PTX ISA, section "tensor memory" of tcgen05,
# 512 columns a multiprocessor. gfx942: AMD Instinct MI300 instruction set architecture, LDS: 64 KiB a workgroup.
TARGETS = {
    target.name: target
    for target in (
        Target(name="sm_80", backend="cuda", arch=80, warp_size=32, shared_bytes=163 * 1024, disassembler="SM80"),
        Target(name="sm_90", backend="cuda", arch=90, warp_size=32, shared_bytes=227 * 1024, disassembler="SM90a"),
        Target(
            name="sm_100",
            backend="cuda",
            arch=100,
            warp_size=32,
            shared_bytes=227 * 1024,
            tensor_memory_columns=512,
            disassembler="SM100a",
        ),
        Target(name="gfx942", backend="hip", arch="gfx942", warp_size=64, shared_bytes=64 * 1024),
    )
}
