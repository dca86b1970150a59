"""Wrappers that call the math for two neighbouring lanes, as matmul and attention pipelines do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy

from fusegen.emit.environment import c_text, environment, needed_definitions
from fusegen.emit.views import LANE, Offsets, cuda_offsets, declared, decode, elements, widened
from fusegen.ir.index_map import Bounds
from fusegen.ir.random import BITS
from fusegen.ir.symbolic import Axes, FloorDiv, Index
from fusegen.schedule.indices import CheckedIndex, IndexCheck, LoadedIndex
from fusegen.schedule.kernel import LoweredKernel
from fusegen.schedule.math import CallArgument, LaneFunction, LaneRead, Origin

_LANES = 2
_LOADS = "Loads these operands."
_INLINE = "__device__ __forceinline__"
_WIDEST = 120  # characters per line
_HEAD = re.compile(rf"^{_INLINE} \w+ (\w+)\(([^{{]*)\) \{{$", re.MULTILINE)
_NAME = re.compile(r"(\w+)(\)\[\d+\])?$")  # of a parameter, or of one that is a reference to an array


@dataclass(frozen=True)
class PairCoordinates:
    """A pipeline's variables for the coordinates of a pair of lanes.

    Attributes:
        leading: the coordinates before the lane's, as parameters of the wrapper, each with the number of axes that it linearizes.
        lane: the coordinate of the first lane, which is even.
        index: the type of coordinates and offsets.
        fixed: True if functions take operands and coordinates that they do not read, without names: the pipeline passes them all.
    """

    leading: tuple[tuple[str, int], ...]
    lane: str
    index: str
    fixed: bool = True

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(f"{self.index} {name}" for name in (*(name for name, _ in self.leading), self.lane))


@dataclass(frozen=True)
class ReadView:
    """A read as the template sees it: a vector access, or one or two scalar ones.

    A ``lazy`` read happens only if its condition holds: it is ``drawn``, as random bits are, or its offset contains an index to
    read and check.
    """

    name: str
    type: str
    pointer: str
    vector: bool
    offset: str
    condition: str
    drawn: bool
    lazy: bool
    values: tuple[str, ...]

    @property
    def lanes(self) -> int:
        return 2 if self.vector else len(self.values)


@dataclass(frozen=True)
class WrapperResult:
    """A result of a wrapper: the array that it fills, and the one that the math writes, possibly of a wider `type`."""

    out: str
    target: str
    type: str = "float"

    @property
    def narrow(self) -> bool:
        """True if results are computed in a wider type than they are stored in."""
        return self.out != self.target


@dataclass(frozen=True)
class WrapperView:
    """A wrapper as the template sees it. ``decode`` computes the axes' indices, ``checks`` checks indices that are read.

    If ``loaded`` is not empty, it names a struct of the operands in memory, which a function of its own loads.
    """

    name: str
    loaded: str
    decode: tuple[str, ...]
    checks: tuple[str, ...]
    reads: tuple[ReadView, ...]
    lanewise: bool
    call: str
    arguments: list[str]
    results: tuple[WrapperResult, ...]


@dataclass(frozen=True)
class Wrapper:
    """A function that a pipeline calls for a pair of lanes; ``inputs`` are arguments besides operands and coordinates.

    ``loaded`` names the struct of operands that the pipeline loads ahead of the call; empty if the function loads them. ``drawn``
    are the random bits that the pipeline passes, as an array with a word for each of these reads.
    """

    name: str
    doc: str
    inputs: tuple[str, ...]
    coordinates: PairCoordinates
    outs: tuple[tuple[str, str], ...]
    loaded: str = ""
    drawn: tuple[LaneRead, ...] = ()


def operand_parts(kernel: LoweredKernel, index: str) -> tuple[list[str], list[str], list[str]]:
    """Returns the fields of Operands, the kernel's parameters for them, and the values of the fields.

    Parameters end in ``_ptr``, ``_extent`` or ``_value`` to avoid the pipeline's names.
    """
    pointers = [p for p in kernel.pointers if not p.writable]
    fields = list(map(declared, pointers))
    parameters, values = list(fields), [p.name for p in pointers]
    for name in kernel.sizes:
        fields.append(f"{index} {name}")
        parameters.append(f"i64 {name}_extent")
        values.append(f"{name}_extent" if index == "i64" else f"static_cast<{index}>({name}_extent)")
    for name, dtype in kernel.scalars:
        fields.append(f"{dtype.compute.spelling} {name}")
        parameters.append(f"{'double' if dtype.is_float else 'i64'} {name}_value")
        values.append(f"static_cast<{dtype.compute.spelling}>({name}_value)")
    return fields, parameters, values


def operands_text(fields: Sequence[str]) -> str:
    return _macro("operands")(fields) + "\n"


def wrapper_text(kernel: LoweredKernel, function: LaneFunction, wrapper: Wrapper) -> str:
    """Prints the function that a pipeline calls for a pair of lanes."""
    seen, coordinates = _view(kernel, function, wrapper), wrapper.coordinates.parameters
    operands, loaded = "const Operands& operands", f"{wrapper.loaded}& loaded"
    drawn = [f"const u32 (&drawn)[{len(wrapper.drawn)}]"] if wrapper.drawn else []
    outs = (f"{type_} (&{out})[{_LANES}]" for out, type_ in wrapper.outs)
    parameters = [operands, *([f"const {loaded}"] if wrapper.loaded else []), *drawn, *wrapper.inputs, *coordinates, *outs]
    text = _function_text(wrapper.doc, "void", wrapper.name, parameters, _macro("wrapper")(seen), wrapper.coordinates)
    if not wrapper.loaded:
        return text
    parameters = [operands, *coordinates, loaded]
    loading = _function_text(_LOADS, "void", f"load_{wrapper.name}", parameters, _macro("loading")(seen), wrapper.coordinates)
    return "\n".join([_macro("loaded")(seen), loading, text])


def offset_text(
    name: str,
    doc: str,
    offset: Index,
    axes: Axes,
    coordinates: PairCoordinates,
    last: bool,
    offsets: Offsets | None = None,
) -> str:
    """Prints a function that returns the offset of a result's element; with ``last``, it also takes the lane's coordinate. Numbers
    that the function reads from memory need `offsets`."""
    parameters = ["const Operands& operands", *coordinates.parameters[: None if last else -1]]
    renamed = _renamed(offset, axes, coordinates)
    returned = f"return {c_text(renamed) if offsets is None else offsets.text(renamed)};"
    lines = [*needed_definitions(_decode(axes, coordinates), returned), returned]
    return _function_text(doc, "i64", name, parameters, "".join(f"    {line}\n" for line in lines), coordinates)


def parameters_of(text: str) -> dict[str, tuple[str, ...]]:
    """Maps each function of a text to the names of its parameters."""
    heads = ((name, map(_NAME.search, parameters.split(","))) for name, parameters in _HEAD.findall(text))
    return {name: tuple(found[1] for found in names if found) for name, names in heads}


def index_text(index: Index, offsets: Offsets, axes: Axes, coordinates: PairCoordinates) -> str:
    """Prints an index over the axes in the pipeline's coordinates."""
    return offsets.text(_renamed(index, axes, coordinates))


