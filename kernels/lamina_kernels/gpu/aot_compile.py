"""Compiles kernels for chips that need not be there, in several processes."""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lamina_kernels.gpu.aot_targets import TARGETS, Target
from lamina_kernels.gpu.compile_case import CompileCase

__all__ = ["Compiled", "collect", "compile_all", "compile_one", "fingerprint", "toolchain_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One case on one target: the binary, or why there is none."""

    case: str
    target: str
    seconds: float  # of processors, the assembler's included: what other processes do does not count
    source: str  # `fingerprint`
    error: str = ""
    shared_bytes: int = 0
    tensor_memory_columns: int = 0
    cubin: bytes = b""  # NVIDIA
    assembly: str = ""  # AMD


def collect(package: str) -> dict[str, CompileCase]:
    """The cases of every module of `package` that has `compile_cases()`, by name. Raises ValueError for doubles."""
    cases: dict[str, CompileCase] = {}
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        module = importlib.import_module(found.name)
        for case in module.compile_cases() if hasattr(module, "compile_cases") else ():
            _check(case)
            if case.name in cases:
                raise ValueError(f"two compile cases are named {case.name!r}; the second is in {found.name}")
            cases[case.name] = case
    return cases


def _check(case: CompileCase) -> None:
    """Raises ValueError for what Triton would answer with an assertion, or compile into something else."""
    names = list(case.kernel.arg_names)
    if list(case.signature) != names:
        raise ValueError(f"{case.name}: the signature names {list(case.signature)}, the kernel's arguments are {names}")
    constant = {name for name, kind in case.signature.items() if kind == "constexpr"}
    if constant != set(case.constants):
        raise ValueError(
            f"{case.name}: constexpr arguments without a value, or values without such an argument: "
            f"{sorted(constant ^ set(case.constants))}"
        )
    if unknown := [name for name in case.divisible if name not in names]:
        raise ValueError(f"{case.name}: no argument is named {unknown[0]!r}, which `divisible` lists")


def fingerprint(case: CompileCase) -> str:
    """Of everything that the compiler is given: the kernel's text and its callees', types, constants, options."""
    given = f"{_source(case).hash()}-{case.num_warps}-{case.num_stages}"
    return hashlib.sha256(given.encode()).hexdigest()[:16]


def _source(case: CompileCase) -> ASTSource:
    return ASTSource(
        case.kernel,
        dict(case.signature),
        dict(case.constants),
        {(list(case.signature).index(name),): [["tt.divisibility", 16]] for name in case.divisible},
    )


def compile_one(case: CompileCase, target: Target) -> Compiled:
    """Compiles, or reads Triton's cache. An error is part of the answer, so that one bad case hides no other."""
    started = _busy()
    source = fingerprint(case)
    try:
        built = triton.compile(
            _source(case),
            target=GPUTarget(target.backend, target.arch, target.warp_size),
            options={"num_warps": case.num_warps, "num_stages": case.num_stages},
        )
    except Exception as error:  # noqa: BLE001 - a compiler's, of any type
        return Compiled(
            case=case.name, target=target.name, seconds=_busy() - started, source=source, error=_reason(error)
        )
    return Compiled(
        case=case.name,
        target=target.name,
        seconds=_busy() - started,
        source=source,
        shared_bytes=built.metadata.shared,
        tensor_memory_columns=getattr(built.metadata, "tmem_size", 0) or 0,
        cubin=built.asm.get("cubin", b""),
        assembly=built.asm.get("amdgcn", ""),
    )


def _busy() -> float:
    return sum(os.times()[:4])  # user and system time of this process and of those it waited for


def _reason(error: BaseException) -> str:
    """Triton wraps an error once per call of a jitted function: the innermost says what is wrong."""
    inner = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    return f"{type(inner).__name__}: {str(inner).strip()}"[:500]


def compile_all(package: str, tasks: list[tuple[str, str]], jobs: int) -> Iterator[Compiled]:
    """Each (case, target), as they are done. Each process imports the kernels anew: jitted functions cannot be sent."""
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(package,)
    ) as pool:
        for done in as_completed([pool.submit(_work, *task) for task in tasks]):
            yield done.result()


_worker_cases: dict[str, CompileCase] = {}


def _start_worker(package: str) -> None:
    _worker_cases.update(collect(package))


def _work(case: str, target: str) -> Compiled:
    return compile_one(_worker_cases[case], TARGETS[target])


def toolchain_of(target: Target) -> str:
    """What compiles for this target. ptxas comes with triton, but an environment variable can name another."""
    if target.backend != "cuda":
        return f"triton {triton.__version__}"
    tool = knobs.nvidia.ptxas_blackwell if int(target.arch) >= 100 else knobs.nvidia.ptxas
    return f"triton {triton.__version__}, ptxas {tool.version}"
