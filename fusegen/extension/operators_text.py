"""The C++ translation unit of several operators, each with the kinds of calls that it accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from fusegen.emit.environment import render
from fusegen.errors import BundleError
from fusegen.extension.call_text import (
    DTYPES,
    LaunchEntry,
    array_of,
    cpp_list,
    results_schema,
    results_type,
    return_value,
    size_name,
    string_literal,
)
from fusegen.extension.program_text import literal_of, program_lines
from fusegen.extension.unit import (
    CallKind,
    CompiledProgram,
    OperatorParameter,
    OperatorPasses,
    OperatorSpec,
    TensorSpec,
    header,
    runtime_for,
)
from fusegen.program.formula import Formula
from fusegen.program.formula import FormulaKind as Sign
from fusegen.runtime.devices import added_features, needed_features

_TENSORS = ("tensor", "written")
_SCHEMA_WORDS = (
    "Tensor",
    "SymInt",
    "Scalar",
    "Device",
    "Layout",
    "float",
    "int",
    "bool",
    "str",
    "complex",
    "number",
    "out",
    "self",
)
"""Reserved words of schemas, besides Python's."""

_EXTRA_ARGUMENTS = ("fg_key", "fg_kind")
"""Arguments of forward passes, after the function's arguments."""

_SCHEMA = {"tensor": "Tensor", "size": "SymInt", "int": "SymInt", "float": "float"}
_PLAIN = {"size": "int64_t", "int": "int64_t", "float": "double"}
_CONSTANT: dict[type, tuple[str, str]] = {
    bool: ("bool", "bool"),
    int: ("int", "int64_t"),
    float: ("float", "double"),
    str: ("str", "std::string"),
}


