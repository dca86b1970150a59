"""A kernel's calls: as compiled programs, as the plain function, or as an operator in a graph that is being recorded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack as function_modes
from torch.utils._pytree import tree_map_only

from fusegen.autodiff.derive import differentiated_inputs, differentiated_results
from fusegen.compiler.backends import builder, machine_of
from fusegen.compiler.compile import Variant
from fusegen.compiler.parameters import (
    KINDS,
    ContainerLayouts,
    Parameters,
    flat_function,
    flat_names,
    flatten_containers,
    with_constant_numbers,
)
from fusegen.compiler.parameters import KINDS as CONTAINERS
from fusegen.compiler.passes import ForwardBackward, passes_of, require_history
from fusegen.compiler.signature import VALUE_AS_SIZE
from fusegen.compiler.tuned import OBSERVERS, UnboundCall, with_measured_plans
from fusegen.compiler.variants import VariantCache
from fusegen.errors import ArgumentError
from fusegen.ir.graph import Graph
from fusegen.options import DEFAULTS, Options
from fusegen.progress import first_call
from fusegen.runtime.arguments import Values, check, check_memory, check_plain, check_values, check_writable, refuse_gradients
from fusegen.runtime.bound import NO_CAPTURED, NO_SCALARS, BoundCall, BoundPlan, ByValue, CallFacts, Captured, condition_of
from fusegen.runtime.callables import (
    as_real_pairs,
    is_complex,
    is_intercepted,
    is_recorded_as_operators,
    is_transformed,
    run_in_torch,
    runs_in_torch,
    taking_real_pairs,
)
from fusegen.runtime.executable import BoundMatch, CallBinder, Executable, forget_all
from fusegen.runtime.instructions import Runner, Scalars
from fusegen.runtime.node import ArgumentSource, BackwardNode, BoundAutogradCall
from fusegen.threads import cached_property, new_lock
from fusegen.trace import RUNNING, inlined
from fusegen.trace.scalars import TracedScalar, stale
from fusegen.trace.values import TracedTensor

RecordedCall: TypeAlias = Callable[["Dispatcher", Sequence[Any], Mapping[str, Any]], Any]

WATCHERS: list[Callable[[Dispatcher, Values], object]] = []
"""Functions that see calls while torch runs them (`watched`)."""

_MOST_LAYOUTS = 64  # layouts of container arguments that a kernel remembers


@contextmanager
def watched(watcher: Callable[[Dispatcher, Values], object]) -> Iterator[None]:
    """A context in which a function sees each call of a kernel, and torch runs the kernel's function: nothing is compiled."""
    forget_all()
    WATCHERS.append(watcher)
    try:
        yield
    finally:
        WATCHERS.remove(watcher)


@dataclass(frozen=True)
class _WithoutHistory:
    """A program that runs under `torch.no_grad`."""

    runner: Runner

    def native_call(self, _: ModuleType) -> None:
        pass

    def call(self, tensors: Sequence[Tensor], scalars: Scalars) -> Any:
        with torch.no_grad():
            return self.runner.call(tensors, scalars)


