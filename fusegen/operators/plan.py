"""The plan of a recorded call, as text: the operator, and the sources of its arguments.

torch.compile and torch.export treat it as a constant while they trace.
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

from fusegen.autodiff.derive import differentiated_inputs, draws, with_random_key
from fusegen.compiler.backends import target_of
from fusegen.compiler.compile import Request, guards_of
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.signature import VALUE_AS_SIZE
from fusegen.errors import FusegenError
from fusegen.guards.locations import PATH_SEPARATOR
from fusegen.guards.recorder import StateRecorder
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import first_version, in_row_major_order
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import literal
from fusegen.operators.gradients import AssumedGraph, GraphOperator, operator_of, recording_operator_of
from fusegen.options import Options
from fusegen.runtime.arguments import GREATEST, LEAST
from fusegen.runtime.bound import without_dynamo
from fusegen.runtime.callables import is_transformed
from fusegen.schedule.names import Namer
from fusegen.trace.run import Trace

LINES, ITEMS = "\n", PATH_SEPARATOR
"""Separators of a plan's lines, and of items in a line. Line 1 is the operator's name. Line 2 has for each result of the call its
position among the operator's results; for a written argument, it has -1 - the argument's position. Each further line is an
argument: a path to a tensor (`fusegen.guards.locations`), or one of the kinds below."""

VALUE, BOXED, KEY, NUMBER = "value", "boxed", "key", "number"
"""An argument of the call, by position; a float argument, as a tensor; a new random key, by device; a number."""

CELLS = SimpleNamespace()
"""Functions that return cells' contents: torch.compile can trace them, but not read a cell."""

_MAX_PLACEHOLDER = 1_000_003  # upper bound of placeholders for unknown sizes
_MIN_PLACEHOLDER = 17
_MAX_ELEMENTS = 1 << 56  # limit of a tensor of placeholders: its bytes must fit 64 bits
_numbers = itertools.count()


def planned(*call: Any) -> str:
    """Returns the plan of a call. Warns and returns "" if torch must run the function. The arguments are those of `plan_of`."""
    try:
        return str(without_dynamo(plan_of)(*call))  # after a graph break in the call, torch.compile would trace into it
    except NoOperator as reason:
        what = f"{call[1]} runs unfused in a graph that torch records: {reason}"
        warnings.warn(what, stacklevel=2)
        return ""


planned._dynamo_marked_constant = True  # type: ignore[attr-defined]
"""Equivalent to torch.compiler.assume_constant_result, which would import the whole compiler: over 1 s."""


def plan_of(
    function: Callable[..., Any],
    name: str,
    options: tuple[Any, ...],
    provided: tuple[str, ...],
    facts: tuple[tuple[Any, ...], ...],
    recording: bool,
    *constants: Any,
) -> str:
    """Returns the plan of a call.

    Args:
        options: the kernel's options as a tuple, which torch.compile treats as a constant. Settings select the compiler.
        provided: the parameters that the call provides.
        facts: facts about their values (`facts_of`).
        recording: whether gradients are recorded.
        constants: values that are neither tensors nor unknown numbers (`constants_of`).

    Raises:
        NoOperator: there is no operator for the call.
    """
    if is_transformed():
        raise NoOperator("a transform of torch.func is active")
    dispatcher = partial(Dispatcher, function, name, Options(*options)._replace(compiler=None))
    have_hints = any(fact[0] == TENSOR and fact[4] not in (None, fact[3]) for fact in facts)
    with _disable_current_modes(), torch.set_grad_enabled(recording):
        try:
            return _Plan(dispatcher(), provided, facts, constants, by_hints=False).text(recording)
        except (NoOperator, FusegenError) as error:
            reason = error
        if have_hints:
            with suppress(NoOperator, FusegenError):
                return _Plan(dispatcher(), provided, facts, constants, by_hints=True).text(recording)
    raise NoOperator(getattr(reason, "what", str(reason))) from reason


class NoOperator(Exception):
    """There is no operator for a call."""