class UnitText:
    """Prints a translation unit.

    Args:
        library: the namespace of the operators.
        level: the level of x86-64 that CPU kernels are compiled for; "" for this machine's processor.

    Attributes:
        kernels: the CPU programs, whose C++ texts are compiled with the unit, and pairs of old and new entry names.
        schemas: of the operators.

    Raises:
        BundleError: two arguments of an operator would have the same name.
    """

    def __init__(self, library: str, operators: Sequence[OperatorSpec], level: str = "") -> None:
        self._library, self._level = library, level
        self._kernels: list[dict[str, object]] = []
        self._programs: list[dict[str, object]] = []
        self.kernels: list[tuple[CompiledProgram, tuple[tuple[str, str], ...]]] = []
        self._views = [self._operator(operator) for operator in operators]
        self.schemas = [_schema(operator) for operator in operators]

    @property
    def text(self) -> str:
        return render(
            "binding/operators.cpp.jinja",
            banner=f"operators of torch.ops.{self._library}: {', '.join(str(view['name']) for view in self._views)}",
            runtime=runtime_for(self._programs),
            numbers=header("numbers.h"),
            processor_header=header("processor.h"),
            operators_header=header("operators.h"),
            built_for=string_literal(self._level or "the processor of the machine that built them"),
            needed=string_literal(" ".join(needed_features(self._level) if self.kernels else ())),
            levels=[(string_literal(name), string_literal(" ".join(added))) for name, added in added_features()],
            on_gpu=any(kernel["cubin"] for kernel in self._kernels),
            kernels=self._kernels,
            programs=self._programs,
            operators=self._views,
            library=self._library,
        )

    def _listed(self, kind: int, programs: Sequence[CompiledProgram]) -> list[dict[str, object]]:
        return [{"kind": kind, "capability": built.capability, "name": self._program(built)} for built in programs]

    def _program(self, built: CompiledProgram) -> str:
        number = len(self._programs)
        names, entries = [], []
        for index, (source, launch) in enumerate(zip(built.sources, built.call.launches, strict=True)):
            name = f"kernel_{number}_{index}"
            cubin = None if built.cubins is None else array_of(built.cubins[index])
            self._kernels.append(
                {
                    "name": name,
                    "quoted": string_literal(source.entry),
                    "cubin": cubin,
                    "shared_bytes": launch.shared_bytes,
                    "cluster": launch.cluster,
                }
            )
            entries.append(LaunchEntry(name, built.cubins is not None))
            names.append((source.entry, name))
        if built.cubins is None and names:
            self.kernels.append((built, tuple(names)))
        name = f"program_{number}"
        self._programs.append({"name": name, "lines": program_lines(built.call, built.assumed, entries)})
        return name

    def _operator(self, op: OperatorSpec) -> dict[str, object]:
        _check_names(op)
        tensors = op.of(*_TENSORS)
        first = op.kinds[0]
        qualified = f"{self._library}::{op.name}"
        integers, floats = op.of("int"), op.of("float")
        count = len(first.results)
        built = "; ".join(dict.fromkeys(kind.description for kind in op.kinds))
        view = {
            "name": op.name,
            "qualified": qualified,
            "quoted": string_literal(qualified),
            "kinds": [{"number": n, "condition": _condition(kind)} for n, kind in enumerate(op.kinds)],
            "programs": [each for n, kind in enumerate(op.kinds) for each in self._listed(n, kind.programs)],
            "parameters": ", ".join(_declared(p, sym=False) for p in op.parameters),
            "sym_parameters": ", ".join(_declared(p, sym=True) for p in op.parameters),
            "sym_types": ", ".join(_type(p, sym=True) for p in op.parameters),
            "plain_arguments": ", ".join(_variable(p) for p in op.parameters),
            "constant_parameters": "".join(f", {_declared(p, sym=False)}" for p in op.of("constant")),
            "constant_arguments": "".join(f", {_variable(p)}" for p in op.of("constant")),
            "tensors": ", ".join(_variable(p) for p in tensors),
            "sizes": ", ".join(_variable(p) for p in op.of("size")),
            "sym_sizes": ", ".join(_variable(p) for p in op.of("size")),
            "words": ", ".join(_variable(p) for p in op.of("int", "float")),
            "written": ", ".join(f"size_t({n})" for n, p in enumerate(tensors) if p.role == "written"),
            "returns": results_type(count),
            "packed": return_value([f"out[{n}]" for n in range(count)]),
            "results": count,
            "result_shapes": [_shapes(n, kind, kind.results) for n, kind in enumerate(op.kinds)],
            "built": string_literal(built),
            "differentiable": all(kind.passes for kind in op.kinds),
            "draws": any(built.call.draws for kind in op.kinds for built in kind.programs),
            "schemas": [string_literal(_schema(op))],
            "integers": [_variable(p) for p in integers],
            "floats": ", ".join(_variable(p) for p in floats),
        }
        return view | self._passes(op, qualified) if view["differentiable"] else view

    def _passes(self, op: OperatorSpec, qualified: str) -> dict[str, object]:
        kinds = [(n, kind, kind.passes) for n, kind in enumerate(op.kinds) if kind.passes]
        extra = [("key", "Tensor?", "const std::optional<at::Tensor>&"), ("kind", "int", "int64_t")]
        declared = [f"{kind} {name}" for name, _, kind in extra]
        parameters = [_declared(p, sym=False) for p in op.parameters]
        sym_parameters = [_declared(p, sym=True) for p in op.parameters]
        extra_parameters = [f"{kind} {name}" for name, (_, kind, _) in zip(_EXTRA_ARGUMENTS, extra, strict=True)]
        parameter_list = ", ".join([*(_typed(p, default=False) for p in op.parameters), *extra_parameters])
        schemas = [
            _schema(op),
            f"{op.name}_forward({parameter_list}) -> Tensor[]",
            f"{op.name}_backward(Tensor[] kept, Tensor[] gradients, SymInt[] sizes, float[] numbers, int kind) -> Tensor[]",
        ]
        return {
            "schemas": [string_literal(schema) for schema in schemas],
            "quoted_forward": string_literal(f"{qualified}_forward"),
            "quoted_backward": string_literal(f"{qualified}_backward"),
            "forward_programs": [each for n, _, passes in kinds for each in self._listed(n, passes.forward)],
            "backward_programs": [each for n, _, passes in kinds for each in self._listed(n, passes.backward)],
            "forward_parameters": ", ".join([*parameters, *declared]),
            "sym_forward_parameters": ", ".join([*sym_parameters, *declared]),
            "sym_forward_types": ", ".join([*(_type(p, sym=True) for p in op.parameters), *(kind for _, _, kind in extra)]),
            "forward_arguments": ", ".join([*(_variable(p) for p in op.parameters), *(name for name, _, _ in extra)]),
            "arguments": len(op.parameters) + len(extra),
            "random": any(passes.draws for _, _, passes in kinds),
            "forward_shapes": [_shapes(n, kind, passes.forward_outputs) for n, kind, passes in kinds],
            "backward_words": [_saved_numbers(n, op, passes) for n, _, passes in kinds],
            "backward_shapes": [_backward_shapes(n, passes) for n, _, passes in kinds],
            "keeping": [_keeping(n, kind, passes) for n, kind, passes in kinds],
            "gradients": [_gradients(n, op, passes) for n, _, passes in kinds],
        }


