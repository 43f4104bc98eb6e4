"""The safetensors files of a model folder and what their headers say. Reads no weights; torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lamina.errors import ConfigurationInvalid

__all__ = ["Checkpoint", "TensorEntry", "open_checkpoint", "weight_files"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_MAX_FILES = 4096


@dataclass(frozen=True, slots=True)
class TensorEntry:
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, ...
    file: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Open files; valid inside `open_checkpoint` only."""

    entries: dict[str, TensorEntry]
    duplicates: tuple[str, ...]  # tensors that more than one file holds
    _files: dict[str, Any]

    def tensor(self, name: str) -> Any:
        """The tensor, on the CPU, in its stored dtype."""
        return self._files[self.entries[name].file].get_tensor(name)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that hold the weights, by name. Raises ConfigurationInvalid if there are none or the index lies."""
    index = folder / _INDEX
    if index.is_file():
        return tuple(_indexed_file(folder, name) for name in _index_names(index))
    if not (folder / _SINGLE).is_file():
        raise ConfigurationInvalid(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}; only safetensors weights are loaded.", param="model"
        )
    return (folder / _SINGLE,)


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Opens every weight file. Raises ConfigurationInvalid for a file that is not sound safetensors."""
    entries: dict[str, TensorEntry] = {}
    duplicates: list[str] = []
    with ExitStack() as stack:
        files = {}
        for path in weight_files(folder):
            file = files[path.name] = stack.enter_context(_open(path))
            for name in file.keys():  # noqa: SIM118 - the handle is no mapping
                if name in entries:
                    duplicates.append(name)
                piece = file.get_slice(name)
                entries[name] = TensorEntry(tuple(piece.get_shape()), piece.get_dtype(), path.name)
        yield Checkpoint(entries, tuple(duplicates), files)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigurationInvalid(f"{path} is not a readable safetensors file: {error}.", param="model") from error


def _index_names(index: Path) -> list[str]:
    problem = ConfigurationInvalid(
        f"{index} must be a JSON object with weight_map: tensor -> file name.", param="model"
    )
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise ConfigurationInvalid(f"{index} is larger than the limit of {_MAX_INDEX_BYTES} bytes.", param="model")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise problem from error
    if not names or len(names) > _MAX_FILES or not all(isinstance(name, str) for name in names):
        raise problem
    return names


def _indexed_file(folder: Path, name: str) -> Path:
    # A name with a path in it could read files outside the folder.
    path = folder / name
    if path.name != name or not name.endswith(".safetensors") or not path.is_file():
        raise ConfigurationInvalid(
            f"{folder / _INDEX} names {name!r}, which is no safetensors file in that folder.", param="model"
        )
    return path