class _Plan:
    """Builds the plan of a call.

    Args:
        dispatcher: a new dispatcher of the kernel's function.
        provided, facts, constants: as for `plan_of`.
        by_hints: whether unknown sizes that are equal in this call are assumed equal. The operator's shape function then makes the
            recorder guard on it.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        provided: Sequence[str],
        facts: Sequence[tuple[Any, ...]],
        constants: Sequence[Any],
        *,
        by_hints: bool,
    ) -> None:
        self._by_hints = by_hints
        self._dispatcher = dispatcher
        parameters = dispatcher.parameters
        self._facts = {
            parameters.emitted_names[parameters.user_names.index(g)]: fact for g, fact in zip(provided, facts, strict=True)
        }
        values = [(name, fact) for name, fact in self._facts.items() if fact[0] in (CONSTANT, OBJECT)]
        self._constants = {name: value_of(fact, constant) for (name, fact), constant in zip(values, constants, strict=True)}
        self._places = {parameter: position for position, parameter in enumerate(self._facts)}
        self._first = _placeholder_size([fact[3] for fact in self._facts.values() if fact[0] == TENSOR])
        defaults = dict(zip(parameters.user_names, parameters.emitted_names, strict=True))
        self._defaults = {defaults[g]: value for g, value in parameters.defaults.items()}

    def text(self, recording: bool) -> str:
        """Returns the plan. Exported graphs contain the operator without saved values."""
        values = [self._placeholder(name) for name in self._dispatcher.parameters.emitted_names]
        device = self._device()
        request, trace, recorder = self._dispatcher.variants.traced(values, target_of(device), device)
        self._require_plain(request, trace, recorder)
        paths = recorder.captured_paths()
        sources = self._sources(paths)
        graph = replace(trace.graph, multiples=(), bounds=())  # of unknown sizes
        if draws(graph):
            key = Namer(reserved=False, taken=list(sources)).take("random_key")
            graph, sources[key] = with_random_key(graph, key), f"{KEY}{ITEMS}{device}"
        results = [p for p in dict.fromkeys(graph.outputs) if p not in graph.puts]
        names = graph.result_names if tuple(results) == graph.outputs else ()
        of_parameters = {symbol: name for symbol, (name, dim) in request.sizes.sources if dim == VALUE_AS_SIZE}
        graph_of_results = in_row_major_order(replace(graph, outputs=tuple(results), result_names=names))
        boxed = tuple(name for name, _ in graph.scalars if self._is_boxed(name))
        assumed = AssumedGraph(graph_of_results, tuple(of_parameters), guards_of(trace), boxed=boxed)
        needed = self._inputs_with_gradients(paths, trace) if recording else set()
        if needed and graph.writes:
            raise NoOperator("it writes in place, which records no gradient")
        if needed and (trace.switches_gradients or recorder.has_backward_hooks):
            raise NoOperator("it disables gradients, or calls a module with backward hooks, which its graph does not contain")
        operator = (
            operator_of(assumed) if torch.compiler.is_exporting() or not needed else self._with_saved(assumed, needed, device)
        )
        arguments = [spec.name for spec in graph.inputs] + [*of_parameters.values()] + [name for name, _ in graph.scalars]
        lines = [operator.name, ITEMS.join(str(self._result_position(graph, results, p)) for p in graph.outputs)]
        return LINES.join([*lines, *(sources[name] for name in arguments)])

    def _result_position(self, graph: Graph, results: Sequence[int], output: int) -> int:
        """Returns the position of an output among the operator's results; for a written argument, -1 - its position."""
        if output in graph.puts:
            return -1 - self._places[str(graph.nodes[first_version(graph, output)].attr("name"))]
        return results.index(output)

    # The trace.

    def _placeholder(self, name: str) -> Any:
        """Returns a placeholder for an argument in the trace."""
        fact = self._facts.get(name)
        if fact is None:
            return self._defaults[name]
        if fact[0] == TENSOR:
            _, dtype, _, shape, hints, _, is_parameter = fact
            if shape and shape[-1] < 0:
                self._dispatcher.variants.history.run_time.add((name, len(shape) - 1))
            if 0 in shape:
                raise NoOperator("a tensor has no elements")
            extents = hints if self._by_hints else [size if size >= 0 else self._first - 2 * size for size in shape]
            tensor = torch.empty(extents, dtype=dtype, device="meta")
            return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        if fact[0] in (INT, FLOAT):
            return self._first if fact[0] == INT else 1.5
        value = self._constants[name]
        if isinstance(value, torch.Tensor):
            raise NoOperator(f"{name!r} is a NumPy value, which the recorder converts to a tensor")
        if isinstance(value, int) and not LEAST <= value <= GREATEST:
            raise NoOperator(f"{name!r} is {value}, which does not fit 64 bits")
        return value

    def _device(self) -> torch.device:
        devices = {fact[2] for fact in self._facts.values() if fact[0] == TENSOR}
        if len(devices) != 1:
            raise NoOperator("no argument is a tensor" if not devices else "its tensors are on several devices")
        return torch.device(devices.pop())

    def _require_plain(self, request: Request, trace: Trace, recorder: StateRecorder) -> None:
        """Rejects traces that depend on unknown sizes or numbers, or on tensors' identities."""
        for spec in request.specs:
            for dim, (size, extent) in enumerate(zip(self._facts[spec.name][3], spec.shape, strict=True)):
                if size < 0 and literal(extent) is not None:
                    raise NoOperator(f"dim {dim} of {spec.name!r} must be known, but is symbolic in the graph")
        if recorder.compares_identity:
            raise NoOperator("it compares tensors by identity")
        if recorder.asks_for_gradients:
            raise NoOperator("it reads requires_grad of an argument")
        sizes = {size for fact in self._facts.values() if fact[0] == TENSOR for size in fact[3] if size < 0}
        unknown = {self._first, *(self._first - 2 * size for size in sizes)}
        for guard in () if self._by_hints else guards_of(trace):
            if guard.sizes & {name for name, hint in request.sizes.hints if hint in unknown}:
                raise NoOperator(f"it is specialized to sizes with {guard}, which are symbolic in the graph")
        if any(self._is_unknown(node) for node in trace.conditions.nodes):
            raise NoOperator("it branches on a number that is symbolic in the graph")

    def _is_unknown(self, node: Node) -> bool:
        """True if a number in a branch condition may change between calls of the graph: a symbolic number, or a size if sizes are
        symbolic."""
        if node.op is Op.SCALAR:
            return self._facts.get(str(node.attr("name")), (CONSTANT,))[0] in (INT, FLOAT)
        return node.op is Op.SIZE and any(fact[0] == TENSOR and min(fact[3], default=0) < 0 for fact in self._facts.values())

    # Sources of arguments.

    def _sources(self, paths: Mapping[str, str | None]) -> dict[str, str]:
        sources = {name: f"{NUMBER}{ITEMS}{value!r}" for name, value in self._defaults.items()}
        sources |= {name: f"{BOXED if self._is_boxed(name) else VALUE}{ITEMS}{position}" for name, position in self._places.items()}
        for name, path in paths.items():
            if path is None:
                raise NoOperator(f"the captured tensor {name!r} cannot be found from the function or its arguments")
            sources[name] = self._traceable_path(path)
        return sources

    def _is_boxed(self, name: str) -> bool:
        """True if an argument is an unknown float, which the operator takes as a tensor."""
        return name in self._facts and self._facts[name] == (FLOAT,)

    def _traceable_path(self, path: str) -> str:
        """Rewrites a path to start at a provided argument or at the function, so that torch.compile can follow it."""
        start, *steps = path.split(ITEMS)
        value: Any = self._dispatcher.function
        items: list[str] = []
        if start != "function":
            name = self._dispatcher.parameters.emitted_names[int(start.removeprefix("argument "))]
            if name not in self._places:
                raise NoOperator(f"it captures a tensor from the default value of {name!r}")
            items, value = [f"value {self._places[name]}"], self._constants[name]
        for step in steps:
            kind, _, key = step.partition(" ")
            if kind == "cell":
                value, items = value.__closure__[int(key)], [f"cell {_cell_reader(value.__closure__[int(key)])}"]
                value = value.cell_contents
            else:
                value, items = _STEPS[kind](value, key), [*items, step]
        return ITEMS.join(items)

    def _inputs_with_gradients(self, captured: Iterable[str], trace: Trace) -> set[str]:
        arguments = {name for name, fact in self._facts.items() if fact[0] == TENSOR and fact[5]}
        return arguments | {name for name, tensor in zip(captured, trace.captured, strict=True) if tensor.requires_grad}

    def _with_saved(self, assumed: AssumedGraph, needed: set[str], device: torch.device) -> GraphOperator:
        """Returns the operator with saved values. If one input requires a gradient, all are differentiated, since torch.compile
        reports `requires_grad` wrongly under a checkpoint. The backward pass computes the requested gradients only."""
        tensors = {name for name, fact in self._facts.items() if fact[0] == TENSOR}
        recompute = self._dispatcher.options.recompute
        with suppress(FusegenError):
            return recording_operator_of(assumed, differentiated_inputs(assumed.graph, needed | tensors), device, needed, recompute)
        wrt = differentiated_inputs(assumed.graph, needed)
        return recording_operator_of(assumed, wrt, device, needed, recompute) if wrt else operator_of(assumed)


