"""Published figures of accelerators, for the roofline. Torch is loaded only to measure this machine.

Units are decimal: 1 GB/s is 1e9 bytes a second. Compute figures are *dense*: data sheets that print figures with 2:4
sparsity print twice as much. They are peaks; a good GEMM reaches 70-85 % of them, a good copy 90 % of the bandwidth.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["CHIPS", "Chip", "detect", "find", "measure_here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What bounds a kernel. `launch_us` and `node_us` are assumed until measured on the device, the rest is published.

    `launch_us`: a kernel's cost beside its work when it is launched from the host; Python in front of the launch costs
    more. `node_us`: the same for a node of a captured CUDA graph: draining, the next one's start, filling the chip.
    """

    key: str  # what the command line takes
    name: str
    memory_gb_s: float
    memory_gib: float
    tflops_16: float  # fp16 and bf16 with fp32 sums
    tflops_32: float  # fp32 as such, without tensor cores
    tflops_8: float | None  # fp8; None: the chip multiplies none
    l2_mib: float
    link_gb_s: float  # to the host, one direction, before protocol overhead (a copy reaches 75-85 %)
    launch_us: float = 2.5  # reported for H100 with a C++ caller: 2-3
    node_us: float = 1.0  # reported: 0.8-1.5 between dependent nodes
    source: str

    @property
    def bytes_per_s(self) -> float:
        return self.memory_gb_s * 1e9

    @property
    def l2_bytes(self) -> float:
        return self.l2_mib * 2**20

    def flops_per_s(self, itemsize: int = 2) -> float:
        """For operands of `itemsize` bytes."""
        return {1: self.tflops_8 or self.tflops_16, 2: self.tflops_16, 4: self.tflops_32}[itemsize] * 1e12


_PUBLISHED = (
    Chip(
        key="a100",
        name="NVIDIA A100 SXM 80 GB",
        memory_gb_s=2039,
        memory_gib=80,
        tflops_16=312,
        tflops_32=19.5,
        tflops_8=None,
        l2_mib=40,
        link_gb_s=32,
        source="NVIDIA A100 data sheet: 2,039 GB/s, 312 TFLOPS, PCIe Gen4 64 GB/s both ways; L2: GA100 white paper",
    ),
    Chip(
        key="h100",
        name="NVIDIA H100 SXM 80 GB",
        memory_gb_s=3350,
        memory_gib=80,
        tflops_16=989,
        tflops_32=67,
        tflops_8=1979,
        l2_mib=50,
        link_gb_s=64,
        source="NVIDIA H100 data sheet: 3.35 TB/s, 1,979 / 3,958 TFLOPS with sparsity, PCIe Gen5 128 GB/s both ways; "
        "L2: GH100 white paper",
    ),
    Chip(
        key="h200",
        name="NVIDIA H200 SXM 141 GB",
        memory_gb_s=4800,
        memory_gib=141,
        tflops_16=989,
        tflops_32=67,
        tflops_8=1979,
        l2_mib=50,
        link_gb_s=64,
        source="NVIDIA H200 data sheet: 4.8 TB/s, 1,979 / 3,958 TFLOPS with sparsity, PCIe Gen5 128 GB/s both ways; "
        "the die and L2 of H100",
    ),
    Chip(
        key="b200",
        name="NVIDIA B200 (HGX, 1000 W)",
        memory_gb_s=8000,
        memory_gib=180,
        tflops_16=2250,
        tflops_32=80,
        tflops_8=4500,
        l2_mib=126,
        link_gb_s=64,
        source="NVIDIA Blackwell architecture brief: 8 TB/s, 4.5 / 9 PFLOPS with sparsity; HGX hosts have PCIe Gen5; "
        "L2 as the driver reports it",
    ),
    Chip(
        key="mi300x",
        name="AMD Instinct MI300X",
        memory_gb_s=5300,
        memory_gib=192,
        tflops_16=1307,
        tflops_32=163.4,
        tflops_8=2615,
        l2_mib=32,
        link_gb_s=64,
        source="AMD Instinct MI300X data sheet: 5.3 TB/s, 1,307.4 / 2,614.9 TFLOPS, PCIe Gen5 x16 128 GB/s both "
        "ways; L2: CDNA 3 white paper, 8 x 4 MiB (the 256 MB memory-side cache behind it is not counted)",
    ),
    Chip(
        key="l40s",
        name="NVIDIA L40S",
        memory_gb_s=864,
        memory_gib=48,
        tflops_16=362,
        tflops_32=91.6,
        tflops_8=733,
        l2_mib=96,
        link_gb_s=32,
        source="NVIDIA L40S data sheet: 864 GB/s, 362.05 / 733 TFLOPS, PCIe Gen4 64 GB/s both ways; L2: Ada's paper",
    ),
)

