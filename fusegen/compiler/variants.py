"""From the arguments of a call to a variant of the function: a known one whose guards hold, or a new trace."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fusegen.compiler.compile import Request, Variant, compile_trace, needs_index64
from fusegen.compiler.parameters import Parameters
from fusegen.compiler.signature import VALUE_AS_SIZE, DimRef, History, Sum, captured_spec, input_specs
from fusegen.compiler.tracing import ProgramFamilies, trace_function, watched_trace
from fusegen.dtypes import DType, autocast_dtype
from fusegen.errors import UnsupportedError
from fusegen.guards.check import StateGuard
from fusegen.guards.recorder import StateRecorder
from fusegen.guards.values import is_plain
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.options import Options
from fusegen.program.names import stride_name
from fusegen.runtime.arguments import WIDE, CallKey, Values, check_values, is_scalar, span, static_part
from fusegen.runtime.bound import NO_CAPTURED, Captured, condition_of
from fusegen.target import Target
from fusegen.threads import new_lock
from fusegen.trace.run import ResultTree, Trace
from fusegen.trace.scalars import NeedsFact, SizeSum
from fusegen.trace.user import CallerTensor

_MANY_VARIANTS = 32  # variants of one kernel from which on it warns
_MOST_VARIANTS = 64  # variants of one key; the oldest is dropped
_MOST_IN_ALL = 1024  # variants of all keys; then all are dropped

_MOST_KERNELS = 8  # kernels of one function whose traces others may use
_KERNELS: weakref.WeakKeyDictionary[Callable[..., Any], dict[Hashable, list[weakref.ref[VariantCache]]]] = (
    weakref.WeakKeyDictionary()
)
"""Kernels that have traced a function, by the function, then by the declaration's options that traces depend on."""


