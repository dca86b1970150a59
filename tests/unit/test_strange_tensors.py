"""Tensors whose values are not the numbers at their address are refused at every call, in words; where something watches a call,
the function runs as torch runs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusegen as fg
from fusegen.errors import ArgumentError
from tests.naming import case
from tests.unit.eager import agree, randn

COUNT = 8


class Wrapper(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(function))


class Dispatching(torch.Tensor):
    """A tensor with memory, whose class says what operations do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Dispatching:
        return torch.Tensor._make_subclass(cls, inner)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(function))


class Louder(torch.Tensor):
    """A tensor with memory, whose class is asked about functions."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {}) + 100


class Summing(torch.Tensor):
    """A tensor with a method of its own for one of torch's."""

    def sum(self, *args: Any) -> Tensor:
        return super().sum(*args) * 2


class Named(torch.Tensor):
    """A plain subclass."""


def freed(bytes_left: int) -> Tensor:
    x = randn(COUNT)
    x.untyped_storage().resize_(bytes_left)
    return x


def quietly(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def made() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


def masked() -> Tensor:
    return torch.masked.masked_tensor(randn(COUNT), torch.ones(COUNT, dtype=torch.bool))


def nested() -> Tensor:
    return torch.nested.nested_tensor([randn(3), randn(5)])


STRANGE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "negative": (lambda: randn(COUNT, dtype=torch.complex64).conj().imag, r"negative bit.*\n.*x\.resolve_neg\(\)"),
    "negative-aligned": (lambda: torch._neg_view(randn(COUNT)), "negative bit"),
    "negative-double": (lambda: randn(COUNT, dtype=torch.complex128).conj().imag.unsqueeze(-1), "negative bit"),
    "zeros": (lambda: torch._efficientzerotensor(COUNT), r"zero tensor without memory.*\n.*x\.clone\(\)"),
    "freed": (lambda: freed(0), "storage of 0 bytes"),
    "wrapper": (lambda: Wrapper(randn(COUNT)), "is a Wrapper, whose class"),
    "dispatching": (lambda: Dispatching(randn(COUNT)), "is a Dispatching, whose class"),
    "functional-class": (lambda: randn(COUNT).as_subclass(Louder), r"is a Louder.*__torch_function__.*\n.*x\.as_subclass"),
    "method-of-its-own": (lambda: randn(COUNT).as_subclass(Summing), r"is a Summing.*\(sum\)"),
    "masked": (quietly(masked), "is a MaskedTensor"),
    "nested": (quietly(nested), "nested tensor"),
    "sparse": (lambda: torch.eye(COUNT).to_sparse(), r"sparse_coo tensor.*\n.*to_dense"),
    "compressed": (quietly(lambda: torch.eye(COUNT).to_sparse_csr()), "sparse_csr tensor"),
    "mkldnn": (lambda: randn(COUNT, COUNT).to_mkldnn(), "mkldnn tensor"),
    "quantized": (quietly(lambda: torch.quantize_per_tensor(randn(COUNT), 0.1, 0, torch.quint8)), "quint8 is not supported"),
    "functional": (lambda: torch._to_functional_tensor(randn(COUNT)), "functionalization"),
    "meta": (lambda: randn(COUNT).to("meta"), "meta"),
    "lazy": (lambda: torch.nn.LazyLinear(COUNT).weight, "without a shape yet"),
}
STAND_FOR_OTHERS = ("functional", "meta")  # with which torch runs the function; closed over, they are refused as well
COMPLEX = {
    "conjugate": (lambda: randn(COUNT, dtype=torch.complex64).conj(), "complex64 is not supported"),
}
"""Which are taken as arguments."""
FIRST = {**STRANGE, "shrunk": (lambda: freed(4), "ends at byte 32 of a storage of 4 bytes")}


def doubled(x: Tensor) -> Tensor:
    return x * 2 + 1


def imaginary() -> Tensor:
    """As `STRANGE`'s negative one, without the bit."""
    return randn(COUNT, dtype=torch.complex64).imag