CHIPS: dict[str, Chip] = {chip.key: chip for chip in _PUBLISHED}

# Names as torch.cuda.get_device_name gives them. Other boards of the same family (PCIe, NVL, 40 GB) have other figures,
# and a MIG slice has a part of them: those are not recognised, rather than compared with the wrong ceiling.
_NAMES = {
    "a100": r"NVIDIA A100-SXM4-80GB",
    "h100": r"NVIDIA H100( SXM5)?( 80GB HBM3)?",
    "h200": r"NVIDIA H200( SXM5)?( 141GB HBM3e)?",
    "b200": r"NVIDIA B200",
    "mi300x": r"AMD Instinct MI300X( OAM| VF)?",
    "l40s": r"NVIDIA L40S",
}


def detect(device_name: str) -> Chip | None:
    """The chip that torch calls `device_name`; None if its figures are not known here."""
    return next((CHIPS[key] for key, name in _NAMES.items() if re.fullmatch(name, device_name.strip())), None)


def find(key: str) -> Chip:
    """A chip by its key, or this machine for "cpu", which takes a second to measure. ValueError for anything else."""
    if key == "cpu":
        return measure_here()
    if key not in CHIPS:
        raise ValueError(f"chip must be cpu or one of {', '.join(CHIPS)}, not {key!r}")
    return CHIPS[key]


def measure_here(device: str = "cpu") -> Chip:
    """This machine's CPU, or a GPU that is not in the list: a copy's bandwidth and a GEMM's rate, measured now.

    On the CPU there is no launch and no link: those figures are zero and the memory's own bandwidth.
    """
    import torch

    on_cpu = device == "cpu"
    mib, size = (32, 512) if on_cpu else (1024, 8192)
    wait = (lambda: None) if on_cpu else torch.cuda.synchronize
    source = torch.ones(mib << 18, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * 4 / _median(lambda: (target.copy_(source), wait()))
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    flops_32 = 2 * size**3 / _median(lambda: (torch.mm(a, b), wait()))
    half_a, half_b = a.bfloat16(), b.bfloat16()
    flops_16 = flops_32 if on_cpu else 2 * size**3 / _median(lambda: (torch.mm(half_a, half_b), wait()))
    name = f"this CPU, {torch.get_num_threads()} threads" if on_cpu else torch.cuda.get_device_name(device)
    l2 = 1 if on_cpu else torch.cuda.get_device_properties(device).L2_cache_size / 2**20
    return Chip(
        key="cpu" if on_cpu else "unknown",
        name=name,
        memory_gb_s=copied / 1e9,
        memory_gib=0 if on_cpu else torch.cuda.get_device_properties(device).total_memory / 2**30,
        tflops_16=flops_16 / 1e12,
        tflops_32=flops_32 / 1e12,
        tflops_8=None,
        l2_mib=l2,
        link_gb_s=copied / 1e9 if on_cpu else 32,
        launch_us=0 if on_cpu else 2.5,
        node_us=0 if on_cpu else 1.0,
        source=f"measured, not published: a copy of {mib} MiB, GEMMs of {size}" + ("" if on_cpu else "; link assumed"),
    )


def _median(run: Callable[[], object], repetitions: int = 5) -> float:
    """Seconds."""
    run()
    taken = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
