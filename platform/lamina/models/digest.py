"""The identity of a base model: what its KV blocks depend on. Torch-free."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from blake3 import blake3

from lamina.errors import ConfigurationInvalid
from lamina.models.checkpoint import weight_files
from lamina.models.config import ModelConfig

__all__ = ["model_digest"]

_FORMAT = b"lamina-model-1"


def model_digest(folder: Path) -> str:
    """64 hexadecimal digits: blake3 over the parsed configuration and the bytes of the weight files, in name order.

    Formatting of `config.json`, file names and time stamps do not enter; how weights are split over files does. Reads
    every byte, on all cores from the page cache: about 0.1 s for 270 MB. Raises ConfigurationInvalid, UnsupportedModel.
    """
    config = json.dumps(dataclasses.asdict(ModelConfig.from_folder(folder)), sort_keys=True)
    digest = blake3(_FORMAT)
    for part in (blake3(config.encode()), *map(_hash_file, weight_files(folder))):
        digest.update(part.digest())
    return digest.hexdigest()


def _hash_file(path: Path) -> blake3:
    try:
        return blake3(max_threads=blake3.AUTO).update_mmap(path)
    except OSError as error:
        raise ConfigurationInvalid(f"{path} cannot be read: {error.strerror}.", param="model") from error