class VariantCache:
    """The variants of a function.

    Args:
        name: the kernel's name.
        options: the kernel's options.
        origin: for a function of leaves, the user's function and the layouts; None for the user's function itself.

    Attributes:
        parameters: the function's parameters.
        history: facts learned from earlier calls.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        options: Options,
        *,
        origin: tuple[Callable[..., Any], Hashable] | None = None,
    ) -> None:
        self.function, self.name, self._fast_math, self._plans = function, name, options.fast_math, options.plan or ()
        self.parameters = Parameters.of(function, options.mutates)
        self.history = History()
        self._variants: dict[
            tuple[CallKey, CallKey], dict[CallKey, list[Variant]]
        ] = {}  # by the facts that a trace depends on (`_trace_key`), then by the others (`_facts`)
        self._families = ProgramFamilies()
        self._lock = new_lock()
        self._warned = False  # about many variants
        user_function, layouts = origin or (function, None)
        kernels = _KERNELS.setdefault(user_function, {}) if isinstance(user_function, FunctionType) else {}
        self._kernels = kernels.setdefault((layouts, name, options.mutates, options.fast_math, self._plans), [])

    @property
    def known(self) -> list[Variant]:
        return [variant for by_facts in self._variants.values() for variants in by_facts.values() for variant in variants]

    @property
    def programs(self) -> int:
        """The number of programs. Variants that differ only in constants share one."""
        return self._families.count

    def statics(self) -> list[bool]:
        """For each parameter, whether its value selects a program."""
        return [self._is_static(name) or name in self.history.sizes for name in self.parameters.emitted_names]

    def _is_static(self, name: str) -> bool:
        return name in self.parameters.static or name in self.history.static

    def variant_of(self, values: Values, target: Target, device: torch.device) -> tuple[Variant, Captured]:
        """The variant for some arguments, compiled if there is none, and the captured tensors.

        Args:
            values: all arguments, in the order of the parameters.
            device: the value of ``x.device`` in the function.
        """
        variant, captured = self._specialized(values, target, device, index64=False)
        if not variant.request.index64 and needs_index64(variant, self.sizes(variant, values, captured)):
            return self._specialized(values, target, device, index64=True)
        return variant, captured

    def _specialized(self, values: Values, target: Target, device: torch.device, *, index64: bool) -> tuple[Variant, Captured]:
        """The variant, specialized for the sizes of the call."""
        variant, captured = self._variant(values, target, device, index64=index64)
        with self._lock:
            return variant.at(self.sizes(variant, values, captured)), captured

    def _variant(self, values: Values, target: Target, device: torch.device, *, index64: bool) -> tuple[Variant, Captured]:
        """A known or a new variant. Its indices have 64 bits if `index64` is True, or if an input needs them."""
        while True:
            with self._lock:
                request = self._request(values, target, device, index64)
            try:
                with self._lock:
                    known = (self._match(request, values) or self._from_known_trace(request, values)) if self._variants else None
                    known = known or (self._from_other_kernel(request, values) if self._kernels else None)
                if known is not None:
                    return known
                trace, state = trace_function(
                    request, self.parameters.emitted_names
                )  # unlocked: it may wait for another thread's call
                with self._lock:
                    self._register()
                    return self._compile(request, values, trace, state)
            except NeedsFact as need:
                self._learn(need, request)

    def _from_other_kernel(self, request: Request, values: Values) -> tuple[Variant, Captured] | None:
        """A variant from another kernel's trace of this function, for a call that differs only in objects that the function cannot
        tell apart, e.g. a model's layers. The caller holds the lock."""
        statics = {self.parameters.emitted_names.index(name): value for name, value in request.statics}
        for other in self._other_kernels() if statics else ():
            history, self.history = self.history, self.history.with_facts_of(other.history)
            own_request = self._request(values, request.target, request.device, request.index64)
            for variant in other.like(own_request):
                state = variant.state.for_counterparts(self.function, statics)
                match = None if state is None else self._first_valid([replace(variant, state=state)], values)
                if state is not None and match is not None:
                    return self._remembered(own_request, _with_facts_of(own_request, variant), state), match[1]
            self.history = history
        return None

    def _other_kernels(self) -> list[VariantCache]:
        """Other kernels that have traced this function."""
        kernels = (reference() for reference in self._kernels)
        return [other for other in kernels if other is not None and other is not self]

    def _register(self) -> None:
        """Registers this kernel as one that has traced its function."""
        if not any(reference() is self for reference in self._kernels):
            self._kernels[:] = [*self._kernels, weakref.ref(self)][-_MOST_KERNELS:]

    def like(self, request: Request) -> list[Variant]:
        """The variants whose traces depend on the same facts as a request, except for the objects it passes."""
        _, rest = _trace_key(request)
        candidates = [by_facts for (_, other), by_facts in tuple(self._variants.items()) if other == rest]
        matches = [variant for by_facts in candidates for variants in tuple(by_facts.values()) for variant in variants[-1:]]
        return [variant for variant in matches if _is_plain(variant.structure)]

    def traced(self, values: Values, target: Target, device: torch.device) -> tuple[Request, Trace, StateRecorder]:
        """The trace for some arguments and its recorder, without compiling it.

        Args:
            values: all arguments, in the order of the parameters.
            device: the value of ``x.device`` in the function.
        """
        while True:
            with self._lock:
                request = self._request(values, target, device, index64=False)
            try:
                return (request, *watched_trace(request, self.parameters.emitted_names))
            except NeedsFact as need:
                self._learn(need, request)

    def _learn(self, need: NeedsFact, request: Request) -> None:
        """Adds a fact that a trace needs to the history."""
        with self._lock:
            if need.fact != "literal":
                getattr(self.history, need.fact).update(need.names)
            elif need.total is None or not self._learn_sum(need.total, request):
                self._learn_literal(need.names[0], request)

    def _learn_literal(self, size: str, request: Request) -> None:
        """Makes a size literal. If outermost and inner dims share its symbol, the inner dims first get their own symbols: the
        number of heads may equal the batch size by chance. The caller holds the lock."""
        inner = {dim for dim in _dims_of_size(size, request) if dim[1]}
        if inner < {*_dims_of_size(size, request)} and not inner <= self.history.separate:
            self.history.separate.update(inner)
        else:
            self.history.literal.add(dict(request.sizes.sources)[size])

    def _learn_sum(self, total: SizeSum, request: Request) -> bool:
        """Records dims of the parameters as sums of others. Returns False if no dim has that size or all are known. The caller
        holds the lock."""
        sources, (size, names, number), known = dict(request.sizes.sources), total, self.history.sums
        parts = tuple(sources[name] for name in names if name in sources)
        if len(parts) < len(names) or any(dim == VALUE_AS_SIZE for _, dim in parts):
            return False
        new = [dim for dim in _dims_of_size(size, request) if dim not in known and not any(part in known for part in parts)]
        known.update((dim, Sum(parts, number)) for dim in new)
        return bool(new)

    def make_static(self, names: Iterable[str]) -> None:
        """Makes the values of scalars select code from now on."""
        with self._lock:
            self.history.static.update(names)

    def _match(self, request: Request, values: Values) -> tuple[Variant, Captured] | None:
        """A variant that serves a call, with the captured tensors."""
        return self._first_valid(self._variants.get(_trace_key(request), {}).get(_facts(request), ()), values)

    def _from_known_trace(self, request: Request, values: Values) -> tuple[Variant, Captured] | None:
        """A new variant of a known trace, for a call that differs only in alignments, divisors and bounds. Guards check everything
        that the trace assumes about these. The caller holds the lock."""
        by_facts = self._variants.get(_trace_key(request), {}).values()
        match = self._first_valid(itertools.chain.from_iterable(by_facts), values)
        if match is None:
            return None
        variant, captured = match
        return self._remembered(request, _with_facts_of(request, variant), variant.state), captured

    def _first_valid(self, variants: Iterable[Variant], values: Values) -> tuple[Variant, Captured] | None:
        """The first variant whose assumptions hold, with the captured tensors."""
        for variant in variants:
            captured = self._captured(variant, values)
            if captured is None:
                continue
            sizes = self.sizes(variant, values, captured)
            condition = condition_of(variant.conditions, sizes, self.parameters.emitted_names)
            if condition is not None and not condition(values):
                continue
            if all(guard(sizes) for guard in variant.guards):
                return variant, captured
        return None

    def _captured(self, variant: Variant, values: Values) -> Captured | None:
        """The captured tensors; None if they, or other state that the function read, differ from what the variant assumes."""
        check = variant.state.check
        tensors = NO_CAPTURED if check is None else check(values)
        if tensors is None:
            return None
        specs = {spec.name: spec for spec in variant.traced.inputs}
        for name, tensor in zip(variant.state.names, tensors, strict=True):
            check_values(self.name, name, tensor)
            if captured_spec(name, tensor) != specs[name]:
                return None
        return tensors

    def _compile(self, request: Request, values: Values, trace: Trace, state: StateGuard) -> tuple[Variant, Captured]:
        """The variant of a trace. Another thread may have compiled it meanwhile.

        Raises:
            UnsupportedError: the function may compare tensors by identity, and one argument is also a captured tensor.
        """
        if repeated := state.also_captured(values):
            emitted_names = ", ".join(self.parameters.emitted_names[position] for position in repeated)
            what = f"{self.name} compares tensors by identity, but gets an argument that it also captures: {emitted_names}"
            raise UnsupportedError(what, hint="pass a bool parameter instead of comparing tensors")
        changes = state.check is not None and state.check(values) is None  # the function changes what it reads: each call runs it
        known = self._match(request, values) if self._variants and not changes else None
        if known is not None:
            return known
        if changes:
            return replace(self._build(request, trace, state), state=state.failing()), trace.captured
        return self._remembered(request, trace, state), trace.captured

    def _build(self, request: Request, trace: Trace, state: StateGuard) -> Variant:
        trace = replace(trace, graph=_with_facts_of_read_inputs(trace.graph))
        fixed = tuple(static_part(value) for name, value in request.statics if name in self.parameters.static)
        return self._families.variant(request, trace, state, compile_trace, fixed)

    def _remembered(self, request: Request, trace: Trace, state: StateGuard) -> Variant:
        """Compiles the variant of a trace and remembers it."""
        variant = self._build(request, trace, state)
        if len(self.known) >= _MOST_IN_ALL:
            self._variants.clear()  # their programs are kept
        by_facts, facts = self._variants.setdefault(_trace_key(request), {}), _facts(request)
        by_facts[facts] = [*by_facts.get(facts, ())[1 - _MOST_VARIANTS :], variant]
        count = self._families.count
        if count >= _MANY_VARIANTS and not self._warned:
            self._warned = True
            warnings.warn(f"{self.name} has {count} variants: a value that selects code changes from call to call", stacklevel=7)
        return variant

    def _request(self, values: Values, target: Target, device: torch.device, index64: bool) -> Request:
        named = dict(zip(self.parameters.emitted_names, values, strict=True))
        tensors = {n: v for n, v in named.items() if isinstance(v, Tensor)}
        specs, sizes = input_specs(tensors, self.history, self.parameters.dim_names)
        numbers = {n: v for n, v in named.items() if not self._is_static(n) and is_scalar(v)}
        literals = {d for spec in specs for d in spec.shape if isinstance(d, int)} - {*dict(sizes.hints).values()}
        numbers = {n: v for n, v in numbers.items() if n not in self.history.tied or v not in literals}
        symbols = {n: v for n, v in numbers.items() if n in self.history.sizes and type(v) is int and v > 1}
        others = {n: v for n, v in numbers.items() if n not in self.history.sizes or type(v) is not int}
        scalars = {n: DType.FLOAT64 if isinstance(v, float) else DType.INT64 for n, v in others.items()}
        numbers = {n: v for n, v in numbers.items() if n in symbols or n in scalars}
        statics = tuple((n, v) for n, v in named.items() if n not in tensors and n not in numbers)
        index64 = index64 or any(span(t) >= WIDE for t in tensors.values())
        sizes = sizes.with_parameters(symbols, self.history.tied)
        arguments = tuple(CallerTensor.of(n, self.parameters.element_of.get(n, n), t) for n, t in tensors.items())
        ids = [id(t) for t in tensors.values()]
        twice = tuple(n for n, t in tensors.items() if ids.count(id(t)) > 1)
        return Request(
            name=self.name,
            function=self.function,
            specs=specs,
            arguments=arguments,
            scalars=tuple(scalars.items()),
            statics=statics,
            sizes=sizes,
            target=target,
            device=device,
            index64=index64,
            numbers=tuple(numbers.items()),
            repeated_tensors=twice,
            mutates=self.parameters.mutates,
            tied=frozenset(self.history.tied),
            fast_math=self._fast_math,
            plans=self._plans,
        )

    def sizes(self, variant: Variant, values: Values, captured: Captured) -> dict[str, int]:
        """Values of all sizes and strides of a variant."""
        named = dict(zip(self.parameters.emitted_names, values, strict=True)) | dict(
            zip(variant.state.names, captured, strict=True)
        )
        sources = variant.request.sizes.sources
        sizes = {size: named[name] if dim == VALUE_AS_SIZE else named[name].shape[dim] for size, (name, dim) in sources}
        for spec in variant.traced.inputs:
            sizes |= {stride_name(spec.name, d): s for d, s in enumerate(named[spec.name].stride())}
        return sizes


