"""Staging folders live as long as their upload."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from fixtures.gateway import until
from lamina.gateway.staging import staged, sweep


def aged(folder: Path) -> Path:
    os.utime(folder, (time.time() - 3600,) * 2)
    return folder


def content(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_a_folder_is_removed_with_its_content(tmp_path: Path) -> None:
    async with staged(tmp_path / "new") as folder:
        (folder / "file").write_bytes(b"x")
    assert content(tmp_path / "new") == []


async def test_a_folder_is_removed_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        async with staged(tmp_path):
            raise RuntimeError("upload failed")
    assert content(tmp_path) == []


async def test_a_slow_disk_does_not_hold_up_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are served while a folder is removed."""
    removing, served = threading.Event(), threading.Event()

    def slow_rmtree(*_: object, **__: object) -> None:
        removing.set()
        assert served.wait(10), "the event loop stood still"

    async def upload() -> None:
        async with staged(tmp_path):
            pass

    monkeypatch.setattr(shutil, "rmtree", slow_rmtree)
    uploading = asyncio.create_task(upload())
    await until(removing.is_set)
    served.set()
    await uploading


def test_sweep_removes_what_a_killed_gateway_left(tmp_path: Path) -> None:
    left = tmp_path / "incoming-left"
    (left / "peft").mkdir(parents=True)
    aged(left)
    assert sweep(tmp_path) == [left]
    assert content(tmp_path) == []


async def test_sweep_spares_uploads_under_way_and_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    aged(tmp_path / "notes")
    async with staged(tmp_path) as folder:
        aged(folder)
        assert sweep(tmp_path) == []
        assert folder.exists()
    assert (tmp_path / "notes").exists()


def test_sweep_of_a_missing_folder_is_no_error(tmp_path: Path) -> None:
    assert sweep(tmp_path / "none") == []
