"""The plan of a recorded call: which operator it is, and where the operator's arguments come from, as text.

It is made while torch.compile or torch.export looks on, which take it for a constant.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import guard_scalar, has_static_value, statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

from fusegen.autodiff.derive import differentiated_inputs, draws, with_key
from fusegen.compiler.backends import target_of
from fusegen.compiler.compile import Request, guards_of
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.signature import ITSELF
from fusegen.errors import FusegenError
from fusegen.guards import StateRecorder
from fusegen.guards.places import BETWEEN
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import in_row_major_order, owner
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal
from fusegen.operators.gradients import AssumedGraph, GraphOperator, operator_of, recording_operator_of
from fusegen.options import Options
from fusegen.runtime.arguments import GREATEST, LEAST
from fusegen.runtime.bound import without_dynamo
from fusegen.runtime.callables import is_transformed
from fusegen.schedule.names import Namer
from fusegen.trace.run import Trace

LINES, ITEMS = "\n", BETWEEN
"""Part a plan's lines, and a line's items. The first line is the operator's name, the second says for each result of the call which
of the operator's it is (or, from -1 downwards, the argument that was written to), and each further one is an argument: a way to a
tensor (`fusegen.guards.places`), or what follows."""

VALUE, BOXED, KEY, NUMBER = "value", "boxed", "key", "number"
"""An argument of the call, by its place; one that is a float, as a tensor; a fresh key of random bits, by its device; a number."""

CELLS = SimpleNamespace()
"""Functions that give what cells of other functions hold: torch.compile can look into them, and cannot into a cell."""

_LARGEST = 1_000_003  # stands for a size that is not known, or a smaller number does
_SMALLEST = 17
_ELEMENTS = 1 << 56  # a tensor of such sizes has no more: torch counts its bytes in 64 bits
_numbers = itertools.count()


def planned(*call: Any) -> str:
    """The plan of a call, as `plan_of` makes it; nothing where there is none, and the function itself is to run.

    Args:
        call: the arguments of `plan_of`.
    """
    try:
        return str(without_dynamo(plan_of)(*call))  # where the graph broke within the call, torch.compile looks into what runs now
    except Unplanned as reason:
        what = f"{call[1]} is not fused where torch records it, and runs as torch runs its function: {reason}"
        warnings.warn(what, stacklevel=2)
        return ""


planned._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""As torch.compiler.assume_constant_result does, which imports the whole compiler: more than a second."""


def plan_of(
    function: Callable[..., Any],
    name: str,
    options: tuple[Any, ...],
    given: tuple[str, ...],
    facts: tuple[tuple[Any, ...], ...],
    recording: bool,
    *constants: Any,
) -> str:
    """The plan of a call.

    Args:
        function: the kernel's.
        name: the kernel's.
        options: the kernel's, as a plain tuple, which torch.compile takes for a constant; it is compiled as the settings say.
        given: the parameters that the call names.
        facts: about their values (`facts_of`).
        recording: whether gradients are recorded.
        constants: the values that are no tensors and no numbers to be known later (`constants_of`).

    Raises:
        Unplanned: there is no operator for it.
    """
    if is_transformed():
        raise Unplanned("a transform of torch.func is under way")
    dispatcher = partial(Dispatcher, function, name, Options(*options)._replace(compiler=None))
    have_hints = any(fact[0] == TENSOR and fact[4] not in (None, fact[3]) for fact in facts)
    with _disable_current_modes(), torch.set_grad_enabled(recording):
        try:
            return _Plan(dispatcher(), given, facts, constants, by_hints=False).text(recording)
        except (Unplanned, FusegenError) as error:
            reason = error
        if have_hints:
            with suppress(Unplanned, FusegenError):
                return _Plan(dispatcher(), given, facts, constants, by_hints=True).text(recording)
    raise Unplanned(getattr(reason, "what", str(reason))) from reason


class Unplanned(Exception):
    """There is no operator for a call."""


