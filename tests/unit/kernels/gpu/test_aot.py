"""Kernels compiled for chips that are not here: what is measured, what is judged, and that all of ours pass."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

import lamina_kernels.gpu
from lamina_kernels.gpu.aot import main
from lamina_kernels.gpu.aot_code import Entry
from lamina_kernels.gpu.aot_compile import collect, fingerprint
from lamina_kernels.gpu.aot_table import Table, breaches, worsened
from lamina_kernels.gpu.aot_targets import TARGETS
from lamina_kernels.gpu.compile_case import CompileCase
from support.toy_kernels import product

TESTS = Path(__file__).parents[3]
MODULES = list(pkgutil.iter_modules(lamina_kernels.gpu.__path__))
GOOD = Entry(
    registers=96,
    spill_bytes=0,
    scalar_spills=0,
    shared_bytes=1024,
    tensor_memory_columns=0,
    tensor_cores=("HGMMA",),
    load_bytes=16,
    code_bytes=4096,
    source="0123456789abcdef",
)
CASE = CompileCase(name="case", kernel=None, signature={}, constants={}, tensor_cores=True)
TOOLS = {"sm_90": "triton 3.8.0, ptxas 12.9"}


def run(cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: this one interprets kernels."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "lamina_kernels.gpu.aot", *arguments],
        env=inherited | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(TESTS), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(900)  # minutes on a loaded machine: every kernel for every chip
def test_every_kernel_compiles_as_the_table_says(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Table, str]:
    """A table made from two good cases on every target, and what ptxas said meanwhile."""
    folder = tmp_path_factory.mktemp("toy")
    table = folder / "table.json"
    arguments = ("--package", "support.toy_kernels", "--table", str(table), "--jobs", "2")
    done = run(folder / "cache", *arguments, "--update", TRITON_DUMP_PTXAS_LOG="1")
    assert done.returncode == 0, done.stdout + done.stderr
    again = run(folder / "cache", *arguments)
    assert again.stdout == "0 compiled, 8 unchanged since the table was made, 0 complaints\n", again.stderr
    repeated = run(folder / "cache", *arguments, "--all")
    assert repeated.stdout == "8 compiled, 0 unchanged since the table was made, 0 complaints\n", repeated.stderr
    return Table.load(table), done.stdout


def test_each_case_has_an_entry_for_each_target(toy: tuple[Table, str]) -> None:
    table, _ = toy
    assert set(table.entries) == {(case, chip) for case in ("product/large", "product/small") for chip in TARGETS}
    assert set(table.toolchain) == set(TARGETS)


@pytest.mark.parametrize(
    ("case", "target", "family"),
    [
        ("product/small", "sm_80", "HMMA"),
        ("product/large", "sm_80", "HMMA"),
        ("product/small", "sm_90", "HMMA"),
        ("product/large", "sm_90", "HGMMA"),
        ("product/large", "sm_100", "UTCHMMA"),
        ("product/small", "gfx942", "mfma"),
    ],
)
def test_matrix_instructions_are_found_in_machine_code(
    toy: tuple[Table, str], case: str, target: str, family: str
) -> None:
    """The small tile is too small for a warp group: each program's own code is read, not its neighbour's."""
    assert toy[0].entries[case, target].tensor_cores == (family,)


def test_registers_are_those_that_ptxas_reports(toy: tuple[Table, str]) -> None:
    table, said = toy
    reported = sorted(int(found) for found in re.findall(r"Used (\d+) registers", said))
    assert reported == sorted(entry.registers for (_, chip), entry in table.entries.items() if chip != "gfx942")


def test_good_code_is_measured(toy: tuple[Table, str]) -> None:
    for entry in toy[0].entries.values():
        assert entry.load_bytes == 16
        assert entry.spill_bytes == entry.scalar_spills == 0
        assert 0 < entry.registers <= 512
        assert 0 < entry.shared_bytes < 64 * 1024
        assert 1000 < entry.code_bytes < 100_000


def test_each_fault_is_named(tmp_path: Path) -> None:
    done = run(
        tmp_path, "--package", "support.bad_kernels", "--table", str(tmp_path / "none.json"), "--targets", "sm_80"
    )
    assert done.returncode == 1
    for complaint in (
        "bad/narrow on sm_80 loads at most 2 bytes at once, not 16",
        r"bad/shared on sm_80 needs \d+ bytes of shared memory, the chip has 166912",
        "bad/tf32 on sm_80 multiplies in TF32",
        r"bad/spills on sm_80 spills \d+ bytes a thread",
        "bad/spills on sm_80 has no tensor-core instructions",
        "bad/nonsense on sm_80 does not compile: ValueError: arange's range must be a power of 2",
        "bad/scalar on sm_80 is not in the table: run with --update",
    ):
        assert re.search(complaint, done.stdout), done.stdout
    assert "bad/scalar on sm_80 loads" not in done.stdout


def test_refuses_to_compile_what_would_be_interpreted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets", "sm_90,sm_70"], "unknown target 'sm_70'; there are sm_80, sm_90, sm_100, gfx942"),
        (["--targets", ","], "unknown target ','"),
        (["--only", "nothing*"], "no case of lamina_kernels.gpu is named nothing*"),
    ],
)
def test_refuses_what_is_not_there(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"registers": 104}, None),  # 8 %
        ({"registers": 112}, "registers 96 -> 112"),
        ({"scalar_spills": 2}, "scalar registers kept in lanes 0 -> 2"),
        ({"tensor_cores": ("HMMA",)}, "tensor-core instructions HGMMA -> HMMA: no HGMMA"),
        ({"tensor_cores": ()}, "tensor-core instructions HGMMA -> none: no HGMMA"),
        ({"load_bytes": 8}, "widest load 16 -> 8 bytes"),
        ({"code_bytes": 9999, "registers": 32, "load_bytes": 32}, None),
    ],
)
def test_what_counts_as_worse(change: dict[str, object], complaint: str | None) -> None:
    assert worsened(GOOD, dataclasses.replace(GOOD, **change)) == ([complaint] if complaint else [])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"spill_bytes": 4}, "spills 4 bytes a thread"),
        ({"shared_bytes": 232449}, "needs 232449 bytes of shared memory, the chip has 232448"),
        ({"tensor_memory_columns": 1}, "needs 1 columns of tensor memory, the chip has 0"),
        ({"tensor_cores": ()}, "has no tensor-core instructions"),
        ({"load_bytes": 8}, "loads at most 8 bytes at once, not 16"),
    ],
)
def test_what_no_table_allows(change: dict[str, object], complaint: str) -> None:
    assert breaches(CASE, "sm_90", GOOD) == []
    assert breaches(CASE, "sm_90", dataclasses.replace(GOOD, **change)) == [complaint]


def test_cases_and_table_must_agree() -> None:
    table = Table(TOOLS, {("gone", "sm_90"): GOOD, ("kept", "sm_90"): GOOD})
    assert table.differences({"kept", "new"}, {("kept", "sm_90"): GOOD, ("new", "sm_90"): GOOD}, TOOLS) == [
        "gone is in the table, but no module has it any more: run with --update and commit the table",
        "new on sm_90 is not in the table: run with --update and commit the table",
    ]


def test_only_the_same_source_under_the_same_compiler_is_not_compiled_again() -> None:
    same, other = {"case": GOOD.source}, {"case": "fedcba9876543210"}
    table = Table(dict(TOOLS), {("case", "sm_90"): GOOD, ("gone", "sm_90"): GOOD})
    assert table.unchanged(same, TOOLS) == {("case", "sm_90"): GOOD}
    assert table.unchanged(other, TOOLS) == {}
    assert table.unchanged(same, {"sm_90": "triton 3.9.0, ptxas 13.0"}) == {}
    assert table.unchanged(same, {"gfx942": "triton 3.8.0"}) == {}, "another target is asked for"


@pytest.mark.parametrize("change", [{"num_warps": 2}, {"num_stages": 2}, {"constants": {"TILE": 32, "STEP": 64}}])
def test_a_source_is_all_that_the_compiler_is_given(change: dict[str, object]) -> None:
    kernel = JITFunction(product.product.fn)  # also where the decorator made an interpreted one
    plain = product.case("case", "bf16", 64, kernel=kernel)
    assert fingerprint(plain) == fingerprint(dataclasses.replace(plain, name="another"))
    assert fingerprint(plain) != fingerprint(dataclasses.replace(plain, **change))
    assert fingerprint(plain) != fingerprint(product.case("case", "fp16", 64, kernel=kernel))


def test_figures_of_another_compiler_are_not_compared() -> None:
    """A new triton allocates registers as it likes; the rules of `breaches` still hold."""
    table = Table({"sm_90": "triton 3.7.0, ptxas 12.8"}, {("case", "sm_90"): GOOD})
    worse = {("case", "sm_90"): dataclasses.replace(GOOD, registers=200)}
    assert table.differences({"case"}, worse, TOOLS) == []
    assert table.strangers(TOOLS) == [
        "the table's part for sm_90 was made by triton 3.7.0, ptxas 12.8, this is triton 3.8.0, ptxas 12.9"
    ]


def test_an_update_keeps_what_was_not_compiled_and_forgets_what_is_gone(tmp_path: Path) -> None:
    table = Table(dict(TOOLS), {("gone", "sm_90"): GOOD, ("kept", "sm_90"): GOOD})
    better = dataclasses.replace(GOOD, registers=64)
    table.update({"kept", "new"}, {("new", "gfx942"): better}, {"gfx942": "triton 3.8.0"})
    table.save(tmp_path / "table.json")
    read = Table.load(tmp_path / "table.json")
    assert read.entries == {("kept", "sm_90"): GOOD, ("new", "gfx942"): better}
    assert read.toolchain == TOOLS | {"gfx942": "triton 3.8.0"}


@pytest.mark.parametrize("content", ["", "[]", '{"cases": {}}', '{"toolchain": {}, "cases": {"a": {"sm_90": {}}}}'])
def test_a_broken_table_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{path} is no table of compiled kernels")):
        Table.load(path)


def test_no_kernel_is_forgotten() -> None:
    """Each jitted function of the package is some case's kernel or constant, or is named in another jitted function."""
    modules = [importlib.import_module(f"lamina_kernels.gpu.{found.name}") for found in MODULES]
    jitted = {value.fn for module in modules for value in vars(module).values() if hasattr(value, "arg_names")}
    cases = collect("lamina_kernels.gpu").values()
    compiled = {value.fn for case in cases for value in (case.kernel, *case.constants.values()) if hasattr(value, "fn")}
    words = {fn: set(re.findall(r"\w+", inspect.getsource(fn))) for fn in jitted}
    parts = {fn for fn in jitted if any(fn.__name__ in words[other] for other in jitted - {fn})}
    assert compiled
    assert {f"{fn.__module__}.{fn.__name__}" for fn in jitted - compiled - parts} == set()
