"""A call as statements of C++: memory, addresses, steps, in the order of `runtime.execute`, with all sizes as expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.program.call import (
    MAX_BLOCK_BYTES,
    ROW_MULTIPLE,
    Buffer,
    KernelLaunch,
    LaunchArgument,
    LaunchPlan,
    LibraryCall,
    Loop,
    MapArgument,
    MatrixProduct,
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

# Formulas, types and texts of a call as C++.


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
"""Element types as ATen has them."""

_CALLED = {FormulaKind.QUOTIENT: "fg::quotient", FormulaKind.REMAINDER: "fg::remainder"}


def size_name(name: str) -> str:
    """The variable of a size."""
    return f"s_{name}"


def number_name(name: str) -> str:
    """The variable of a run-time number."""
    return f"n_{name}"


def spelled(formula: Formula) -> str:
    """A formula as an expression of 64-bit integers."""
    if formula.operator is FormulaKind.SIZE:
        return size_name(str(formula.value))
    if formula.operator is FormulaKind.INTEGER:
        return f"int64_t({formula.value})"
    operands = [spelled(operand) for operand in formula.operands]
    if formula.operator is FormulaKind.NEGATION:
        return f"(-{operands[0]})"
    if formula.operator is FormulaKind.MINIMUM:
        found = operands[0]
        for operand in operands[1:]:
            found = f"fg::least({found}, {operand})"
        return found
    if formula.operator in _CALLED:
        return f"{_CALLED[formula.operator]}({operands[0]}, {operands[1]})"
    return f"({f' {formula.operator.value} '.join(operands)})"


def spelled_list(formulas: Sequence[Formula]) -> str:
    """Formulas as a braced list."""
    return f"{{{', '.join(map(spelled, formulas))}}}"


def quoted(text: str) -> str:
    """A text as a literal, in UTF-8."""
    escaped = "".join(chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03o}" for byte in text.encode())
    return f'"{escaped}"'


def array_of(content: bytes) -> str:
    """Machine code as the numbers of an array."""
    rows = [",".join(map(str, content[start : start + 64])) for start in range(0, len(content), 64)]
    return "{\n" + ",\n".join(rows) + "}"


def results_type(count: int) -> str:
    """The C++ type of an operator's results."""
    if count == 1:
        return "at::Tensor"
    return f"std::tuple<{', '.join(['at::Tensor'] * count)}>" if count else "void"


def results_schema(count: int) -> str:
    """The same as schemas have it."""
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def returned(results: Sequence[str]) -> str:
    """The operand of an operator's ``return``."""
    return results[0] if len(results) == 1 else f"{{{', '.join(results)}}}" if results else ""


# Calls.


_KINDS = {DType.FLOAT16: 6, DType.FLOAT32: 7, DType.BFLOAT16: 9}
"""Element types of tensor maps, by their numbers in ``cuda.h``."""


@dataclass(frozen=True)
class LaunchEntry:
    """The kernel of a launch.

    Attributes:
        name: of the C++ object that launches it on a GPU, or of the function that is it on a CPU.
        is_cuda: which of the two.
    """

    name: str
    is_cuda: bool


