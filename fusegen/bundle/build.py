"""Builds kernels into a folder: binaries for each target, and launch plans as data. Needs no GPU."""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from fusegen.bundle.manifest import (
    NAME,
    NOT_DESCRIBED,
    BuiltKernel,
    BuiltParameter,
    BuiltPasses,
    BuiltVariant,
    Manifest,
    RequestedCall,
    manifest_text,
    mark_of,
    stored,
)
from fusegen.bundle.programs import (
    Example,
    File,
    built_passes,
    built_program,
    limits,
    machine_of,
    new_folder,
    passes_by_all,
    require_new,
    tensor_argument,
    with_mark,
    write,
)
from fusegen.compiler.compile import Variant
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.parameters import Parameters
from fusegen.dtypes import autocast_dtype, from_torch
from fusegen.errors import ArgumentError, BundleError
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.options import DEFAULTS, Options
from fusegen.program.formula import Relation
from fusegen.program.names import ascii_name, stride_name
from fusegen.program.signature import (
    ArgumentSpec,
    Constant,
    ContainerKind,
    ExtentArgument,
    NumberArgument,
    ResultStructure,
    Signature,
    TensorArgument,
)
from fusegen.runtime.callables import by_position
from fusegen.target import Backend, Target
from fusegen.trace import run


