"""The script for GPUs runs here through Triton's interpreter, and what it is made of notices errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu_case import Call, check
from gpu_report import Figure, Item, Report, Skipped

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the script itself is the test on a GPU")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_check.py"
SECTIONS = [
    "kernels",
    "graph",
    "engine",
    "base",
    "lora",
    "attention",
    "sampling",
    "tiers",
]  # pytest runs tests/gpu itself


def test_the_shrunken_check_passes_and_writes_its_report(tmp_path: Path) -> None:
    """Every section, nothing failed, nothing skipped, figures beside their rooflines."""
    out = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--only", *SECTIONS]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    report = json.loads(out.read_text())
    sections = {section["name"]: section for section in report["sections"]}
    assert list(sections) == SECTIONS
    assert all(section["passed"] for section in sections.values())
    assert not any(section["failed"] or section["skipped"] for section in sections.values())
    assert report["environment"]["device"] == "cpu"
    names = [figure["name"] for figure in sections["lora"]["figures"]]
    assert any("two-launch" in name for name in names)
    assert any("fused" in name for name in names)
    assert all(figure["predicted"] > 0 for figure in sections["lora"]["figures"])


def test_imports_of_the_script_need_no_web_framework() -> None:
    """It runs where only torch, triton, numpy, safetensors, transformers and pytest are installed."""
    absent = ["blake3", "psutil", "platformdirs", "pydantic", "fastapi", "sqlalchemy", "zmq", "msgspec", "typer"]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
sys.path.insert(0, {str(SCRIPT.parent)!r})
import gpu_setup, gpu_engine, gpu_kernels, fixtures.engines, lamina.wiring.core
assert gpu_setup.MISSING == ("blake3", "psutil", "platformdirs")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def _call(launch: object, **options: object) -> Call:
    x = torch.linspace(-1, 1, 8)
    y = torch.full((8,), float("nan"))

    def oracle(x: Tensor, y: Tensor) -> None:
        y[:4] = x[:4].double() * 2

    return Call(name="twice", launch=launch, oracle=oracle, arguments=(x, y), written=(1,), **options)  # type: ignore[arg-type]


def _writes(scale: float, stop: int) -> object:
    def launch(x: Tensor, y: Tensor) -> None:
        y[:stop] = x[:stop] * scale

    return launch


def test_a_right_kernel_passes_with_its_error() -> None:
    [figure] = check(_call(_writes(2.0, 4)))
    assert figure.measured == 0


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (_writes(2.001, 4), "error .* of the largest value"),
        (_writes(-2.0, 4), "error"),
        (_writes(2.0, 3), "NaN on one side only"),
        (_writes(2.0, 5), "NaN on one side only"),
    ],
    ids=["inexact", "wrong sign", "too few written", "too many written"],
)
def test_a_wrong_kernel_fails(launch: object, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(_call(launch))


def test_a_failing_item_stops_neither_its_section_nor_the_next(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no")

    def unfit() -> None:
        raise Skipped("too small")

    def items() -> Iterator[Item]:
        yield "broken", broken
        yield "unfit", unfit
        yield "fine", lambda: [Figure.of_time("fast", 2e-6, 1e-6)]
        raise RuntimeError("while listing")

    report = Report({"device": "none"}, tmp_path / "r.json", total_s=60)
    report.run("first", 60, items)
    report.run("second", 60, lambda: iter([("fine", lambda: None)]))
    assert report.failures == 2
    first, second = json.loads(report.save().read_text())["sections"]
    assert list(first["failed"]) == ["broken", "setting up"]
    assert first["skipped"] == {"unfit": "too small"}
    assert first["figures"][0]["percent"] == 50.0
    assert (first["passed"], second["passed"]) == (1, 1)


def test_items_beyond_the_budget_are_named_as_skipped(tmp_path: Path) -> None:
    report = Report({}, tmp_path / "r.json", total_s=60)
    report.run("slow", 0.02, lambda: iter([("one", lambda: time.sleep(0.05)), ("two", lambda: None)]))
    [section] = json.loads(report.save().read_text())["sections"]
    assert section["passed"] == 1
    assert section["skipped"] == {"two": "the section's time was up"}
    assert report.failures == 0


def test_a_lost_device_skips_the_rest(tmp_path: Path) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    report = Report({}, tmp_path / "r.json", total_s=60)
    report.run("first", 60, lambda: iter([("bad", lost)]))
    report.run("second", 60, lambda: iter([("fine", lambda: None)]))
    _, second = json.loads(report.save().read_text())["sections"]
    assert second["skipped"] == {"fine": "the device was lost in 'bad'"}
