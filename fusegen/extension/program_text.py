"""A program as a C++ function that first checks its guards: shapes, strides, sizes, numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.extension.call_text import DTYPES, CallText, LaunchEntry, cpp_expression, number_name, size_name, sizes_text
from fusegen.program.call import MAX_BLOCK_BYTES, ROW_MULTIPLE, LaunchPlan, Loop
from fusegen.program.formula import Formula, FormulaKind, Relation
from fusegen.program.names import stride_name
from fusegen.program.numbers import TORCH_OPERATIONS, Numbers, Operation, Scalar
from fusegen.program.signature import TensorArgument

_WIDE, _WIDEST = 1 << 31, 1 << 56  # bounds of indices; bytes of values below the second one fit 64 bits


@dataclass(frozen=True)
class CallGuards:
    """The guards of a program on its calls.

    Attributes:
        tensors: all tensors, by name.
        sizes: names of the sizes that are not dims of tensors.
        numbers: the run-time numbers, with their dtypes.
        relations: of sizes.
        rows: relations that select one of several valid programs.
        conditions: on numbers.
        constants: values of numbers that are not arguments.
        index64: whether it uses 64-bit indexing.
        distinct: whether no tensor may occur twice.
    """

    tensors: tuple[tuple[str, TensorArgument], ...]
    sizes: tuple[str, ...]
    numbers: tuple[tuple[str, DType], ...]
    relations: tuple[Relation, ...]
    conditions: Numbers
    rows: tuple[Relation, ...] = ()
    constants: tuple[tuple[str, int | float], ...] = ()
    index64: bool = False
    distinct: bool = False


def program_lines(call: LaunchPlan, assumed: CallGuards, entries: Sequence[LaunchEntry]) -> list[str]:
    """Returns the lines of the emitted function's body. The function takes tensors ``t``, sizes ``z``, numbers ``n`` and
    results ``out``, and returns false if a guard fails.
    """
    names = [name for name, _ in assumed.tensors]
    text = CallText(call, entries, computed_name)
    computed = computed_numbers(call, assumed, text.numbers)
    inputs = [f"const at::Tensor& b{key} = t[{names.index(name)}];" for key, name in call.inputs]
    named = [sizes_text(list(text.sizes))] if any("sizes()" in line for line in text.lines) else []
    inputs_of_call = {key for key, _ in call.inputs}
    fresh = [result for key, result in zip(call.results, text.results, strict=True) if key not in inputs_of_call]
    ends = [f"out = {{{', '.join(fresh)}}};", "return true;"]
    return [*_Guards(assumed, call).lines(), *computed, *inputs, *named, *_device_setup(entries), *text.lines, *ends]


def computed_name(name: str) -> str:
    """Returns the C++ variable of a number that kernels take; the caller's numbers have other variables."""
    return f"k_{name}"


def computed_numbers(call: LaunchPlan, assumed: CallGuards, requested: Mapping[str, bool]) -> list[str]:
    """Defines the numbers that kernels take; ``requested`` maps their names to whether they are floats."""
    numbers = {name: dtype.is_float for name, dtype in assumed.numbers}
    scalars = NumberText(call.scalars, numbers, dict(assumed.constants), "v")
    values = {name: scalars.value(position) for name, position in call.scalars.results}
    defined = [
        f"const {'double' if is_float else 'int64_t'} {computed_name(name)} = {values.get(name, number_name(name))};"
        for name, is_float in requested.items()
    ]
    return [*scalars.lines, *defined]


def size_guards(assumed: CallGuards, call: LaunchPlan) -> list[str]:
    """Returns statements that return false if the sizes and strides, which are variables, violate a guard.

    The variable ``any`` disables the guards on row counts.
    """
    return _Guards(assumed, call).size_checks()


def number_guards(assumed: CallGuards, call: LaunchPlan) -> list[str]:
    """Returns statements that return false if the numbers, which are variables, violate a condition."""
    return _Guards(assumed, call).number_checks()


def _device_setup(entries: Sequence[LaunchEntry]) -> list[str]:
    lines = ["const at::Device device = t[0].device();"]
    if any(entry.is_cuda for entry in entries):
        lines += ["const c10::DeviceGuard guard(device);", "void* const stream = fg::current_stream(device.index());"]
    return lines


