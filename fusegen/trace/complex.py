"""Complex tensors of a traced function: pairs of real tensors. The graph contains only the real parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from fusegen.errors import TraceError, UnsupportedError
from fusegen.trace import registry
from fusegen.trace.modes import functions_named
from fusegen.trace.registry import Composite
from fusegen.trace.user import user_line
from fusegen.trace.values import BINARY_OPERATORS, TracedTensor

_DTYPES = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_VIEWS = """
    view reshape flatten unflatten squeeze unsqueeze transpose permute expand expand_as broadcast_to t movedim moveaxis swapaxes
    swapdims narrow select contiguous clone detach repeat roll flip
"""
"""Functions that move elements: they apply to both parts."""

_RULES: dict[Callable[..., Any], Callable[..., Any]] = {}


def _rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update(dict.fromkeys(functions_named(names), rule))
        return rule

    return register


class ComplexTensor(Composite):
    def __init__(self, real: Any, imag: Any) -> None:
        if real.dtype is not imag.dtype or real.dtype not in _DTYPES:
            message = f"a complex tensor cannot have parts of {real.dtype} and {imag.dtype}"
            raise TraceError(message, where=user_line(), hint="make both float32, or both float64")
        self.real, self.imag = real, imag

    def rule_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the handler of a torch function, or raises `UnsupportedError`."""
        rule = _RULES.get(function)
        if rule is None:
            message = f"torch's {registry.name_of(function)!r} of complex numbers cannot be traced"
            hint = "use +, -, *, conj, abs, real, imag and views, or compute with torch.view_as_real(z)"
            raise UnsupportedError(message, where=user_line(), hint=hint)
        return rule

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return registry.call(func, args, kwargs or {})

    T = property(lambda self: registry.call(torch.Tensor.t, (self,), {}))
    shape = property(lambda self: self.real.shape)
    ndim = property(lambda self: self.real.ndim)
    device = property(lambda self: self.real.device)
    dtype = property(lambda self: _DTYPES[self.real.dtype])
    requires_grad = property(lambda self: False)

    def size(self, dim: int | None = None) -> Any:
        return self.real.size(dim)

    def dim(self) -> int:
        return int(self.real.ndim)

    def numel(self) -> Any:
        return self.real.numel()

    def is_complex(self) -> bool:
        return True

    def is_floating_point(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name, None)
        if method is None or name.startswith("__"):
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        if not callable(method):
            raise UnsupportedError(
                f"{name} of a complex tensor cannot be traced", where=user_line(), hint="use torch.view_as_real(z)"
            )
        return lambda *args, **kwargs: registry.call(method, (self, *args), kwargs)

    def __getitem__(self, key: Any) -> ComplexTensor:
        return ComplexTensor(self.real[key], self.imag[key])

    def __eq__(self, other: object) -> Any:
        return registry.call(torch.eq, (self, other), {}) if isinstance(other, _OPERANDS) else NotImplemented

    __hash__ = object.__hash__

    __neg__, __abs__ = registry.calling(torch.neg), registry.calling(torch.abs)

    def __len__(self) -> int:
        return len(self.real)

    def __iter__(self) -> Iterator[ComplexTensor]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> NoReturn:
        raise TraceError(
            "a branch on a complex number cannot be traced", where=user_line(), hint="use torch.where with a condition on its parts"
        )

    def __repr__(self) -> str:
        return f"<traced complex of {self.real!r}>"


_OPERANDS = (ComplexTensor, TracedTensor, torch.Tensor, bool, int, float, complex)


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    _function = BINARY_OPERATORS[_name]
    setattr(ComplexTensor, f"__{_name}__", registry.calling(_function))
    setattr(ComplexTensor, f"__r{_name}__", registry.calling(_function, swapped=True))


def _parts(value: Any) -> tuple[Any, Any]:
    """The real and the imaginary part of an operand; None for an imaginary part of 0."""
    if isinstance(value, (ComplexTensor, complex)):
        return value.real, value.imag
    return value, None


def _on_both_parts(function: Callable[..., Any]) -> Callable[..., ComplexTensor]:

    def rule(input: ComplexTensor, *args: Any, **kwargs: Any) -> ComplexTensor:
        shaped = [a.real if isinstance(a, ComplexTensor) else a for a in args]
        return ComplexTensor(*(registry.call(function, (part, *shaped), kwargs) for part in (input.real, input.imag)))

    return rule


for _name in _VIEWS.split():
    for _function in functions_named((_name,)):
        _RULES[_function] = _on_both_parts(_function)


def _on_lists(function: Callable[..., Any]) -> Callable[..., ComplexTensor]:

    def rule(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> ComplexTensor:
        if not all(isinstance(tensor, ComplexTensor) for tensor in tensors):
            message = f"{registry.name_of(function)} of complex and real tensors is not supported"
            raise UnsupportedError(message, where=user_line(), hint="make all complex: torch.complex(x, torch.zeros_like(x))")
        parts = ([tensor.real for tensor in tensors], [tensor.imag for tensor in tensors])
        return ComplexTensor(*(registry.call(function, (part, *args), kwargs) for part in parts))

    return rule


for _function in functions_named(("stack", "cat", "concat")):
    _RULES[_function] = _on_lists(_function)


@_rule("mul", "multiply")
def mul(input: Any, other: Any) -> ComplexTensor:
    (a, b), (c, d) = _parts(input), _parts(other)
    if b is None:
        return ComplexTensor(a * c, a * d)
    return ComplexTensor(a * c, b * c) if d is None else ComplexTensor(a * c - b * d, a * d + b * c)


@_rule("add")
def add(input: Any, other: Any) -> ComplexTensor:
    (a, b), (c, d) = _parts(input), _parts(other)
    real = a + c
    if b is None or d is None:
        return ComplexTensor(real, torch.zeros_like(real) + (d if b is None else b))
    return ComplexTensor(real, b + d)


@_rule("sub", "subtract")
def sub(input: Any, other: Any) -> ComplexTensor:
    difference: ComplexTensor = add(input, -other)
    return difference


@_rule("div", "divide", "true_divide")
def div(input: ComplexTensor, other: Any) -> ComplexTensor:
    if isinstance(other, (ComplexTensor, complex)):
        hint = "multiply by the divisor's conjugate, and divide by its squared magnitude"
        raise UnsupportedError("division by complex numbers cannot be traced", where=user_line(), hint=hint)
    return ComplexTensor(input.real / other, input.imag / other)


@_rule("neg", "negative")
def neg(input: ComplexTensor) -> ComplexTensor:
    return ComplexTensor(-input.real, -input.imag)


@_rule("conj", "conj_physical")
def conj(input: ComplexTensor) -> ComplexTensor:
    return ComplexTensor(input.real, -input.imag)


@_rule("resolve_conj", "resolve_neg")
def resolved(input: ComplexTensor) -> ComplexTensor:
    """Returns its input: conjugation is never lazy in a trace."""
    return input


@_rule("abs", "absolute")
def magnitude(input: ComplexTensor) -> Any:
    return torch.hypot(input.real, input.imag)


@_rule("angle")
def angle(input: ComplexTensor) -> Any:
    return torch.atan2(input.imag, input.real)


@_rule("real")
def real_part(input: ComplexTensor) -> Any:
    return input.real


@_rule("imag")
def imaginary_part(input: ComplexTensor) -> Any:
    return input.imag


@_rule("is_complex")
def is_complex(input: ComplexTensor) -> bool:
    return input.is_complex()


@_rule("view_as_real")
def view_as_real(input: ComplexTensor) -> Any:
    return torch.stack([input.real, input.imag], -1)