_STEPS: dict[str, Callable[[Any, str], Any]] = {
    "member": getattr,
    "item": lambda value, key: value[int(key)],
    "key": lambda value, key: value[key],
    "globals": lambda value, _: value.__globals__,
}


def _cell_reader(cell: Any) -> str:
    """Returns the name in `CELLS` of a function that returns a cell's content."""
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


def _placeholder_size(shapes: Sequence[Sequence[int]]) -> int:
    """Returns the placeholder for the first unknown size; the others are greater by 2, 4 and so on. Placeholders are odd and differ
    from all known sizes.

    Args:
        shapes: known sizes; equal negative numbers are equal unknown sizes.

    Raises:
        NoOperator: no placeholder is free.
    """
    numbers = {size for shape in shapes for size in shape}
    last = -2 * min(numbers, default=0)
    placeholder = _MAX_PLACEHOLDER
    for shape in shapes:
        unknown = sum(size < 0 for size in shape)
        if unknown:
            known = math.prod(max(size, 1) for size in shape if size >= 0)
            placeholder = min(placeholder, int((_MAX_ELEMENTS / known) ** (1 / unknown)) - last)
    if placeholder < _MIN_PLACEHOLDER:
        raise NoOperator("a tensor has too many symbolic sizes")
    placeholder |= 1
    while not numbers.isdisjoint(range(placeholder, placeholder + last + 1, 2)):
        placeholder += last + 2
    return placeholder