class CallText:
    """The statements of a call.

    Args:
        call: what is done.
        entries: the kernels of its launches.
        number: names the variable of a run-time number.
        is_inside: whether another call makes it, so that what it writes to has been seen to.

    Attributes:
        lines: the statements; `results` names the tensors that they end with.
        sizes: names of the sizes that they read.
        numbers: the run-time numbers that they read, with whether each is a float.
    """

    def __init__(
        self,
        call: LaunchPlan,
        entries: Sequence[LaunchEntry],
        number: Callable[[str], str] = number_name,
        *,
        is_inside: bool = False,
    ) -> None:
        self.call, self._named_number = call, number
        self._written = () if is_inside else call.written
        self.sizes: dict[str, None] = {}
        self.numbers: dict[str, bool] = {}
        self._specs = {spec.key: spec for spec in call.buffers}
        self._made = call.library_allocated
        touched = [step.accesses for step in call.steps]
        self._slots = {
            spec.key: (place, [n for n, keys in enumerate(touched) if spec.key in keys])
            for place, spec in enumerate(
                spec for spec in call.buffers if spec.role is Role.TEMPORARY and spec.key not in self._made
            )
        }
        self._first_of, self._last_of = live_ranges(call)
        self._late = {spec.key for spec in self._outputs() if spec.key in self._first_of}.union(self._slots)
        self._parts: set[int] = set()  # temporaries that are needed as tensors
        self._located: set[int] = set()  # buffers that a step allocates, and of which one needs the address
        self._addresses: dict[str, str] = {}
        steps = [self._step(number, entries) for number in range(len(call.steps))]
        self.results = [self.tensor(key) for key in call.results]
        lines = [line for n, step in enumerate(steps) for line in (*self._begin(n), *step, *self._end(n))]
        self.lines = [*self._checks(), *self._memory(), *self._keys(), *self._addresses.values(), *lines, *self._counted()]

    # Names.

    def formula(self, formula: Formula) -> str:
        """A formula, whose sizes are noted."""
        self.sizes |= dict.fromkeys(sorted(formula.sizes))
        return spelled(formula)

    def formulas(self, formulas: Sequence[Formula]) -> str:
        """A list of formulas, likewise."""
        for formula in formulas:
            self.formula(formula)
        return spelled_list(formulas)

    def tensor(self, key: int) -> str:
        """The variable of a buffer as a tensor."""
        if key in self._slots:
            self._parts.add(key)
        return _named(key)

    def _address(self, key: int) -> str:
        if key in self._made:  # which a step before this one allocates
            return f"fg::address({_named(key)})"
        name = _named(key)
        if key in self._late:
            self._located.add(key)
        else:
            self._addresses.setdefault(name, f"const int64_t at_{name} = fg::address({name});")
        return f"at_{name}"

    def _number(self, name: str, *, is_float: bool) -> str:
        self.numbers[name] = self.numbers.get(name, False) or is_float
        return self._named_number(name)

    def _argument(self, argument: LaunchArgument) -> str:
        if isinstance(argument, PointerArgument):
            return self._address(argument.buffer)
        if isinstance(argument, SizeArgument):
            return self.formula(argument.formula)
        assert isinstance(argument, ScalarArgument)
        name = self._number(argument.name, is_float=argument.is_float)
        return f"double({name})" if argument.is_float else f"fg::integer({name})"

    # Before the steps.

    def _checks(self) -> list[str]:
        if not self._written:
            return []
        names = ", ".join(quoted(name) for _, name in self.call.inputs)
        tensors = ", ".join(_named(key) for key, _ in self.call.inputs)
        return [f"fg::check_apart({{{names}}}, {{{tensors}}}, {place});" for place in self._written]

    def _memory(self) -> list[str]:
        lines = [f"at::Tensor {_named(o.key)} = {self._fresh(o.key)};" for o in self._outputs() if o.key not in self._late]
        if not self._slots:
            return lines
        slots = [f"{{{self._bytes(key)}, {used[0]}, {used[-1]}}}" for key, (_, used) in self._slots.items()]
        lines.append(f"std::vector<fg::Slot> slots{{{', '.join(slots)}}};")
        return [*lines, "const at::Tensor workspace = fg::workspace(slots, device);"]

    def _outputs(self) -> list[Buffer]:
        """Results that no library allocates."""
        return [spec for spec in self.call.buffers if spec.role is Role.OUTPUT and spec.key not in self._made]

    def _fresh(self, key: int) -> str:
        return f"fg::fresh({self.formulas(self._specs[key].shape)}, {DTYPES[self._specs[key].dtype]}, device)"

    def _begin(self, number: int) -> list[str]:
        """Allocates values that no step before this one knows; small ones have their places in the workspace."""
        lines = []
        for key in sorted(key for key in self._late if self._first_of[key] == number):
            name, slot = _named(key), f"slots[{self._slots[key][0]}]" if key in self._slots else ""
            dtype = DTYPES[self._specs[key].dtype]
            made = f"fg::is_apart({slot}) ? {self._fresh(key)} : " if slot else self._fresh(key)
            if slot and key in self._parts:
                made += f"fg::part(workspace, {slot}, {self.formulas(self._specs[key].shape)}, {dtype})"
            elif slot:
                made += "at::Tensor()"
            lines.append(f"at::Tensor {name} = {made};")
            if key in self._located:
                at = (
                    f"fg::is_apart({slot}) ? fg::address({name}) : fg::address(workspace) + {slot}.offset"
                    if slot
                    else f"fg::address({name})"
                )
                lines.append(f"const int64_t at_{name} = {at};")
        return lines

    def _end(self, number: int) -> list[str]:
        """Lets go of values that no step behind this one knows."""
        own = (self._made | set(self._slots)) - set(self.call.results)
        return [f"{_named(key)}.reset();" for key in sorted(own) if self._last_of.get(key) == number]

    def _bytes(self, key: int) -> str:
        spec = self._specs[key]
        return " * ".join([f"int64_t({spec.dtype.itemsize})", *(self.formula(extent) for extent in spec.shape)])

    def _keys(self) -> list[str]:
        """Keys of random bits, one drawn for all that have none of their own."""
        lines, drawn = [], ""
        for key in self.call.keys:
            value = self._given_key(key) or drawn or "fg::drawn_key(device)"
            lines.append(f"const at::Tensor {_named(key.buffer)} = {value};")
            drawn = drawn or ("" if key.source is not None else _named(key.buffer))
        return lines

    def _given_key(self, key: RandomKey) -> str:
        if isinstance(key.source, PointerArgument):
            return self.tensor(key.source.buffer)
        if isinstance(key.source, SizeArgument):
            return f"fg::key_of({self.formula(key.source.formula)}, device)"
        if isinstance(key.source, ScalarArgument):
            return f"fg::key_of(fg::integer({self._number(key.source.name, is_float=False)}), device)"
        return ""

    def _counted(self) -> list[str]:
        return [f"fg::count_write({_named(self.call.inputs[place][0])});" for place in self._written]

    # Steps.

    def _step(self, number: int, entries: Sequence[LaunchEntry]) -> list[str]:
        step = self.call.steps[number]
        if isinstance(step, MatrixProduct):
            views = [self._strided(operand) for operand in (step.a, step.b, step.out)]
            if step.adds == formula_of(0):
                return [f"fg::multiply({', '.join(views)});"]
            return [f"({self.formula(step.adds)} ? fg::multiply_into : fg::multiply)({', '.join(views)});"]
        if isinstance(step, LibraryCall):
            return self._library_call(number, step)
        place = sum(len(launches_of(before)) for before in self.call.steps[:number])
        if isinstance(step, Loop):
            return self._loop(step, entries[place : place + len(step.body.launches)])
        if not entries[place].is_cuda:
            return self._host_launch(step, entries[place])
        before = self.call.steps[number - 1] if number else None
        overlaps = f"grid_{place - 1} > 0" if step.overlaps and isinstance(before, KernelLaunch) else "false"
        return self._cuda_launch(step, entries[place], place, overlaps)

    def _library_call(self, number: int, call: LibraryCall) -> list[str]:
        """The call, and its results as they are wanted in memory, where the function left them otherwise."""
        wanted = ", ".join(f"{{{result.number}, {DTYPES[self._specs[result.buffer].dtype]}}}" for result in call.results)
        settings = [f"{{{', '.join(map(repr, call.settings))}}}"] if call.settings else []
        operands = f"{{{', '.join(self._strided(operand) for operand in call.operands)}}}"
        given = ", ".join([f"{{{wanted}}}", *settings, *map(self.formula, call.sizes), operands])
        lines = [f"std::vector<at::Tensor> made_{number} = fg::{call.function}({given});"]
        for place, result in enumerate(call.results):
            spec, order = self._specs[result.buffer], f"{{{', '.join(map(str, result.order))}}}"
            moved = f"made_{number}[{place}].permute({order}).contiguous()"
            lines.append(f"at::Tensor {_named(result.buffer)} = {moved}.view({self.formulas(spec.shape)});")
        return [*lines, f"made_{number}.clear();"]

    def _loop(self, loop: Loop, entries: Sequence[LaunchEntry]) -> list[str]:
        """A function of the buffers that are the body's inputs, called for each block."""
        body = CallText(loop.body, entries, self._named_number, is_inside=True)
        self.sizes |= {size: None for size in body.sizes if size not in (loop.start, loop.rows)}
        for name, is_float in body.numbers.items():
            self._number(name, is_float=is_float)
        given = ", ".join(self.tensor(key) for key in loop.operands)
        taken = ", ".join(f"const at::Tensor& {_named(key)}" for key, _ in loop.body.inputs)
        start, rows = size_name(loop.start), size_name(loop.rows)
        of_bytes = f"{self.formula(loop.row_bytes)}, {self.formula(loop.sum_bytes)}"
        return [
            *(f"{self.tensor(key)}.zero_();" for key in loop.zeros),
            "{",
            f"  const int64_t extent = {self.formula(loop.extent)};",
            f"  const int64_t most = fg::rows_of_block(extent, {of_bytes}, {MAX_BLOCK_BYTES}, {ROW_MULTIPLE});",
            f"  for (int64_t {start} = 0; {start} < extent; {start} += most) {{",
            f"    [[maybe_unused]] const int64_t {rows} = std::min(most, extent - {start});",
            f"    [&]({taken}) {{",
            *(f"      {line}" for line in body.lines),
            f"    }}({given});",
            "  }",
            "}",
        ]

    def _strided(self, operand: StridedOperand) -> str:
        places = f"{self.formulas(operand.shape)}, {self.formulas(operand.strides)}, {self.formula(operand.offset)}"
        return f"fg::view({self.tensor(operand.buffer)}, {places})"

    def _host_launch(self, launch: KernelLaunch, entry: LaunchEntry) -> list[str]:
        arguments = [self._argument(argument) for argument in launch.arguments]
        lines = ["const char* failed = nullptr;"] if launch.checks else []
        arguments += ["reinterpret_cast<int64_t>(&failed)"] if launch.checks else []
        lines += [f"const fg::Word words[] = {{{', '.join(arguments)}}};", f"{entry.name}(reinterpret_cast<const char*>(words));"]
        if launch.checks:
            lines.append("if (failed) fg::out_of_range(failed, sizes());")
        return ["{", *(f"  {line}" for line in lines), "}"]

    def _cuda_launch(self, launch: KernelLaunch, entry: LaunchEntry, place: int, overlaps: str) -> list[str]:
        lines, taken = [], []
        for number, argument in enumerate(launch.arguments):
            if isinstance(argument, MapArgument):
                lines += self._made_map(f"a{number}", self._map(launch.tensor_maps[argument.number]))
            else:
                kind = "double" if isinstance(argument, ScalarArgument) and argument.is_float else "int64_t"
                lines.append(f"{kind} a{number} = {self._argument(argument)};")
            taken.append(f"&a{number}")
        lines.append(f"void* arguments[] = {{{', '.join(taken)}}};")
        lines.append(self._launched(launch, entry, place, overlaps))
        return [f"const int64_t grid_{place} = {self.formula(launch.grid)};", "{", *(f"  {line}" for line in lines), "}"]

    def _made_map(self, name: str, arguments: str) -> list[str]:
        return [f"fg::TensorMap {name} = fg::tensor_map(device.index(), {arguments});"]

    def _launched(self, launch: KernelLaunch, entry: LaunchEntry, place: int, overlaps: str) -> str:
        return f"fg::launch({entry.name}, device.index(), grid_{place}, {launch.block}, arguments, stream, {overlaps});"

    def _map(self, spec: TensorMapSpec) -> str:
        dtype = self._specs[spec.buffer].dtype
        place = f"{self._address(spec.buffer)} + {self.formula(spec.offset)} * {dtype.itemsize}, {_KINDS[dtype]}, {dtype.itemsize}"
        box = f"{{{', '.join(map(str, spec.box))}}}"
        return f"{place}, {self.formulas(spec.shape)}, {self.formulas(spec.strides)}, {box}, {str(not spec.writable).lower()}"


def _named(key: int) -> str:
    return f"b{key}".replace("-", "_")


def sizes_text(names: Sequence[str]) -> str:
    """The function that gives the sizes of a call by name, for messages."""
    pairs = ", ".join(f"{{{quoted(name)}, {size_name(name)}}}" for name in names)
    return f"const auto sizes = [&]() -> fg::Named {{ return {{{pairs}}}; }};"
