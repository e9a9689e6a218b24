"""The agent's own settings."""

import re
from pathlib import Path

import pytest
from dflash_agent.config import AgentConfig, load_config
from dflash_agent.runfile import ConfigError


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    assert load_config(tmp_path / "agent.toml") == AgentConfig()


def test_a_key_replaces_its_default_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_text('housekeepers = ["mine"]\nmetrics = ""\n')
    config = load_config(tmp_path / "agent.toml")
    assert (config.housekeepers, config.metrics) == (("mine",), "")
    assert config.display_servers == AgentConfig().display_servers


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("housekeeper = []", "did you mean housekeepers?"),
        ("housekeepers = 1", "must be a list of names"),
        ("housekeepers = [1]", "must be a list of names"),
        ('metrics = "9479"', "ADDRESS:PORT"),
        ('metrics = "h:99999"', "ADDRESS:PORT"),
        ("metrics = 9479", "ADDRESS:PORT"),
        ("= 1", "cannot be read"),
    ],
)
def test_what_is_wrong_is_refused_with_place_value_and_remedy(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_settings_that_are_shipped_show_the_defaults(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "agent" / "agent.toml"
    assert load_config(shipped) == AgentConfig()
    text = re.sub(r"^#(?! [A-Z])", "", shipped.read_text(), flags=re.MULTILINE)
    assert "\nhousekeepers = [" in text
    (tmp_path / "agent.toml").write_text(text)
    assert load_config(tmp_path / "agent.toml") == AgentConfig()
