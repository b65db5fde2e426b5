"""`tilewise.toml`: what every command should know without being told. Read from the folder one is in, else from
`~/.config/tilewise`; an option or an environment variable that is given comes first.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from tilewise._files import read_text_input
from tilewise.errors import ConfigurationError, TilewiseError

_KINDS: dict[str, type] = {"cache": str, "threads": int, "board": str}
_PARAMETERS = {"threads": "threads", "board": "where"}  # key to the parameter it is the default of
_MOST_BYTES = 1 << 16


def configuration_file() -> Path | None:
    """The file that counts here."""
    base = os.environ.get("XDG_CONFIG_HOME")
    config = Path(base) if base else Path("~/.config").expanduser()
    places = (Path("tilewise.toml"), config / "tilewise" / "tilewise.toml")
    return next((place for place in places if place.is_file()), None)


def read_configuration(path: Path) -> dict[str, Any]:
    """The settings of a file, checked; a mistake is one sentence with the file's name."""
    try:
        settings = tomllib.loads(read_text_input(path, _MOST_BYTES))
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
    """What the configuration says, as the defaults of every command that has the option; sets the cache's folder."""
    path = configuration_file()
    settings = read_configuration(path) if path is not None else {}
    if "cache" in settings:
        os.environ.setdefault("TILEWISE_CACHE", str(Path(settings["cache"]).expanduser()))
    chosen = {_PARAMETERS[key]: value for key, value in settings.items() if key in _PARAMETERS}
    return _for(command, chosen) if chosen else {}


def _for(command: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    if hasattr(command, "commands"):
        return {name: _for(child, chosen) for name, child in command.commands.items()}
    return {parameter.name: chosen[parameter.name] for parameter in command.params if parameter.name in chosen}
