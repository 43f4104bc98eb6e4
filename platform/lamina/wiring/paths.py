"""Where Lamina keeps its files unless told otherwise. Light: the offline library uses it too."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from lamina.models.catalog import default_cache_dir

__all__ = ["default_cache", "default_home"]


def default_home() -> Path:
    """Database, secret and adapters: `LAMINA_HOME` if set, else the user's data folder for Lamina."""
    if chosen := os.environ.get("LAMINA_HOME"):
        return Path(chosen).expanduser()
    return Path(platformdirs.user_data_dir("lamina"))


def default_cache() -> Path:
    """Fetched models: `LAMINA_CACHE` if set, else `models` in the user's cache folder for Lamina."""
    return default_cache_dir()