def _is_plain(structure: ResultTree) -> bool:
    """True if a result structure contains only plain values and classes: other objects may belong to a single layer."""
    context = structure.context
    parts = context if isinstance(context, list) else [context]
    return all(isinstance(part, type) or is_plain(part) for part in parts) and all(map(_is_plain, structure.children()))


def _dims_of_size(size: str | int, request: Request) -> list[DimRef]:
    """The dims with a symbolic size, or the last dims with a literal extent."""
    dims = [((spec.name, dim), extent) for spec in request.specs for dim, extent in enumerate(spec.shape)]
    last = {(spec.name, len(spec.shape) - 1) for spec in request.specs}
    return [dim for dim, extent in dims if str(extent) == str(size) and (isinstance(size, str) or dim in last)]


def _facts(request: Request) -> CallKey:
    """Facts on which kernels depend and traces do not: alignments, and divisors and bounds of sizes."""
    return (tuple(spec.alignment for spec in request.specs), request.sizes.multiples, request.sizes.bounds)


def _with_facts_of(request: Request, variant: Variant) -> Trace:
    """The trace of a variant with the alignments, divisors and bounds of another call."""
    specs = {spec.name: spec for spec in request.specs}
    graph = variant.trace.graph
    inputs = tuple(specs.get(spec.name, spec) for spec in graph.inputs)
    graph = replace(graph, inputs=inputs, multiples=request.sizes.multiples, bounds=request.sizes.bounds)
    return replace(variant.trace, graph=graph)