@torch.no_grad()
def test_a_strange_tensor_in_the_first_call() -> None:
    for name in FIRST.keys() - STAND_FOR_OTHERS:
        with case(name):
            make, words = FIRST[name]
            with pytest.raises(ArgumentError, match=words):
                fg.kernel(doubled)(make())


@torch.no_grad()
def test_a_later_call_with_a_strange_tensor_of_the_same_shape() -> None:
    for name in STRANGE.keys() - STAND_FOR_OTHERS:
        with case(name):
            make, words = STRANGE[name]
            kernel = agree(doubled, (randn(COUNT),), (imaginary(),), (imaginary().double().unsqueeze(-1),))
            for _ in range(2):
                with pytest.raises(ArgumentError, match=words):
                    kernel(make())
            agree(kernel, (randn(COUNT),))


@pytest.mark.parametrize("name", [*FIRST, *COMPLEX])
@torch.no_grad()
def test_a_strange_tensor_that_is_closed_over(name: str) -> None:
    make, words = (FIRST | COMPLEX)[name]
    strange = [make()]
    weight = strange[0]
    with pytest.raises(ArgumentError, match=words.replace("x\\.", "weight\\.")):
        fg.kernel(lambda x: x * weight)(randn(COUNT))


@pytest.mark.parametrize(
    "name", ["negative", "negative-aligned", "zeros", "freed", "dispatching", "functional-class", "masked", "meta", "sparse"]
)
def test_a_closed_over_tensor_that_becomes_strange(name: str) -> None:
    make, words = STRANGE[name]
    weight = randn(2 * COUNT)[1::2]
    kernel = fg.kernel(lambda x: x * weight)
    x = randn(COUNT)
    assert torch.equal(kernel(x), x * weight)
    weight = make()
    with pytest.raises(ArgumentError, match=words.replace("x\\.", "weight\\.")):
        kernel(x)


@torch.no_grad()
def test_a_class_that_says_what_operations_do_is_no_argument_of_other_calls() -> None:
    strange, x = STRANGE["functional-class"][0](), randn(COUNT)
    kernel, scaled = fg.kernel(doubled), fg.kernel(lambda x, o: x * o.weight)
    passes = fg.vjp(kernel, x)
    holder = torch.nn.Module()
    holder.weight = strange
    for call in (lambda: kernel.lower(strange), lambda: fg.vjp(kernel, strange), lambda: scaled(x, holder)):
        with pytest.raises(ArgumentError, match="is a Louder"):
            call()
    with pytest.raises(ArgumentError, match="is a Louder"):
        passes.forward(strange)


def test_plain_subclasses_are_tensors_and_results_are_plain() -> None:
    x = randn(COUNT)
    for one in (torch.nn.Parameter(x, requires_grad=False), torch.nn.Buffer(x), x.as_subclass(Named)):
        result = fg.kernel(doubled)(one)
        assert type(result) is Tensor and torch.equal(result, doubled(x))


# What watches a call.


def fake(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = function(mode.from_tensor(x))
    return torch.zeros(found.shape, dtype=found.dtype) + function(x)


def traced(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(function, (x,))(x)


def by_tangent(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones(COUNT)))).tangent


WATCHED: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "make_fx": lambda function, x: make_fx(function)(x)(x),
    "make_fx-of-fakes": lambda function, x: make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(x)(x),
    "fake": fake,
    "jit": traced,
    "vmap": lambda function, x: torch.vmap(function)(x.expand(3, COUNT)),
    "grad": lambda function, x: torch.func.grad(lambda y: function(y).sum())(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,))[1],
    "dual": by_tangent,
    "functionalize": lambda function, x: torch.func.functionalize(function)(x),
    "compile": lambda function, x: torch.compile(function, fullgraph=True, backend="aot_eager")(x),
}


@pytest.mark.parametrize("was_called", [True, False], ids=["later", "first"])
@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.filterwarnings("ignore:under a transform")
def test_a_call_that_is_watched(name: str, was_called: bool) -> None:
    """By way of a captured tensor too: what comes of it is what comes of the function."""
    weight, x = randn(COUNT), randn(COUNT)

    def function(x: Tensor) -> Tensor:
        return doubled(x) * weight

    kernel = fg.kernel(function)
    if was_called:
        kernel(x)
        kernel(randn(3, COUNT))
    torch.testing.assert_close(WATCHED[name](lambda y: kernel(y).sin(), x), WATCHED[name](lambda y: function(y).sin(), x))
    agree(kernel, (x,))


