"""Programs as CUDA C++ for plain nvcc: the emitted kernels, and a function that launches them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, count

from fusegen.emit.environment import render
from fusegen.errors import BundleError
from fusegen.extension.call_text import CallText, LaunchEntry, cpp_expression, number_name, size_name
from fusegen.extension.program_text import CallGuards, computed_name, computed_numbers, number_guards, size_guards
from fusegen.extension.unit import CompiledProgram
from fusegen.jit.nvrtc import FLAGS
from fusegen.program.call import KernelLaunch, LaunchPlan, PointerArgument, Role, ScalarArgument, SizeArgument
from fusegen.program.formula import Formula, FormulaKind, Relation, size
from fusegen.program.names import stride_name
from fusegen.program.numbers import TORCH_OPERATIONS, Numbers, Operation, Scalar
from fusegen.program.signature import TensorArgument
from fusegen.schedule.names import field_identifier

_INVALID = "return cudaErrorInvalidValue;"
_ALLOCATED, _KEY_BYTES, _WORKSPACE = 16, 8, 256  # alignments of results, keys and workspaces that kernels rely on


@dataclass(frozen=True)
class Field:
    """A field of the argument struct of a function; C++ initializes it with ``initial``."""

    type: str
    name: str
    what: str
    initial: str = "0"


class FieldKind(Enum):
    """The namespaces of a program's names."""

    TENSOR = "tensor"
    RESULT = "result"
    NUMBER = "number"
    SIZE = "size or stride"
    KEY = "random_key"
    SCRATCH = "workspace"


class Fields:
    """The fields of the argument struct, each with a name of its own. Names of parameters stay."""

    def __init__(self, struct: str, assumed: CallGuards) -> None:
        self._used, self._names = {struct}, dict[tuple[FieldKind, str], str]()
        self._fields: dict[str, Field] = {}
        for name, _ in assumed.tensors:
            self.name(FieldKind.TENSOR, name)
        for name, _ in assumed.numbers:
            self.name(FieldKind.NUMBER, name)
        for name in assumed.sizes:
            self.name(FieldKind.SIZE, name)

    def name(self, kind: FieldKind, name: str) -> str:
        """Returns the name of the field for a program's name."""
        if (kind, name) not in self._names:
            base = field_identifier(name)
            names = chain([base], (f"{base.rstrip('_')}_{number}" for number in count(2)))
            self._names[kind, name] = next(each for each in names if each not in self._used)
            self._used.add(self._names[kind, name])
        return self._names[kind, name]

    def add(self, kind: FieldKind, name: str, type: str, what: str, initial: str = "0") -> str:
        """Adds a field if there is none for the name, and returns its expression."""
        field = self.name(kind, name)
        self._fields.setdefault(field, Field(type, field, what, initial))
        return f"a.{field}"

    def ordered(self) -> list[Field]:
        """Returns the addresses, then the other fields."""
        return sorted(self._fields.values(), key=lambda field: "*" not in field.type)

    def formula(self, formula: Formula) -> Formula:
        """Returns a formula of fields."""
        if formula.operator is FormulaKind.SIZE:
            return size(self.name(FieldKind.SIZE, str(formula.value)))
        return replace(formula, operands=tuple(map(self.formula, formula.operands)))

    def rules(self, assumed: CallGuards) -> list[str]:
        """Describes the relations of sizes and the conditions on numbers."""
        relations = [Relation(self.formula(each.left), each.sign, self.formula(each.right)) for each in assumed.relations]
        constants = dict(assumed.constants)
        lines = [
            self.formula(line)
            if isinstance(line, Formula)
            else constants.get(line.name, Scalar(self.name(FieldKind.NUMBER, line.name)))
            if isinstance(line, Scalar)
            else line
            for line in assumed.conditions.lines
        ]
        conditions = Numbers(tuple(lines), assumed.conditions.results)
        return [*map(str, relations), *(conditions.text(position) for _, position in conditions.results)]


