"""Building kernels in C: cached, atomic, and never required."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from lamina_kernels import dispatch
from lamina_kernels.cpu import build as module
from lamina_kernels.cpu.build import BuildFailed, build, kernel_cache
from lamina_kernels.cpu.lora import NativeLoraTable
from lamina_kernels.lora import TorchLoraTable


@pytest.fixture
def source(tmp_path: Path) -> Path:
    try:
        module._compiler()
    except BuildFailed as reason:
        pytest.skip(str(reason))
    path = tmp_path / "answer.c"
    path.write_text("int answer(void) { return 42; }")
    return path


def test_builds_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call finds the library and does not compile."""
    first = build(source, (), tmp_path / "cache")
    monkeypatch.setattr(module, "_run", lambda *_: pytest.fail("compiled again"))
    assert build(source, (), tmp_path / "cache") == first
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [first.name]


def test_another_source_is_another_library(source: Path, tmp_path: Path) -> None:
    """The key covers sources and headers, so an upgrade never loads an old library."""
    header = tmp_path / "answer.h"
    header.write_text("")
    first = build(source, (header,), tmp_path / "cache")
    header.write_text("// changed")
    assert build(source, (header,), tmp_path / "cache") != first


def test_a_failing_build_says_why_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """The compiler's message is in the error."""
    source.write_text("int answer(void) { return forty_two; }")
    with pytest.raises(BuildFailed, match="forty_two"):
        build(source, (), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written_is_reported(source: Path, tmp_path: Path) -> None:
    """The message names the folder and the variable that moves it."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BuildFailed, match="LAMINA_CACHE"):
        build(source, (), blocked / "cache")


def test_without_a_compiler_lora_runs_in_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fallback is chosen once, and the log says how to be faster."""

    def fail(sites: int, dtype: torch.dtype) -> NativeLoraTable:
        raise BuildFailed("no GCC is installed")

    monkeypatch.setattr(dispatch, "NativeLoraTable", fail)
    with caplog.at_level(logging.WARNING):
        table = dispatch.lora_table(1, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(table, TorchLoraTable)
    assert "no GCC" in caplog.text


def test_float64_runs_in_torch() -> None:
    """A dtype that the kernel lacks is served, not refused."""
    assert isinstance(dispatch.lora_table(1, dtype=torch.float64, device=torch.device("cpu")), TorchLoraTable)


def test_no_gcc_is_a_build_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a compiler that is not GCC, whose threads would fight with torch's."""
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(BuildFailed, match="no GCC"):
        module._compiler()


def test_the_cache_follows_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LAMINA_CACHE moves built kernels too."""
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path))
    assert kernel_cache() == tmp_path / "kernels"