class _Plan:
    """The plan of a call in the making.

    Args:
        dispatcher: of the kernel's function, which knows no call.
        given, facts, constants: as of `plan_of`.
        by_hints: whether sizes that are not known, and equal in this call, count as one. What is assumed of them is then asked of
            whoever records, by the operator's shapes.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        given: Sequence[str],
        facts: Sequence[tuple[Any, ...]],
        constants: Sequence[Any],
        *,
        by_hints: bool,
    ) -> None:
        self._by_hints = by_hints
        self._dispatcher = dispatcher
        parameters = dispatcher.parameters
        self._facts = {parameters.names[parameters.given.index(g)]: fact for g, fact in zip(given, facts, strict=True)}
        values = [(name, fact) for name, fact in self._facts.items() if fact[0] in (CONSTANT, OBJECT)]
        self._constants = {name: value_of(fact, constant) for (name, fact), constant in zip(values, constants, strict=True)}
        self._places = {parameter: place for place, parameter in enumerate(self._facts)}
        self._first = _stand_in([fact[3] for fact in self._facts.values() if fact[0] == TENSOR])
        defaults = dict(zip(parameters.given, parameters.names, strict=True))
        self._defaults = {defaults[g]: value for g, value in parameters.defaults.items()}

    def text(self, recording: bool) -> str:
        """The plan. A graph that is exported holds the operator of what the user wrote, without what a backward pass needs."""
        values = [self._value(name) for name in self._dispatcher.parameters.names]
        device = self._device()
        request, found, recorder = self._dispatcher.variants.traced(values, target_of(device), device)
        self._require_plain(request, found, recorder)
        ways = recorder.ways()
        sources = self._sources(ways)
        graph = replace(found.graph, multiples=(), bounds=())  # which are of sizes that are not known
        if draws(graph):
            key = Namer(reserved=False, taken=list(sources)).take("random_key")
            graph, sources[key] = with_key(graph, key), f"{KEY}{ITEMS}{device}"
        results = [p for p in dict.fromkeys(graph.outputs) if p not in graph.puts]
        of_parameters = {symbol: name for symbol, (name, dim) in request.sizes.sources if dim == ITSELF}
        graph_of_results = in_row_major_order(replace(graph, outputs=tuple(results)))
        boxed = tuple(name for name, _ in graph.scalars if self._is_boxed(name))
        assumed = AssumedGraph(graph_of_results, tuple(of_parameters), guards_of(found), boxed=boxed)
        needed = self._needed(ways, found) if recording else set()
        if needed and graph.writes:
            raise Unplanned("it writes in place, of which no gradient is recorded")
        if needed and (found.switches_gradients or recorder.has_backward_hooks):
            raise Unplanned("it switches gradients off, or calls a module with backward hooks, which its graph does not show")
        operator = operator_of(assumed) if torch.compiler.is_exporting() or not needed else self._recording(assumed, needed, device)
        arguments = [spec.name for spec in graph.inputs] + [*of_parameters.values()] + [name for name, _ in graph.scalars]
        lines = [operator.name, ITEMS.join(str(self._place(graph, results, p)) for p in graph.outputs)]
        return LINES.join([*lines, *(sources[name] for name in arguments)])

    def _place(self, graph: Graph, results: Sequence[int], output: int) -> int:
        """The place of a result among the operator's, or -1 and downwards, among the arguments that were written to."""
        if output in graph.puts:
            return -1 - self._places[str(graph.nodes[owner(graph, output)].attr("name"))]
        return results.index(output)

    # The trace.

    def _value(self, name: str) -> Any:
        """A value that stands for an argument in the trace."""
        fact = self._facts.get(name)
        if fact is None:
            return self._defaults[name]
        if fact[0] == TENSOR:
            _, dtype, _, shape, hints, _, is_parameter = fact
            if shape and shape[-1] < 0:
                self._dispatcher.variants.history.run_time.add((name, len(shape) - 1))
            if 0 in shape:
                raise Unplanned("a tensor has no elements")
            extents = hints if self._by_hints else [size if size >= 0 else self._first - 2 * size for size in shape]
            tensor = torch.empty(extents, dtype=dtype, device="meta")
            return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        if fact[0] in (INT, FLOAT):
            return self._first if fact[0] == INT else 1.5
        value = self._constants[name]
        if isinstance(value, torch.Tensor):
            raise Unplanned(f"{name!r} is of NumPy, which the recorder makes a tensor of")
        if isinstance(value, int) and not LEAST <= value <= GREATEST:
            raise Unplanned(f"{name!r} is {value}, which does not fit 64 bits")
        return value

    def _device(self) -> torch.device:
        devices = {fact[2] for fact in self._facts.values() if fact[0] == TENSOR}
        if len(devices) != 1:
            raise Unplanned("no argument is a tensor" if not devices else "its tensors are on several devices")
        return torch.device(devices.pop())

    def _require_plain(self, request: Request, found: Trace, recorder: StateRecorder) -> None:
        """Refuses what a graph for sizes and numbers that are not known cannot stand for."""
        for spec in request.specs:
            for dim, (size, extent) in enumerate(zip(self._facts[spec.name][3], spec.shape, strict=True)):
                if size < 0 and literal(extent) is not None:
                    raise Unplanned(f"dim {dim} of {spec.name!r} must be known, and is not yet")
        if recorder.compares_identity:
            raise Unplanned("it asks whether two tensors are one")
        if recorder.asks_for_gradients:
            raise Unplanned("it asks whether an argument requires a gradient")
        sizes = {size for fact in self._facts.values() if fact[0] == TENSOR for size in fact[3] if size < 0}
        unknown = {self._first, *(self._first - 2 * size for size in sizes)}
        for guard in () if self._by_hints else guards_of(found):
            if guard.sizes & {name for name, hint in request.sizes.hints if hint in unknown}:
                raise Unplanned(f"it is traced for sizes of which {guard} holds, and they are not known yet")
        if any(self._is_unknown(node) for node in found.conditions.nodes):
            raise Unplanned("it chooses by a number that is not known yet")

    def _is_unknown(self, node: Node) -> bool:
        """Tells if a number that the function chooses by may change between calls of the graph: an unknown one, or a size
        where sizes are unknown."""
        if node.op is Op.SCALAR:
            return self._facts.get(str(node.attr("name")), (CONSTANT,))[0] in (INT, FLOAT)
        return node.op is Op.SIZE and any(fact[0] == TENSOR and min(fact[3], default=0) < 0 for fact in self._facts.values())

    # Where arguments come from.

    def _sources(self, ways: Mapping[str, str | None]) -> dict[str, str]:
        sources = {name: f"{NUMBER}{ITEMS}{value!r}" for name, value in self._defaults.items()}
        sources |= {name: f"{BOXED if self._is_boxed(name) else VALUE}{ITEMS}{place}" for name, place in self._places.items()}
        for name, way in ways.items():
            if way is None:
                raise Unplanned(f"no way is known to {name!r}, which it closes over")
            sources[name] = self._followed(way)
        return sources

    def _is_boxed(self, name: str) -> bool:
        """Tells if an argument is a float that is not known: the operator takes it as a tensor."""
        return name in self._facts and self._facts[name] == (FLOAT,)

    def _followed(self, way: str) -> str:
        """A way that torch.compile can follow: it begins with an argument that the call names, or with the function."""
        start, *steps = way.split(ITEMS)
        found: Any = self._dispatcher.function
        taken: list[str] = []
        if start != "function":
            name = self._dispatcher.parameters.names[int(start.removeprefix("argument "))]
            if name not in self._places:
                raise Unplanned(f"it reads the default of {name!r}")
            taken, found = [f"value {self._places[name]}"], self._constants[name]
        for step in steps:
            kind, _, key = step.partition(" ")
            if kind == "cell":
                found, taken = found.__closure__[int(key)], [f"cell {_reader(found.__closure__[int(key)])}"]
                found = found.cell_contents
            else:
                found, taken = _STEPS[kind](found, key), [*taken, step]
        return ITEMS.join(taken)

    def _needed(self, hidden: Iterable[str], found: Trace) -> set[str]:
        given = {name for name, fact in self._facts.items() if fact[0] == TENSOR and fact[5]}
        return given | {name for name, tensor in zip(hidden, found.hidden, strict=True) if tensor.requires_grad}

    def _recording(self, assumed: AssumedGraph, needed: set[str], device: torch.device) -> GraphOperator:
        """The operator that gives what the backward pass needs.

        Where one input requires a gradient, any argument may: torch.compile says otherwise of what a checkpoint returns. The
        backward pass computes those that are wanted then.
        """
        tensors = {name for name, fact in self._facts.items() if fact[0] == TENSOR}
        recompute = self._dispatcher.options.recompute
        with suppress(FusegenError):
            return recording_operator_of(assumed, differentiated_inputs(assumed.graph, needed | tensors), device, needed, recompute)
        wrt = differentiated_inputs(assumed.graph, needed)
        return recording_operator_of(assumed, wrt, device, needed, recompute) if wrt else operator_of(assumed)


