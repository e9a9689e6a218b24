"""The agent's own settings, /etc/dflash/agent.toml: what may hold a GPU, and where metrics are served."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from dflash_agent.runfile import ConfigError, nearest

AGENT_FILE = Path("/etc/dflash/agent.toml")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Names are of executables, of commands (comm of proc(5)) or of units (those end in .service)."""

    housekeepers: tuple[str, ...] = (
        "dflash-agent.service",
        "nvidia-persistenced",
        "nv-hostengine",
        "nv-fabricmanager",
        "nvidia-cuda-mps-control",
        "nvidia-cuda-mps-server",
        "nvidia-smi",
        "nvidia-powerd",
        "dcgm-exporter",
        "dcgmi",
        "nvidia_gpu_exporter",
        "prometheus-nvidia-exporter",
        "node_exporter",
        "nvidia-device-plugin",
        "nvtop",
        "nvitop",
        "gpustat",
        "btop",
        "telegraf",
    )
    display_servers: tuple[str, ...] = (
        "Xorg",
        "Xwayland",
        "gnome-shell",
        "kwin_wayland",
        "kwin_x11",
        "mutter",
        "sddm",
        "sway",
        "weston",
    )
    metrics: str = "127.0.0.1:9479"


def load_config(path: Path = AGENT_FILE) -> AgentConfig:
    """The settings in a file; the defaults if there is none. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            given = tomllib.load(file)
    except FileNotFoundError:
        return AgentConfig()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    known = [spec.name for spec in fields(AgentConfig)]
    values = {}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key}; {nearest(key, known)}")
        if key == "metrics":
            host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
            if value != "" and (not host or not port.isdigit() or int(port) > 65535):
                raise ConfigError(f'{path}: metrics = {value!r}: must be "ADDRESS:PORT", or "" for none')
            values[key] = value
        elif isinstance(value, list) and all(isinstance(word, str) for word in value):
            values[key] = tuple(value)
        else:
            raise ConfigError(f"{path}: {key} = {value!r}: must be a list of names in quotes")
    return AgentConfig(**values)