def _trace_key(request: Request) -> tuple[CallKey, CallKey]:
    """The facts that select a trace before its guards are checked: values that select code, and all others."""
    specs = tuple(replace(spec, alignment=1) for spec in request.specs)
    features = tuple(name for name, _ in request.sizes.bounds)
    statics = tuple((name, static_part(value)) for name, value in request.statics)
    types = (*(each.type for each in request.arguments), *((name, type(value)) for name, value in request.numbers))
    modes = (torch.get_default_dtype(), torch.is_grad_enabled(), autocast_dtype(request.device.type))
    known = (features, request.sizes.shared, request.target, request.index64)
    return statics, (specs, request.scalars, types, *known, *modes)


def _with_facts_of_read_inputs(graph: Graph) -> Graph:
    """The graph with divisors and bounds only for the inputs that it reads: those of other inputs would make equal graphs compile
    twice."""
    read = {node.attr("name") for position, node in graph if node.op is Op.INPUT and graph.users[position]}
    shapes = [spec.shape for spec in graph.inputs if spec.name in read]
    symbols = {symbol.name for shape in shapes for dim in shape for symbol in getattr(dim, "free_symbols", ())}
    multiples, bounds = (tuple(fact for fact in facts if fact[0] in symbols) for facts in (graph.multiples, graph.bounds))
    return replace(graph, multiples=multiples, bounds=bounds)
