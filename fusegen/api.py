"""The class of declared kernels: call, inspect, differentiate."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from fusegen import target as targets
from fusegen.compiler.backends import target_of
from fusegen.compiler.compile import Variant
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.parameters import KINDS as CONTAINERS
from fusegen.compiler.parameters import all_arguments
from fusegen.eager_cost import EagerCost, as_meta, eager_cost
from fusegen.errors import ArgumentError
from fusegen.gradients import Vjp, passes_of
from fusegen.lowered import Lowered
from fusegen.operators.named import autocasts, register, require_closed
from fusegen.operators.plan import has_unknown_floats
from fusegen.operators.recorded_call import operator_for, recorded_call, recorded_container_call
from fusegen.options import DEFAULTS, Options
from fusegen.runtime.arguments import Values
from fusegen.runtime.bound import Captured
from fusegen.runtime.callables import OUT, fill_out, is_complex, with_out_parameter
from fusegen.target import Target
from fusegen.threads import cached_property
from fusegen.trace import inlined
from fusegen.trace.user import location

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


class Kernel(Generic[P, R]):
    """A declared chain of torch operations, compiled at the first call for each combination of dtypes, ranks and layouts.

    `kernel` creates it. Called with torch tensors it returns torch tensors; called inside another kernel it is inlined.
    """

    __name__: str  # copied from the function, like its docstring and module

    def __init__(
        self,
        function: Callable[P, R],
        name: str | None = None,
        op: str | None = None,
        options: Options = DEFAULTS,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.options = function, options
        name = name or str(getattr(function, "__name__", type(function).__name__))
        requires = None if op is None else partial(require_closed, op)
        self._dispatcher = Dispatcher(function, name, options, self._recorded, requires)
        self.op = op
        self._operator = None if op is None else register(op, function, lambda *values: self._dispatcher.call(values, {}))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the kernel.

        ``out=`` names a tensor that receives the result and is returned, unless the function has a parameter of that name.

        Raises:
            ArgumentError: an argument has the wrong type, device or dtype.
            GradientError: an input requires a gradient that the kernel cannot compute.
            TraceError: the function does something that cannot be traced.
        """
        if kwargs:
            kwargs = self._named(kwargs)  # type: ignore[assignment]
        if is_dynamo_compiling():
            return cast(R, self._while_compiling(args, kwargs))
        result: R = (self._dispatcher_of(kwargs) if kwargs else self._dispatcher).call(args, kwargs)
        return result

    def _while_compiling(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Handles a call that torch.compile or torch.export traces."""
        if self._has_out(kwargs):
            remaining = {name: value for name, value in kwargs.items() if name != OUT}
            return fill_out(self._dispatcher.name, kwargs[OUT], self._compiled(args, remaining))
        return self._compiled(args, kwargs)

    def _compiled(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        parameters = self._dispatcher.parameters
        if not (parameters.variadic or any([isinstance(value, CONTAINERS) for value in (*args, *kwargs.values())])):
            return self._recorded(self._dispatcher, args, kwargs)
        values = all_arguments(parameters, args, kwargs)
        return recorded_container_call(self.function, parameters, self._dispatcher.name, self.options, values)

    def _recorded(self, dispatcher: Dispatcher, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Adds the call as an operator to the graph that torch is recording."""
        values = (*args, *kwargs.values())
        if any(map(is_complex, values)):  # operators have no complex dtypes
            return self.function(*args, **kwargs)
        # Named operators support neither autocast nor symbolic floats.
        if self._operator is not None and not (autocasts(values) or has_unknown_floats(values)):
            return self._operator(*args, **kwargs)
        names = dispatcher.parameters.user_names
        return recorded_call(dispatcher.function, names, dispatcher.name, dispatcher.options, args, kwargs)

    def _named(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Drops ``out=None``, which torch treats like a missing ``out``."""
        is_left_out = self._has_out(kwargs) and kwargs[OUT] is None
        return {name: value for name, value in kwargs.items() if name != OUT} if is_left_out else kwargs

    def _has_out(self, kwargs: Mapping[str, Any]) -> bool:
        """Returns True if the call passes ``out=`` without a parameter of that name."""
        parameters = self._dispatcher.parameters
        return OUT in kwargs and OUT not in parameters.user_names and not parameters.takes_any_name

    def _dispatcher_of(self, kwargs: Mapping[str, Any]) -> Dispatcher:
        """Returns the dispatcher of the call; calls with ``out=`` have their own."""
        return self._into_out if self._has_out(kwargs) else self._dispatcher

    @cached_property
    def _into_out(self) -> Dispatcher:
        function: Callable[..., Any] = with_out_parameter(self.function)  # type: ignore[arg-type]
        options = self.options._replace(mutates=(*self.options.mutates, OUT))
        return Dispatcher(function, self._dispatcher.name, options)

    def lower(self, *args: Any, target: str | None = None, **kwargs: Any) -> Lowered:
        """Shows the stages of a call without running it.

        Args:
            args, kwargs: as in a call; tensors may be meta or fake. Pass a parameter that is called ``target`` by position.
            target: ``sm_80`` to ``sm_120``, or ``cpu``; by default that of the tensors' device, with the costs of that GPU.

        Raises:
            ArgumentError: the target is not a string.
            TargetError: an unknown target.
            TraceError: the function does something that cannot be traced.
        """
        _check_target_name(self._dispatcher.name, target)
        named = self._named(kwargs)
        dispatcher = self._dispatcher_of(named)
        function = dispatcher.function
        dispatcher, arguments = dispatcher.resolve_call(args, named)
        dispatcher, values = dispatcher.with_real_pairs(arguments)
        variant, captured = self._variant(dispatcher, values, target=target)
        sizes = dispatcher.variants.sizes(variant, values, captured)
        return Lowered(variant, sizes, eager=_eager(function, args, named))

    @property
    def backward(self) -> BackwardPass:
        """The derived backward pass: ``kernel.backward.lower(...)`` shows the kernels that it runs."""
        return BackwardPass(self)

    def operator(self, *args: Any, **kwargs: Any) -> torch._ops.OpOverload[..., Any]:
        """Returns the operator that represents a call in a graph of torch.compile, torch.export or make_fx.

        Its name is ``torch.ops.fusegen.<name>_<digest>``, or the one declared with ``op=``.

        It takes the call's tensors, the captured tensors, sizes and run-time numbers, in the order of its schema. The operator
        of a random kernel also takes the key of the random bits, one int64.

        Args:
            args, kwargs: as in a call.

        Raises:
            UnsupportedError: the call has no operator.
        """
        dispatcher, values = self._dispatcher.resolve_call(args, kwargs)
        if self._operator is not None:
            return self._operator
        return operator_for(dispatcher.function, dispatcher.name, dispatcher.options, dispatcher.parameters.user_names, values)

    def _variant(self, dispatcher: Dispatcher, values: Values, *, target: str | None) -> tuple[Variant, Captured]:
        """Returns the variant of a call with all arguments, and the captured tensors."""
        device = next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))
        machine = _default_target(device) if target is None else targets.target(target)
        target_device = torch.device(machine.device)
        return dispatcher.variants.variant_of(values, machine, target_device if device.type == "meta" else device)

    @overload
    def __get__(self, instance: None, owner: type) -> Kernel[P, R]: ...
    @overload
    def __get__(self: Kernel[Concatenate[S, Q], R], instance: S, owner: type) -> Method[Q, R]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        """Binds a kernel that is declared as a method to its object, the first argument of each call."""
        return self if instance is None else Method(self, instance)

    def fresh(self, function: Callable[P, R] | None = None, *, options: Options | None = None) -> Kernel[P, R]:
        """Returns a copy with an empty cache and no registered operator, optionally with another function or other options."""
        return Kernel(self.function if function is None else function, options=self.options if options is None else options)

    def __copy__(self) -> Kernel[P, R]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernel[P, R]:
        """Copies the kernel with its function. A kernel that is registered as an operator returns itself."""
        return self if self.op else Kernel(copy.deepcopy(self.function, memo), *self._declared)

    @property
    def _declared(self) -> tuple[str, None, Options]:
        """The constructor arguments after the function. They register no operator, since they make copies."""
        return self._dispatcher.name, None, self.options

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickles the kernel by its name or that of its function, as Python pickles functions."""
        function = self.function
        if inspect.ismethod(function):
            return Kernel, (function, *self._declared)
        original = _lookup(function.__module__, function.__qualname__)
        if original is self:
            return function.__qualname__
        if original is function:
            return Kernel, (function, *self._declared)
        raise pickle.PicklingError(
            f"the kernel {function.__qualname__} cannot be pickled: {function.__module__} has no such function\n"
            "  try: define the function at the top of a module, or save a state_dict and declare the kernel again"
        )

    def __repr__(self) -> str:
        return f"<fusegen kernel {self.function.__name__}>"


class Method(Generic[Q, R]):
    """A kernel that a class declares as a method, bound to an object."""

    def __init__(self, kernel: Kernel[..., R], instance: object) -> None:
        self.kernel, self.instance = kernel, instance  # not ``__func__``: torch.compile expects a Python method there
        self.__name__, self.__doc__ = kernel.function.__name__, kernel.__doc__

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:
        """Runs the kernel, like `Kernel.__call__`."""
        return self.kernel(self.instance, *args, **kwargs)

    def lower(self, *args: Any, target: str | None = None, **kwargs: Any) -> Lowered:
        """Shows the stages of a call, like `Kernel.lower`."""
        return self.kernel.lower(self.instance, *args, target=target, **kwargs)

    @property
    def backward(self) -> BackwardPass:
        """The derived backward pass, like `Kernel.backward`."""
        return BackwardPass(self.kernel, self.instance)

    def operator(self, *args: Any, **kwargs: Any) -> torch._ops.OpOverload[..., Any]:
        """Returns the operator of a call, like `Kernel.operator`."""
        return self.kernel.operator(self.instance, *args, **kwargs)

    @property
    def function(self) -> Callable[..., R]:
        """The user's function, bound to the object."""
        return types.MethodType(self.kernel.function, self.instance)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and self.kernel is other.kernel and self.instance is other.instance

    def __hash__(self) -> int:
        # Older versions of torch.compile call this before ``__init__``.
        return hash((id(vars(self).get("kernel")), id(vars(self).get("instance"))))

    def __repr__(self) -> str:
        return f"<fusegen kernel {self.__name__} of {self.instance!r}>"


def vjp(
    kernel: Kernel[..., Any] | Method[..., Any] | nn.Module,
    *args: Any,
    wrt: str | Sequence[str] | None = None,
    target: str | None = None,
    **kwargs: Any,
) -> Vjp:
    """Returns the forward and backward pass of a kernel.

    A saved tensor must not be modified before the backward pass: `Backward` checks its version counter. Inference tensors have no
    version counter, so `Forward` refuses to save them; use ``torch.no_grad()`` instead of inference mode.

    Args:
        kernel: the kernel, or a module that was declared as one.
        args, kwargs: as in a call; tensors may be meta or fake.
        wrt: names of the parameters and captured tensors to differentiate by, as in `Lowered.traced`. By default all arguments that
            are tensors of floats, and the captured tensors that require a gradient.
        target: ``sm_80`` to ``sm_120``, or ``cpu``; by default that of the tensors' device.

    Raises:
        ArgumentError: a name in ``wrt`` has no gradient, or the kernel was not declared with `fusegen.kernel`.
        GradientError: there is nothing to differentiate.
        UnsupportedError: an operation has no derivative, or torch records operations that the graph does not contain.
    """
    declared = getattr(kernel, "_kernel", None) if isinstance(kernel, nn.Module) else None
    if isinstance(declared, Kernel):
        kernel = Method(declared, kernel)
    if not isinstance(kernel, (Kernel, Method)):
        what = f"fg.vjp differentiates kernels that fg.kernel declared, but got {kernel!r}"
        raise ArgumentError(what, hint="declare it: fg.kernel(function) or fg.kernel(module)")
    _check_target_name(kernel.function.__name__, target)
    instance = (kernel.instance,) if isinstance(kernel, Method) else ()
    kernel = kernel.kernel if isinstance(kernel, Method) else kernel
    dispatcher = kernel._dispatcher
    dispatcher, values = dispatcher.resolve_call((*instance, *args), kwargs)
    return passes_of(dispatcher, partial(kernel._variant, dispatcher, target=target), instance, values, wrt)


class BackwardPass:
    """The backward pass of a kernel, for inspection."""

    def __init__(self, kernel: Kernel[..., Any], *instance: object) -> None:
        self._kernel, self._instance = kernel, instance

    def lower(self, *args: Any, wrt: str | Sequence[str] | None = None, target: str | None = None, **kwargs: Any) -> Lowered:
        """Shows every stage of the backward pass of a call, without running it; arguments and errors are those of `vjp`.

        The gradients of the results are row-major.
        """
        return vjp(self._kernel, *self._instance, *args, wrt=wrt, target=target, **kwargs).backward.lower()

    def __repr__(self) -> str:
        return f"<backward pass of {self._kernel!r}>"


def _lookup(module: str, path: str) -> object:
    """Returns the object that a module holds under a dotted name, or None."""
    value: object = sys.modules.get(module)
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _eager(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], EagerCost | None]:
    """Returns a function that counts what a call costs in torch eager."""
    positional, named = as_meta((tuple(args), dict(kwargs)))
    return partial(eager_cost, inlined(partial(function, *positional, **named)), {}, place=location)


def _check_target_name(kernel: str, target: object) -> None:
    """Raises `ArgumentError` for a ``target=`` that is not a string: it may be meant for a parameter of the kernel."""
    if target is not None and not isinstance(target, str):
        what = f"{kernel}: target= must be the name of a target, not a {type(target).__name__}"
        raise ArgumentError(what, hint="pass the kernel's own parameter of that name by position")


def _default_target(device: torch.device) -> Target:
    if device.type == "meta":
        return target_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return target_of(device)
