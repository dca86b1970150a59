"""Programs as CUDA C++ for plain nvcc: the emitted kernels, and a function that launches them."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusegen.emit.environment import render
from fusegen.errors import BundleError
from fusegen.extension.call_text import CallText, LaunchEntry, cpp_expression, number_name, size_name
from fusegen.extension.program_text import CallGuards, computed_name, computed_numbers, size_guards
from fusegen.extension.unit import CompiledProgram
from fusegen.jit.nvrtc import FLAGS
from fusegen.program.call import KernelLaunch, LaunchPlan, PointerArgument, Role, ScalarArgument, SizeArgument
from fusegen.program.numbers import TORCH_OPERATIONS, Operation
from fusegen.program.signature import TensorArgument
from fusegen.schedule.names import stride_name

_INVALID = "return cudaErrorInvalidValue;"
_ALLOCATED, _KEY_BYTES, _WORKSPACE = 16, 8, 256  # alignments of results, keys and workspaces that kernels rely on


@dataclass(frozen=True)
class Field:
    """A field of the argument struct of a function; C++ initializes it with ``initial``."""

    type: str
    name: str
    what: str
    initial: str = "0"


class SourcesCall(CallText):
    """The statements of a call on addresses ``a`` that returns a status; ``tensors`` are those of the function."""

    def __init__(
        self,
        call: LaunchPlan,
        entries: Sequence[LaunchEntry],
        number: Callable[[str], str],
        tensors: Mapping[str, TensorArgument],
    ) -> None:
        self.fields: dict[str, Field] = {}
        self._tensors, self._alignments = tensors, dict[str, int]()
        self._seeds = {key.buffer: key.source.buffer for key in call.keys if isinstance(key.source, PointerArgument)}
        super().__init__(call, entries, number)

    def tensor(self, key: int) -> str:
        """Returns the field of a buffer, or of the seed for random bits."""
        spec = self._specs[self._seeds.get(key, key)]
        name = spec.name if spec.role is not Role.RANDOM else "random_key"
        is_written = spec.role is Role.OUTPUT or any(step.accesses.get(key) for step in self.call.steps)
        shape = " x ".join(str(extent) for extent in spec.shape) or "one element"
        given = self._tensors.get(name)
        strides = f" with strides [{', '.join(map(str, given.strides))}]" if given and not _is_row_major(given) else ""
        what = f"{spec.dtype} of {shape}{strides}" if spec.role is not Role.RANDOM else "the key of the random bits, one int64"
        alignment = _KEY_BYTES if spec.role is Role.RANDOM else given.alignment if given else _ALLOCATED
        self._alignments.setdefault(name, alignment)
        described = f"{what}, aligned to {alignment} bytes"
        self.fields.setdefault(name, Field(f"{'' if is_written else 'const '}void*", name, described, "nullptr"))
        return f"a.{name}"

    def _address(self, key: int) -> str:
        if key in self._slots:
            self._addresses.setdefault("workspace", "const int64_t at_workspace = reinterpret_cast<int64_t>(a.workspace);")
            return f"at_workspace + slots[{self._slots[key][0]}].offset"
        name = f"at_b{key}".replace("-", "_")
        self._addresses.setdefault(name, f"const int64_t {name} = reinterpret_cast<int64_t>({self.tensor(key)});")
        return name

    def _alias_checks(self) -> list[str]:
        return []

    def _memory(self) -> list[str]:
        slots = [f"{{{self._bytes(key)}, {used[0]}, {used[-1]}}}" for key, (_, used) in self._slots.items()]
        checks = [f"if (!fg::lies_at(a.{name}, {alignment})) {_INVALID}" for name, alignment in self._alignments.items()]
        if not slots:
            return ["if (bytes) return cudaSuccess;", *checks]
        what = f"memory that only this call uses, aligned to {_WORKSPACE} bytes; its size is that of the function below"
        self.fields["workspace"] = Field("void*", "workspace", what, "nullptr")
        lines = [f"std::vector<fg::Slot> slots{{{', '.join(slots)}}};", "const int64_t taken = fg::plan_workspace(slots);"]
        returned = "if (bytes) return *bytes = static_cast<size_t>(taken), cudaSuccess;"
        return [*lines, returned, *checks, f"if (taken && !fg::lies_at(a.workspace, {_WORKSPACE})) {_INVALID}"]

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


def _stride_checks(assumed: CallGuards, known: Container[str]) -> list[str]:
    """Refuses strides that kernels do not expect: negative, not aligned, or too far apart for 31-bit indices."""
    strides = {name: divisor for name, divisor in _strides(assumed.tensors).items() if name in known}
    lines = [f"if (s_{stride} < 0 || s_{stride} % {divisor}) {_INVALID}" for stride, divisor in strides.items()]
    for _, tensor in assumed.tensors:
        if not assumed.index64 and frozenset[str]().union(*(stride.sizes for stride in tensor.strides)) & strides.keys():
            steps = [
                f"({cpp_expression(extent)} - 1) * {cpp_expression(stride)}"
                for extent, stride in zip(tensor.shape, tensor.strides, strict=True)
            ]
            lines.append(f"if ({' + '.join(steps)} > INT32_MAX) {_INVALID}")
    return lines


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
    fields: dict[str, Field] = {}
    kernels, forms = [], []
    for number, built in enumerate(_plain_programs(name, programs)):
        entries = []
        for index, source in enumerate(built.sources):
            entry = f"{source.entry}_{name}_{number}_{index}"
            renamed = re.sub(rf"\b{source.entry}\b", entry, source.text)
            kernels.append({"space": f"kernel_{name}_{number}_{index}", "text": renamed})
            entries.append(LaunchEntry(f"kernel_{name}_{number}_{index}::{entry}", True))
        text = SourcesCall(built.call, entries, computed_name, dict(built.assumed.tensors))
        sizes = [size_name(size) for size in dict.fromkeys([*_sizes(built), *text.sizes])]
        lines = [f"[[maybe_unused]] const int64_t {size} = a.{size.removeprefix('s_')};" for size in sizes]
        strides = _strides(built.assumed.tensors)
        for size in sizes:
            plain = size.removeprefix("s_")
            divisor = strides.get(plain)
            what = "a size, 1 or more" if divisor is None else f"a stride in elements, a multiple of {divisor}"
            fields.setdefault(plain, Field("int64_t", plain, what))
        for number_of, dtype in built.assumed.numbers:
            kind = "double" if dtype.is_float else "int64_t"
            initial = defaults.get(number_of, 0)
            what = f"a number; {initial} by default" if number_of in defaults else "a number"
            fields.setdefault(number_of, Field(kind, number_of, what, repr(initial)))
            lines.append(f"[[maybe_unused]] const {kind} {number_name(number_of)} = a.{number_of};")
        fields |= text.fields
        lines += _stride_checks(built.assumed, [size.removeprefix("s_") for size in sizes])
        guards = [line.replace("return false;", _INVALID) for line in size_guards(built.assumed, built.call)]
        computed = computed_numbers(built.call, built.assumed, text.numbers)
        forms.append({"name": f"form_{number}", "lines": [*lines, *guards, *computed, *text.lines, "return cudaSuccess;"]})
    arguments = f"{name}_arguments"
    banner = f"{name}, made by fusegen for {target}"
    order = sorted(fields.values(), key=lambda field: "*" not in field.type)
    assumed = programs[0].assumed
    conditions = (assumed.conditions.text(index) for _, index in assumed.conditions.results)
    required = [
        *map(str, assumed.relations),
        *conditions,
        *([] if assumed.index64 else ["fewer than 2^31 elements from the first to the last of each tensor and intermediate value"]),
    ]
    context = {"banner": banner, "name": name, "arguments": arguments, "target": target, "required": required}
    return {
        f"{name}.h": render("binding/program.h.jinja", fields=order, **context),
        f"{name}.cu": render("binding/program.cu.jinja", header=f"{name}.h", kernels=kernels, forms=forms, **context),
    }


def cmake_text(library: str, functions: Mapping[str, Sequence[str]]) -> str:
    """Returns a CMake target of the CUDA files; ``functions`` are listed by GPU."""
    architectures = [(target.removeprefix("sm_"), names) for target, names in functions.items()]
    flags = [flag for flag in FLAGS if not flag.startswith("--std")]
    banner = f"{library}: kernels made by fusegen"
    return render("binding/CMakeLists.txt.jinja", banner=banner, library=library, flags=flags, architectures=architectures)


def _sizes(built: CompiledProgram) -> list[str]:
    shapes = [extent for _, tensor in built.assumed.tensors for extent in tensor.shape]
    return [*built.assumed.sizes, *(name for extent in shapes for name in sorted(extent.sizes))]


def _plain_programs(name: str, programs: Sequence[CompiledProgram]) -> list[CompiledProgram]:
    """Returns the programs without library calls."""
    call = programs[0].call
    if any(isinstance(key.source, (ScalarArgument, SizeArgument)) for key in call.keys):
        what = f"{name} takes a seed as a number, but its kernels read seeds from GPU memory"
        raise BundleError(what, hint="take the seed as a tensor of one int64")
    if {line.name for line in call.scalars.lines if isinstance(line, Operation)} & TORCH_OPERATIONS.keys():
        what = f"{name} computes with numbers by functions of torch, which plain sources cannot call"
        raise BundleError(what, hint="build it with --format extension")
    plain = [built for built in programs if all(isinstance(step, KernelLaunch) for step in built.call.steps)]
    if not plain:
        what = f"{name} is {programs[0].call.summary}, but plain sources contain kernels only"
        where = "where kernels compute matmuls: for sm_90a in bf16 or f16, without plan='library'"
        raise BundleError(what, hint=f"build it with --format extension, or {where}")
    return plain
