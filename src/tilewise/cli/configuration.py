"""`tilewise.toml`: defaults for options of all commands.

The file is read from the current folder, else from `~/.config/tilewise`. Options on the command line and environment
variables take precedence.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from tilewise._files import read_text_input
from tilewise.errors import ConfigurationError, TilewiseError

_KINDS: dict[str, type] = {"cache": str, "threads": int, "board": str}
_PARAMETERS = {"threads": "threads", "board": "where"}  # setting: parameter whose default it sets
_MAX_FILE_BYTES = 1 << 16  # arbitrary: rejects files that are not a short list of settings


def configuration_file() -> Path | None:
    """Return the configuration file that applies in the current folder, if any."""
    base = os.environ.get("XDG_CONFIG_HOME")
    config = Path(base) if base else Path("~/.config").expanduser()
    candidates = (Path("tilewise.toml"), config / "tilewise" / "tilewise.toml")
    return next((path for path in candidates if path.is_file()), None)


def read_configuration(path: Path) -> dict[str, Any]:
    """Read and check the settings of a file; errors name the file."""
    try:
        settings = tomllib.loads(read_text_input(path, _MAX_FILE_BYTES))
    except TilewiseError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read as TOML: {error}") from None
    for key, value in settings.items():
        if key not in _KINDS:
            raise ConfigurationError(f"{path}: there is no setting {key!r}; there are {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[key]) or isinstance(value, bool):
            kind = "a text in quotes" if _KINDS[key] is str else "a whole number"
            raise ConfigurationError(f"{path}: {key} must be {kind}, not {value!r}")
    return settings


def defaults(command: Any) -> dict[str, Any]:
    """Return the configured defaults of every command as a click `default_map`, and set the cache folder."""
    path = configuration_file()
    settings = read_configuration(path) if path is not None else {}
    if "cache" in settings:
        os.environ.setdefault("TILEWISE_CACHE", str(Path(settings["cache"]).expanduser()))
    settings_by_parameter = {_PARAMETERS[key]: value for key, value in settings.items() if key in _PARAMETERS}
    return _defaults_for(command, settings_by_parameter) if settings_by_parameter else {}


def _defaults_for(command: Any, settings_by_parameter: dict[str, Any]) -> dict[str, Any]:
    """Select the settings that a command, or each command of a group, has as parameters."""
    if hasattr(command, "commands"):
        return {name: _defaults_for(child, settings_by_parameter) for name, child in command.commands.items()}
    names = [parameter.name for parameter in command.params if parameter.name in settings_by_parameter]
    return {name: settings_by_parameter[name] for name in names}
