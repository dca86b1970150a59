"""From a call to a bound program: exact shapes seen before are a dictionary look-up, new ones are matched or compiled."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fusegen.autodiff.derive import differentiated_inputs, differentiated_results
from fusegen.dtypes import DType, autocast_dtype
from fusegen.errors import GradientError
from fusegen.lang.argument import Argument
from fusegen.lang.run import Trace
from fusegen.lang.running import RUNNING
from fusegen.lang.scalars import NeedsSize, NeedsStatic, NeedsTie, TracedScalar
from fusegen.lang.tracer import NeedsLiteral
from fusegen.lang.values import TracedTensor, stale
from fusegen.runtime.arguments import check, check_memory, check_plain, check_values
from fusegen.runtime.backends import machine_of
from fusegen.runtime.bound import NO_SCALARS, NOTHING, Bound, ByValue, Facts, Hidden, Program, unfollowed
from fusegen.runtime.compile import Request, Variant, compile_trace, needs_wide
from fusegen.runtime.keys import Key, Values, is_scalar, static_part
from fusegen.runtime.parameters import Parameters
from fusegen.runtime.passes import KnownPasses, require_history
from fusegen.runtime.promotion import Promotions
from fusegen.runtime.recorded import Recorded
from fusegen.runtime.remembered import Remembered
from fusegen.runtime.scalars import condition_of
from fusegen.runtime.signature import ITSELF, History, hidden_spec, input_specs
from fusegen.runtime.tensors import WIDE, span
from fusegen.runtime.tracing import trace_function, watched_trace
from fusegen.runtime.tuned import in_measured_form
from fusegen.runtime.watched import is_recorded_as_operators, is_transformed, is_watched
from fusegen.runtime.written import check_writable
from fusegen.schedule.names import stride_name
from fusegen.state import Recorder, State
from fusegen.target import Target

_MANY_VARIANTS = 32  # from here on the user is told
_MOST_VARIANTS = 64  # for one key; the oldest goes
_MOST_IN_ALL = 1024  # for all keys; all go


class Dispatcher:
    """Finds the program of a call, or makes it.

    Args:
        function: the user's function.
        name: the kernel's name.
        mutates: parameters that it may write to.
        recorded: what runs a call that is recorded in a graph of torch's operators; the function where there is nothing else.
        requires: refuses variants that the kernel must not have.

    Attributes:
        remembered: the programs of earlier calls.
        passes: of its graphs, for gradients.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        mutates: Sequence[str] = (),
        recorded: Callable[[Sequence[Any], Mapping[str, Any]], Any] | None = None,
        requires: Callable[[Variant], None] | None = None,
    ) -> None:
        self.function = function
        self.name = name
        self._recorded_call, self._requires = recorded, requires
        self.parameters = Parameters.of(function, mutates)
        self.history = History()
        self._variants: dict[Key, list[Variant]] = {}
        self._promotions = Promotions()
        self.passes = KnownPasses()
        self._lock = threading.RLock()
        self.remembered = Remembered(self.parameters, self.history, self._lock)
        self._warned = False  # of many variants
        self._told = False  # that nothing is fused under a transform

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """One of the copied function, which knows no call."""
        mutates = [
            given
            for given, name in zip(self.parameters.given, self.parameters.names, strict=True)
            if name in self.parameters.mutates
        ]
        return Dispatcher(copy.deepcopy(self.function, memo), self.name, mutates)

    @cached_property
    def _positional(self) -> int | None:
        """How many arguments a call has that names none of them; None where some must be named."""
        return None if self.parameters.keyword_only else len(self.parameters.names)

    def _is_static(self, name: str) -> bool:
        return name in self.parameters.static or name in self.history.static

    # Calls.

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the kernel, or, inside of another kernel's trace, the function itself.

        Raises:
            ArgumentError: an argument has the wrong type, device or dtype.
            GradientError: an input requires a gradient.
            TraceError: the function does something that no kernel can do.
        """
        if RUNNING.count:
            self.parameters.bind(args, kwargs)  # refuses what does not fit, as a call of its own does
            return self.function(*args, **kwargs)
        values = args if len(args) == self._positional and not kwargs else self.parameters.bind(args, kwargs)
        for knows, recent in self.remembered.recent.known:
            hidden = knows(values)
            if hidden is not None:
                bound = recent
                break
        else:
            if is_watched(values):
                return self._as_torch_does(values, args, kwargs)
            found = self.remembered.look_up(values, self.check)
            if found is None:
                return self._first_call(values, args, kwargs)
            bound, hidden = found
        return bound(values, hidden) if bound.plain is None else bound.plain(values, NO_SCALARS)

    def _as_torch_does(self, values: Values, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call into which something looks: the function itself."""
        for name, value in zip(self.parameters.names, values, strict=True):
            if not isinstance(value, Tensor):
                check_plain(self.name, name, value)
        if is_transformed() and not self._told:
            self._told = True
            what = f"under a transform of torch.func or forward-mode differentiation, {self.name} runs as torch runs its function"
            warnings.warn(what, stacklevel=4)
        if self._recorded_call is not None and is_recorded_as_operators():
            return self._recorded_call(args, kwargs)
        return self.function(*args, **kwargs)

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
        """All arguments in the order of the parameters."""
        return args if len(args) == self._positional and not kwargs else self.parameters.bind(args, kwargs)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """All arguments in the order of the parameters, for a call that runs nothing.

        Raises:
            ArgumentError: something is neither a tensor nor a value that can select code.
        """
        values = self.parameters.bind(args, kwargs)
        for name, value in zip(self.parameters.names, values, strict=True):
            (check_values if isinstance(value, Tensor) else check_plain)(self.name, name, value)
        return values

    def _first_call(self, values: Values, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.check(values)
        tensors = [v for v in values if isinstance(v, Tensor)]
        if any(t.numel() == 0 for t in tensors):
            written = [v for n, v in zip(self.parameters.names, values, strict=True) if n in self.parameters.mutates]
            args, kwargs = _copied((tuple(args), dict(kwargs)), written)
            return _copied(self.function(*args, **kwargs), written)  # nothing to fuse: torch knows what an empty input gives
        bound, hidden = unfollowed(self._bind)(values, _device(tensors))
        with self._lock:
            if bound.find(values) is not None:  # else the function changes what it reads
                self.remembered.keep(bound, values)
        return bound(values, hidden)

    def check(self, values: Values) -> None:
        """Refuses what no kernel can work on, values of a trace that is over among it."""
        if any(type(value) is TracedScalar or isinstance(value, TracedTensor) for value in values):
            raise stale()
        check(self.name, self.parameters.names, values)
        for name, value in zip(self.parameters.names, values, strict=True):
            if name in self.parameters.mutates and isinstance(value, Tensor):
                check_writable(self.name, name, value)

    # Variants.

    def _bind(self, values: Values, device: torch.device) -> tuple[Program, Hidden]:
        machine = machine_of(device)
        variant, hidden = self.variant(values, machine.target, device)
        if self._requires is not None:
            self._requires(variant)
        for name, tensor in zip(variant.state.names, hidden, strict=True):
            check_memory(self.name, name, tensor, device, "the first tensor")
        wrt = self._recorded(variant, values, hidden)
        with self._lock:
            if wrt:
                return self._with_gradients(variant, values, hidden, wrt), hidden
            measured = in_measured_form(variant, self.sizes(variant, values, hidden), device)
            return self.bound(measured, values, hidden, device), hidden

    def _recorded(self, variant: Variant, values: Values, hidden: Hidden) -> tuple[str, ...]:
        """The inputs by which autograd wants gradients, and there are some.

        Raises:
            GradientError: the function writes to its parameters.
            UnsupportedError: the graph does not show all that torch records.
        """
        if not torch.is_grad_enabled():
            return ()
        named = (*zip(self.parameters.names, values, strict=True), *zip(variant.state.names, hidden, strict=True))
        wanted = {name for name, value in named if isinstance(value, Tensor) and value.requires_grad}
        if wanted and variant.traced.writes:
            what = f"{self.name} writes in place, of which no gradient is recorded, and {', '.join(sorted(wanted))} requires one"
            raise GradientError(what, mend="return new values, and write them outside of it; or call it under torch.no_grad()")
        if wanted:
            require_history(variant)
        return differentiated_inputs(variant.traced, wanted)

    def bound(self, variant: Variant, values: Values, hidden: Hidden, device: torch.device) -> Bound:
        """A variant for the exact shapes of a call."""
        sizes = self.sizes(variant, values, hidden)
        program = machine_of(device).bound(variant, sizes, device)
        facts = Facts(variant.program.call, variant.conditions, dict(variant.constants), sizes, self.parameters.names)
        return Bound(program, facts, self._by_value(variant), variant.state, hidden)

    def _with_gradients(self, variant: Variant, values: Values, hidden: Hidden, wrt: Sequence[str]) -> Recorded:
        """The passes of a variant for the exact shapes of a call."""
        passes, sizes = self.passes.of(variant, wrt), self.sizes(variant, values, hidden)
        recorded, names = differentiated_results(variant.traced, wrt), self.parameters.names
        return Recorded(variant, passes, recorded, values, hidden, sizes, names, self._by_value(variant))

    def _by_value(self, variant: Variant) -> ByValue:
        scalars = [name for name in variant.graph.derived.names if name in self.parameters.names]
        return partial(self._call_by_value, scalars)

    def _call_by_value(self, scalars: Sequence[str], values: Values) -> Any:
        """The call with the values of these scalars in the trace."""
        self._make_static(scalars)
        return self._first_call(values, values, {})

    def variant(self, values: Values, target: Target, device: torch.device) -> tuple[Variant, Hidden]:
        """The variant for some arguments, compiled when there is none, and the tensors that the function closes over.

        Args:
            values: all arguments, in the order of the parameters.
            target: the machine.
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
                known = self._match(request, values)
            if known is not None:
                return known
            try:
                found, state = trace_function(request, self.parameters.names)  # unlocked: it may wait for another thread's call
                with self._lock:
                    return self._compile(request, values, found, state)
            except (NeedsLiteral, NeedsSize, NeedsTie, NeedsStatic) as need:
                self._learn(need, request)

    def traced(self, values: Values, target: Target, device: torch.device) -> tuple[Request, Trace, Recorder]:
        """The trace for some arguments, of which nothing is compiled, and who watched it.

        Args:
            values: all arguments, in the order of the parameters.
            target: the machine.
            device: what ``x.device`` answers.
        """
        while True:
            request = self._request(values, target, device, wide=False)
            try:
                return (request, *watched_trace(request, self.parameters.names))
            except (NeedsLiteral, NeedsSize, NeedsTie, NeedsStatic) as need:
                self._learn(need, request)

    def _learn(self, need: NeedsLiteral | NeedsSize | NeedsTie | NeedsStatic, request: Request) -> None:
        """Takes into account what a trace needs to know."""
        if isinstance(need, NeedsLiteral):
            with self._lock:
                self.history.literal.add(dict(request.sizes.sources)[need.size])
        elif isinstance(need, NeedsSize):
            self._make_sizes(need.names)
        elif isinstance(need, NeedsTie):
            with self._lock:
                self.history.tied.update(need.names)
        else:
            self._make_static(need.names)

    def _make_static(self, names: Iterable[str]) -> None:
        """From now on the values of these scalars select code: what was bound without them is forgotten."""
        with self._lock:
            self.history.static.update(names)
            self.remembered.forget_keys()

    def _make_sizes(self, names: Iterable[str]) -> None:
        """From now on these ints are symbols, as dims are, where they are not 0 or 1."""
        with self._lock:
            self.history.sizes.update(names)
            self.remembered.forget_keys()

    def _match(self, request: Request, values: Values) -> tuple[Variant, Hidden] | None:
        for variant in self._variants.get(_variant_key(request), ()):
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

    def _compile(self, request: Request, values: Values, found: Trace, state: State) -> tuple[Variant, Hidden]:
        """The variant of a trace; another thread may have made it meanwhile."""
        changes = state.check is not None and state.check(values) is None  # the function changes what it reads: each call runs it
        known = None if changes else self._match(request, values)
        if known is not None:
            return known
        fixed = tuple(static_part(value) for name, value in request.statics if name in self.parameters.static)
        variant = self._promotions.variant(request, found, state, compile_trace, fixed)
        if changes:
            return replace(variant, state=state.never()), found.hidden
        if sum(map(len, self._variants.values())) >= _MOST_IN_ALL:
            self._variants.clear()  # their programs are kept
        key = _variant_key(request)
        self._variants[key] = [*self._variants.get(key, ())[1 - _MOST_VARIANTS :], variant]
        count = self._promotions.count
        if count >= _MANY_VARIANTS and not self._warned:
            self._warned = True
            warnings.warn(f"{self.name} has {count} variants: something that selects code changes from call to call", stacklevel=6)
        return variant, found.hidden

    def _request(self, values: Values, target: Target, device: torch.device, wide: bool) -> Request:
        named = dict(zip(self.parameters.names, values, strict=True))
        tensors = {n: v for n, v in named.items() if isinstance(v, Tensor)}
        specs, sizes = input_specs(tensors, self.history, self.parameters.dim_names)
        numbers = {n: v for n, v in named.items() if not self._is_static(n) and is_scalar(v)}
        literals = {d for spec in specs for d in spec.shape if isinstance(d, int)}
        numbers = {n: v for n, v in numbers.items() if n not in self.history.tied or v not in literals}
        symbols = {n: v for n, v in numbers.items() if n in self.history.sizes and type(v) is int and v > 1}
        scalars = {n: _scalar_dtype(v) for n, v in numbers.items() if n not in self.history.sizes or type(v) is not int}
        numbers = {n: v for n, v in numbers.items() if n in symbols or n in scalars}
        statics = tuple((n, v) for n, v in named.items() if n not in tensors and n not in numbers)
        wide = wide or any(span(t) >= WIDE for t in tensors.values())
        sizes = sizes.with_parameters(symbols, self.history.tied)
        given = tuple(numbers.items())
        arguments = tuple(Argument.of(n, t) for n, t in tensors.items())
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
        )

    def sizes(self, variant: Variant, values: Values, hidden: Hidden) -> dict[str, int]:
        """Values of all sizes and strides of a variant."""
        named = dict(zip(self.parameters.names, values, strict=True)) | dict(zip(variant.state.names, hidden, strict=True))
        places = variant.request.sizes.sources
        sizes = {size: named[name] if dim == ITSELF else named[name].shape[dim] for size, (name, dim) in places}
        for spec in variant.graph.inputs:
            sizes |= {stride_name(spec.name, d): s for d, s in enumerate(named[spec.name].stride())}
        return sizes


def _copied(values: Any, written: Sequence[Any]) -> Any:
    """Tensors in memory of their own, so that neither arguments nor what the function closes over can be written to.

    Args:
        written: those that may be, and are left as they are.
    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor if any(tensor is each for each in written) else tensor.clone(memory_format=torch.contiguous_format)

    return tree_map_only(Tensor, copy, values)


def _scalar_dtype(value: float) -> DType:
    return DType.FLOAT64 if isinstance(value, float) else DType.INT64


def _device(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device


def _variant_key(request: Request) -> Key:
    sizes = request.sizes
    statics = tuple((name, static_part(value)) for name, value in request.statics)
    types = (*(each.type for each in request.arguments), *((name, type(value)) for name, value in request.numbers))
    modes = (torch.get_default_dtype(), torch.is_grad_enabled(), autocast_dtype(request.device.type))
    known = (sizes.multiples, sizes.bounds, sizes.shared)
    return (request.specs, request.scalars, types, statics, *known, request.target, request.wide, *modes)