def test_a_meta_tensor_beside_one_with_values_is_refused() -> None:
    given = torch.empty(3, COUNT, device="meta")
    for function in (lambda x: x + torch.ones(COUNT), lambda x: x * x.sum().item()):
        with pytest.raises(ArgumentError, match="a meta tensor has a shape and no values") as caught:
            fg.kernel(function)(given)
        assert "all tensors on the meta device" in str(caught.value)


def test_meta_tensors_give_shapes() -> None:
    y = fg.kernel(doubled)(torch.empty(3, COUNT, dtype=torch.float16, device="meta"))
    assert y.is_meta and y.shape == (3, COUNT) and y.dtype is torch.float16


def test_a_transform_says_once_that_nothing_is_fused() -> None:
    kernel, x = fg.kernel(doubled), randn(3, COUNT)
    with pytest.warns(UserWarning, match="doubled runs unfused"):
        torch.vmap(kernel)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.vmap(kernel)(x)


class WithoutMemory(TorchDispatchMode):
    """Hands out tensors without memory."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return Wrapper(result) if function is torch.ops.aten.empty_strided.default else result


def test_results_without_memory_end_no_process() -> None:
    y = fg.kernel(doubled)(randn(COUNT).requires_grad_()).sum()
    with WithoutMemory(), pytest.raises(ArgumentError, match="tensor without memory"):
        y.backward()


class Logged(TorchDispatchMode):
    """Notes all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operations_of_the_function() -> None:
    kernel, x = fg.kernel(doubled), randn(COUNT)
    for _ in range(3):  # until the call is one of the recent ones
        kernel(x)
    with Logged() as seen:
        kernel(x)
    with Logged() as expected:
        doubled(x)
    assert seen.operations == expected.operations


class Doubling(TorchFunctionMode):
    """Replaces a GELU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 2 * args[0] if function is torch.nn.functional.gelu else function(*args, **(kwargs or {}))


def activated(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x) + torch.ones(3).sum()


def test_a_function_mode_replaces_the_functions_operations() -> None:
    kernel, x = fg.kernel(activated), randn(COUNT)
    with Doubling():
        kernel.lower(x)  # whose graph is good for later calls
        torch.testing.assert_close(kernel(x), 2 * x + 3)
    for _ in range(3):
        torch.testing.assert_close(kernel(x), activated(x))
    with Doubling():
        torch.testing.assert_close(kernel(x), 2 * x + 3)


def test_new_tensors_of_another_device_are_made_there() -> None:
    kernel, x = fg.kernel(activated), randn(COUNT)
    for _ in range(4):
        kernel(x)
    with torch.device("meta"), pytest.raises(RuntimeError, match="device"):
        kernel(x)
    with torch.device("cpu"):
        torch.testing.assert_close(kernel(x), activated(x))


def test_a_symbolic_trace_holds_the_functions_operations() -> None:
    kernel, x = fg.kernel(doubled), randn(COUNT)
    for _ in range(4):  # until the call is one of the recent ones
        kernel(x)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return kernel(x) + 1

    traced = torch.fx.symbolic_trace(Module())
    torch.testing.assert_close(traced(x), doubled(x) + 1)
    assert "data_ptr" not in traced.code


@pytest.mark.parametrize("saved", ["as_strided.default", "mm.default", "mm.out"])
def test_selective_checkpointing_saves_operations_of_the_function(saved: str) -> None:
    def mlp(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x @ w) @ w

    def policy(_: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if str(operation) == f"aten.{saved}" else CheckpointPolicy.PREFER_RECOMPUTE

    gradients, arguments = [], (randn(4, 4).requires_grad_(), randn(4, 4).requires_grad_())
    for function in (mlp, fg.kernel(mlp)):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        y = checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)
        gradients.append(torch.autograd.grad(y.square().sum(), arguments))
    torch.testing.assert_close(gradients[0], gradients[1])
