"""Staging folders live as long as their upload."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lamina.gateway.staging import staged, sweep


def aged(folder: Path) -> Path:
    os.utime(folder, (time.time() - 3600,) * 2)
    return folder


def test_a_folder_is_removed_with_its_content(tmp_path: Path) -> None:
    with staged(tmp_path / "new") as folder:
        (folder / "file").write_bytes(b"x")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_is_removed_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staged(tmp_path):
        raise RuntimeError("upload failed")
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_what_a_killed_gateway_left(tmp_path: Path) -> None:
    left = tmp_path / "incoming-left"
    (left / "peft").mkdir(parents=True)
    aged(left)
    assert sweep(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == []


def test_sweep_spares_uploads_under_way_and_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    aged(tmp_path / "notes")
    with staged(tmp_path) as folder:
        aged(folder)
        assert sweep(tmp_path) == []
        assert folder.exists()
    assert (tmp_path / "notes").exists()


def test_sweep_of_a_missing_folder_is_no_error(tmp_path: Path) -> None:
    assert sweep(tmp_path / "none") == []