def _variable(parameter: OperatorParameter) -> str:
    return f"p_{parameter.name}"


def _type(parameter: OperatorParameter, *, sym: bool) -> str:
    """Returns the C++ type of a parameter, with symbolic or plain ints."""
    if parameter.role in _TENSORS:
        return "const at::Tensor&"
    if parameter.role == "constant":
        return _CONSTANT[type(parameter.default)][1]
    return "c10::SymInt" if sym and parameter.role != "float" else _PLAIN[parameter.role]


def _declared(parameter: OperatorParameter, *, sym: bool) -> str:
    return f"{_type(parameter, sym=sym)} {_variable(parameter)}"


def _typed(parameter: OperatorParameter, position: int = 0, *, default: bool = True) -> str:
    name = _schema_name(parameter)
    if parameter.role == "written":
        return f"Tensor(a{position}!) {name}"
    if parameter.role == "constant":
        value = f"={_default(parameter.default)}" if default else ""
        return f"{_CONSTANT[type(parameter.default)][0]} {name}{value}"
    return f"{_SCHEMA[parameter.role]} {name}"


def _schema_name(parameter: OperatorParameter) -> str:
    """Returns a parameter's name in the schema; it differs from the schema language's reserved words."""
    return f"{parameter.name}_" if iskeyword(parameter.name) or parameter.name in _SCHEMA_WORDS else parameter.name


def _check_names(op: OperatorSpec) -> None:
    names = [*map(_schema_name, op.parameters), *_EXTRA_ARGUMENTS]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BundleError(f"two arguments of {op.name} would be called {twice[0]}", hint="rename a parameter or a captured tensor")