def _macro(name: str) -> Callable[[Any], str]:
    return cast(Callable[[Any], str], getattr(environment().get_template("cuda/lanes.cuh.jinja").module, name))


def _view(kernel: LoweredKernel, function: LaneFunction, wrapper: Wrapper) -> WrapperView:
    coordinates = wrapper.coordinates
    offsets = cuda_offsets(kernel, prefix="operands.")
    return WrapperView(
        name=wrapper.name,
        loaded=wrapper.loaded,
        decode=tuple(_decode(function.axes, coordinates)),
        checks=tuple(offsets.check(_renamed_check(c, function.axes, coordinates)) for c in function.checks),
        reads=tuple(
            _drawn_view(r, wrapper.drawn.index(r)) if r in wrapper.drawn else _read_view(r, offsets, function.axes, coordinates)
            for r in function.reads
        ),
        lanewise=function.lanewise,
        call=function.function.name,
        arguments=[argument_text(a, function, offsets, coordinates) for a in function.arguments],
        results=tuple(
            WrapperResult(out, out if type_ == "float" else out.replace("out", "result"), written)
            for (out, type_), written in zip(wrapper.outs, _written_types(function), strict=True)
        ),
    )


def _written_types(function: LaneFunction) -> list[str]:
    """Returns the types of the variables that the math writes; a returned value is converted."""
    results = function.function.results
    return ["float"] if len(results) == 1 else [r.dtype.spelling for r in results[:: 1 if function.lanewise else _LANES]]


def _function_text(doc: str, returned: str, name: str, parameters: Sequence[str], body: str, coordinates: PairCoordinates) -> str:
    """Prints a function. Parameters that its body does not read have no name; operands and coordinates are left out unless they are
    fixed."""
    read = set(re.findall(r"\w+", body))
    left_out = set() if coordinates.fixed else {"const Operands& operands", *coordinates.parameters}
    taken = [p for p in parameters if p not in left_out or p.split()[-1] in read]
    named = [_NAME.sub(lambda m: m[0] if m[1] in read else f"/*{m[1]}*/{m[2] or ''}", p) for p in taken]
    return f"// {doc}\n{_signature(returned, name, named)} {{\n{body}}}\n"


