"""The content-addressed store: everything or nothing, whatever dies when."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lamina_lora import store as module
from lamina_lora.errors import AdapterMissing, AdapterRejected, InvalidDigest
from lamina_lora.store import ADAPTER_FILES, AdapterStore
from support.lora_folders import write_plain

DIGEST = "ab" * 32


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "home" / "adapters")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_plain(tmp_path / "upload", rank=2)
    (path / "README.md").write_text("not kept")
    return path


def left_over(store: AdapterStore) -> list[str]:
    return [p.name for p in store.root.iterdir() if p.name.startswith(".")] if store.root.is_dir() else []


def test_publishes_the_two_files(store: AdapterStore, folder: Path) -> None:
    """The source stays; nothing else is copied; no staging folder is left."""
    path = store.publish(folder, DIGEST)
    assert path == store.path(DIGEST) == store.root / DIGEST
    assert sorted(p.name for p in path.iterdir()) == sorted(ADAPTER_FILES)
    for name in ADAPTER_FILES:
        assert (path / name).read_bytes() == (folder / name).read_bytes()
    assert store.contains(DIGEST)
    assert store.digests() == [DIGEST]
    assert not left_over(store)


def test_publishing_twice_is_one_adapter(store: AdapterStore, folder: Path) -> None:
    """The second publisher gets the first one's folder, untouched."""
    first = store.publish(folder, DIGEST).stat().st_ino
    assert store.publish(folder, DIGEST).stat().st_ino == first


def test_an_empty_store(store: AdapterStore) -> None:
    """Looking at a store that does not exist yet creates nothing."""
    assert store.digests() == []
    assert not store.contains(DIGEST)
    assert store.sweep() == 0
    with pytest.raises(AdapterMissing):
        store.path(DIGEST)
    assert not store.root.exists()


@pytest.mark.parametrize(
    "digest",
    [
        "",
        "..",
        "../" * 21 + "x",
        "AB" * 32,
        "ab" * 31,
        "ab" * 33,
        "ab" * 31 + "a\n",
        "ab" * 32 + "\n",
        "/etc",
        "\uff41" * 64,
    ],
    ids=repr,
)
def test_no_other_name_reaches_the_disk(store: AdapterStore, folder: Path, digest: str) -> None:
    """Only 64 lower-case hexadecimal digits name a folder."""
    for act in (store.path, store.contains, store.remove, lambda d: store.publish(folder, d)):
        with pytest.raises(InvalidDigest):
            act(digest)
    assert not store.root.exists()


def test_removes(store: AdapterStore, folder: Path) -> None:
    """A removed adapter is missing, and can be published again."""
    store.publish(folder, DIGEST)
    store.remove(DIGEST)
    assert not store.contains(DIGEST)
    assert not left_over(store)
    with pytest.raises(AdapterMissing):
        store.remove(DIGEST)
    store.publish(folder, DIGEST)


@pytest.mark.parametrize("name", ADAPTER_FILES)
def test_an_incomplete_folder_is_refused(store: AdapterStore, folder: Path, name: str) -> None:
    """No half adapter is published."""
    (folder / name).unlink()
    with pytest.raises(AdapterRejected, match=name):
        store.publish(folder, DIGEST)
    assert not store.contains(DIGEST)
    assert not left_over(store)


@pytest.mark.parametrize("step", ["_copy", "_sync_folder"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_failing_disk_leaves_nothing_half(
    store: AdapterStore, folder: Path, monkeypatch: pytest.MonkeyPatch, step: str, call: int
) -> None:
    """Whatever call fails, the adapter is complete or absent, and staging is clean."""
    real, calls = getattr(module, step), 0

    def fail(*args: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(28, "No space left on device")
        real(*args)

    monkeypatch.setattr(module, step, fail)
    with pytest.raises(OSError, match="No space"):
        store.publish(folder, DIGEST)
    published = store.root / DIGEST
    assert not published.exists() or sorted(p.name for p in published.iterdir()) == sorted(ADAPTER_FILES)
    assert not left_over(store)


_KILLED = """
import os, signal, sys
from pathlib import Path
from lamina_lora import store as module
step, call = sys.argv[3], int(sys.argv[4])
owner = module.AdapterStore if step == "_rename" else module
real, calls = getattr(owner, step), 0
def kill(*args):
    global calls
    calls += 1
    if calls == call:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
setattr(owner, step, kill)
module.AdapterStore(Path(sys.argv[1])).publish(Path(sys.argv[2]), "ab" * 32)
"""


@pytest.mark.parametrize(
    ("step", "call", "complete"),
    [
        ("_copy", 1, False),
        ("_copy", 2, False),
        ("_sync_folder", 1, False),
        ("_rename", 1, False),
        ("_sync_folder", 2, True),
    ],
)
def test_sigkill_leaves_a_whole_adapter_or_none(
    store: AdapterStore, folder: Path, step: str, call: int, complete: bool
) -> None:
    """After a kill at any stage the store is readable, sweeping tidies it, and publishing again works."""
    command = [sys.executable, "-c", _KILLED, str(store.root), str(folder), step, str(call)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -9
    assert store.contains(DIGEST) == complete
    assert store.sweep() == 0  # young folders may belong to someone
    assert store.sweep(older_than_s=0) == (0 if complete else 1)
    assert not left_over(store)
    assert sorted(p.name for p in store.publish(folder, DIGEST).iterdir()) == sorted(ADAPTER_FILES)


def test_sweep_leaves_young_and_foreign_folders(store: AdapterStore, folder: Path) -> None:
    """Adapters and running uploads stay."""
    store.publish(folder, DIGEST)
    with store.staging() as young:
        old = store.root / ".staging-old"
        old.mkdir()
        os.utime(old, (1, 1))
        assert store.sweep() == 1
        assert young.is_dir()
        assert store.contains(DIGEST)


def test_staging_is_private_and_temporary(store: AdapterStore) -> None:
    """Only the owner can look in, and nothing is left after an error."""

    def fail(staged: Path) -> None:
        assert staged.parent == store.root
        assert staged.stat().st_mode & 0o777 == 0o700
        (staged / "part").write_text("x")
        raise RuntimeError

    with pytest.raises(RuntimeError), store.staging() as staged:
        fail(staged)
    assert not left_over(store)


def test_publishers_at_the_same_time(store: AdapterStore, folder: Path) -> None:
    """All succeed with one complete adapter."""
    start, errors = threading.Barrier(8), []

    def publish() -> None:
        start.wait()
        try:
            store.publish(folder, DIGEST)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(p.name for p in store.path(DIGEST).iterdir()) == sorted(ADAPTER_FILES)
    assert not left_over(store)
