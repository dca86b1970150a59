"""From tables of kinds and places to scenarios: one tour a kind, and random ones; the smallest scenario that is still wrong."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from string import Template

from tests.fuzz.scenario import replay
from tests.fuzz.state_kinds import GUARDED, Kind
from tests.fuzz.state_places import PLACES, Place
from tests.fuzz.state_refusable import REFUSABLE, REFUSED

KINDS = GUARDED | REFUSABLE

NUMBERS = (2.0, 3.0, 0.5)
"""Few, so that few texts are compiled."""

NAMES = (("v", "u"), ("a", "a_e"), ("w", "w_"), ("x_", "e"), ("f_", "f_1"), ("k", "result"))
"""Of two variables that hold state; some pairs are easily taken for one another."""

_SHRINKING = 10.0  # seconds

ARGUMENTS = (
    "ramp(2, 4)", "ramp(3, 4)", "ramp(2, 4)", "ramp(2, 3, 4)", "ramp(2, 4, dtype=torch.float64)", "ramp(3, 4, dtype=torch.int64)",
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """Statements, and when a refusal is right."""

    title: str
    statements: tuple[str, ...]
    refused: str = "False"

    @property
    def paste_text(self) -> str:
        """A test of its own."""
        lines = "\n".join(f"    {statement!r}," for statement in self.statements)
        end = "" if self.refused == "False" else f", {self.refused!r}"
        return (
            f"# {self.title}\nfrom tests.fuzz.scenario import check\n\nSTATEMENTS = [\n{lines}\n]\n\n\n"
            f"def test_scenario():\n    check(STATEMENTS{end})\n"
        )

    def wrong(self) -> str | None:
        """What is wrong with the smallest part of it that is; with a test to paste."""
        if replay(self.statements, self.refused) is None:
            return None
        small = _smallest(self, time.monotonic() + _SHRINKING)
        return f"{replay(small.statements, small.refused)}\n\n{small.paste_text}"


def _smallest(scenario: Scenario, until: float) -> Scenario:
    """Without statements that it is wrong without, as far as time suffices."""
    for number in reversed(range(len(scenario.statements))):
        if time.monotonic() > until:
            break
        left = scenario.statements[:number] + scenario.statements[number + 1 :]
        shorter = Scenario(scenario.title, left, scenario.refused)
        if replay(left, scenario.refused) is not None:
            return _smallest(shorter, until)
    return scenario


@dataclass
class Script:
    """Writes statements about some state that is read at some place.

    Attributes:
        kinds: of the state that one function reads.
        place: where it is read.
        names: of the variables.
    """

    kinds: tuple[Kind, ...]
    place: Place
    names: tuple[str, ...] = ("v", "u")
    statements: list[str] = field(default_factory=list)
    kernels: int = 0
    _values: Iterator[float] = field(default_factory=lambda: itertools.cycle(NUMBERS))

    def text(self, template: str, **known: str) -> str:
        """A template with its numbers and tensors, each another one than that before."""
        template = template.replace("$t", "(ramp(4) * $n)")
        while "$n" in template:
            template = template.replace("$n", str(next(self._values)), 1)
        return Template(template).substitute(known)

    def state(self, template: str, name: str) -> None:
        """A statement about state, where the state lies."""
        text = self.text(template, v=name, k="k0")
        if text:
            self.statements.append(f"exec({text!r}, vars(other))" if self.place.elsewhere else text)

    def make(self) -> None:
        """State, and a kernel that reads it: the first one, or one more of the same factory."""
        for kind, name in zip(self.kinds, self.names, strict=False):
            self.state(kind.setup, name)
        reads = [self.text(kind.read, v=name) for kind, name in zip(self.kinds, self.names, strict=False)]
        variables = ", ".join(self.names[: len(self.kinds)])
        known = {"read": ") + (".join(reads), "variables": variables, "k": f"k{self.kernels}"}
        own = self.kinds[0].function
        if not self.kernels and self.place.once and not own:
            once = self.text(self.place.once, **known)
            self.statements.append(f"exec({once!r}, vars(other))" if self.place.elsewhere else once)
        parts = [own or self.place.function, "$k = kernel(f)" if own else self.place.declare]
        self.statements += [text for text in (self.text(part, **known, v=self.names[0]) for part in parts) if text]
        self.kernels += 1

    def change(self, which: int, number: int) -> None:
        """A change of the state that a kind describes."""
        self.state(self.kinds[which].changes[number], self.names[which])

    def call(self, kernel: int, argument: str | None = None, way: int = 0, form: str = "{}") -> None:
        """A call, with the same argument as before or another one."""
        if argument:
            self.statements.append(f"x = {argument}")
        ways = self.kinds[0].calls
        owner = "other." if self.place.elsewhere else ""
        called = ways[way % len(ways)].replace("$v", owner + self.names[0])
        self.statements.append(f"r.append({form.format(self.text(called, k=f'k{kernel}'))})")

    def scenario(self, title: str, refused: str) -> Scenario:
        """What was written."""
        return Scenario(title, tuple(self.statements), refused)


def refusal(kinds: Sequence[str], place: Place, names: Sequence[str]) -> str:
    """When a kernel of such state may be refused."""
    if place.refused or any(kind not in GUARDED for kind in kinds):
        return "True"
    conditions = []
    for kind, name in zip(kinds, names, strict=False):
        condition = Template(KINDS[kind].refused).substitute(v=name)
        conditions.append(f"eval({condition!r}, vars(other))" if place.elsewhere else condition)
    return " or ".join(conditions)


def tour(kind: str, place: str = "function") -> Scenario:
    """Everything that a kind can do, in order: a call before and after each change, at sizes that were seen and at others."""
    script = Script((KINDS[kind],), PLACES[place])
    script.make()
    ways = len(KINDS[kind].calls)
    script.call(0, ARGUMENTS[0])
    for number in range(len(KINDS[kind].changes)):
        script.change(0, number)
        script.call(0, way=number)
    for way in range(ways):
        script.call(0, ARGUMENTS[1], way)
        script.call(0, ARGUMENTS[0], way)
    script.make()
    for number in (1, 0):
        script.call(number, form="quick(lambda: {})")
    works = place == "function" and kind in REFUSABLE and kind not in REFUSED
    return script.scenario(f"{kind}, {place}", "False" if works else refusal([kind], PLACES[place], script.names))


def drawn(seed: int) -> Scenario:
    """A random scenario."""
    rng = random.Random(seed)
    kinds = [rng.choice(list(KINDS))]
    mixes = not KINDS[kinds[0]].function
    if mixes and rng.random() < 0.5:
        kinds.append(rng.choice([name for name, kind in KINDS.items() if not kind.function and len(kind.calls) == 1]))
    place = rng.choice(list(PLACES)) if mixes else "function"
    script = Script(tuple(KINDS[kind] for kind in kinds), PLACES[place], rng.choice(NAMES))
    script.make()
    script.call(0, ARGUMENTS[0])
    for _ in range(rng.randint(2, 8)):
        _step(rng, script)
        script.call(rng.randrange(script.kernels), rng.choice((*ARGUMENTS, None)), rng.randrange(3))
    return script.scenario(f"seed {seed}: {', '.join(kinds)}; {place}", refusal(kinds, PLACES[place], script.names))


def _step(rng: random.Random, script: Script) -> None:
    """Something that happens between two calls."""
    which = rng.randrange(len(script.kinds))
    happening = rng.choice(["change"] * 6 + ["again", "write", "argument", "copy"])
    if happening == "change" and script.kinds[which].changes:
        script.change(which, rng.randrange(len(script.kinds[which].changes)))
    elif happening == "again" and script.kernels < 3:
        script.make()
    elif happening == "write":
        script.statements.append("r[-1].mul_(3)")
    elif happening == "argument":
        script.statements.append("x.mul_(2)")
    elif happening == "copy":
        number = rng.randrange(script.kernels)
        script.statements.append(f"k{number} = copy.deepcopy(k{number})")
