"""Arguments that hold tensors: each leaf is a parameter, the structure is part of what a variant is for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fusegen as fg
from fusegen.errors import ArgumentError, GradientError, UnsupportedError
from tests.naming import case
from tests.unit.eager import agree, randn, refused


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


A, B, C, D = (randn(4, 8) for _ in range(4))


def nested(xs: list[Tensor], cache: dict[str, Any], pair: Pair, scale: float = 1.0) -> Tensor:
    return xs[0] * cache["k"] + xs[1] * scale - cache["v"][0] * pair.first / (1 + pair.second**2)


def arguments(a: Tensor = A, b: Tensor = B) -> tuple[Any, ...]:
    return [a, b], {"k": C, "v": (D,)}, Pair(b, a)


def gathered(scale: float, *xs: Tensor, eps: float = 0.5, **others: Any) -> Tensor:
    total: Any = sum(xs) * scale + eps
    result: Tensor = total + others["bias"] if "bias" in others else total
    return result


def test_nests_of_tensors() -> None:
    kernel = agree(nested, arguments(), (*arguments(), 2.0), arguments(B, A))
    lowered = kernel.lower(*arguments(), target="sm_90a")
    names = [spec.name for spec in lowered.graph.inputs]
    assert names == ["xs_0", "xs_1", "cache_k", "cache_v_0", "pair_first", "pair_second"]


def test_any_number_of_arguments() -> None:
    kernel = fg.kernel(gathered)
    for args, named in [((2.0, A), {}), ((2.0, A, B, C), {"bias": D}), ((3.0, A, B), {"eps": 1.0, "bias": D})]:
        with case((len(args), *named)):
            torch.testing.assert_close(kernel(*args, **named), gathered(*args, **named))


def test_the_structure_selects_the_variant() -> None:
    def total(xs: Any) -> Tensor:
        parts = list(xs.values()) if isinstance(xs, dict) else list(xs)
        return sum(float(n + 1) * part for n, part in enumerate(parts)) + (0 if isinstance(xs, list) else 1)

    agree(
        total, ([A, B],), ((A, B),), ([A, B, C],), ({"a": A, "b": B},), ({"b": A, "a": B},), (OrderedDict(x=A, y=B),), (Pair(A, B),)
    )


def test_leaves_that_are_no_tensors() -> None:
    def scaled(settings: dict[str, Any], x: Tensor) -> Tensor:
        return x * settings["scale"] + settings["bias"] if settings["on"] else x

    agree(scaled, *(({"scale": s, "on": on, "bias": B}, A) for s in (2.0, 3.0) for on in (True, False)))


def test_two_leaves_of_one_name() -> None:
    def difference(x: dict[Any, Tensor], x_0: Tensor) -> Tensor:
        return x[0] - x_0 * x["0"]

    agree(difference, ({0: A, "0": B}, C))


def test_settings_in_containers() -> None:
    agree(lambda x, shape: x.reshape(shape), (A, (8, 4)), (A, [2, 16]), (A, [16, 2]), (A, [2, 16]))
    agree(lambda x, ways: x.sum(ways["dims"]) * ways["by"] + len(ways["no"]), (A, {"dims": [0], "by": 2.0, "no": []}))
    norm = fg.kernel(F.layer_norm)
    x = A.clone().requires_grad_()
    (found,) = torch.autograd.grad(norm(x, [8], B[0]).sin().sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(F.layer_norm(x, [8], B[0]).sin().sum(), x)[0])
    compiled = torch.compile(lambda x: norm(x, [8]) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(A), F.layer_norm(A, [8]) * 2)
    refused(lambda x, shape: x.reshape(shape), A, [8, object()], error=ArgumentError, says="neither a tensor nor hashable")


def test_gradients_of_leaves() -> None:
    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (A, B)]
        function(*arguments(*leaves)).sin().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    torch.testing.assert_close(gradients(fg.kernel(nested)), gradients(nested))


def test_passes_by_leaves() -> None:
    passes = fg.vjp(fg.kernel(nested), *arguments())
    assert passes.wrt == ("xs_0", "xs_1", "cache_k", "cache_v_0", "pair_first", "pair_second")
    by_cache = fg.vjp(fg.kernel(nested), *arguments(), wrt="cache")
    assert by_cache.wrt == ("cache_k", "cache_v_0")
    result, saved = by_cache.forward(*arguments())
    torch.testing.assert_close(result, nested(*arguments()))
    torch.testing.assert_close(by_cache.backward(saved, torch.ones_like(A))[0], A)
    with pytest.raises(ArgumentError, match=r"(?s)have another structure than in the first call.*try: "):
        by_cache.forward([A], *arguments()[1:])


def test_a_result_into_a_tensor() -> None:
    kernel, out = fg.kernel(nested), torch.empty_like(A)
    assert kernel(*arguments(), out=out) is out
    torch.testing.assert_close(out, nested(*arguments()))


def test_a_parameter_of_any_name_takes_out() -> None:
    kernel = fg.kernel(lambda **named: named["x"] * 2 + named["out"])
    torch.testing.assert_close(kernel(x=A, out=B), A * 2 + B)


def test_writes_to_leaves() -> None:
    def append(cache: dict[str, Tensor], k: Tensor) -> None:
        cache["k"][1:2] = k * 2
        cache["count"].add_(1)

    ours, theirs = ({"k": torch.zeros(4, 8), "count": torch.zeros(3)} for _ in range(2))
    fg.kernel(mutates=("cache",))(append)(ours, A[:1])
    append(theirs, A[:1])
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(GradientError, match="cache_k"):
        fg.kernel(mutates=("cache",))(append)({"k": torch.zeros(4, 8, requires_grad=True), "count": torch.zeros(3)}, A[:1])


def test_a_container_that_the_function_changes() -> None:
    def replaced(xs: list[Tensor]) -> Tensor:
        xs[0] = xs[0] + 1
        return xs[0] * 2

    refused(replaced, [A, B], error=UnsupportedError, says="changes its caller's list 'xs'", line="return")
    refused(lambda d: d.pop("x"), {"x": A, "y": B}, error=UnsupportedError, says="its caller's dict")


def test_a_write_that_is_not_declared_names_the_parameter() -> None:
    def written(xs: list[Tensor]) -> Tensor:
        xs[0] += 1
        return xs[0]

    refused(written, [A], error=UnsupportedError, says="writes to its parameter 'xs'", line="xs[0] += 1")


def test_recorded_calls() -> None:
    kernel, star = fg.kernel(nested), fg.kernel(gathered)

    def model(a: Tensor, b: Tensor, xs: list[Tensor]) -> Tensor:
        return kernel(*arguments(a, b)) + star(2.0, *xs, bias=a)

    def wanted(a: Tensor, b: Tensor, xs: list[Tensor]) -> Tensor:
        return nested(*arguments(a, b)) + gathered(2.0, *xs, bias=a)

    graphs: list[Any] = []
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    torch.testing.assert_close(compiled(A, B, [C, D]), wanted(A, B, [C, D]))
    assert "fusegen.nested" in str(graphs[0].graph) and "fusegen.gathered" in str(graphs[0].graph)
    torch.testing.assert_close(compiled(A, B, [C, D, A]), wanted(A, B, [C, D, A]))
    recorded = make_fx(model)(A, B, [C, D])
    assert "fusegen.nested" in str(recorded.graph) and "fusegen.gathered" in str(recorded.graph)


def test_exported_calls() -> None:
    kernel = fg.kernel(nested)

    class Model(torch.nn.Module):
        def forward(self, a: Tensor, cache: dict[str, Any]) -> Tensor:
            return kernel([a, a], cache, Pair(a, a))

    exported = torch.export.export(Model(), (A, {"k": C, "v": (D,)}))
    assert "fusegen.nested" in str(exported.graph)
    torch.testing.assert_close(exported.module()(B, {"k": C, "v": (D,)}), nested([B, B], {"k": C, "v": (D,)}, Pair(B, B)))


def test_methods_and_modules() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(randn(8))

        def forward(self, xs: list[Tensor], **named: Tensor) -> Tensor:
            return (xs[0] + xs[1]) * self.weight + named["bias"]

    module = Scaled()
    fused = fg.kernel(module)
    torch.testing.assert_close(fused([A, B], bias=C), module([A, B], bias=C))
    fused([A, B], bias=C).sum().backward()
    torch.testing.assert_close(module.weight.grad, (A + B).sum(0))


def test_a_kernel_in_a_kernel() -> None:
    inner = fg.kernel(nested)
    agree(lambda a, b: inner([a, b], {"k": a, "v": (b,)}, Pair(a, b)) + 1, (A, B))


def test_state_is_looked_at() -> None:
    table = {"scale": 2.0}
    kernel = fg.kernel(lambda xs: xs[0] * table["scale"])
    torch.testing.assert_close(kernel([A]), A * 2)
    table["scale"] = 3.0
    torch.testing.assert_close(kernel([A]), A * 3)


def test_tensors_without_elements() -> None:
    agree(lambda xs: xs[0] + xs[1], ([A[:0], B[:0]],))


def test_a_container_of_itself() -> None:
    holder: list[object] = [A]
    holder.append({"again": holder})
    with pytest.raises(ArgumentError, match="first: a list, tuple or dict among the arguments contains itself"):
        fg.kernel(first)(holder)


def first(xs: list[Tensor]) -> Tensor:
    return xs[0] * 2


def test_a_named_operator_takes_no_lists() -> None:
    with pytest.raises(ArgumentError, match=r"(?s)takes a list of tensors.*try: declare a parameter"):
        fg.kernel(op="fusegen_tests::first_of_list")(first)