_STEPS: dict[str, Callable[[Any, str], Any]] = {
    "member": getattr,
    "item": lambda found, key: found[int(key)],
    "key": lambda found, key: found[key],
    "globals": lambda found, _: found.__globals__,
}


def _reader(cell: Any) -> str:
    """The name of a function among `CELLS` that gives what a cell holds."""
    for name, function in vars(CELLS).items():
        if function.__closure__[0] is cell:
            return name
    name = f"cell_{next(_numbers)}"
    setattr(CELLS, name, FunctionType(_READS_A_CELL, globals(), name, None, (cell,)))
    return name


def _code_that_reads_a_cell() -> CodeType:
    held = None
    return (lambda: held).__code__


_READS_A_CELL = _code_that_reads_a_cell()


def _stand_in(shapes: Sequence[Sequence[int]]) -> int:
    """The number that stands for a size which is not known; for others stand those that are greater by 2, 4 and so on. It is odd,
    no known size is such a number, and a tensor may have several of them.

    Args:
        shapes: known sizes, and for others negative numbers, the same for the same size.

    Raises:
        Unplanned: there is no such number.
    """
    numbers = {size for shape in shapes for size in shape}
    last = -2 * min(numbers, default=0)
    found = _LARGEST
    for shape in shapes:
        unknown = sum(size < 0 for size in shape)
        if unknown:
            known = math.prod(max(size, 1) for size in shape if size >= 0)
            found = min(found, int((_ELEMENTS / known) ** (1 / unknown)) - last)
    if found < _SMALLEST:
        raise Unplanned("a tensor has too many sizes that are not known")
    found |= 1
    while not numbers.isdisjoint(range(found, found + last + 1, 2)):
        found += last + 2
    return found