@dataclass(frozen=True)
class BuildRequest:
    """A kernel to build for one kind of call.

    Attributes:
        name: the name to load it by.
        arguments: example arguments by parameter; tensors may be on the meta device.
        options: options of the declaration. Settings select the compiler.
        described: the call as the command line describes it.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    target: Target
    options: Options = DEFAULTS
    described: RequestedCall = NOT_DESCRIBED

    @property
    def dispatcher(self) -> Dispatcher:
        return Dispatcher(self.function, self.function.__name__, self.options._replace(compiler=None))


@dataclass(frozen=True)
class TracedCall:
    """A kernel traced for one kind of call. Names and values are of its parameters and captured tensors, as in emitted text."""

    requested: BuildRequest
    dispatcher: Dispatcher
    variant: Variant
    names: tuple[str, ...]
    values: tuple[Any, ...]


def build(folder: Path, requests: Iterable[BuildRequest], version: str) -> tuple[BuiltKernel, ...]:
    """Compiles kernels into a new folder, atomically.

    Args:
        folder: the folder to create; its parent must exist.
        requests: one per kind of call and target.
        version: version of fusegen.

    Raises:
        BundleError: the folder exists or cannot be written, or a kernel cannot run without its function.
        CompileError, ToolNotFoundError: a compiler fails or is missing.
        TraceError: a function cannot be traced.
    """
    require_new(folder)
    kernels: list[BuiltKernel] = []
    with new_folder(folder) as unfinished:
        for request in requests:
            first = sum(len(kernel.variants) for kernel in kernels)
            kernels.append(built_kernel(request, unfinished, first))
        built = merged(kernels)
        described = [stored(kernel) for kernel in built]
        for kernel in described:
            write(unfinished / kernel.file.file, kernel.text)
        write(unfinished / NAME, manifest_text(Manifest(version, tuple(kernel.file for kernel in described))).encode())
    return built


def built_kernel(requested: BuildRequest, folder: Path, first: int = 0, tag: str = "") -> BuiltKernel:
    """Compiles a kernel for one kind of call, and writes its files.

    Args:
        folder: the folder of the files.
        first: number of the first program; later ones count on.
        tag: goes before the numbers.

    Raises:
        BundleError, CompileError, ToolNotFoundError, TraceError: as for `build`.
    """
    subdir = f"{ascii_name(requested.name)}/{requested.target.name}-{tag}"
    kernels: list[BuiltKernel] = []
    for traced in traced_calls(requested):
        parameters = _parameters(traced.dispatcher.parameters, traced.variant.state.names)
        number = first + sum(len(kernel.variants) for kernel in kernels)
        passes, files = _passes(traced, parameters, f"{subdir}{number}")
        variants = []
        for variant, own_files in _built(traced, passes, subdir, number):
            marked, marked_files = with_mark(variant, own_files, mark_of(parameters, variant))
            variants.append(marked)
            files += marked_files
        for file in files:
            write(folder / file.path, file.content)
        kernels.append(BuiltKernel(requested.name, parameters, tuple(variants), ""))
    return merged(kernels)[0]


def merged(kernels: Iterable[BuiltKernel]) -> tuple[BuiltKernel, ...]:
    """Joins the programs of kernels with the same name. A program with the signature of an earlier one is left out.

    Raises:
        BundleError: two kernels of a name have different parameters or captured tensors.
    """
    by_name: dict[str, BuiltKernel] = {}
    for kernel in kernels:
        known = by_name.setdefault(kernel.name, replace(kernel, variants=()))
        _require_same(known, kernel.parameters)
        calls = {(variant.target, variant.machine, variant.signature, variant.rows) for variant in known.variants}
        new = (v for v in kernel.variants if (v.target, v.machine, v.signature, v.rows) not in calls)
        by_name[kernel.name] = replace(known, variants=(*known.variants, *new))
    return tuple(by_name.values())


def _traced(requested: BuildRequest) -> TracedCall:
    dispatcher = requested.dispatcher
    values = dispatcher.arguments(*by_position(dispatcher.function, requested.arguments))
    device = torch.device("cpu" if requested.target.backend is Backend.CPU else "cuda")
    variant, captured = dispatcher.variants.variant_of(values, requested.target, device)
    if queries := variant.state.queries:
        what = f"{requested.name} reads {', '.join(queries)} while it is traced, but a built kernel cannot check it in later calls"
        raise BundleError(what, hint="pass the value as an argument")
    names = (*dispatcher.parameters.emitted_names, *variant.state.names)
    return TracedCall(requested, dispatcher, variant, names, (*values, *captured))


def traced_calls(requested: BuildRequest) -> Iterator[TracedCall]:
    """Traces a kernel for its arguments. If the function tests sizes for 1, variants with these sizes set to 1 come first.

    Raises:
        BundleError: it depends on state that a built kernel cannot check.
        TraceError: the function cannot be traced.
    """
    traced = _traced(requested)
    signature = signature_of(traced.variant, traced.names, traced.values)
    asked = [name for name in sorted(signature.sizes) if any(_asks_for_one(each, name) for each in signature.relations)]
    for ones in (some for count in range(len(asked), 0, -1) for some in combinations(asked, count)):
        try:
            traced_ones = _traced(replace(requested, arguments=_with_ones(traced, signature, ones)))
        except Exception:  # the function does not accept these sizes
            continue
        yield traced_ones
    yield traced


def _asks_for_one(relation: Relation, name: str) -> bool:
    return relation.sizes == {name} and not relation({name: 1}) and relation({name: 2})


def _with_ones(traced: TracedCall, signature: Signature, ones: Sequence[str]) -> dict[str, Any]:
    parameters = traced.dispatcher.parameters
    sizes = dict(traced.variant.request.sizes.hints) | dict.fromkeys(ones, 1)
    arguments = dict(traced.requested.arguments)
    for parameter, name, argument, value in zip(
        parameters.user_names,
        parameters.emitted_names,
        signature.arguments,
        traced.values,
        strict=False,  # captured tensors have no parameter
    ):
        if isinstance(argument, ExtentArgument):
            arguments[parameter] = sizes[argument.size]
        elif isinstance(argument, TensorArgument):
            known = sizes | {stride_name(name, dim): stride for dim, stride in enumerate(value.stride())}
            shape, strides = ([extent(known) for extent in some] for some in (argument.shape, argument.strides))
            arguments[parameter] = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    return arguments


def _require_same(kernel: BuiltKernel, parameters: Sequence[BuiltParameter]) -> None:
    if kernel.parameters != tuple(parameters):
        names = (", ".join(p.name for p in some if p.captured) or "none" for some in (kernel.parameters, parameters))
        what = "{} captures different tensors for different arguments: {}; {}".format(kernel.name, *names)
        raise BundleError(what, hint="build each into its own folder, or pass them as arguments")


def _built(traced: TracedCall, passes: BuiltPasses | None, subdir: str, number: int) -> Iterator[tuple[BuiltVariant, list[File]]]:
    """Yields the programs for all ranges of row counts, with the files of their kernels."""
    requested, variant = traced.requested, traced.variant
    signature = signature_of(variant, traced.names, traced.values)
    hints = dict(variant.request.sizes.hints)
    for count, (rows, form) in enumerate(variant.specializer.all(hints, is_general=True), number):
        compiled = variant.with_specialization(form)
        program, files = built_program(requested.target, signature, limits(rows), compiled, f"{subdir}{count}")
        machine, structure = machine_of(requested.target), structure_of(variant.structure)
        yield (
            BuiltVariant(
                **vars(program),
                requested=requested.described,
                target=requested.target.name,
                machine=machine,
                structure=structure,
                passes=passes,
            ),
            files,
        )


def _passes(traced: TracedCall, parameters: Sequence[BuiltParameter], subdir: str) -> tuple[BuiltPasses | None, list[File]]:
    """Returns a kernel's forward and backward pass and their files, or None if it has no derivative."""
    variant, dispatcher = traced.variant, traced.dispatcher
    count = len(dispatcher.parameters.emitted_names)
    sizes = dispatcher.variants.sizes(variant, traced.values[:count], traced.values[count:])
    passes = passes_by_all(variant, dispatcher.options, sizes)
    if passes is None:
        return None, []
    call = Example(dict(zip(traced.names, traced.values, strict=True)), sizes, signature_of(variant, traced.names, traced.values))
    return built_passes(passes, variant, call, parameters, subdir)