# Facts about a call's arguments while a graph is recorded, as constants. torch.compile traces this code, so it is plain Python.
# Unknown sizes are negative numbers, equal for sizes known to be equal; their values in this call are stored beside them.


TENSOR, CONSTANT, OBJECT, INT, FLOAT = "tensor", "constant", "object", "int", "float"
"""Kinds of arguments. OBJECT is a value that older versions of torch.compile do not accept as a constant; INT and FLOAT are unknown
numbers."""

_hint: Any = getattr(symbolic_shapes, "optimization_hint", getattr(symbolic_shapes, "size_hint", None))
"""The value of a size in this call; its name depends on torch's version."""

_TAKES_OBJECTS = torch.__version__ >= "2.13"  # torch.compile accepts any object as a constant
_NUMBERS = (bool, int, float)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), tuple, list, dict, torch.dtype, torch.device)


def constants_of(values: Sequence[Any], facts: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Returns the non-tensor values, as constants for torch.compile; an object by its id."""
    constants = []
    for value, fact in zip(values, facts, strict=True):
        if fact[0] == CONSTANT:
            constants.append(guard_scalar(value) if type(value) in _NUMBERS else value)  # a symbol is not a constant
        elif fact[0] == OBJECT:
            constants.append(id(value))
    return constants


def value_of(fact: tuple[Any, ...], constant: Any) -> Any:
    """Returns the value of a constant. An object lives at least as long as the call."""
    return ctypes.cast(constant, ctypes.py_object).value if fact[0] == OBJECT else constant


def facts_of(values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns the known facts about arguments.

    Returns:
        The kind of each argument, and for tensors: dtype, device, shape, shape in this call or None, `requires_grad`, and whether
        it is a parameter. Values are separate (`constants_of`): torch.compile accepts no tuple of objects as a constant.
    """
    unknown: list[Any] = []
    facts: list[tuple[Any, ...]] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            shape = tuple([_size(size, unknown) for size in value.shape])
            hints = None if _hint is None else tuple([_hint(size) for size in value.shape])
            is_parameter = isinstance(value, torch.nn.Parameter)
            facts.append((TENSOR, value.dtype, value.device, shape, hints, value.requires_grad, is_parameter))
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and not has_static_value(value):
            facts.append((INT if isinstance(value, int) else FLOAT,))
        else:
            facts.append((CONSTANT if _TAKES_OBJECTS or isinstance(value, _PLAIN) else OBJECT,))
    return facts


def has_unknown_floats(values: Iterable[Any]) -> bool:
    """True if an argument is a float whose value is unknown."""
    return any(isinstance(value, float) and not has_static_value(value) for value in values)


def _size(size: Any, unknown: list[Any]) -> int:
    """Returns a known size. Unknown sizes yield -1, -2 and so on; sizes known to be equal yield the same number."""
    if has_static_value(size):
        return operator.index(size)  # int() would keep a symbol with a single value
    for position, known_equal in enumerate(unknown):
        if statically_known_true(size == known_equal):
            return -1 - position
    unknown.append(size)
    return -len(unknown)
