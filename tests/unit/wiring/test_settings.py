"""Settings: environment, command line, defaults, and their documentation."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from lamina.config import EngineConfig, GatewayConfig, TenancyConfig
from lamina.errors import ConfigurationInvalid
from lamina.wiring.settings import Settings, load_settings, unknown_variables
from lamina.wiring.settings_table import main, markdown

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
MODEL = Path("/models/tiny")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("LAMINA_"):
            monkeypatch.delenv(name)


def test_defaults_are_those_of_the_configs(tmp_path: Path) -> None:
    """Without any variable the configs are what their own defaults say; the gateway knows how long its engine waits."""
    settings = load_settings(home=tmp_path)
    assert settings.engine(MODEL) == EngineConfig(model=MODEL, adapters=tmp_path / "adapters")
    assert settings.gateway() == GatewayConfig(max_queue_s=settings.engine(MODEL).max_queue_s)
    assert settings.tenancy() == TenancyConfig(database_url=f"sqlite+aiosqlite:///{tmp_path}/lamina.db", home=tmp_path)


def test_every_config_field_can_be_set() -> None:
    """A field added to a config is a setting too, unless it is derived."""
    derived = {"adapters"}
    for config in (EngineConfig, GatewayConfig, TenancyConfig):
        assert {field.name for field in fields(config)} - derived <= set(Settings.model_fields)


def test_the_environment_is_read_and_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAMINA_X sets x; an override that is not None replaces it; empty means unset."""
    monkeypatch.setenv("LAMINA_PORT", "9000")
    monkeypatch.setenv("LAMINA_KV_BYTES", "2GiB")
    monkeypatch.setenv("LAMINA_MAX_RUNNING", "")
    monkeypatch.setenv("LAMINA_LOG_LEVEL", "debug")
    settings = load_settings(port=None, kv_bytes="3GiB")
    assert settings.gateway().port == 9000
    assert settings.engine(MODEL).kv_bytes == 3 << 30
    assert type(settings.engine(MODEL).kv_bytes) is int
    assert settings.engine(MODEL).max_running == EngineConfig(model=MODEL, adapters=MODEL).max_running
    assert settings.log_level == "DEBUG"


def test_all_wrong_values_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by what the user wrote it as, the variable or the option."""
    monkeypatch.setenv("LAMINA_PORT", "99999")
    monkeypatch.setenv("LAMINA_DTYPE", "float8")
    with pytest.raises(ConfigurationInvalid) as caught:
        load_settings(max_running=0)
    for part in ("LAMINA_PORT", "65535", "LAMINA_DTYPE", "'bfloat16'", "--max-running"):
        assert part in caught.value.message


def test_passwords_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the settings' text nor in an error."""
    url = "postgresql+psycopg://u:hunter2@h/d"
    assert "hunter2" not in repr(load_settings(database_url=url))
    monkeypatch.setenv("LAMINA_DATABASE_URL", url)
    with pytest.raises(ConfigurationInvalid) as caught:
        load_settings(port=-1)
    assert "hunter2" not in caught.value.message


def test_paths_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`~` and relative paths mean the same to every process."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LAMINA_HOME", "~/data")
    monkeypatch.chdir(tmp_path)
    settings = load_settings(cache=Path("models"))
    assert (settings.home, settings.cache) == (tmp_path / "data", tmp_path / "models")


def test_an_unknown_option_is_refused() -> None:
    """A misspelt override in code does not pass in silence."""
    with pytest.raises(ConfigurationInvalid, match="prot"):
        load_settings(prot=1)


def test_misspelt_variables_are_pointed_out() -> None:
    """With the likely spelling where there is one; others' variables are left alone."""
    found = unknown_variables({"LAMINA_KV_BYTE": "1", "LAMINA_XYZZY": "1", "LAMINA_PORT": "1", "HOME": "/"})
    assert found == [
        "LAMINA_KV_BYTE is no setting and is ignored; did you mean LAMINA_KV_BYTES?",
        "LAMINA_XYZZY is no setting and is ignored.",
    ]


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/configuration.md is what the settings say."""
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run: python -m lamina.wiring.settings --markdown > docs/configuration.md"
    )
    assert main(["--markdown"]) == 0
    assert capsys.readouterr().out == markdown()
    assert main([]) == 2