# Facts about a call's arguments while a graph is recorded, as constants.
#
# torch.compile reads this file as it reads a user's: it is plain Python, whose questions are answered while it compiles. A size
# that is not known then is a negative number, the same for sizes that are known to be equal; beside it stands its value in this
# call.


TENSOR, CONSTANT, OBJECT, INT, FLOAT = "tensor", "constant", "object", "int", "float"
"""Kinds of arguments: an object is what older versions of torch.compile take for no constant, and the last two are numbers that are
not known."""

_hint: Any = getattr(symbolic_shapes, "optimization_hint", getattr(symbolic_shapes, "size_hint", None))
"""A size in this call, by the name of this or of an older version of torch."""

_TAKES_OBJECTS = torch.__version__ >= "2.13"  # torch.compile, for constants
_NUMBERS = (bool, int, float)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), tuple, list, dict, torch.dtype, torch.device)


def constants_of(values: Sequence[Any], facts: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The values that are no tensors, as torch.compile takes them for constants: of an object, where it lies."""
    found = []
    for value, fact in zip(values, facts, strict=True):
        if fact[0] == CONSTANT:
            found.append(guard_scalar(value) if type(value) in _NUMBERS else value)  # a symbol of one value is no constant yet
        elif fact[0] == OBJECT:
            found.append(id(value))
    return found


def value_of(fact: tuple[Any, ...], constant: Any) -> Any:
    """The value of a constant; an object lives, as the call that it is given to is under way."""
    return ctypes.cast(constant, ctypes.py_object).value if fact[0] == OBJECT else constant


def facts_of(values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Facts about some arguments, as far as they are known.

    Returns:
        For each argument its kind, and of a tensor dtype, device, shape, the shape in this call (None where that is not known),
        whether it needs a gradient, and whether it is a parameter. A value is not among them: torch.compile takes an object for a
        constant by itself alone.
    """
    unknown: list[Any] = []
    found: list[tuple[Any, ...]] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            shape = tuple([_size(size, unknown) for size in value.shape])
            hints = None if _hint is None else tuple([_hint(size) for size in value.shape])
            is_parameter = isinstance(value, torch.nn.Parameter)
            found.append((TENSOR, value.dtype, value.device, shape, hints, value.requires_grad, is_parameter))
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and not has_static_value(value):
            found.append((INT if isinstance(value, int) else FLOAT,))
        else:
            found.append((CONSTANT if _TAKES_OBJECTS or isinstance(value, _PLAIN) else OBJECT,))
    return found


def has_unknown_floats(values: Iterable[Any]) -> bool:
    """Tells if some of a call's arguments are floats that are not known."""
    return any(isinstance(value, float) and not has_static_value(value) for value in values)


def _size(size: Any, unknown: list[Any]) -> int:
    """A size as a constant: its value, or the place of the first one like it, from -1 downwards."""
    if has_static_value(size):
        return operator.index(size)  # int() leaves a symbol that has one value a symbol
    for place, other in enumerate(unknown):
        if statically_known_true(size == other):
            return -1 - place
    unknown.append(size)
    return -len(unknown)
