"""A built pass of a kernel: a function of its tensors, of sizes and of run-time numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fusegen.bundle.choose import Reasons, choose
from fusegen.bundle.kernels import Kernels
from fusegen.bundle.match import described, fit
from fusegen.errors import ArgumentError
from fusegen.program.numbers import Numbers
from fusegen.program.signature import ExtentArgument
from fusegen.runtime.arguments import check_memory, check_recorded, check_surroundings, check_values
from fusegen.runtime.bound import NOTHING, Bound, Facts, Hidden, Program
from fusegen.runtime.executable import Executable, Found, Plan
from fusegen.runtime.execute import bound_call
from fusegen.runtime.keys import Values


class BuiltPass(Plan):
    """A forward or a backward pass.

    Args:
        name: for messages.
        names: of its values.
        kernels: of its programs.
        movable: places of tensors that are copied in row-major order where no program takes them as they lie.
    """

    def __init__(self, name: str, names: Sequence[str], kernels: Sequence[Kernels], movable: range = range(0)) -> None:
        self._name, self._names, self._kernels, self._movable = name, tuple(names), tuple(kernels), movable
        self.executable = Executable(self)

    def __call__(self, values: Values) -> Sequence[Tensor]:
        """Runs the pass.

        Raises:
            ArgumentError: nothing was built for its tensors.
        """
        results: Sequence[Tensor] = self.executable(values)
        return results

    def statics(self) -> list[bool]:
        """Programs are bound to sizes, and to no number."""
        signatures = [each.program.signature for each in self._kernels]
        return [any(isinstance(s.arguments[n], ExtentArgument) for s in signatures) for n in range(len(self._names))]

    def check(self, values: Values) -> None:
        """Checks that the tensors can be read, and that nobody wants a derivative."""
        first = next(value for value in values if isinstance(value, Tensor))
        for name, value in zip(self._names, values, strict=True):
            if isinstance(value, Tensor):
                check_values(self._name, name, value)
                check_recorded(self._name, name, value)
                check_memory(self._name, name, value, first.device, "the first tensor")
        check_surroundings(self._name)

    def bind(self, values: Values) -> Found:
        """The program for the exact shapes of some values.

        Raises:
            ArgumentError: nothing was built for them.
        """
        found = self._bound(values)
        if isinstance(found, list) and self._movable:
            moved = self._bound(_in_rows(values, self._movable))
            found = moved if isinstance(moved, list) else _Moving(moved, self._movable)
        if isinstance(found, list):
            raise self._unfit(found)
        return found, NOTHING

    def sizes(self, values: Values) -> dict[str, int]:
        """Values of all sizes and strides.

        Raises:
            ArgumentError: nothing was built for them.
        """
        found = self._chosen(values)
        if isinstance(found, list):
            raise self._unfit(found)
        return found[1]

    def _chosen(self, values: Values) -> tuple[int, dict[str, int]] | Reasons:
        programs = enumerate(each.program for each in self._kernels)
        return choose(programs, lambda program: fit(program.signature, program.call, self._names, values), _device(values))

    def _bound(self, values: Values) -> Program | Reasons:
        found = self._chosen(values)
        if isinstance(found, list):
            return found
        number, sizes = found
        kernels, device = self._kernels[number], _device(values)
        call = kernels.program.call
        run = bound_call(call, tuple, sizes, device, *kernels.on(device))
        return Bound(run, Facts(call, Numbers(), {}, sizes, self._names), _uncomputable)

    def _unfit(self, reasons: Reasons) -> ArgumentError:
        what = "; ".join(dict.fromkeys(reason for _, reason in reasons)) or "nothing was built for as many rows"
        built = "; ".join(dict.fromkeys(described(program.signature, self._names) for program, _ in reasons))
        return ArgumentError(f"{self._name}: {what}", mend=f"build it for such a call too; it was built for {built}")


class _Moving(Program):
    """A program before which some tensors are copied in row-major order.

    Args:
        program: what runs then.
        places: of the tensors.
    """

    def __init__(self, program: Program, places: range) -> None:
        super().__init__(None, None, NOTHING)
        self._program, self._places = program, places

    def __call__(self, values: Values, hidden: Hidden) -> Any:
        return self._program(_in_rows(values, self._places), hidden)


def _in_rows(values: Values, places: range) -> list[Any]:
    """Values with copies of some tensors that lie in row-major order."""
    return [v.clone(memory_format=torch.contiguous_format) if n in places else v for n, v in enumerate(values)]


def _device(values: Values) -> torch.device:
    return next(value.device for value in values if isinstance(value, Tensor))


def _uncomputable(_: Values) -> NoReturn:
    """Raises what Python raised of a call's numbers."""
    raise