class _Guards:
    """Statements that return false if a guard fails."""

    def __init__(self, assumed: CallGuards, call: LaunchPlan) -> None:
        self._assumed, self._call = assumed, call

    def lines(self) -> list[str]:
        assumed = self._assumed
        statements = [line for n, (_, tensor) in enumerate(assumed.tensors) for line in self._kind(n, tensor)]
        statements += self._sizes()
        statements += self._strides()
        statements += [line for n, (_, tensor) in enumerate(assumed.tensors) for line in self._layout(n, tensor)]
        statements += [_require(_relation(relation)) for relation in (*assumed.relations, *assumed.rows)]
        statements += self._number_variables()
        if assumed.distinct:
            statements.append("if (fg::one_twice(t)) return false;")
        return statements + ([] if assumed.index64 else self._narrow())

    def size_checks(self) -> list[str]:
        assumed = self._assumed
        bound = _WIDEST if assumed.index64 else _WIDE
        names = {name for _, tensor in assumed.tensors for extent in (*tensor.shape, *tensor.strides) for name in extent.sizes}
        lines = [
            _require(f"{size_name(name)} >= 1 && {size_name(name)} < int64_t({bound})") for name in sorted(names | {*assumed.sizes})
        ]
        lines += [_require(_relation(relation)) for relation in assumed.relations]
        lines += [_require(f"any || {_relation(relation)}") for relation in assumed.rows]
        lines += [_span(tensor, bound) for _, tensor in assumed.tensors if any(tensor.own_strides)]
        return list(dict.fromkeys([*lines, *_narrow_counts(self._call, bound)]))

    def _kind(self, n: int, tensor: TensorArgument) -> list[str]:
        return [_require(f"t[{n}].dim() == {len(tensor.shape)} && t[{n}].scalar_type() == {DTYPES[tensor.dtype]}")]

    def _sizes(self) -> list[str]:
        sizes = self._assumed.sizes
        lines = [f"const int64_t {size_name(name)} = z[{sizes.index(name)}];" for name in dict.fromkeys(sizes)]
        checks = [_require(f"z[{n}] == {size_name(name)}") for n, name in enumerate(sizes) if n != sizes.index(name)]
        defined = set(sizes)
        for n, (_, tensor) in enumerate(self._assumed.tensors):
            for d, extent in enumerate(tensor.shape):
                if extent.operator is FormulaKind.SIZE and str(extent.value) not in defined:
                    defined.add(str(extent.value))
                    lines.append(f"const int64_t {size_name(str(extent.value))} = t[{n}].size({d});")
                    continue
                checks.append(_require(f"t[{n}].size({d}) == {cpp_expression(extent)}"))
        return lines + checks + [_require(f"{size_name(name)} >= 1") for name in sorted(defined)]

    def _layout(self, n: int, tensor: TensorArgument) -> list[str]:
        lines = []
        for d, stride in enumerate(tensor.strides):
            if not _is_free_stride(stride, tensor.shape):
                lines.append(_require(f"t[{n}].size({d}) == 1 || t[{n}].stride({d}) == {cpp_expression(stride)}"))
        free_dims = f"{{{', '.join(str(d) for d, is_free in enumerate(tensor.own_strides) if is_free)}}}"
        return [*lines, _require(f"fg::lies_at(t[{n}], {tensor.alignment}, {free_dims})")]

    def _strides(self) -> list[str]:
        return [
            f"[[maybe_unused]] const int64_t {size_name(stride_name(name, d))} = t[{n}].stride({d});"
            for n, (name, tensor) in enumerate(self._assumed.tensors)
            for d in range(len(tensor.shape))
        ]

    def _number_variables(self) -> list[str]:
        assumed = self._assumed
        kinds = {True: ("double", "real"), False: ("int64_t", "integer")}
        numbers = [(name, *kinds[dtype.is_float]) for name, dtype in assumed.numbers]
        lines = [f"const {kind} {number_name(name)} = n[{n}].{field};" for n, (name, kind, field) in enumerate(numbers)]
        return lines + self.number_checks()

    def number_checks(self) -> list[str]:
        assumed = self._assumed
        kinds = {name: dtype.is_float for name, dtype in assumed.numbers}
        conditions = NumberText(assumed.conditions, kinds, dict(assumed.constants), "c")
        lines: list[str] = []
        for _, position in assumed.conditions.results:  # later conditions may be valid only if earlier ones hold
            value = conditions.value(position)
            lines += [line for line in conditions.lines if line not in lines]
            lines.append(_require(value))
        return (
            ["try {", *(f"  {line}" for line in lines), "} catch (const std::domain_error&) {", "  return false;", "}"]
            if lines
            else []
        )

    def _narrow(self) -> list[str]:
        spans = [_require(f"fg::elements(t[{n}]) < int64_t({_WIDE})") for n in range(len(self._assumed.tensors))]
        return spans + _narrow_counts(self._call, _WIDE)


