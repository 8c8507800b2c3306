"""The catalogue fits the source as it is; that every fault is caught is for ``make mutants`` to see."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from catalogue import MUTANTS
from mutant import Edit, Mutant

import kvstow

PACKAGE = Path(kvstow.__file__).parent
LEAST = 100


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_applies(mutant: Mutant) -> None:
    mutated = mutant.mutated(PACKAGE)
    assert len(mutated) == len({edit.path for edit in mutant.edits}) == len(mutant.modules)
    assert all(text != path.read_text(encoding="utf-8") for path, text in mutated.items())


def test_there_are_enough_and_no_two_are_the_same() -> None:
    assert len(MUTANTS) >= LEAST
    names = Counter(mutant.name for mutant in MUTANTS)
    edits = Counter(mutant.edits for mutant in MUTANTS)
    assert [what for what, count in [*names.items(), *edits.items()] if count > 1] == []


def test_each_says_what_it_costs_in_one_sentence() -> None:
    assert [mutant.name for mutant in MUTANTS if not mutant.breaks.endswith(".")] == []
    assert [mutant.name for mutant in MUTANTS if ". " in mutant.breaks] == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("no such line", "x", "0 places"),
        ("a", "b", "2 places"),
        ("x = ", "x = = ", "no Python"),
    ],
)
def test_one_that_does_not_apply_says_why(tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "module.py").write_text("x = 1\na = a\n")
    with pytest.raises(ValueError, match=said):
        Mutant("one", "Nothing.", "module.py", old, new).mutated(tmp_path)


def test_edits_of_one_file_add_up(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = 1\ny = 2\n")
    mutant = Mutant("two", "Nothing.", "module.py", "1", "3", more=(Edit("module.py", "2", "4"),))
    assert mutant.mutated(tmp_path) == {tmp_path / "module.py": "x = 3\ny = 4\n"}
