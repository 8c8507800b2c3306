"""Reading the settings: a mapping over the environment over a file.

The only module that reads the environment. Every value is checked where it was found, also one
that a stronger source overrides; an unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import inspect

from kvstow.config.settings import Settings
from kvstow.errors import ConfigError

ENV_PREFIX = "KVSTOW_"
CONFIG_FILE = "config_file"
"""Names a TOML file of settings; a key of the mapping or the environment, not of the file."""

EXTRA_SOURCE = "kv_connector_extra_config"

_TYPES = typing.get_type_hints(Settings, include_extras=True)
_FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}


def load_settings(extra: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings of this engine. Called once, at start.

    Args:
        extra: settings by key, as an engine passes them on; the strongest source.
        environ: the environment; ``None`` reads the process's own. A variable ``KVSTOW_<KEY>``
            that is empty counts as not set; ``none`` stands for None where a key takes it.

    Returns:
        The settings, checked.

    Raises:
        ConfigError: an unknown key, a wrong type or range, or a file that cannot be read. Names
            the key, where it was found, its value, and what would be right.
    """
    variables = _read_environment(os.environ if environ is None else environ)
    options = dict(extra)
    file = options.pop(CONFIG_FILE, None)
    from_file: dict[str, object] = {}
    if file is not None:
        if not isinstance(file, str) or not file:
            raise ConfigError(f"{CONFIG_FILE}={file!r} ({EXTRA_SOURCE}): want the path of a TOML file")
        from_file = _read_file(Path(file), f"{CONFIG_FILE} in {EXTRA_SOURCE}")
    elif CONFIG_FILE in variables:
        from_file = _read_file(Path(variables[CONFIG_FILE]), ENV_PREFIX + CONFIG_FILE.upper())
    variables.pop(CONFIG_FILE, None)

    merged = from_file | _check_environment(variables) | _check(options, EXTRA_SOURCE)
    if "disk_gib" in merged and "disk_path" not in merged:
        raise ConfigError(
            f"disk_gib={merged['disk_gib']:g} is set without disk_path, so there is no disk tier; "
            "set disk_path, or leave disk_gib out"
        )
    return msgspec.convert(merged, Settings)


def wanted(key: str) -> str:
    """Say in words what values ``key`` takes; for errors and for the documentation."""
    return _wanted(inspect.type_info(_TYPES[key]))


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Non-empty ``KVSTOW_*`` variables by key."""
    known = {ENV_PREFIX + key.upper(): key for key in (*_FIELDS, CONFIG_FILE)}
    found: dict[str, str] = {}
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX):
            if name not in known:
                raise ConfigError(_unknown(name, "the environment", known))
            if environ[name]:
                found[known[name]] = environ[name]
    return found


def _read_file(path: Path, named_by: str) -> dict[str, object]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{named_by}: cannot read {path} ({error.strerror}); name a readable TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{named_by}: {path} is not TOML ({error}); correct that line") from error
    return _check(content, str(path))


def _check(found: Mapping[str, object], source: str) -> dict[str, object]:
    for key in found:
        if key not in _FIELDS:
            raise ConfigError(_unknown(str(key), source, (*_FIELDS, CONFIG_FILE)))
    return {key: _convert(key, key, value, source) for key, value in found.items()}


def _check_environment(variables: Mapping[str, str]) -> dict[str, object]:
    checked: dict[str, object] = {}
    for key, text in variables.items():
        takes_none = _FIELDS[key].default is None
        value = None if takes_none and text.lower() in ("none", "null") else text
        checked[key] = _convert(key, ENV_PREFIX + key.upper(), value, "the environment")
    return checked


def _convert(key: str, spelled: str, value: object, source: str) -> object:
    # Text from the environment has no types of its own; everywhere else "256" is not 256.
    is_text = source == "the environment"
    try:
        return msgspec.convert(value, _TYPES[key], strict=not is_text)
    except msgspec.ValidationError:
        raise ConfigError(f"{spelled}={value!r} ({source}): want {wanted(key)}") from None


def _unknown(key: str, source: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
    return f"unknown key {key} in {source}; {hint}"


def _wanted(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(type=inner, extra=extra):
            return str(extra["wanted"]) if extra and "wanted" in extra else _wanted(inner)
        case inspect.UnionType(types=types):
            named = [_wanted(inner) for inner in types if not isinstance(inner, inspect.NoneType)]
            return ", or ".join([*named, "none"])
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"a whole number, {kind.ge} to {kind.le}"
        case inspect.FloatType(gt=None):
            return f"a number, {kind.ge:g} to {kind.le:g}"
        case inspect.FloatType():
            return f"a number above {kind.gt:g}, at most {kind.le:g}"
        case _:
            raise TypeError(f"no words for {kind}")
