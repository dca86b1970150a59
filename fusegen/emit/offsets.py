"""Offsets in emitted text, with the indices in them that a kernel reads and checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import sympy

from fusegen.emit.text import c_text, condition_text
from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Index
from fusegen.schedule.access import Access
from fusegen.schedule.indices import Check, Checked, Choice, Differs, Loaded, Scalar
from fusegen.schedule.kernel import Kernel, Pointer
from fusegen.schedule.names import plain

_CALLS = (Loaded, Checked, Choice, Differs, Scalar)


@dataclass(frozen=True)
class Offsets:
    """How a kernel writes the places that it reads and writes.

    Attributes:
        kernel: its name.
        pointers: its buffers, by key.
        load: the format of an integer that is read: of a pointer and an offset.
        checked: the format of an index that is checked: of the function, the value, the extent and the message.
        prefix: of the names of its buffers.
        named: what indices are called that are found before they are used.
        lines: the statements that find them, by name.
    """

    kernel: str
    pointers: Mapping[int, Pointer]
    load: str
    checked: str
    prefix: str = ""
    named: Mapping[sympy.Expr, str] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)

    def text(self, index: Index) -> str:
        """An offset, or any index."""
        if isinstance(index, int) or not index.has(*_CALLS):
            return c_text(index)
        return c_text(self._written(index.subs({call: _word(name) for call, name in self.named.items()})))

    def condition(self, bounds: Iterable[Bounds]) -> str:
        """Conditions, all of which must hold; nothing where there are none."""
        return " && ".join(condition_text(b) for b in bounds)

    def found_first(self, accesses: Iterable[Access], varying: Collection[sympy.Symbol]) -> Offsets:
        """How offsets are written behind statements that find the indices which are the same along some axes.

        Args:
            varying: the axes along which accesses run.
        """
        named: dict[sympy.Expr, str] = {}
        found = _invariant(accesses, frozenset(varying))
        for call in found:
            stem = f"{plain(call.table)}_at"
            number = sum(name.rstrip("0123456789") == stem for name in named.values())
            named[call] = f"{stem}{number or ''}"
        lines = {name: self._finding(name, call, found[call]) for call, name in named.items()}
        return replace(self, named=named, lines=lines)

    def _finding(self, name: str, call: Checked, conditions: tuple[Bounds, ...]) -> str:
        condition = self.condition(conditions)
        return f"const Index {name} = {f'!({condition}) ? 0 : ' if condition else ''}{self.text(call)};"

    def indices(self, accesses: Iterable[Access]) -> list[str]:
        """The statements that find what some accesses need."""
        needed = {name for a in accesses for call, name in self.named.items() if sympy.sympify(a.offset).has(call)}
        return [line for name, line in self.lines.items() if name in needed]

    def check(self, check: Check) -> str:
        """A statement that checks an index, whether it was found before or not."""
        condition = self.condition(check.conditions)
        return f"{f'if ({condition}) ' if condition else ''}{c_text(self._written(check.call))};"

    def _written(self, expression: sympy.Expr) -> sympy.Expr:
        """An expression whose values that are read are words: the innermost first."""
        while calls := expression.atoms(*_CALLS):
            innermost = [call for call in calls if not any(a.has(*_CALLS) for a in call.args)]
            expression = expression.subs({call: _word(self._call(call)) for call in innermost})
        return expression

    def _call(self, call: Loaded | Checked | Choice | Differs | Scalar) -> str:
        if isinstance(call, Scalar):
            return call.name
        if isinstance(call, Differs):
            return " != ".join(map(c_text, call.args))
        if isinstance(call, Choice):
            return f"choose({', '.join(map(c_text, call.args))})"
        if isinstance(call, Loaded):
            return self.load.format(f"{self.prefix}{self.pointers[call.buffer].name}", c_text(call.offset))
        function = "wrapped_index" if call.wraps else "checked_index"
        return self.checked.format(function, *map(c_text, call.args[:2]), f"fusegen: {self.kernel}: {call.message}")


def cuda_offsets(kernel: Kernel, prefix: str = "") -> Offsets:
    """How a CUDA kernel writes offsets."""
    pointers = {p.buffer: p for p in kernel.pointers}
    return Offsets(kernel.name, pointers, "widen(load_once({}, {}))", '{}({}, {}, "{}")', prefix)


def cpu_offsets(kernel: Kernel) -> Offsets:
    """How a kernel of the CPU target writes offsets."""
    pointers = {p.buffer: p for p in kernel.pointers}
    return Offsets(kernel.name, pointers, "widen({}[{}])", '{}({}, {}, "{}", failed)')


def _word(text: str) -> sympy.Symbol:
    return sympy.Symbol(text, integer=True)


def _invariant(accesses: Iterable[Access], varying: frozenset[sympy.Symbol]) -> dict[Checked, tuple[Bounds, ...]]:
    """Indices that do not depend on some axes, each with the conditions under which it can be read; those within others and those
    that can be read under several conditions are left out."""
    found: dict[Checked, set[tuple[Bounds, ...]]] = {}
    for access in accesses:
        calls = set() if isinstance(access.offset, int) else access.offset.atoms(Checked)
        same = {call for call in calls if not call.free_symbols & varying}
        outer = (call for call in same if not any(call is not other and other.has(call) for other in same))
        conditions = tuple(b for b in access.conditions if not sympy.sympify(b.index).free_symbols & varying)
        for call in sorted(outer, key=str):
            found.setdefault(call, set()).add(conditions)
    always: set[tuple[Bounds, ...]] = {()}
    return {call: () if () in under else next(iter(under)) for call, under in found.items() if len(under) == 1 or always & under}