class Dispatcher(CallBinder):
    """Runs the calls of a kernel.

    Args:
        name: the kernel's name.
        options: the options of its declaration.
        recorded: runs a call that torch records in a graph of operators; None to run the function itself.
        requires: raises an error for variants that the kernel does not allow.
        origin: as in `VariantCache`.

    Attributes:
        variants: the variants of the function.
        executable: runs calls outside of torch's modes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        options: Options = DEFAULTS,
        recorded: RecordedCall | None = None,
        requires: Callable[[Variant], None] | None = None,
        origin: tuple[Callable[..., Any], ContainerLayouts] | None = None,
    ) -> None:
        self.function, self.name, self.options = function, name, options
        self._recorded_call, self._requires = recorded, requires
        self._flat: dict[ContainerLayouts, FlatDispatcher] = {}
        self._keyword_pattern: tuple[KeywordPattern, FlatDispatcher] | None = (
            None  # the last call whose only container was **kwargs
        )
        self.variants = VariantCache(function, name, options, origin=origin)
        self.parameters = self.variants.parameters
        self.executable = Executable(self)
        self._lock = new_lock()
        self._derived: dict[tuple[str, ...], Dispatcher] = {}  # by the parameters that are complex
        self._warned = False  # True after a warning that nothing is fused under a transform

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """The dispatcher of the copied function, with empty caches."""
        return Dispatcher(copy.deepcopy(self.function, memo), self.name, self.options)

    @cached_property
    def _positional(self) -> int | None:
        """The number of positional arguments of a call without keywords; None if some must be named."""
        return None if self.parameters.keyword_only or self.parameters.variadic else len(self.parameters.emitted_names)

    # Calls.

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the kernel; inside another kernel's trace, the function itself.

        Raises:
            ArgumentError: an argument has the wrong type, device or dtype.
            GradientError: an input requires a gradient.
            TraceError: the function does something that no kernel can do.
        """
        if RUNNING.count:
            self.parameters.bind(args, kwargs)  # checks the arguments like a call outside of a trace
            return self.function(*args, **kwargs)
        values = args if len(args) == self._positional and not kwargs else self.parameters.bind(args, kwargs)
        match = None if function_modes() and is_intercepted(values) else self.executable.recent_match(values)
        if match is None:
            flat = self._flatten(values)
            if flat is not None:
                return flat[0].call(flat[1], {})
            if any(map(is_complex, values)):
                derived, pairs = self.with_real_pairs(values)
                return derived.call((), dict(zip(self.parameters.user_names, pairs, strict=True)))
            if runs_in_torch(values):
                return self._as_torch_does(values, args, kwargs)
            if WATCHERS:
                return self._watched(values)
            match = self.executable.lookup(values)
        program, captured = match
        return program(values, captured) if program.plain is None else program.plain.call(values, NO_SCALARS)

    def _watched(self, values: Values) -> Any:
        """Runs the function itself: a build only traces calls."""
        for watcher in WATCHERS:
            watcher(self, values)
        return inlined(self.parameters.call)(values)

    def with_real_pairs(self, values: Values) -> tuple[Dispatcher, Values]:
        """The dispatcher and the arguments of a call, with complex tensors replaced by real tensors of pairs."""
        names = tuple(name for name, value in zip(self.parameters.user_names, values, strict=True) if is_complex(value))
        if not names:
            return self, values
        with self._lock:
            if names not in self._derived:
                function = taking_real_pairs(self.function, names)
                self._derived[names] = Dispatcher(function, self.name, self.options, None, self._requires)
        return self._derived[names], as_real_pairs(values)

    def _as_torch_does(self, values: Values, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the function itself, under a torch mode or transform that watches the call."""
        values, args = [with_constant_numbers(value) for value in values], [with_constant_numbers(value) for value in args]
        kwargs = {name: with_constant_numbers(value) for name, value in kwargs.items()}
        for name, value in zip(self.parameters.emitted_names, values, strict=True):
            if not isinstance(value, Tensor):
                check_plain(self.name, name, value)
        if is_transformed() and not self._warned:
            self._warned = True
            what = f"under a transform of torch.func or forward-mode differentiation, {self.name} runs unfused"
            warnings.warn(what, stacklevel=4)
        if self._recorded_call is not None and is_recorded_as_operators():
            return self._recorded_call(self, args, kwargs)
        return run_in_torch(self.name, self.function, args, kwargs)

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
        """All arguments in the order of the parameters."""
        return args if len(args) == self._positional and not kwargs else self.parameters.bind(args, kwargs)

    def resolve_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Dispatcher, list[Any]]:
        """The dispatcher of a call that is not run, and all its arguments, with containers of tensors replaced by leaves.

        Raises:
            ArgumentError: an argument is neither a tensor nor a value that can select code.
        """
        flat = self._flatten(self.parameters.bind(args, kwargs))
        return (self, self.arguments(args, kwargs)) if flat is None else (flat[0], flat[0].arguments(flat[1], {}))

    def _flatten(self, values: Values) -> tuple[FlatDispatcher, list[Any]] | None:
        """The dispatcher for the leaves of containers of tensors, and the leaves; None if no argument is such a container."""
        last = self._keyword_pattern
        if last is not None and (leaves := last[0].leaves(values)) is not None:
            return last[1], leaves
        for value in values:
            if isinstance(value, CONTAINERS):
                break
        else:
            return None
        try:
            layouts, leaves = flatten_containers(self.parameters.user_names, values, self.parameters.variadic)
        except RecursionError:
            what = f"{self.name}: a list, tuple or dict among the arguments contains itself, or is nested too deeply"
            raise ArgumentError(what, hint="pass shallow containers of tensors and numbers") from None
        if all(layout is None for _, layout in layouts):
            return None
        with self._lock:
            if layouts not in self._flat:
                if len(self._flat) >= _MOST_LAYOUTS:
                    self._flat.clear()
                self._flat[layouts] = FlatDispatcher(self, layouts)
            flat = self._flat[layouts]
            if self.parameters.takes_any_name and (named := KeywordPattern.of(layouts, leaves)) is not None:
                self._keyword_pattern = named, flat
            return flat, leaves

    def inputs(self, name: str) -> Sequence[str]:
        """The parameters of this dispatcher for a parameter of the user's function."""
        return (name,)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """All arguments in the order of the parameters, for a call that is not run and takes tensors one by one.

        Raises:
            ArgumentError: an argument is neither a tensor nor a value that can select code.
        """
        self.parameters.require_fixed()
        values = self.parameters.bind(args, kwargs)
        self.parameters.require_not_none(values)
        for name, value in zip(self.parameters.emitted_names, values, strict=True):
            (check_values if isinstance(value, Tensor) else check_plain)(self.name, name, value)
        return values

    # The interface `CallBinder`.

    def statics(self) -> list[bool]:
        """For each parameter, whether its value selects a program."""
        return self.variants.statics()

    def check(self, values: Values) -> None:
        """Refuses arguments that no kernel can take, such as values of a finished trace."""
        if any(type(value) is TracedScalar or isinstance(value, TracedTensor) for value in values):
            raise stale()
        self.parameters.require_not_none(values)
        check(self.name, self.parameters.emitted_names, values)
        for name, value in zip(self.parameters.emitted_names, values, strict=True):
            if name in self.parameters.mutates and isinstance(value, Tensor):
                check_writable(self.name, name, value)

    @first_call
    def bind(self, values: Values) -> BoundMatch:
        """The program of a call: its variant's, with a backward pass if autograd needs one; the function itself for empty
        tensors."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        if any(tensor.numel() == 0 for tensor in tensors):
            return _EmptyCall(self.parameters), NO_CAPTURED
        device = tensors[0].device
        variant, captured = self.variants.variant_of(values, machine_of(device).target, device)
        if self._requires is not None:
            self._requires(variant)
        for name, tensor in zip(variant.state.names, captured, strict=True):
            check_memory(self.name, name, tensor, device, "the first tensor")
        differentiated = self._differentiated(variant, values, captured)
        wrt = differentiated_inputs(variant.traced, differentiated)
        if wrt and _has_empty_result(variant.traced):  # its gradients are empty too
            return _EmptyCall(self.parameters), NO_CAPTURED
        with self._lock:
            if wrt:
                return self._with_gradients(variant, values, captured, wrt), captured
            for observer in OBSERVERS:
                observer(self.unbound_call(variant, values, captured, device))
            sizes = self.variants.sizes(variant, values, captured)
            loadable = machine_of(device, self.options.compiler).loadable(variant, sizes, device)
            measured = with_measured_plans(loadable, sizes, device)
            return self.bound(measured, values, captured, device, without_history=bool(differentiated)), captured

    def passes(self, variant: Variant, values: Values, captured: Captured) -> ForwardBackward | None:
        """The passes of a call that autograd records; None if it records nothing."""
        wrt = differentiated_inputs(variant.traced, self._differentiated(variant, values, captured))
        return passes_of(variant, wrt, self.options, self.variants.sizes(variant, values, captured)) if wrt else None

    def _differentiated(self, variant: Variant, values: Values, captured: Captured) -> set[str]:
        """The inputs that autograd differentiates.

        Raises:
            GradientError: the function writes to its parameters.
            UnsupportedError: the graph does not show everything that torch records.
        """
        if not torch.is_grad_enabled():
            return set()
        named = (*zip(self.parameters.emitted_names, values, strict=True), *zip(variant.state.names, captured, strict=True))
        differentiated = {name for name, value in named if isinstance(value, Tensor) and value.requires_grad}
        if variant.traced.writes:
            refuse_gradients(self.name, differentiated)
        if differentiated:
            require_history(variant)
        return differentiated

    def bound(
        self, variant: Variant, values: Values, captured: Captured, device: torch.device, *, without_history: bool = False
    ) -> BoundPlan:
        """A variant bound to the exact shapes of a call.

        Args:
            without_history: True if autograd would record torch functions that the program calls, though no result has a gradient.
        """
        sizes = self.variants.sizes(variant, values, captured)
        program = machine_of(device, self.options.compiler).bound(variant, sizes, device)
        program = _WithoutHistory(program) if without_history else program
        facts = CallFacts(variant.call, variant.conditions, dict(variant.constants), sizes, self.parameters.emitted_names)
        return BoundPlan(program, facts, self._by_value(variant), variant.state, captured)

    def unbound_call(self, variant: Variant, values: Values, captured: Captured, device: torch.device) -> UnboundCall:
        """A call without gradients, for tuning."""
        names = self.parameters.emitted_names
        written = frozenset(position for position, name in enumerate(names) if name in self.parameters.mutates)

        sizes, bind = self.variants.sizes(variant, values, captured), partial(self._bound_again, values, captured, device)
        return UnboundCall(self.name, variant, sizes, device, tuple(values), bind, captured, written)

    def _bound_again(self, values: Values, captured: Captured, device: torch.device, variant: Variant) -> BoundPlan:
        return self.bound(variant, values, captured, device)

    def _with_gradients(self, variant: Variant, values: Values, captured: Captured, wrt: Sequence[str]) -> BoundAutogradCall:
        """The forward and backward pass of a variant, bound to the exact shapes of a call."""
        sizes = self.variants.sizes(variant, values, captured)
        passes = passes_of(variant, wrt, self.options, sizes)
        names, all_values = self.parameters.emitted_names, (*values, *captured)
        index_of = {name: index for index, name in enumerate((*names, *variant.state.names))}
        index_of |= {size: index_of[name] for size, (name, dim) in variant.request.sizes.sources if dim == VALUE_AS_SIZE}
        device = next(value.device for value in all_values if isinstance(value, Tensor))
        source = ArgumentSource(tuple(index_of.get(name) for name in passes.forward.names), device)
        arguments = source.example(all_values)
        with torch.no_grad():
            forward, _ = passes.forward.executable.lookup(arguments)
        recorded = differentiated_results(variant.traced, wrt)
        return BoundAutogradCall(
            source=source,
            count=len(all_values),
            tensors=len(passes.forward.graph.inputs),
            forward=forward,
            node=BackwardNode(passes.wiring, passes.backward.executable, recorded, {**passes.forward.sizes(arguments), **sizes}),
            pack_results=builder(variant.structure),
            by_value=self._by_value(variant) if passes.forward.graph.scalars else None,
            condition=condition_of(variant.conditions, sizes, names),
            state=variant.state,
            captured=captured,
        )

    def _by_value(self, variant: Variant) -> ByValue:
        scalars = [name for name in variant.call.scalars.names if name in self.parameters.emitted_names]
        return partial(self._call_by_value, scalars)

    def _call_by_value(self, scalars: Sequence[str], values: Values) -> Any:
        """Runs the call with the values of these scalars as constants of the trace."""
        self.variants.make_static(scalars)
        program, captured = self.executable.bind_new(values)
        return program(values, captured)


class FlatDispatcher(Dispatcher):
    """Runs a kernel whose arguments contain tensors, for one structure of the containers. Each leaf is a parameter."""

    def __init__(self, kernel: Dispatcher, layouts: ContainerLayouts) -> None:
        self._kernel, self._layouts = kernel, layouts
        self._leaves = flat_names(layouts)
        parameters = kernel.parameters
        mutates = tuple(leaf for name in parameters.writable for leaf in self._leaves[name])
        function = flat_function(kernel.function, layouts)
        function.__annotations__ = {
            n: parameters.annotations[n] for n, layout in layouts if layout is None and n in parameters.annotations
        }
        options, origin = kernel.options._replace(mutates=mutates), (kernel.function, layouts)
        super().__init__(function, kernel.name, options, kernel._recorded_call, kernel._requires, origin)

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatDispatcher:
        """The dispatcher of the copied kernel."""
        return FlatDispatcher(copy.deepcopy(self._kernel, memo), self._layouts)

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
        """The leaves of a call's arguments.

        Raises:
            ArgumentError: the containers have another structure.
        """
        parameters = self._kernel.parameters
        layouts, leaves = flatten_containers(parameters.user_names, parameters.bind(args, kwargs), parameters.variadic)
        if layouts != self._layouts:
            what = f"{self.name}: the lists, tuples and dicts among the arguments have another structure than in the first call"
            raise ArgumentError(what, hint="call fg.vjp again for the new arguments")
        return leaves

    def inputs(self, name: str) -> Sequence[str]:
        """The leaves of a parameter."""
        return self._leaves.get(name, (name,))


_NO_ELEMENTS = ("to have non-zero size", "input.numel() == 0")
"""Texts in torch's errors for reductions of empty tensors."""


def _has_empty_result(graph: Graph) -> bool:
    return any(dim == 0 for position in graph.outputs for dim in graph.nodes[position].shape)


class _EmptyCall(BoundCall):
    """Runs the function itself for empty tensors or empty results: nothing can be fused."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(None, None, NO_CAPTURED)
        self.find = lambda _: None  # not cached: each call binds again
        self._parameters = parameters

    def __call__(self, values: Values, captured: Captured) -> Any:
        parameters = self._parameters
        written = [value for name, value in zip(parameters.emitted_names, values, strict=True) if name in parameters.mutates]
        try:
            result = parameters.call(_copied(list(values), written))
        except (IndexError, RuntimeError) as error:
            if any(words in str(error) for words in _NO_ELEMENTS):
                raise self._refused(values, error) from error
            raise
        return _copied(result, written)

    def _refused(self, values: Values, error: Exception) -> ArgumentError:
        """The error for a reduction that has no result for an empty tensor, e.g. a maximum."""
        named = zip(self._parameters.emitted_names, values, strict=True)
        empty = [(name, value) for name, value in named if isinstance(value, Tensor) and not value.numel()]
        shapes = ", ".join(f"{name!r} of shape {tuple(value.shape)}" for name, value in empty)
        what = f"{self._parameters.function.__name__}: a reduction of no elements has no result: {error}"
        return ArgumentError(what, where=shapes, hint="pass tensors with elements, or skip the call for empty ones")


def _copied(values: Any, written: Sequence[Any]) -> Any:
    """Copies tensors, so that neither arguments nor captured tensors can be written to.

    Args:
        written: tensors that may be written to, which are not copied.
    """

    def copy(tensor: Tensor) -> Tensor:
        return tensor if any(tensor is each for each in written) else tensor.clone(memory_format=torch.contiguous_format)

    return tree_map_only(Tensor, copy, values)


# Calls whose only container is ``**kwargs``: names and types recognize a call like the last one in a tenth of the time.


@dataclass(frozen=True)
class KeywordPattern:
    """The pattern of calls whose only container is ``**kwargs``: its names, and the types of all leaves.

    Attributes:
        names: the names in ``**kwargs``.
        types: the types of all leaves.
    """

    names: list[str]
    types: list[type]

    @classmethod
    def of(cls, layouts: ContainerLayouts, leaves: Sequence[Any]) -> KeywordPattern | None:
        """The pattern of a call; None if the function's last parameter is not ``**kwargs``, or another argument is a container."""
        *others, (_, last) = layouts
        if last is None or any(layout is not None for _, layout in others) or any(isinstance(leaf, KINDS) for leaf in leaves):
            return None
        _, names, elements = last
        return cls([*names], [*map(type, leaves)]) if all(element is None for element in elements) else None

    def leaves(self, values: Values) -> list[Any] | None:
        """The leaves of a call that matches the pattern; None for another call."""
        *others, named = values
        leaves = [*others, *named.values()]
        return leaves if [*named] == self.names and [*map(type, leaves)] == self.types else None
