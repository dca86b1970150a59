"""A program as data: tensors over storages, steps of torch calls, results. It runs eagerly, as a kernel, and prints as a test."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg

HARD = "[0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -7.25, 1e-30, 1e-7, 300.0, -6e4, 1e30, inf, -inf, nan]"
"""Values at which formulas go wrong, as text."""

VALUES: dict[str, str] = {
    "normal": "torch.randn({size}, generator={generator})",
    "positive": "torch.rand({size}, generator={generator}) + 0.125",
    "moved": "100 + 10 * torch.randn({size}, generator={generator})",
    "small": "torch.randint(-4, 5, ({size},), generator={generator})",
    "natural": "torch.randint(1, 12, ({size},), generator={generator})",
    "wide": "torch.randint(-(2**40), 2**40, ({size},), generator={generator})",
    "hard": "torch.tensor({hard})[torch.randint(15, ({size},), generator={generator})]",
    "flags": "torch.randint(2, ({size},), generator={generator})",
}
"""How a storage is filled, as text; a generator of its own makes it independent of the others."""


@dataclass(frozen=True)
class Storage:
    """Memory that inputs lie in: a number of elements of a dtype (as torch names it), filled with a kind of values."""

    size: int
    dtype: str
    values: str = "normal"
    seed: int = 0

    @property
    def text(self) -> str:
        """An expression that makes it."""
        generator = f"torch.Generator().manual_seed({self.seed})"
        hard = HARD.replace("inf", 'float("inf")').replace("nan", 'float("nan")')
        return f"({VALUES[self.values].format(size=self.size, generator=generator, hard=hard)}).to(torch.{self.dtype})"


@dataclass(frozen=True)
class Input:
    """A tensor: a view of a storage. A hidden one is a variable that the function closes over."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    hidden: bool = False


@dataclass(frozen=True)
class Step:
    """A value: a call as a format of its operands, which are numbers of earlier values (inputs, scalars, steps)."""

    call: str
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Everything about a program; equal values are equal programs.

    Attributes:
        storages: memory that inputs share.
        inputs: tensors.
        scalars: run-time numbers.
        steps: in order.
        results: numbers of the values that are returned.
    """

    storages: tuple[Storage, ...]
    inputs: tuple[Input, ...]
    scalars: tuple[float, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    def name_of(self, value: int) -> str:
        """The variable that holds a value."""
        if value < len(self.inputs):
            return f"t{value}"
        value -= len(self.inputs)
        return f"s{value}" if value < len(self.scalars) else f"v{value - len(self.scalars)}"

    @property
    def parameters(self) -> list[str]:
        """The function's parameters."""
        visible = [self.name_of(k) for k, each in enumerate(self.inputs) if not each.hidden]
        return [*visible, *(f"s{k}" for k in range(len(self.scalars)))]

    @property
    def digest(self) -> str:
        """A short name that depends on everything."""
        return sha256(repr(self).encode()).hexdigest()[:12]

    def smaller(self) -> Iterator[Program]:
        """Programs with a result less, or with a step replaced by one of its operands, without what is no longer needed."""
        for k in range(len(self.results) if len(self.results) > 1 else 0):
            yield replace(self, results=self.results[:k] + self.results[k + 1 :]).without_idle()
        first = len(self.inputs) + len(self.scalars)
        for k, step in reversed(list(enumerate(self.steps))):
            for operand in dict.fromkeys(step.operands):
                moved = [Step(s.call, tuple(operand if o == first + k else o for o in s.operands)) for s in self.steps]
                results = tuple(operand if r == first + k else r for r in self.results)
                if len(set(results)) == len(results) and min(results) >= first:
                    yield replace(self, steps=tuple(moved), results=results).without_idle()

    def without_idle(self) -> Program:
        """Without steps that no result needs, and without inputs, scalars and storages that no step reads; one input stays."""
        first = len(self.inputs) + len(self.scalars)
        needed, stack = set(range(first)), list(self.results)
        read: set[int] = set()
        while stack:
            value = stack.pop()
            if value >= first and value not in needed:
                needed.add(value)
                read |= set(self.steps[value - first].operands)
                stack += self.steps[value - first].operands
        visible = [k for k in read if k < len(self.inputs) and not self.inputs[k].hidden]
        kept = [k for k in sorted(needed) if k >= first or k in read or (k == 0 and not visible)]
        number = {old: new for new, old in enumerate(kept)}
        inputs = [self.inputs[k] for k in kept if k < len(self.inputs)]
        memory = {old: new for new, old in enumerate(sorted({each.storage for each in inputs}))}
        return Program(
            tuple(self.storages[m] for m in memory),
            tuple(replace(each, storage=memory[each.storage]) for each in inputs),
            tuple(self.scalars[k - len(self.inputs)] for k in kept if len(self.inputs) <= k < first),
            tuple(Step(s.call, tuple(number[o] for o in s.operands)) for s in (self.steps[k - first] for k in kept if k >= first)),
            tuple(number[r] for r in self.results),
        )

    def function_text(self, name: str = "program") -> str:
        """The function."""
        first = len(self.inputs) + len(self.scalars)
        lines = [f"def {name}({', '.join(self.parameters)}):"]
        for number, step in enumerate(self.steps):
            call = step.call.format(*map(self.name_of, step.operands))
            lines.append(f"    {self.name_of(first + number)} = {call}")
        lines.append(f"    return {', '.join(map(self.name_of, self.results))}")
        return "\n".join(lines) + "\n"

    def tensors_text(self, device: str = "cpu") -> str:
        """Statements that make the inputs and the scalars."""
        moved = "" if device == "cpu" else f".to({device!r})"
        lines = [f"m{k} = {storage.text}{moved}" for k, storage in enumerate(self.storages)]
        made: dict[Input, str] = {}
        for k, each in enumerate(self.inputs):
            view = f"m{each.storage}.as_strided({each.shape}, {each.strides}, {each.offset})"
            lines.append(f"t{k} = {made.setdefault(each, f't{k}') if each in made and not each.hidden else view}")
            if not each.hidden:
                made.setdefault(each, f"t{k}")
        return "\n".join([*lines, *(f"s{k} = {value!r}" for k, value in enumerate(self.scalars))]) + "\n"

    def paste_text(self, device: str = "cpu") -> str:
        """A test of its own."""
        return (
            "import torch\nimport torch.nn.functional as F\n\nimport fusegen as fg\nfrom tests.fuzz.check import check\n\n"
            f"{self.tensors_text(device)}\n\n{self.function_text()}\n\n"
            f"def test_program():\n    check(program, [{', '.join(self.parameters)}])\n"
        )

    def build(self, device: str = "cpu") -> tuple[Callable[..., Any], list[Any]]:
        """The function, under a name of its own, and its arguments."""
        name = f"program_{self.digest}"
        text = self.function_text(name)
        file = f"<{name}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        space: dict[str, Any] = {"torch": torch, "F": F, "fg": fg}
        exec(_compiled(self.tensors_text(device), "<tensors>"), space)
        exec(compile(text, file, "exec"), space)
        return space[name], [space[p] for p in self.parameters]


@lru_cache(maxsize=256)
def _compiled(text: str, file: str) -> Any:
    return compile(text, file, "exec")


def tensors_of(function: Callable[..., Any], args: list[Any], names: list[str]) -> Mapping[str, Tensor]:
    """The tensors that a function takes, or closes over, by name."""
    inner = getattr(function, "__globals__", {})
    hidden = {name: value for name, value in inner.items() if isinstance(value, Tensor)}
    return hidden | {name: value for name, value in zip(names, args, strict=True) if isinstance(value, Tensor)}
