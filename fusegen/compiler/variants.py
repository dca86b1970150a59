"""From the arguments of a call to a variant of its function: a known one whose guards hold, or one that is traced and compiled."""

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

from fusegen.compiler.compile import Request, Variant, compile_trace, needs_wide
from fusegen.compiler.parameters import Parameters
from fusegen.compiler.signature import ITSELF, DimRef, History, Sum, hidden_spec, input_specs
from fusegen.compiler.tracing import Promotions, trace_function, watched_trace
from fusegen.dtypes import DType, autocast_dtype
from fusegen.errors import UnsupportedError
from fusegen.guards import StateGuard, StateRecorder, is_plain
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.options import Options
from fusegen.runtime.arguments import WIDE, CallKey, Values, check_values, is_scalar, span, static_part
from fusegen.runtime.bound import NOTHING, Hidden, condition_of
from fusegen.schedule.names import stride_name
from fusegen.target import Target
from fusegen.threads import new_lock
from fusegen.trace.run import ResultTree, Trace
from fusegen.trace.scalars import NeedsFact, SizeSum
from fusegen.trace.user import CallerTensor

_MANY_VARIANTS = 32  # from here on the user is told
_MOST_VARIANTS = 64  # for one key; the oldest goes
_MOST_IN_ALL = 1024  # for all keys; all go


_MOST_LEADERS = 8  # kernels of one function whose traces others take over

_ALIKE: weakref.WeakKeyDictionary[Callable[..., Any], dict[Hashable, list[weakref.ref[VariantCache]]]] = weakref.WeakKeyDictionary()
"""Kernels that have traced a function, by the function that they are made of, and by all else that is theirs."""


