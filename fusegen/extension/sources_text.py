"""Programs as CUDA C++ for plain nvcc: the emitted kernels, and a function that launches them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fusegen.emit.environment import render
from fusegen.errors import BundleError
from fusegen.extension.call_text import CallText, LaunchEntry, number_name, size_name
from fusegen.extension.program_text import computed_name, computed_numbers, size_guards
from fusegen.extension.unit import CompiledProgram
from fusegen.jit.nvrtc import FLAGS
from fusegen.program.call import KernelLaunch, LaunchPlan, PointerArgument, Role, ScalarArgument, SizeArgument
from fusegen.program.numbers import TORCH_OPERATIONS, Operation

_INVALID = "return cudaErrorInvalidValue;"


@dataclass(frozen=True)
class Field:
    """A field of the argument struct of a function."""

    type: str
    name: str
    what: str


class SourcesCall(CallText):
    """The statements of a call on addresses ``a`` that returns a status."""

    def __init__(self, call: LaunchPlan, entries: Sequence[LaunchEntry], number: Callable[[str], str]) -> None:
        self.fields: dict[str, Field] = {}
        self._seeds = {key.buffer: key.source.buffer for key in call.keys if isinstance(key.source, PointerArgument)}
        super().__init__(call, entries, number)

    def tensor(self, key: int) -> str:
        """Returns the field of a buffer, or of the seed for random bits."""
        spec = self._specs[self._seeds.get(key, key)]
        name = spec.name if spec.role is not Role.RANDOM else "random_key"
        is_written = spec.role is Role.OUTPUT or any(step.accesses.get(key) for step in self.call.steps)
        shape = " x ".join(str(extent) for extent in spec.shape) or "one element"
        what = f"{spec.dtype} of {shape}" if spec.role is not Role.RANDOM else "the key of the random bits, one 64-bit integer"
        self.fields.setdefault(name, Field(f"{'' if is_written else 'const '}void*", name, what))
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
        if not slots:
            return ["if (bytes) return cudaSuccess;"]
        self.fields["workspace"] = Field("void*", "workspace", "memory of the call's own")
        lines = [f"std::vector<fg::Slot> slots{{{', '.join(slots)}}};", "const int64_t taken = fg::plan_workspace(slots);"]
        return [*lines, "if (bytes) return *bytes = static_cast<size_t>(taken), cudaSuccess;"]

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


def program_files(name: str, target: str, programs: Sequence[CompiledProgram]) -> dict[str, str]:
    """Returns a header and a CUDA file for the programs of one kind of call.

    Args:
        name: of the function.
        programs: in order of preference, for different row counts.

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
        text = SourcesCall(built.call, entries, computed_name)
        sizes = [size_name(size) for size in dict.fromkeys([*_sizes(built), *text.sizes])]
        lines = [f"[[maybe_unused]] const int64_t {size} = a.{size.removeprefix('s_')};" for size in sizes]
        for size in sizes:
            plain = size.removeprefix("s_")
            what = "a stride, in elements" if "_stride" in plain else "a size, 1 or more"
            fields.setdefault(plain, Field("int64_t", plain, what))
        for number_of, dtype in built.assumed.numbers:
            kind = "double" if dtype.is_float else "int64_t"
            fields.setdefault(number_of, Field(kind, number_of, "a number"))
            lines.append(f"[[maybe_unused]] const {kind} {number_name(number_of)} = a.{number_of};")
        fields |= text.fields
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
        *([] if assumed.index64 else ["fewer than 2^31 elements in each tensor"]),
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
