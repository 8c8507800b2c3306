"""What a planted fault is, and how it is put into a copy of the source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """One place that is changed.

    Attributes:
        path: of the file, under ``src/kvstow``.
        old: text that occurs exactly once in it.
        new: what stands there instead.
    """

    path: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Attributes:
        name: in a few words.
        breaks: which promise it breaks, and what that would cost a user.
        path, old, new: its edit, see `Edit`.
        more: further edits, where one is not enough.
    """

    name: str
    breaks: str
    path: str
    old: str
    new: str
    more: tuple[Edit, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All of its edits, in order."""
        return (Edit(self.path, self.old, self.new), *self.more)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that it changes."""
        paths = dict.fromkeys(edit.path for edit in self.edits)
        return tuple("kvstow." + path.removesuffix(".py").replace("/", ".") for path in paths)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the package that it changes, which are also the folders of their tests."""
        return tuple(dict.fromkeys(edit.path.split("/")[0] for edit in self.edits))

    def mutated(self, package: Path) -> dict[Path, str]:
        """The text of every file that it changes.

        Args:
            package: the folder of the package ``kvstow``.

        Raises:
            ValueError: the text of an edit does not occur exactly once, or what comes of it is no Python.
        """
        texts: dict[Path, str] = {}
        for edit in self.edits:
            path = package / edit.path
            text = texts.get(path) or path.read_text(encoding="utf-8")
            found = text.count(edit.old)
            if found != 1:
                raise ValueError(
                    f"{self.name}: {found} places in {edit.path} are {edit.old!r}; want exactly 1"
                )
            texts[path] = text.replace(edit.old, edit.new)
        for path, text in texts.items():
            try:
                compile(text, str(path), "exec")
            except SyntaxError as error:
                raise ValueError(f"{self.name}: {path} is no Python any more: {error}") from error
        return texts