def _default(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _schema(op: OperatorSpec) -> str:
    last = max((position for position, parameter in enumerate(op.parameters) if parameter.role != "constant"), default=-1)
    parameter_list = ", ".join(
        _typed(parameter, position, default=position > last) for position, parameter in enumerate(op.parameters)
    )
    count = len(op.kinds[0].results)
    return f"{op.name}({parameter_list}) -> {results_schema(count)}"


def _condition(kind: CallKind) -> str:
    """Tests whether tensors ``t`` and constants are of a kind of call, on a device."""
    parts = [f"device != {0 if kind.on_gpu else 1}"]
    for n, tensor in enumerate(kind.tensors):
        parts.append(f"t[{n}].dim() == {len(tensor.shape)} && t[{n}].scalar_type() == {DTYPES[tensor.dtype]}")
        parts += [
            f"t[{n}].sym_size({d}) == {extent.value}" for d, extent in enumerate(tensor.shape) if extent.operator is Sign.INTEGER
        ]
    parts += [f"p_{name} == {string_literal(v) if isinstance(v, str) else literal_of(v)}" for name, v in kind.constants]  # type: ignore[arg-type]
    return " && ".join(parts)


def _sizes_of(shapes: Sequence[Sequence[Formula]], extra_sizes: Sequence[str]) -> Iterator[str]:
    """Defines the sizes of tensors ``t``, and of further sizes ``z``, as symbols."""
    defined = set(extra_sizes)
    for name in dict.fromkeys(extra_sizes):
        yield f"[[maybe_unused]] const c10::SymInt {size_name(name)} = z[{extra_sizes.index(name)}];"
    for n, shape in enumerate(shapes):
        for d, extent in enumerate(shape):
            if extent.operator is Sign.SIZE and str(extent.value) not in defined:
                defined.add(str(extent.value))
                yield f"[[maybe_unused]] const c10::SymInt {size_name(str(extent.value))} = t[{n}].sym_size({d});"


def _placeholders(tensors: Sequence[TensorSpec]) -> Iterator[str]:
    for tensor in tensors:
        yield f"out.push_back(fg::stand_in({cpp_list(tensor.shape)}, {DTYPES[tensor.dtype]}, t[0]));"


def _shapes(number: int, kind: CallKind, tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    lines = [*_sizes_of([tensor.shape for tensor in kind.tensors], kind.sizes), *_placeholders(tensors)]
    return {"kind": number, "lines": lines}


def _backward_shapes(number: int, passes: OperatorPasses) -> dict[str, Any]:
    return {"kind": number, "lines": [*_sizes_of(passes.backward_shapes, passes.sizes), *_placeholders(passes.backward_outputs)]}


def _saved_numbers(number: int, op: OperatorSpec, passes: OperatorPasses) -> dict[str, Any]:
    """Assigns the sizes and numbers of the backward pass from those saved in the autograd node."""
    sources: Mapping[str, str] = {p.name: f"sizes[{len(passes.sizes) + n}]" for n, p in enumerate(op.of("int"))} | {
        p.name: f"numbers[{n}]" for n, p in enumerate(op.of("float"))
    }
    sizes = ", ".join(f"sizes[{n}]" for n in range(len(passes.sizes)))
    return {"kind": number, "lines": [f"z = {{{sizes}}};", f"n = {{{', '.join(sources[name] for name in passes.numbers)}}};"]}


def _keeping(number: int, kind: CallKind, passes: OperatorPasses) -> dict[str, Any]:
    saved = ", ".join(f"t[{position}]" if position >= 0 else f"out[{~position}]" for position in passes.saved)
    sizes = [*_sizes_of([tensor.shape for tensor in kind.tensors], kind.sizes)] if passes.sizes else []
    pushed = [f"sizes.push_back({size_name(name)});" for name in passes.sizes]
    plain = ", ".join(f"out[{n}]" for n, result in enumerate(kind.results) if not result.dtype.is_float)
    return {"kind": number, "kept": saved, "plain_results": plain, "lines": [*sizes, *pushed]}


def _gradients(number: int, op: OperatorSpec, passes: OperatorPasses) -> dict[str, Any]:
    """Selects the gradients that a kind takes, and the gradient of each argument."""
    positions = [position for position, p in enumerate(op.parameters) if p.role in _TENSORS]
    lines = []
    for edge, (argument, source) in enumerate(zip(positions, passes.gradients, strict=True)):
        if source is not None:
            gradient = f"found[{source}]" if source >= 0 else f"given[{~source}]"
            lines.append(f"if (ctx->needs_input_grad({edge})) all[{argument}] = {gradient};")
    taken = ", ".join(f"gradients[{position}]" for position in passes.results_with_gradients)
    return {"kind": number, "given": taken, "lines": lines, "saves_dependent": passes.saves_dependent}