class SourcesCall(CallText):
    """The statements of a call on addresses ``a`` that returns a status; ``tensors`` are those of the function."""

    def __init__(
        self,
        call: LaunchPlan,
        entries: Sequence[LaunchEntry],
        number: Callable[[str], str],
        tensors: Mapping[str, TensorArgument],
        fields: Fields,
    ) -> None:
        self._fields, self._alignments = fields, dict[str, int]()
        self._given = {key: (name, tensors[name]) for key, name in call.inputs}
        self.used: dict[str, TensorArgument] = {}
        self._seeds = {key.buffer: key.source.buffer for key in call.keys if isinstance(key.source, PointerArgument)}
        super().__init__(call, entries, number)

    def tensor(self, key: int) -> str:
        """Returns the field of a buffer, or of the seed for random bits."""
        buffer = self._seeds.get(key, key)
        spec = self._specs[buffer]
        if buffer not in self._given and spec.role is Role.RANDOM:
            what = f"the key of the random bits, one int64, aligned to {_KEY_BYTES} bytes"
            return self._add(FieldKind.KEY, FieldKind.KEY.value, "const void*", what, _KEY_BYTES)
        is_written = spec.role is Role.OUTPUT or any(step.accesses.get(key) for step in self.call.steps)
        shape = " x ".join(str(self._fields.formula(extent)) for extent in spec.shape) or "one element"
        kind, name, strides, alignment = FieldKind.RESULT, spec.name, "", _ALLOCATED
        if buffer in self._given:
            kind, (name, given) = FieldKind.TENSOR, self._given[buffer]
            alignment, self.used[name] = given.alignment, given
            if not _is_row_major(given):
                strides = f" with strides [{', '.join(str(self._fields.formula(stride)) for stride in given.strides)}]"
        what = f"{spec.dtype} of {shape}{strides}, aligned to {alignment} bytes"
        return self._add(kind, name, f"{'' if is_written else 'const '}void*", what, alignment)

    def _add(self, kind: FieldKind, name: str, type: str, what: str, alignment: int) -> str:
        field = self._fields.add(kind, name, type, what, "nullptr")
        self._alignments.setdefault(field, alignment)
        return field

    def _address(self, key: int) -> str:
        if key in self._slots:
            definition = f"const int64_t at_workspace = reinterpret_cast<int64_t>(a.{self._workspace});"
            self._addresses.setdefault("workspace", definition)
            return f"at_workspace + slots[{self._slots[key][0]}].offset"
        name = f"at_b{key}".replace("-", "_")
        self._addresses.setdefault(name, f"const int64_t {name} = reinterpret_cast<int64_t>({self.tensor(key)});")
        return name

    def _alias_checks(self) -> list[str]:
        return []

    def _memory(self) -> list[str]:
        slots = [f"{{{self._bytes(key)}, {used[0]}, {used[-1]}}}" for key, (_, used) in self._slots.items()]
        checks = [f"if (!fg::lies_at({field}, {alignment})) {_INVALID}" for field, alignment in self._alignments.items()]
        if not slots:
            return ["if (bytes) return cudaSuccess;", *checks]
        what = f"memory that only this call uses, aligned to {_WORKSPACE} bytes; its size is that of the function below"
        workspace = self._fields.add(FieldKind.SCRATCH, FieldKind.SCRATCH.value, "void*", what, "nullptr")
        lines = [f"std::vector<fg::Slot> slots{{{', '.join(slots)}}};", "const int64_t taken = fg::arrange(slots);"]
        returned = "if (bytes) return *bytes = static_cast<size_t>(taken), cudaSuccess;"
        return [*lines, returned, *checks, f"if (taken && !fg::lies_at({workspace}, {_WORKSPACE})) {_INVALID}"]

    @property
    def _workspace(self) -> str:
        return self._fields.name(FieldKind.SCRATCH, FieldKind.SCRATCH.value)

    def _before_step(self, number: int) -> list[str]:
        return []

    def _after_step(self, number: int) -> list[str]:
        return []

    def _keys(self) -> list[str]:
        return []

    def _version_bumps(self) -> list[str]:
        return []

    def _tensor_map(self, name: str, arguments: str) -> list[str]:
        return [f"fg::TensorMap {name};", f"if (const cudaError_t status = fg::tensor_map({name}, {arguments})) return status;"]

    def _counter(self, name: str) -> list[str]:
        return [f"int64_t {name} = 0;", f"if (const cudaError_t status = fg::counter_of({name}, stream)) return status;"]

    def _launch(self, launch: KernelLaunch, entry: LaunchEntry, index: int, overlaps: str) -> str:
        shape = f"grid_{index}, {launch.block}, {launch.shared_bytes}, {launch.cluster}"
        call = f"fg::launch(reinterpret_cast<const void*>(&{entry.name}), {shape}, arguments, stream, {overlaps})"
        return f"if (const cudaError_t status = {call}) return status;"


