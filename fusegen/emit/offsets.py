"""Offsets in emitted text, with the indices in them that a kernel reads and checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import sympy

from fusegen.emit.text import c_text, condition_text
from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Index
from fusegen.schedule.access import Access
from fusegen.schedule.indices import Checked, Loaded
from fusegen.schedule.kernel import Kernel, Pointer


@dataclass(frozen=True)
class Offsets:
    """How a kernel writes the places that it reads and writes.

    Attributes:
        kernel: its name.
        pointers: its buffers, by key.
        load: the format of an integer that is read: of a pointer and an offset.
        check: the format of an index that is checked: of the function, the value, the extent and the message.
        prefix: of the names of its buffers and sizes.
        named: what indices are called that are found before they are used.
    """

    kernel: str
    pointers: Mapping[int, Pointer]
    load: str
    check: str
    prefix: str = ""
    named: Mapping[sympy.Expr, str] = field(default_factory=dict)

    def text(self, index: Index) -> str:
        """An offset, or any index."""
        if isinstance(index, int) or not index.has(Loaded, Checked):
            return c_text(index)
        return c_text(self._written(index.subs({call: _word(name) for call, name in self.named.items()})))

    def condition(self, bounds: Iterable[Bounds]) -> str:
        """Conditions, all of which must hold; nothing where there are none."""
        return " && ".join(condition_text(b) for b in bounds)

    def found_first(self, accesses: Iterable[Access], varying: Collection[sympy.Symbol]) -> tuple[list[str], Offsets]:
        """Statements that find the indices which are the same along some axes, and how offsets are written behind them.

        Args:
            varying: the axes along which accesses run.
        """
        lines: list[str] = []
        named: dict[sympy.Expr, str] = {}
        for call, conditions in _invariant(accesses, frozenset(varying)).items():
            name = self._name(call, named)
            condition = self.condition(conditions)
            lines.append(f"const Index {name} = {f'!({condition}) ? 0 : ' if condition else ''}{self.text(call)};")
            named[call] = name
        return lines, replace(self, named=named)

    def _name(self, call: Checked, others: Mapping[sympy.Expr, str]) -> str:
        number = sum(other.buffer == call.buffer for other in others)
        return f"{self._buffer(call)}_at{number or ''}"

    def _buffer(self, call: Checked) -> str:
        """The name of the buffer that is indexed."""
        return self.pointers[call.buffer].name.removesuffix("_ptr") if call.buffer >= 0 else "value"

    def _written(self, expression: sympy.Expr) -> sympy.Expr:
        """An expression whose values that are read are words: the innermost first."""
        while calls := expression.atoms(Loaded, Checked):
            innermost = [call for call in calls if not any(a.has(Loaded, Checked) for a in call.args)]
            expression = expression.subs({call: _word(self._call(call)) for call in innermost})
        return expression

    def _call(self, call: Loaded | Checked) -> str:
        if isinstance(call, Loaded):
            return self.load.format(f"{self.prefix}{self.pointers[call.buffer].name}", c_text(call.offset))
        extent = c_text(call.args[1])
        function = "wrapped_index" if call.wraps else "checked_index"
        return self.check.format(function, c_text(call.args[0]), extent, self._message(call, extent))

    def _message(self, call: Checked, extent: str) -> str:
        known = extent.replace(self.prefix, "") if self.prefix else extent
        first = (f"-{known}" if known.isidentifier() or known.isdigit() else f"-({known})") if call.wraps else "0"
        return f"fusegen: {self.kernel}: index of '{self._buffer(call)}' out of range [{first}, {known})"


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