def _span(tensor: TensorArgument, bound: int) -> str:
    """Checks that a bound exceeds the number of elements from the first to the last, for strides that no size implies."""
    steps = [
        f"({cpp_expression(extent)} - 1) * {cpp_expression(stride)}"
        for extent, stride in zip(tensor.shape, tensor.strides, strict=True)
    ]
    return _require(f"{' + '.join(steps)} < int64_t({bound - 1})")


def _narrow_counts(call: LaunchPlan, bound: int) -> list[str]:
    """Checks that a bound exceeds all indices of a call, and of the first blocks of its loops."""
    used = {key for step in call.steps for key in step.accesses}
    shapes = [*(buffer.shape for buffer in call.buffers if buffer.key in used), *((count,) for count in call.counts)]
    varying = [shape for shape in shapes if any(extent.sizes for extent in shape) or math.prod(n({}) for n in shape) >= bound]
    lines = [_require(f"{' * '.join(map(cpp_expression, shape))} < int64_t({bound})") for shape in varying]
    for loop in call.steps:
        if isinstance(loop, Loop):
            arguments = ", ".join(
                [*map(cpp_expression, (loop.extent, loop.row_bytes, loop.sum_bytes)), str(MAX_BLOCK_BYTES), str(ROW_MULTIPLE)]
            )
            block = {loop.start: "0", loop.rows: f"fg::rows_of_block({arguments})"}
            sizes = [f"[[maybe_unused]] const int64_t {size_name(name)} = {value};" for name, value in block.items()]
            body = [*sizes, *_narrow_counts(loop.body, bound)]
            lines += ["{", *(f"  {line}" for line in body), "}"]
    return lines


def _is_free_stride(stride: Formula, shape: Sequence[Formula]) -> bool:
    """Returns True if a stride has its own symbol."""
    return stride.operator is FormulaKind.SIZE and not any(stride.sizes <= extent.sizes for extent in shape)


def _require(condition: str) -> str:
    return f"if (!({condition})) return false;"


def _relation(relation: Relation) -> str:
    return f"{cpp_expression(relation.left)} {relation.sign} {cpp_expression(relation.right)}"


# Number arithmetic of `program.numbers` in C++, with Python's semantics.


_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_HELPERS = (
    "bitwise_and", "bitwise_or", "bitwise_xor",
    "copy", "neg", "abs", "add", "sub", "mul", "div", "floor_divide", "remainder", "pow",
    "bitwise_left_shift", "bitwise_right_shift", "exp_below",
)  # fmt: skip
_MATH_FUNCTIONS = ("exp", "expm1", "log", "log1p", "log2", "sqrt", "sin", "cos", "tanh", "erf", "erfc")


class NumberText:
    """Prints number arithmetic.

    Args:
        numbers: the run-time numbers, and whether each is a float.
        constants: values of the others.
        stem: prefix of variables.
    """

    def __init__(self, program: Numbers, numbers: Mapping[str, bool], constants: Mapping[str, int | float], stem: str) -> None:
        self._program, self._numbers, self._constants, self._stem = program, numbers, constants, stem
        self._lines: dict[int, str] = {}

    @property
    def lines(self) -> list[str]:
        """Definitions of the requested values, in order."""
        return [line for _, line in sorted(self._lines.items())]

    def value(self, position: int) -> str:
        line = self._program.lines[position]
        if isinstance(line, Scalar):
            return number_name(line.name) if line.name in self._numbers else literal_of(self._constants[line.name])
        if isinstance(line, Formula):
            return cpp_expression(line)
        if not isinstance(line, Operation):
            return literal_of(line)
        if position not in self._lines:
            operands = [self.value(operand) for operand in line.operands]
            self._lines[position] = f"const auto {self._stem}{position} = {_operation(line.name, operands)};"
        return f"{self._stem}{position}"


def literal_of(value: float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"int64_t({value})"
    if math.isnan(value):
        return 'std::nan("")'
    return value.hex() if math.isfinite(value) else f"{'-' if value < 0 else ''}HUGE_VAL"


def _operation(name: str, operands: Sequence[str]) -> str:
    if name in _SIGNS:
        return f"({operands[0]} {_SIGNS[name]} {operands[1]})"
    if name in _HELPERS:
        return f"py::{name}({', '.join(operands)})"
    if name in _MATH_FUNCTIONS:
        return f"py::applied(std::{name}, {operands[0]})"
    if name == "atan2":
        return f"std::atan2(double({operands[0]}), double({operands[1]}))"
    if name == "one_plus_erf":
        return f"std::erfc(-double({operands[0]}))"
    if name == "logical_not":
        return f"(!{operands[0]})"
    if name == "where":
        return f"({operands[0]} ? {operands[1]} : {operands[2]})"
    assert name in TORCH_OPERATIONS
    return f"py::by_torch([](const auto&... given) {{ return at::{name}(given...); }}, {', '.join(operands)})"