def _is_row_major(tensor: TensorArgument) -> bool:
    """Returns True if the strides are those of a contiguous tensor, for sizes that have no common divisors."""
    names = sorted(frozenset[str]().union(*(extent.sizes for extent in (*tensor.shape, *tensor.strides))))
    sizes = {name: 1_000_003 + 2 * number for number, name in enumerate(names)}
    shape, expected = [extent(sizes) for extent in tensor.shape], 1
    for extent, stride in zip(reversed(shape), reversed(tensor.strides), strict=True):
        if extent != 1 and stride(sizes) != expected:
            return False
        expected *= extent
    return True


def _strides(tensors: Iterable[tuple[str, TensorArgument]]) -> dict[str, int]:
    """Returns the divisors, in elements, of the strides that no size implies."""
    return {
        stride_name(name, dim): max(1, tensor.alignment // tensor.dtype.itemsize)
        for name, tensor in tensors
        for dim, is_own in enumerate(tensor.own_strides)
        if is_own
    }


def program_files(
    name: str, target: str, programs: Sequence[CompiledProgram], defaults: Mapping[str, int | float]
) -> dict[str, str]:
    """Returns a header and a CUDA file for the programs of one kind of call.

    Args:
        name: of the function.
        programs: in order of preference, for different row counts.
        defaults: of numbers, by name.

    Raises:
        BundleError: all programs call libraries, or need numbers or seeds that plain sources do not support.
    """
    arguments = f"{name}_arguments"
    fields = Fields(arguments, programs[0].assumed)
    kernels, forms = [], []
    for number, built in enumerate(_plain_programs(name, programs)):
        entries = []
        for index, source in enumerate(built.sources):
            entry = f"{source.entry}_{name}_{number}_{index}"
            renamed = re.sub(rf"\b{source.entry}\b", entry, source.text)
            kernels.append({"space": f"kernel_{name}_{number}_{index}", "text": renamed})
            entries.append(LaunchEntry(f"kernel_{name}_{number}_{index}::{entry}", True))
        forms.append({"name": f"form_{number}", "lines": _form(built, entries, fields, defaults)})
    assumed = programs[0].assumed
    bound = 56 if assumed.index64 else 31
    limits = f"sizes and strides below 2^{bound}, and fewer than 2^{bound} elements from the first to the last of each tensor and "
    context = {
        "banner": f"{name}, made by fusegen for {target}",
        "name": name,
        "arguments": arguments,
        "target": target,
        "workspace": fields.name(FieldKind.SCRATCH, FieldKind.SCRATCH.value),
        "required": [*fields.rules(assumed), f"{limits}intermediate value", "sizes for which no kernel needs 2^31 blocks"],
    }
    return {
        f"{name}.h": render("binding/program.h.jinja", fields=fields.ordered(), **context),
        f"{name}.cu": render("binding/program.cu.jinja", header=f"{name}.h", kernels=kernels, forms=forms, **context),
    }


def _form(built: CompiledProgram, entries: Sequence[LaunchEntry], fields: Fields, defaults: Mapping[str, int | float]) -> list[str]:
    """Returns the statements that check a call and launch the kernels of a program; adds its fields."""
    text = SourcesCall(built.call, entries, computed_name, dict(built.assumed.tensors), fields)
    assumed = replace(built.assumed, tensors=tuple(text.used.items()))  # the sizes of unused tensors are not known
    computed = computed_numbers(built.call, assumed, text.numbers)
    strides, sizes = _strides(text.used.items()), dict[str, str]()
    for name in dict.fromkeys([*_sizes(built.call, assumed), *text.sizes]):
        multiple = f", a multiple of {strides[name]}" if strides.get(name, 1) > 1 else ""
        what = f"a stride in elements, 1 or more{multiple}" if name in strides else "a size, 1 or more"
        sizes[size_name(name)] = fields.add(FieldKind.SIZE, name, "int64_t", what)
    numbers = []
    for name, dtype in assumed.numbers:
        kind, initial = "double" if dtype.is_float else "int64_t", repr(+defaults.get(name, 0))
        what = f"a number; {initial} by default" if name in defaults else "a number"
        numbers.append(
            f"[[maybe_unused]] const {kind} {number_name(name)} = {fields.add(FieldKind.NUMBER, name, kind, what, initial)};"
        )
    own = [(size_name(name), divisor) for name, divisor in strides.items() if size_name(name) in sizes]
    multiples = [f"if ({variable} % {divisor}) {_INVALID}" for variable, divisor in own if divisor > 1]
    grids = dict.fromkeys(launch.grid for launch in built.call.launches if launch.grid.sizes)
    blocks = [f"if ({cpp_expression(grid)} > INT32_MAX) {_INVALID}" for grid in grids]
    guards = [*_invalid(size_guards(assumed, built.call)), *multiples, *blocks]
    checked = [f"[[maybe_unused]] const fg::Size {variable}{{{field}}};" for variable, field in sizes.items()]
    return [
        *(f"[[maybe_unused]] const int64_t {variable} = {field};" for variable, field in sizes.items()),
        *numbers,
        *(["{", *(f"  {line}" for line in (*checked, *guards)), "}"] if guards else []),
        *_invalid(number_guards(assumed, built.call)),
        *computed,
        *text.lines,
        "return cudaSuccess;",
    ]


def _invalid(guards: Iterable[str]) -> list[str]:
    return [line.replace("return false;", _INVALID) for line in guards]


def cmake_text(library: str, functions: Mapping[str, Sequence[str]]) -> str:
    """Returns a CMake target of the CUDA files; ``functions`` are listed by GPU."""
    architectures = [(target.removeprefix("sm_"), names) for target, names in functions.items()]
    flags = [flag for flag in FLAGS if not flag.startswith("--std")]
    banner = f"{library}: kernels made by fusegen"
    return render("binding/CMakeLists.txt.jinja", banner=banner, library=library, flags=flags, architectures=architectures)


def _sizes(call: LaunchPlan, assumed: CallGuards) -> list[str]:
    """Returns the sizes and strides that the checks and the numbers of a call take."""
    used = {key for step in call.steps for key in step.accesses}
    formulas = [extent for _, tensor in assumed.tensors for extent in (*tensor.shape, *tensor.strides)]
    formulas += [*call.counts, *(extent for buffer in call.buffers if buffer.key in used for extent in buffer.shape)]
    relations = [each.sizes for each in (*assumed.relations, *assumed.rows)] + [assumed.conditions.sizes, call.scalars.sizes]
    ordered = [name for each in (*(formula.sizes for formula in formulas), *relations) for name in sorted(each)]
    return [*assumed.sizes, *ordered]


def _plain_programs(name: str, programs: Sequence[CompiledProgram]) -> list[CompiledProgram]:
    """Returns the programs without library calls."""
    call = programs[0].call
    if any(isinstance(key.source, (ScalarArgument, SizeArgument)) for key in call.keys):
        what = f"{name} takes a seed as a number, but its kernels read the key of their random bits from GPU memory"
        raise BundleError(what, hint="leave seed= out, and pass the key to the built function")
    if {line.name for line in call.scalars.lines if isinstance(line, Operation)} & TORCH_OPERATIONS.keys():
        what = f"{name} computes with numbers by functions of torch, which plain sources cannot call"
        raise BundleError(what, hint="build it with --format extension")
    plain = [built for built in programs if all(isinstance(step, KernelLaunch) for step in built.call.steps)]
    if not plain:
        what = f"{name} is {programs[0].call.summary}, but plain sources contain kernels only"
        where = "where kernels compute matmuls: for sm_90a in bf16 or f16, without plan='library'"
        raise BundleError(what, hint=f"build it with --format extension, or {where}")
    return plain
