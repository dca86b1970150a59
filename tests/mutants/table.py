"""The planted bugs: one line of the repository each, and the test that notices."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        name: in the table.
        file: from the repository's root.
        old: text that occurs once in the file.
        new: what stands there instead.
        why: what is wrong then.
        caught_by: the node id of a test that fails.
        hardware: why only a GPU can show what the bug does, where that is so; `caught_by` then sees that the text changed.
        gpu_test: the node id of the GPU test that shows it, where there is one.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    caught_by: str
    hardware: str = ""
    gpu_test: str = ""

    def planted_in(self, text: str) -> str:
        """The file's text with the bug.

        Raises:
            ValueError: the old text does not occur exactly once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} occurs {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """All of the table, in its order."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [Mutant(name=name, **row) for name, row in rows.items()]
