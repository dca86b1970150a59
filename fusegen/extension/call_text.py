"""A launch plan as C++ statements: memory, addresses, steps, in the order of `runtime.execute`, with sizes as expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.program.call import (
    MAX_BLOCK_BYTES,
    ROW_MULTIPLE,
    Buffer,
    CounterArgument,
    KernelLaunch,
    LaunchArgument,
    LaunchPlan,
    LibraryCall,
    Loop,
    MapArgument,
    MatmulCall,
    PointerArgument,
    RandomKey,
    Role,
    ScalarArgument,
    SizeArgument,
    StridedOperand,
    TensorMapSpec,
    launches_of,
    live_ranges,
)
from fusegen.program.formula import Formula, FormulaKind, formula_of

DTYPES: dict[DType, str] = {
    DType.FLOAT64: "at::kDouble",
    DType.FLOAT32: "at::kFloat",
    DType.BFLOAT16: "at::kBFloat16",
    DType.FLOAT16: "at::kHalf",
    DType.FLOAT8_E4M3FN: "at::kFloat8_e4m3fn",
    DType.FLOAT8_E5M2: "at::kFloat8_e5m2",
    DType.INT64: "at::kLong",
    DType.INT32: "at::kInt",
    DType.INT16: "at::kShort",
    DType.INT8: "at::kChar",
    DType.UINT8: "at::kByte",
    DType.BOOL: "at::kBool",
}

_FUNCTIONS = {FormulaKind.QUOTIENT: "fg::quotient", FormulaKind.REMAINDER: "fg::remainder"}


def size_name(name: str) -> str:
    """Returns the C++ variable of a size."""
    return f"s_{name}"


def number_name(name: str) -> str:
    """Returns the C++ variable of a run-time number."""
    return f"n_{name}"


def cpp_expression(formula: Formula) -> str:
    """Prints a formula as an expression of 64-bit integers."""
    if formula.operator is FormulaKind.SIZE:
        return size_name(str(formula.value))
    if formula.operator is FormulaKind.INTEGER:
        return f"int64_t({formula.value})"
    operands = [cpp_expression(operand) for operand in formula.operands]
    if formula.operator is FormulaKind.NEGATION:
        return f"(-{operands[0]})"
    if formula.operator is FormulaKind.MINIMUM:
        minimum = operands[0]
        for operand in operands[1:]:
            minimum = f"fg::least({minimum}, {operand})"
        return minimum
    if formula.operator in _FUNCTIONS:
        return f"{_FUNCTIONS[formula.operator]}({operands[0]}, {operands[1]})"
    return f"({f' {formula.operator.value} '.join(operands)})"


def cpp_list(formulas: Sequence[Formula]) -> str:
    return f"{{{', '.join(map(cpp_expression, formulas))}}}"


def string_literal(text: str) -> str:
    """Prints a text as a UTF-8 literal."""
    escaped = "".join(chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03o}" for byte in text.encode())
    return f'"{escaped}"'


def array_of(content: bytes) -> str:
    """Prints bytes as an array initializer."""
    rows = [",".join(map(str, content[start : start + 64])) for start in range(0, len(content), 64)]
    return "{\n" + ",\n".join(rows) + "}"


def results_type(count: int) -> str:
    """Returns the C++ type of an operator's results."""
    if count == 1:
        return "at::Tensor"
    return f"std::tuple<{', '.join(['at::Tensor'] * count)}>" if count else "void"


def results_schema(count: int) -> str:
    """Returns the schema type of an operator's results."""
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def return_value(results: Sequence[str]) -> str:
    return results[0] if len(results) == 1 else f"{{{', '.join(results)}}}" if results else ""


_EIGHT_BITS = dict.fromkeys((DType.INT8, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2), 0)  # UINT8: TMA only moves them
_KINDS = {DType.FLOAT16: 6, DType.FLOAT32: 7, DType.BFLOAT16: 9, **_EIGHT_BITS}
"""Element types of tensor maps, as numbered in ``cuda.h``."""


@dataclass(frozen=True)
class LaunchEntry:
    """The kernel of a launch.

    Attributes:
        name: of the C++ object that launches it on a GPU, or of the function on a CPU.
    """

    name: str
    is_cuda: bool