class VariantCache:
    """The compiled forms of a function.

    Args:
        function: the user's.
        name: the kernel's.
        options: of the kernel.
        origin: the function that it was made of, and how; None where it is the user's own.

    Attributes:
        parameters: of the function.
        history: what was found out of them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        options: Options,
        *,
        origin: tuple[Callable[..., Any], Hashable] | None = None,
    ) -> None:
        self.function, self.name, self._fast_math = function, name, options.fast_math
        self.parameters = Parameters.of(function, options.mutates)
        self.history = History()
        self._variants: dict[
            tuple[CallKey, CallKey], dict[CallKey, list[Variant]]
        ] = {}  # by what traces share, and what they don't know
        self._promotions = Promotions()
        self._lock = new_lock()
        self._warned = False  # about many variants
        made_of, how = origin or (function, None)
        alike = _ALIKE.setdefault(made_of, {}) if isinstance(made_of, FunctionType) else {}
        self._alike = alike.setdefault((how, name, options.mutates, options.fast_math), [])

    @property
    def known(self) -> list[Variant]:
        """All that are known."""
        return [variant for kin in self._variants.values() for variants in kin.values() for variant in variants]

    @property
    def programs(self) -> int:
        """The number of programs: variants that differ in numbers alone share one."""
        return self._promotions.count

    def statics(self) -> list[bool]:
        """Tells for each parameter whether programs are bound to its value."""
        return [self._is_static(name) or name in self.history.sizes for name in self.parameters.names]

    def _is_static(self, name: str) -> bool:
        return name in self.parameters.static or name in self.history.static

    def of(self, values: Values, target: Target, device: torch.device) -> tuple[Variant, Hidden]:
        """The variant for some arguments, compiled when there is none, and the tensors that the function closes over.

        Args:
            values: all arguments, in the order of the parameters.
            device: what ``x.device`` answers.
        """
        variant, hidden = self._in_form(values, target, device, wide=False)
        if not variant.request.wide and needs_wide(variant, self.sizes(variant, values, hidden)):
            return self._in_form(values, target, device, wide=True)
        return variant, hidden

    def _in_form(self, values: Values, target: Target, device: torch.device, *, wide: bool) -> tuple[Variant, Hidden]:
        """The variant in its form for the sizes of the call."""
        variant, hidden = self._variant(values, target, device, wide=wide)
        with self._lock:
            return variant.at(self.sizes(variant, values, hidden)), hidden

    def _variant(self, values: Values, target: Target, device: torch.device, *, wide: bool) -> tuple[Variant, Hidden]:
        """The variant whose indices have 64 bits if they are asked to, or if an input needs it."""
        while True:
            with self._lock:
                request = self._request(values, target, device, wide)
            try:
                with self._lock:
                    known = (self._match(request, values) or self._of_kin(request, values)) if self._variants else None
                    known = known or (self._of_alike(request, values) if self._alike else None)
                if known is not None:
                    return known
                found, state = trace_function(request, self.parameters.names)  # unlocked: it may wait for another thread's call
                with self._lock:
                    self._lead()
                    return self._compile(request, values, found, state)
            except NeedsFact as need:
                self._learn(need, request)

    def _of_alike(self, request: Request, values: Values) -> tuple[Variant, Hidden] | None:
        """A new variant of a trace that another kernel of this function has, for a call that differs in objects alone which the
        function cannot tell apart: the layers of a model, say. The lock is held."""
        given = {self.parameters.names.index(name): value for name, value in request.statics}
        for other in self._leaders() if given else ():
            known, self.history = self.history, self.history.with_facts_of(other.history)
            asked = self._request(values, request.target, request.device, request.wide)
            for variant in other.like(asked):
                state = variant.state.for_counterparts(self.function, given)
                found = None if state is None else self._fitting([replace(variant, state=state)], values)
                if state is not None and found is not None:
                    return self._kept(asked, _with_facts_of(asked, variant), state), found[1]
            self.history = known
        return None

    def _leaders(self) -> list[VariantCache]:
        """Other kernels of this function that have traced it."""
        found = (reference() for reference in self._alike)
        return [other for other in found if other is not None and other is not self]

    def _lead(self) -> None:
        """Lets other kernels of this function know that this one has traced it."""
        if not any(reference() is self for reference in self._alike):
            self._alike[:] = [*self._alike, weakref.ref(self)][-_MOST_LEADERS:]

    def like(self, request: Request) -> list[Variant]:
        """The variants whose traces depend on the same as that of a request, but for the objects that it gives."""
        _, rest = _trace_key(request)
        alike = [kin for (_, other), kin in tuple(self._variants.items()) if other == rest]
        found = [variant for kin in alike for variants in tuple(kin.values()) for variant in variants[-1:]]
        return [variant for variant in found if _is_plain(variant.structure)]

    def traced(self, values: Values, target: Target, device: torch.device) -> tuple[Request, Trace, StateRecorder]:
        """The trace for some arguments, of which nothing is compiled, and who watched it.

        Args:
            values: all arguments, in the order of the parameters.
            device: what ``x.device`` answers.
        """
        while True:
            with self._lock:
                request = self._request(values, target, device, wide=False)
            try:
                return (request, *watched_trace(request, self.parameters.names))
            except NeedsFact as need:
                self._learn(need, request)

    def _learn(self, need: NeedsFact, request: Request) -> None:
        """Takes into account what a trace needs to know."""
        with self._lock:
            if need.fact != "literal":
                getattr(self.history, need.fact).update(need.names)
            elif need.total is None or not self._learn_sum(need.total, request):
                self._learn_literal(need.names[0], request)

    def _learn_literal(self, size: str, request: Request) -> None:
        """Takes a size for literal; first, where it is that of outermost and of other dims, these for sizes of their own: as many
        heads as sequences are a coincidence. The lock is held."""
        others = {place for place in _places(size, request) if place[1]}
        if others < {*_places(size, request)} and not others <= self.history.apart:
            self.history.apart.update(others)
        else:
            self.history.literal.add(dict(request.sizes.sources)[size])

    def _learn_sum(self, total: SizeSum, request: Request) -> bool:
        """Takes dims of the parameters for the sum of others; False where none is of that size, or all are known already. The lock
        is held."""
        sources, (size, names, number), known = dict(request.sizes.sources), total, self.history.sums
        parts = tuple(sources[name] for name in names if name in sources)
        if len(parts) < len(names) or any(dim == ITSELF for _, dim in parts):
            return False
        new = [place for place in _places(size, request) if place not in known and not any(part in known for part in parts)]
        known.update((place, Sum(parts, number)) for place in new)
        return bool(new)

    def make_static(self, names: Iterable[str]) -> None:
        """From now on the values of these scalars select code."""
        with self._lock:
            self.history.static.update(names)

    def _match(self, request: Request, values: Values) -> tuple[Variant, Hidden] | None:
        """A variant that serves a call, and the tensors that the function closes over."""
        return self._fitting(self._variants.get(_trace_key(request), {}).get(_facts(request), ()), values)

    def _of_kin(self, request: Request, values: Values) -> tuple[Variant, Hidden] | None:
        """A new variant of an earlier trace, for a call that differs from those before in alignments and in what divides and
        bounds sizes alone: a trace says nothing of these but in its guards. The lock is held."""
        kin = self._variants.get(_trace_key(request), {}).values()
        found = self._fitting(itertools.chain.from_iterable(kin), values)
        if found is None:
            return None
        variant, hidden = found
        return self._kept(request, _with_facts_of(request, variant), variant.state), hidden

    def _fitting(self, variants: Iterable[Variant], values: Values) -> tuple[Variant, Hidden] | None:
        """The first variant of which all that it assumes holds, and the tensors that the function closes over."""
        for variant in variants:
            hidden = self._hidden(variant, values)
            if hidden is None:
                continue
            sizes = self.sizes(variant, values, hidden)
            condition = condition_of(variant.conditions, sizes, self.parameters.names)
            if condition is not None and not condition(values):
                continue
            if all(guard(sizes) for guard in variant.guards):
                return variant, hidden
        return None

    def _hidden(self, variant: Variant, values: Values) -> Hidden | None:
        """The tensors that the function closes over; None where they, or what else it read, are not as the variant knows them."""
        check = variant.state.check
        found = NOTHING if check is None else check(values)
        if found is None:
            return None
        specs = {spec.name: spec for spec in variant.traced.inputs}
        for name, tensor in zip(variant.state.names, found, strict=True):
            check_values(self.name, name, tensor)
            if hidden_spec(name, tensor) != specs[name]:
                return None
        return found

    def _compile(self, request: Request, values: Values, found: Trace, state: StateGuard) -> tuple[Variant, Hidden]:
        """The variant of a trace; another thread may have made it meanwhile.

        Raises:
            UnsupportedError: the function may ask whether two tensors are one, and is given one that it also reads otherwise.
        """
        if met := state.also_captured(values):
            names = ", ".join(self.parameters.names[position] for position in met)
            what = f"{self.name} asks whether two tensors are one, and is given one that it also closes over: {names}"
            raise UnsupportedError(what, hint="pass a flag in place of the comparison")
        changes = state.check is not None and state.check(values) is None  # the function changes what it reads: each call runs it
        known = self._match(request, values) if self._variants and not changes else None
        if known is not None:
            return known
        if changes:
            return replace(self._made(request, found, state), state=state.failing()), found.hidden
        return self._kept(request, found, state), found.hidden

    def _made(self, request: Request, found: Trace, state: StateGuard) -> Variant:
        found = replace(found, graph=_with_facts_of_what_is_read(found.graph))
        fixed = tuple(static_part(value) for name, value in request.statics if name in self.parameters.static)
        return self._promotions.variant(request, found, state, compile_trace, fixed)

    def _kept(self, request: Request, found: Trace, state: StateGuard) -> Variant:
        """The variant of a trace, from now on known."""
        variant = self._made(request, found, state)
        if len(self.known) >= _MOST_IN_ALL:
            self._variants.clear()  # their programs are kept
        kin, facts = self._variants.setdefault(_trace_key(request), {}), _facts(request)
        kin[facts] = [*kin.get(facts, ())[1 - _MOST_VARIANTS :], variant]
        count = self._promotions.count
        if count >= _MANY_VARIANTS and not self._warned:
            self._warned = True
            warnings.warn(f"{self.name} has {count} variants: something that selects code changes from call to call", stacklevel=7)
        return variant

    def _request(self, values: Values, target: Target, device: torch.device, wide: bool) -> Request:
        named = dict(zip(self.parameters.names, values, strict=True))
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
        wide = wide or any(span(t) >= WIDE for t in tensors.values())
        sizes = sizes.with_parameters(symbols, self.history.tied)
        given = tuple(numbers.items())
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
            wide=wide,
            numbers=given,
            one_tensor_twice=twice,
            mutates=self.parameters.mutates,
            tied=frozenset(self.history.tied),
            fast_math=self._fast_math,
        )

    def sizes(self, variant: Variant, values: Values, hidden: Hidden) -> dict[str, int]:
        """Values of all sizes and strides of a variant."""
        named = dict(zip(self.parameters.names, values, strict=True)) | dict(zip(variant.state.names, hidden, strict=True))
        places = variant.request.sizes.sources
        sizes = {size: named[name] if dim == ITSELF else named[name].shape[dim] for size, (name, dim) in places}
        for spec in variant.traced.inputs:
            sizes |= {stride_name(spec.name, d): s for d, s in enumerate(named[spec.name].stride())}
        return sizes


def _is_plain(structure: ResultTree) -> bool:
    """True if results are put together by nothing but names and classes: other objects may be those of a layer."""
    context = structure.context
    parts = context if isinstance(context, list) else [context]
    return all(isinstance(part, type) or is_plain(part) for part in parts) and all(map(_is_plain, structure.children()))


def _places(size: str | int, request: Request) -> list[DimRef]:
    """The dims that a symbol is the size of, or the last dims of a literal extent."""
    dims = [((spec.name, dim), extent) for spec in request.specs for dim, extent in enumerate(spec.shape)]
    last = {(spec.name, len(spec.shape) - 1) for spec in request.specs}
    return [place for place, extent in dims if str(extent) == str(size) and (isinstance(size, str) or place in last)]


def _facts(request: Request) -> CallKey:
    """Facts that a trace does not depend on, though the kernels do: alignments, and numbers that divide and bound sizes."""
    return (tuple(spec.alignment for spec in request.specs), request.sizes.multiples, request.sizes.bounds)


def _with_facts_of(request: Request, variant: Variant) -> Trace:
    """The trace of a variant for a call that differs in alignments and in what divides and bounds sizes."""
    given = {spec.name: spec for spec in request.specs}
    graph = variant.trace.graph
    inputs = tuple(given.get(spec.name, spec) for spec in graph.inputs)
    graph = replace(graph, inputs=inputs, multiples=request.sizes.multiples, bounds=request.sizes.bounds)
    return replace(variant.trace, graph=graph)


def _trace_key(request: Request) -> tuple[CallKey, CallKey]:
    """All that a trace depends on, but for what its guards and conditions say, and what the function reads: values that select
    code, and the rest."""
    specs = tuple(replace(spec, alignment=1) for spec in request.specs)
    features = tuple(name for name, _ in request.sizes.bounds)
    statics = tuple((name, static_part(value)) for name, value in request.statics)
    types = (*(each.type for each in request.arguments), *((name, type(value)) for name, value in request.numbers))
    modes = (torch.get_default_dtype(), torch.is_grad_enabled(), autocast_dtype(request.device.type))
    known = (features, request.sizes.shared, request.target, request.wide)
    return statics, (specs, request.scalars, types, *known, *modes)


def _with_facts_of_what_is_read(graph: Graph) -> Graph:
    """A graph that knows what divides and bounds the sizes of the inputs that it reads, and of no others: what it compiles to would
    change with these."""
    read = {node.attr("name") for position, node in graph if node.op is Op.INPUT and graph.users[position]}
    shapes = [spec.shape for spec in graph.inputs if spec.name in read]
    symbols = {symbol.name for shape in shapes for dim in shape for symbol in getattr(dim, "free_symbols", ())}
    multiples, bounds = (tuple(fact for fact in facts if fact[0] in symbols) for facts in (graph.multiples, graph.bounds))
    return replace(graph, multiples=multiples, bounds=bounds)
