"""From what a user writes after `--model` to a local Hugging Face folder."""

from __future__ import annotations

import re
from pathlib import Path

from lamina.errors import ModelFetchFailed
from lamina.models.catalog import CATALOG, pull
from lamina.models.progress import Progress, silent

__all__ = ["resolve"]

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
# Data only: no pickles, no code.
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]


def resolve(name_or_path: str | Path, cache_dir: Path, progress: Progress = silent) -> Path:
    """The local folder of a model: a catalogue name, a folder, or a hub id (`org/name[@revision]`).

    A catalogue name wins over a folder of the same name (write `./name` for the folder). Raises
    ModelFetchFailed, saying what was expected, if it is none of these or cannot be fetched.
    """
    text = str(name_or_path)
    if text in CATALOG:
        return pull(text, cache_dir, progress)
    path = Path(text).expanduser()
    if path.exists():
        return _model_folder(path)
    if match := _HUB_ID.fullmatch(text):
        return _from_hub(match["repo"], match["revision"], cache_dir)
    raise ModelFetchFailed(
        f"{text!r} is no model: it is neither a catalogue name ({', '.join(CATALOG)}), nor an existing "
        "folder, nor a hub id of the form org/name."
    )


def _model_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelFetchFailed(
            f"{path} is no Hugging Face model folder: it must be a folder that holds config.json, "
            "tokenizer.json and *.safetensors."
        )
    return path.resolve()


def _from_hub(repo: str, revision: str | None, cache_dir: Path) -> Path:
    try:
        from huggingface_hub import snapshot_download  # an extra: most installations never need it
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ModelFetchFailed(
            f"No folder {repo!r} exists here, and fetching it from the hub needs the hub extra: "
            "pip install 'lamina[hub]'."
        ) from None
    try:
        folder = snapshot_download(repo, revision=revision, cache_dir=cache_dir / "hub", allow_patterns=_HUB_FILES)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelFetchFailed(
            f"{repo!r} is no local folder and could not be fetched from the hub: {error}. Check the name and "
            "the network; gated models need HF_TOKEN."
        ) from error
    return _model_folder(Path(folder))
