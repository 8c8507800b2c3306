"""The table of docs/configuration.md, made from `Settings`.

``python -m kvstow.config.reference`` prints it.
"""

from __future__ import annotations

import typing

import msgspec

from kvstow.config.load import ENV_PREFIX, wanted
from kvstow.config.settings import Settings


def settings_table() -> str:
    """One Markdown row per key: name, environment variable, values, default, meaning."""
    types = typing.get_type_hints(Settings, include_extras=True)
    rows = ["| key | environment | values | default | meaning |", "|---|---|---|---|---|"]
    for field in msgspec.structs.fields(Settings):
        default = "none" if field.default is None else _shown(field.default)
        meaning = next(m.description for m in reversed(types[field.name].__metadata__) if m.description)
        variable = ENV_PREFIX + field.name.upper()
        rows.append(f"| `{field.name}` | `{variable}` | {wanted(field.name)} | `{default}` | {meaning} |")
    return "\n".join(rows) + "\n"


def _shown(default: object) -> str:
    """A default as one writes it in TOML."""
    match default:
        case bool():
            return str(default).lower()
        case str():
            return f'"{default}"'
        case float():
            return f"{default:g}"
        case _:
            return str(default)


if __name__ == "__main__":
    print(settings_table(), end="")
