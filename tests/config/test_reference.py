"""docs/configuration.md says what the code says."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvstow.config import Settings
from kvstow.config.reference import settings_table

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_docs_hold_the_table_made_from_the_settings() -> None:
    assert settings_table() in DOCS.read_text(), "run python -m kvstow.config.reference and paste its table"


def test_the_table_has_every_key_with_its_variable_default_and_a_meaning() -> None:
    rows = settings_table().splitlines()[2:]
    for row, field in zip(rows, msgspec.structs.fields(Settings), strict=True):
        key, variable, values, default, meaning = (cell.strip() for cell in row.strip("|").split("|"))
        assert key == f"`{field.name}`"
        assert variable == f"`KVSTOW_{field.name.upper()}`"
        assert values
        assert default != "``"
        assert len(meaning) > 40