class CallText:
    """The C++ statements of a call.

    Args:
        entries: the kernels of its launches.
        number: returns the variable of a run-time number.
        is_inside: whether another call contains it, and handles its writes.

    Attributes:
        lines: the statements; `results` names the tensors that they produce.
        sizes: names of the sizes that they use.
        numbers: the run-time numbers that they use, and whether each is a float.
    """

    def __init__(
        self,
        call: LaunchPlan,
        entries: Sequence[LaunchEntry],
        number: Callable[[str], str] = number_name,
        *,
        is_inside: bool = False,
    ) -> None:
        self.call, self._number_variable = call, number
        self._written = () if is_inside else call.written
        self.sizes: dict[str, None] = {}
        self.numbers: dict[str, bool] = {}
        self._specs = {spec.key: spec for spec in call.buffers}
        self._library_allocated = call.library_allocated
        touched = [step.accesses for step in call.steps]
        self._slots = {
            spec.key: (index, [n for n, keys in enumerate(touched) if spec.key in keys])
            for index, spec in enumerate(
                spec for spec in call.buffers if spec.role is Role.TEMPORARY and spec.key not in self._library_allocated
            )
        }
        self._first_of, self._last_of = live_ranges(call)
        self._step_allocated = {spec.key for spec in self._outputs() if spec.key in self._first_of}.union(self._slots)
        self._used_as_tensors: set[int] = set()
        self._used_as_addresses: set[int] = set()  # among those that steps allocate
        self._addresses: dict[str, str] = {}
        steps = [self._step(number, entries) for number in range(len(call.steps))]
        self.results = [self.tensor(key) for key in call.results]
        lines = [line for n, step in enumerate(steps) for line in (*self._before_step(n), *step, *self._after_step(n))]
        self.lines = [
            *self._alias_checks(),
            *self._memory(),
            *self._keys(),
            *self._addresses.values(),
            *lines,
            *self._version_bumps(),
        ]

    def formula(self, formula: Formula) -> str:
        """Prints a formula, and records its sizes."""
        self.sizes |= dict.fromkeys(sorted(formula.sizes))
        return cpp_expression(formula)

    def formulas(self, formulas: Sequence[Formula]) -> str:
        for formula in formulas:
            self.formula(formula)
        return cpp_list(formulas)

    def tensor(self, key: int) -> str:
        """Returns the variable of a buffer as a tensor."""
        if key in self._slots:
            self._used_as_tensors.add(key)
        return _buffer_name(key)

    def _address(self, key: int) -> str:
        if key in self._library_allocated:  # allocated by an earlier step
            return f"fg::address({_buffer_name(key)})"
        name = _buffer_name(key)
        if key in self._step_allocated:
            self._used_as_addresses.add(key)
        else:
            self._addresses.setdefault(name, f"const int64_t at_{name} = fg::address({name});")
        return f"at_{name}"

    def _number(self, name: str, *, is_float: bool) -> str:
        self.numbers[name] = self.numbers.get(name, False) or is_float
        return self._number_variable(name)

    def _argument(self, argument: LaunchArgument) -> str:
        if isinstance(argument, PointerArgument):
            return self._address(argument.buffer)
        if isinstance(argument, SizeArgument):
            return self.formula(argument.formula)
        assert isinstance(argument, ScalarArgument)
        name = self._number(argument.name, is_float=argument.is_float)
        return f"double({name})" if argument.is_float else f"fg::integer({name})"

    def _alias_checks(self) -> list[str]:
        if not self._written:
            return []
        names = ", ".join(string_literal(name) for _, name in self.call.inputs)
        tensors = ", ".join(_buffer_name(key) for key, _ in self.call.inputs)
        return [f"fg::check_apart({{{names}}}, {{{tensors}}}, {position});" for position in self._written]

    def _memory(self) -> list[str]:
        lines = [
            f"at::Tensor {_buffer_name(o.key)} = {self._allocation(o.key)};"
            for o in self._outputs()
            if o.key not in self._step_allocated
        ]
        if not self._slots:
            return lines
        slots = [f"{{{self._bytes(key)}, {steps[0]}, {steps[-1]}}}" for key, (_, steps) in self._slots.items()]
        lines.append(f"std::vector<fg::Slot> slots{{{', '.join(slots)}}};")
        return [*lines, "const at::Tensor workspace = fg::workspace(slots, device);"]

    def _outputs(self) -> list[Buffer]:
        """Returns the results that no library function allocates."""
        return [spec for spec in self.call.buffers if spec.role is Role.OUTPUT and spec.key not in self._library_allocated]

    def _allocation(self, key: int) -> str:
        return f"fg::fresh({self.formulas(self._specs[key].shape)}, {DTYPES[self._specs[key].dtype]}, device)"

    def _before_step(self, number: int) -> list[str]:
        """Allocates the buffers that a step uses first; small ones are part of the workspace."""
        lines = []
        for key in sorted(key for key in self._step_allocated if self._first_of[key] == number):
            name, slot = _buffer_name(key), f"slots[{self._slots[key][0]}]" if key in self._slots else ""
            dtype = DTYPES[self._specs[key].dtype]
            value = f"fg::is_apart({slot}) ? {self._allocation(key)} : " if slot else self._allocation(key)
            if slot and key in self._used_as_tensors:
                value += f"fg::part(workspace, {slot}, {self.formulas(self._specs[key].shape)}, {dtype})"
            elif slot:
                value += "at::Tensor()"
            lines.append(f"at::Tensor {name} = {value};")
            if key in self._used_as_addresses:
                address = (
                    f"fg::is_apart({slot}) ? fg::address({name}) : fg::address(workspace) + {slot}.offset"
                    if slot
                    else f"fg::address({name})"
                )
                lines.append(f"const int64_t at_{name} = {address};")
        return lines

    def _after_step(self, number: int) -> list[str]:
        """Releases buffers after their last step."""
        releasable = (self._library_allocated | set(self._slots)) - set(self.call.results)
        return [f"{_buffer_name(key)}.reset();" for key in sorted(releasable) if self._last_of.get(key) == number]

    def _bytes(self, key: int) -> str:
        spec = self._specs[key]
        return " * ".join([f"int64_t({spec.dtype.itemsize})", *(self.formula(extent) for extent in spec.shape)])

    def _keys(self) -> list[str]:
        """Defines the keys of random bits; those without a source share one draw."""
        lines, drawn = [], ""
        for key in self.call.keys:
            value = self._explicit_key(key) or drawn or "fg::drawn_key(device)"
            lines.append(f"const at::Tensor {_buffer_name(key.buffer)} = {value};")
            drawn = drawn or ("" if key.source is not None else _buffer_name(key.buffer))
        return lines

    def _explicit_key(self, key: RandomKey) -> str:
        if isinstance(key.source, PointerArgument):
            return self.tensor(key.source.buffer)
        if isinstance(key.source, SizeArgument):
            return f"fg::key_of({self.formula(key.source.formula)}, device)"
        if isinstance(key.source, ScalarArgument):
            return f"fg::key_of(fg::integer({self._number(key.source.name, is_float=False)}), device)"
        return ""

    def _version_bumps(self) -> list[str]:
        return [f"fg::count_write({_buffer_name(self.call.inputs[position][0])});" for position in self._written]

    def _step(self, number: int, entries: Sequence[LaunchEntry]) -> list[str]:
        step = self.call.steps[number]
        if isinstance(step, MatmulCall):
            views = [self._strided(operand) for operand in (step.a, step.b, step.out)]
            if step.adds == formula_of(0):
                return [f"fg::multiply({', '.join(views)});"]
            return [f"({self.formula(step.adds)} ? fg::multiply_into : fg::multiply)({', '.join(views)});"]
        if isinstance(step, LibraryCall):
            return self._library_call(number, step)
        launch_index = sum(len(launches_of(previous)) for previous in self.call.steps[:number])
        if isinstance(step, Loop):
            return self._loop(step, entries[launch_index : launch_index + len(step.body.launches)])
        if not entries[launch_index].is_cuda:
            return self._host_launch(step, entries[launch_index])
        overlaps = self._follows(number, launch_index) if step.overlaps else "false"
        return self._cuda_launch(step, entries[launch_index], launch_index, overlaps)

    def _follows(self, number: int, launch_index: int) -> str:
        """Returns a condition: the previous step starts a kernel."""
        previous = self.call.steps[number - 1] if number else None
        if isinstance(previous, MatmulCall):
            return f"{self.formula(previous.products)} > 0"
        return f"grid_{launch_index - 1} > 0" if isinstance(previous, KernelLaunch) else "false"

    def _library_call(self, number: int, call: LibraryCall) -> list[str]:
        """Calls the function, and permutes its results to the expected layout."""
        requested = ", ".join(f"{{{result.number}, {DTYPES[self._specs[result.buffer].dtype]}}}" for result in call.results)
        settings = [f"{{{', '.join(map(repr, call.settings))}}}"] if call.settings else []
        operands = f"{{{', '.join(self._strided(operand) for operand in call.operands)}}}"
        arguments = ", ".join([f"{{{requested}}}", *settings, *map(self.formula, call.sizes), operands])
        lines = [f"std::vector<at::Tensor> made_{number} = fg::{call.function}({arguments});"]
        for index, result in enumerate(call.results):
            spec, order = self._specs[result.buffer], f"{{{', '.join(map(str, result.order))}}}"
            permuted = f"made_{number}[{index}].permute({order}).contiguous()"
            lines.append(f"at::Tensor {_buffer_name(result.buffer)} = {permuted}.view({self.formulas(spec.shape)});")
        return [*lines, f"made_{number}.clear();"]

    def _loop(self, loop: Loop, entries: Sequence[LaunchEntry]) -> list[str]:
        """Calls a lambda of the body's inputs for each block."""
        body = CallText(loop.body, entries, self._number_variable, is_inside=True)
        self.sizes |= {size: None for size in body.sizes if size not in (loop.start, loop.rows)}
        for name, is_float in body.numbers.items():
            self._number(name, is_float=is_float)
        arguments = ", ".join(self.tensor(key) for key in loop.operands)
        parameters = ", ".join(f"const at::Tensor& {_buffer_name(key)}" for key, _ in loop.body.inputs)
        start, rows = size_name(loop.start), size_name(loop.rows)
        of_bytes = f"{self.formula(loop.row_bytes)}, {self.formula(loop.sum_bytes)}"
        return [
            *(f"{self.tensor(key)}.zero_();" for key in loop.zeros),
            "{",
            f"  const int64_t extent = {self.formula(loop.extent)};",
            f"  const int64_t most = fg::rows_of_block(extent, {of_bytes}, {MAX_BLOCK_BYTES}, {ROW_MULTIPLE});",
            f"  for (int64_t {start} = 0; {start} < extent; {start} += most) {{",
            f"    [[maybe_unused]] const int64_t {rows} = std::min(most, extent - {start});",
            f"    [&]({parameters}) {{",
            *(f"      {line}" for line in body.lines),
            f"    }}({arguments});",
            "  }",
            "}",
        ]

    def _strided(self, operand: StridedOperand) -> str:
        view = f"{self.formulas(operand.shape)}, {self.formulas(operand.strides)}, {self.formula(operand.offset)}"
        return f"fg::view({self.tensor(operand.buffer)}, {view})"

    def _host_launch(self, launch: KernelLaunch, entry: LaunchEntry) -> list[str]:
        arguments = [self._argument(argument) for argument in launch.arguments]
        lines = ["const char* failed = nullptr;"] if launch.checks else []
        arguments += ["reinterpret_cast<int64_t>(&failed)"] if launch.checks else []
        lines += [f"const fg::Word words[] = {{{', '.join(arguments)}}};", f"{entry.name}(reinterpret_cast<const char*>(words));"]
        if launch.checks:
            lines.append("if (failed) fg::out_of_range(failed, sizes());")
        return ["{", *(f"  {line}" for line in lines), "}"]

    def _cuda_launch(self, launch: KernelLaunch, entry: LaunchEntry, index: int, overlaps: str) -> list[str]:
        lines, pointers = [], []
        for number, argument in enumerate(launch.arguments):
            if isinstance(argument, MapArgument):
                lines += self._tensor_map(f"a{number}", self._map(launch.tensor_maps[argument.number]))
            elif isinstance(argument, CounterArgument):
                lines += self._counter(f"a{number}")
            else:
                kind = "double" if isinstance(argument, ScalarArgument) and argument.is_float else "int64_t"
                lines.append(f"{kind} a{number} = {self._argument(argument)};")
            pointers.append(f"&a{number}")
        lines.append(f"void* arguments[] = {{{', '.join(pointers)}}};")
        lines.append(self._launch(launch, entry, index, overlaps))
        return [f"const int64_t grid_{index} = {self.formula(launch.grid)};", "{", *(f"  {line}" for line in lines), "}"]

    def _tensor_map(self, name: str, arguments: str) -> list[str]:
        return [f"fg::TensorMap {name} = fg::tensor_map(device.index(), {arguments});"]

    def _counter(self, name: str) -> list[str]:
        return [f"int64_t {name} = fg::counter_of(device.index(), stream);"]

    def _launch(self, launch: KernelLaunch, entry: LaunchEntry, index: int, overlaps: str) -> str:
        return f"fg::launch({entry.name}, device.index(), grid_{index}, {launch.block}, arguments, stream, {overlaps});"

    def _map(self, spec: TensorMapSpec) -> str:
        dtype = self._specs[spec.buffer].dtype
        start = f"{self._address(spec.buffer)} + {self.formula(spec.offset)} * {dtype.itemsize}, {_KINDS[dtype]}, {dtype.itemsize}"
        box = f"{{{', '.join(map(str, spec.box))}}}"
        return f"{start}, {self.formulas(spec.shape)}, {self.formulas(spec.strides)}, {box}"


def _buffer_name(key: int) -> str:
    return f"b{key}".replace("-", "_")


def sizes_text(names: Sequence[str]) -> str:
    """Defines a function that returns the sizes of a call by name, for messages."""
    pairs = ", ".join(f"{{{string_literal(name)}, {size_name(name)}}}" for name in names)
    return f"const auto sizes = [&]() -> fg::Named {{ return {{{pairs}}}; }};"
