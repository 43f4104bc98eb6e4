"""`python -m lamina_kernels.gpu.aot`: compile every kernel for every chip, without one, and compare with a table.

Each module of `lamina_kernels.gpu` that has `compile_cases()` takes part. What compiled code costs is read from the
machine code (`aot_code`) and judged twice (`aot_table`): by rules that hold for any kernel - no spills, shared memory
within the chip's, tensor cores and 16-byte loads where the case asks for them - and against the committed table, made
by the same compiler: registers must not rise by more than a tenth, instructions must not vanish.

A kernel whose text, types, constants and compiler are those of the table is not compiled again, as the same would come
of it (`--all` does so nevertheless); rules are applied to its figures all the same.

What it cannot say: whether results are right (the interpreter's tests do), and how fast the code is (`make gpu-check`).
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from pathlib import Path

from triton import knobs

from lamina_kernels.gpu.aot_code import read_all
from lamina_kernels.gpu.aot_compile import Compiled, collect, compile_all, fingerprint, toolchain_of
from lamina_kernels.gpu.aot_table import Table, breaches
from lamina_kernels.gpu.aot_targets import TARGETS

__all__ = ["main"]

_TABLE = Path(__file__).with_name("compile_table.json")
_EXAMPLE = """
example:
  python -m lamina_kernels.gpu.aot --targets sm_90 --only 'lora_*' --update

exit status: 0 if nothing is worse, 1 if something is, 2 if nothing could be compared.
"""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if knobs.runtime.interpret:
        return _refuse("TRITON_INTERPRET is set: kernels would be interpreted, not compiled. Unset it.")
    try:
        targets = _targets(options.targets)
        every = collect(options.package)
        table = Table.load(options.table) if options.table.exists() else Table()
    except ValueError as error:
        return _refuse(str(error))
    names = fnmatch.filter(every, options.only)
    if not names:
        return _refuse(f"no case of {options.package} is named {options.only}; there are {len(every)}")
    toolchain = {name: toolchain_of(TARGETS[name]) for name in targets}
    strangers = table.strangers(toolchain)
    if strangers and options.update and len(names) < len(every):
        return _refuse(f"{strangers[0]}; update all cases together")
    sources = {name: fingerprint(every[name]) for name in names}
    known = {} if options.all else table.unchanged(sources, toolchain)
    tasks = [(name, target) for name in names for target in targets if (name, target) not in known]
    compiled = _compile(options.package, tasks, options.jobs)
    entries = known | read_all(compiled)
    failures = [f"{one.case} on {one.target} does not compile: {one.error}" for one in compiled if one.error]
    for (name, target), entry in entries.items():
        failures += [f"{name} on {target} {breach}" for breach in breaches(every[name], target, entry)]
    if options.update:
        table.update(every, entries, toolchain)
        table.save(options.table)
    else:
        failures += table.differences(every, entries, toolchain)
        for stranger in strangers:
            print(f"warning: {stranger}: registers and instructions are not compared", file=sys.stderr)
    return _report(failures, len(compiled), len(known))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lamina_kernels.gpu.aot",
        description="Compile every kernel for every chip, without one, and compare with the committed table.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--targets", default=",".join(TARGETS), help="chips, with commas between (%(default)s)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases by name, with * and ? (all)")
    parser.add_argument("--update", action="store_true", help="write what was found into the table")
    parser.add_argument("--all", action="store_true", help="compile also what has not changed since the table")
    parser.add_argument("--jobs", type=_positive, default=_processors(), help="processes (%(default)s)")
    parser.add_argument("--table", type=Path, default=_TABLE, help="file (%(default)s)")
    parser.add_argument("--package", default="lamina_kernels.gpu", help="where kernels are looked for (%(default)s)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number above 0, not {text!r}")
    return int(text)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _targets(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TARGETS]
    if unknown or not names:
        raise ValueError(f"unknown target {(unknown or [text])[0]!r}; there are {', '.join(TARGETS)}")
    return names


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


def _compile(package: str, tasks: list[tuple[str, str]], jobs: int) -> list[Compiled]:
    if not tasks:
        return []
    started = time.perf_counter()
    compiled = []
    for one in compile_all(package, tasks, min(jobs, len(tasks))):
        compiled.append(one)
        done = "failed" if one.error else f"{one.seconds:.1f} s"
        print(f"[{len(compiled):4}/{len(tasks)}] {one.target:6} {one.case}: {done}", file=sys.stderr, flush=True)
    print(f"compiled in {time.perf_counter() - started:.0f} s by {jobs} processes", file=sys.stderr)
    return compiled


def _report(failures: list[str], compiled: int, known: int) -> int:
    for failure in sorted(failures):
        print(failure)
    print(f"{compiled} compiled, {known} unchanged since the table was made, {len(failures)} complaints")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