def _signature(returned: str, name: str, parameters: Sequence[str]) -> str:
    head = f"{_INLINE} {returned} {name}("
    lines = [head + parameters[0]]
    for parameter in parameters[1:]:
        if len(f"{lines[-1]}, {parameter},") > _WIDEST:
            lines.append(" " * len(head) + parameter)
            lines[-2] += ","
        else:
            lines[-1] += f", {parameter}"
    return "\n".join(lines) + ")"


def _decode(axes: Axes, coordinates: PairCoordinates) -> list[str]:
    lines: list[str] = []
    first = 0
    for name, count in coordinates.leading:
        numbered = slice(first, first + count)
        extents = tuple(_renamed(e, axes, coordinates) for e in axes.extents[numbered])
        lines += decode(Axes(axes.symbols[numbered], extents), name, coordinates.index)
        first += count
    return lines


def _read_view(read: LaneRead, offsets: Offsets, axes: Axes, coordinates: PairCoordinates) -> ReadView:
    pointer = offsets.pointers[read.buffer]
    wide = pointer.dtype.compute.spelling
    offset_texts = [offsets.text(_renamed(o, axes, coordinates)) for o in read.offsets]
    conditions = [offsets.condition(_renamed_bounds(b, axes, coordinates) for b in c) for c in read.conditions]
    base = elements(pointer, offsets.prefix)
    values = [widened(f"load({base}, {offset})", pointer.dtype) for offset in offset_texts]
    guarded = [f"{c} ? {v} : {wide}(0)" if c else v for c, v in zip(conditions, values, strict=True)]
    is_drawn = pointer.stream is not None
    is_lazy = is_drawn or sympy.sympify(read.offsets[0]).has(LoadedIndex, CheckedIndex)
    return ReadView(read.name, wide, base, read.vector, offset_texts[0], conditions[0], is_drawn, is_lazy, tuple(guarded))


def _drawn_view(read: LaneRead, number: int) -> ReadView:
    values = (f"static_cast<i16>(drawn[{number}])", f"static_cast<i16>(drawn[{number}] >> {BITS})")
    return ReadView(read.name, "i64", "", vector=False, offset="", condition="", drawn=True, lazy=False, values=values)


def argument_text(argument: CallArgument, function: LaneFunction, offsets: Offsets, coordinates: PairCoordinates) -> str:
    """Prints an argument of the math on a pair, for lane ``v`` if the lanes do not mix."""
    if argument.origin is Origin.LANES:
        return f"{argument.name}[v]" if function.lanewise else argument.name
    if argument.origin is Origin.SCALAR:
        return f"operands.{argument.name}"
    if argument.origin is Origin.VALUE:
        return argument.name
    value = argument.coordinates[0]
    step = LANE if len(argument.coordinates) > 1 else 0  # lanes of one call are neighbours
    if isinstance(value, Bounds):
        renamed = _renamed_bounds(value, function.axes, coordinates)
        return offsets.condition([Bounds(renamed.index + step, renamed.lower, renamed.upper)])
    return offsets.value(_renamed(value, function.axes, coordinates) + step)


def _renamed_bounds(bounds: Bounds, axes: Axes, coordinates: PairCoordinates) -> Bounds:
    lower, upper = (None if b is None else _renamed(b, axes, coordinates) for b in (bounds.lower, bounds.upper))
    return Bounds(_renamed(bounds.index, axes, coordinates), lower, upper)


def _renamed_check(check: IndexCheck, axes: Axes, coordinates: PairCoordinates) -> IndexCheck:
    return IndexCheck(
        _renamed(check.call, axes, coordinates), tuple(_renamed_bounds(b, axes, coordinates) for b in check.conditions)
    )


def _renamed(index: Index, axes: Axes, coordinates: PairCoordinates) -> sympy.Expr:
    """Rewrites an index for the wrapper: axes become the pipeline's coordinates, sizes become fields of `Operands`."""
    expression = sympy.expand(index)
    sizes = {s: _variable(f"operands.{s.name}") for s in expression.free_symbols - set(axes.symbols)}
    renamed = expression.subs({**sizes, **_names(axes, coordinates)}, simultaneous=True)
    return _in_lanes(renamed, axes.symbols[-1], _variable(coordinates.lane))


def _names(axes: Axes, coordinates: PairCoordinates) -> dict[sympy.Symbol, sympy.Symbol]:
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    first = 0
    for name, count in coordinates.leading:
        if count == 1:
            names[axes.symbols[first]] = _variable(name)
        first += count
    return names


def _in_lanes(expression: sympy.Expr, pair: sympy.Symbol, lane: sympy.Symbol) -> sympy.Expr:
    """Replaces the pair's number by its first lane's coordinate; divides by 2 only if the factors do not cancel."""
    halved = sympy.expand(expression.subs(pair, lane / _LANES))
    if all(number.is_Integer for number in halved.atoms(sympy.Number)):
        return halved
    return expression.subs(pair, FloorDiv(lane, sympy.Integer(_LANES)))


def _variable(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)