def _parameters(parameters: Parameters, captured: Sequence[str]) -> tuple[BuiltParameter, ...]:
    """Returns the declared parameters, followed by the captured tensors."""
    parameters_by_name = inspect.signature(parameters.function).parameters
    defaults = {name: Constant(value) for name, value in parameters.defaults.items()}
    is_named = {name: parameters_by_name[name].kind is inspect.Parameter.KEYWORD_ONLY for name in parameters.user_names}
    both = zip(parameters.user_names, parameters.emitted_names, strict=True)
    declared = [
        BuiltParameter(user_name, name, is_named[user_name], defaults.get(user_name), written=name in parameters.mutates)
        for user_name, name in both
    ]
    return (*declared, *(BuiltParameter(name, name, True, None, captured=True) for name in captured))


def signature_of(variant: Variant, names: Sequence[str], values: Sequence[Any]) -> Signature:
    """Returns the assumptions of a variant that was compiled for these values of its parameters and captured tensors."""
    request = variant.request
    lower = autocast_dtype(request.device.type)
    known: dict[str, ArgumentSpec] = {spec.name: tensor_argument(spec) for spec in (*request.specs, *variant.traced.inputs)}
    takes_ints = _floats_meet_floats(variant.traced)
    known |= {name: NumberArgument(dtype.is_float, takes_ints and dtype.is_float) for name, dtype in request.scalars}
    known |= {name: ExtentArgument(size) for name, size in request.sizes.parameters.items()}
    return Signature(
        arguments=tuple(known.get(name, Constant(value)) for name, value in zip(names, values, strict=True)),
        default_dtype=from_torch(torch.get_default_dtype()),
        autocast=None if lower is None else from_torch(lower),
        multiples=request.sizes.multiples,
        bounds=request.sizes.bounds,
        relations=variant.guards,
        conditions=variant.conditions,
        index64=request.index64,
        distinct=variant.state.compares_identity and sum(isinstance(value, torch.Tensor) for value in values) > 1,
    )


def _floats_meet_floats(graph: Graph) -> bool:
    """True if every run-time float is combined with a float tensor, so that an int instead changes no dtype."""
    operands = [[graph.nodes[position] for position in node.args] for node in graph.nodes if not node.weak]
    operations = [nodes for nodes in operands if any(n.weak and n.dtype.is_float and n.op is not Op.CONSTANT for n in nodes)]
    return all(any(n.dtype.is_float and not n.weak for n in nodes) for nodes in operations)


_CONTAINER_KINDS = {
    run.Nothing: ContainerKind.NONE,
    run.ComplexResult: ContainerKind.COMPLEX,
    tuple: ContainerKind.TUPLE,
    list: ContainerKind.LIST,
    dict: ContainerKind.DICT,
    namedtuple: ContainerKind.NAMED_TUPLE,
}


def structure_of(structure: run.ResultTree) -> ResultStructure:
    if structure.is_leaf():
        return ResultStructure(ContainerKind.TENSOR)
    kind = _CONTAINER_KINDS.get(structure.type)
    if kind is None:
        what = f"a result is a {structure.type.__name__}, which a bundle cannot store"
        raise BundleError(what, hint="return tuples, lists, dicts and named tuples")
    keys: tuple[Any, ...] = tuple(structure.context) if kind is ContainerKind.DICT else ()
    if kind is ContainerKind.NAMED_TUPLE:
        keys = structure.context._fields
    if not all(type(key) in (str, int) for key in keys):
        raise ArgumentError("a result is a dict with a key that is neither a string nor an int", hint="use strings or ints as keys")
    name = structure.context.__name__ if kind is ContainerKind.NAMED_TUPLE else ""
    return ResultStructure(kind, tuple(map(structure_of, structure.children())), keys, name)
