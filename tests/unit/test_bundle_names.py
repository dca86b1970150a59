"""Built kernels serve graphs that differ from theirs in names alone: those of modules and patched models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen.bundle.build import BuildRequest, build
from fusegen.compiler.canonical import canonical_facts, names_of
from fusegen.compiler.compile import BuiltSpecialization, SpecializationCache
from fusegen.compiler.dispatch import Dispatcher
from fusegen.errors import ToolNotFoundError
from fusegen.ir.graph import Graph
from fusegen.ir.symbolic import size_symbol
from fusegen.options import Options
from fusegen.program.call import LaunchPlan, Loop
from fusegen.program.formula import formula_of, size
from fusegen.program.numbers import Numbers
from fusegen.program.renaming import GraphNames, renamed
from fusegen.target import target
from tests.naming import case
from tests.unit.bundles import CASES, equal, row, wanted
from tests.unit.eager import randn
from tests.unit.test_bundle_path import only  # noqa: F401  # a fixture


class Layer(nn.Module):
    """A layer whose graph has captured parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(16, 24), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(self.norm(x)))


class Stack(nn.Module):
    """A model of two layers, which have other names than a layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = Layer(), nn.Linear(24, 16)
        self.second = Layer()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = self.down(layer(x))
        return x


def results(call: Callable[..., Tensor], parameters: list[Tensor], x: Tensor) -> list[Tensor]:
    """A result without gradients, one with gradients, and the gradients."""
    with torch.no_grad():
        alone = call(x)
    x = x.clone().requires_grad_()
    result = call(x)
    return [alone, result.detach(), *torch.autograd.grad(result, (x, *parameters), torch.ones_like(result))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a kernel of `Layer`."""
    request = BuildRequest("layer", Layer().forward, {"x": torch.empty(8, 16, device="meta")}, target("cpu"))
    build(tmp_path / "kernels", [request], "test")
    return tmp_path / "kernels"


def test_a_kernel_of_a_module(folder: Path, only: Callable[..., None]) -> None:  # noqa: F811
    x, layer = randn(5, 16), Layer()
    expected = results(fg.kernel(layer), [*layer.parameters()], x)
    only(folder)
    assert all(map(torch.equal, results(fg.kernel(layer), [*layer.parameters()], x), expected))
    with pytest.raises(ToolNotFoundError):
        fg.kernel(layer.double())(x.double())


def test_layers_of_a_patched_model(folder: Path, only: Callable[..., None]) -> None:  # noqa: F811
    x, stack = randn(5, 16), Stack()
    expected = results(stack, [*stack.parameters()], x)
    only(folder)
    report = fg.patch(stack, only=Layer)
    found = results(stack, [*stack.parameters()], x)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected, strict=True))
    assert [(row.path, row.fused, row.reason) for row in report.rows] == [("first", True, ""), ("second", True, "")]


# Names by which functions differ, and places by which they do.


def other_row(weight: Tensor, x_stride0: Tensor) -> Tensor:
    return F.layer_norm(weight, weight.shape[-1:], x_stride0) + weight


def other_numbers(step: Tensor, x: float, lr: int, *, kind: str = "plain") -> Tensor:
    factor = x / (1 - 0.9**lr)
    return step * factor if x > 0.25 else step - factor * (2 if kind == "plain" else 3)


def other_sized(y: Tensor, x: Tensor) -> Tensor:
    return y.sum(0) + (x.sum(0) if x.shape[0] > 4 * y.shape[0] else x.amax(0))


def other_several(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    hidden = (w - w.mean(0)) @ x
    return hidden.softmax(-1), (hidden * 2).sum(0), (hidden @ x.mT).amax(1)


def test_functions_with_other_names(tmp_path: Path, only: Callable[..., None]) -> None:  # noqa: F811
    others = {"row": other_row, "numbers": other_numbers, "sized": other_sized, "several": other_several}
    wide = randn(7, 200)[:, :100]
    requests = [wanted(*CASES[name][:2]) for name in others]
    build(tmp_path / "kernels", [*requests, replace(wanted(row, (wide, randn(100))), name="strided")], "test")
    calls = [(row, other_row, (randn(65, 200)[:, :100], randn(100)))]
    calls += [(CASES[name][0], other, each) for name, other in others.items() for each in CASES[name][1:]]
    expected = [fg.kernel(function)(*arguments) for function, _, arguments in calls]
    only(tmp_path / "kernels")
    for (_, other, arguments), result in zip(calls, expected, strict=True):
        with case((other, [getattr(each, "shape", each) for each in arguments])):
            assert equal(fg.kernel(other)(*arguments), result)


def minus(x: Tensor, y: Tensor) -> Tensor:
    return x - y


def graph(function: Callable[..., Any], *arguments: Any, **options: Any) -> Graph:
    variants = Dispatcher(function, "kernel", Options(**options)).variants
    return variants.variant_of([*arguments], target("cpu"), torch.device("cpu"))[0].traced


A, B, WIDE = randn(6, 8), randn(6, 8), randn(6, 16)[:, :8]
FIXED = randn(8)


def accumulated(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def written_second(x: Tensor, y: Tensor) -> None:
    y.add_(x)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param((minus, A, B), (lambda x, y: y - x, A, B), id="order"),
        pytest.param((minus, A, B), (minus, A, B.double()), id="dtype"),
        pytest.param((minus, A, B), (minus, WIDE, B), id="stride"),
        pytest.param((minus, WIDE, B), (minus, A, WIDE), id="stride of another input"),
        pytest.param((minus, A, B), (minus, randn(6, 8, 1)[..., 0], B[:, :1]), id="shape"),
        pytest.param((minus, A, B), (minus, A, randn(1, 8)), id="symbols"),
        pytest.param(
            (lambda x, y: x.sum(0) - y.sum(0), A, B), (lambda x, y: x.sum(0) - y.sum(0), A, randn(5, 8)), id="shared symbol"
        ),
        pytest.param((lambda x, y: x * 2.0, A, B), (lambda x, y: x * 3.0, A, B), id="constant"),
        pytest.param((lambda x: x + 1.0, A), (lambda x, y: x + 1.0, A, B), id="unused input"),
        pytest.param((lambda x, y: x - y, A, FIXED), (lambda x: x - FIXED, A), id="captured"),
        pytest.param((lambda x, s, t: x * s - t, A, 1.5, 2.5), (lambda x, s, t: x * t - s, A, 1.5, 2.5), id="numbers"),
        pytest.param((lambda x, s: x * s, A, 1.5), (lambda x, s: x * s, A, 3), id="kind of number"),
        pytest.param((lambda x, y: x - y.shape[0], A, randn(5, 8)), (lambda x, y: y - x.shape[0], A, randn(5, 8)), id="a size"),
    ],
)
def test_places_that_matter(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert canonical_facts(graph(*one)) != canonical_facts(graph(*other))


def test_writes_matter() -> None:
    graphs = [graph(function, A, B, mutates=("x", "y")) for function in (accumulated, written_second)]
    assert canonical_facts(graphs[0]) != canonical_facts(graphs[1])


def test_names_do_not_matter() -> None:
    one, other = graph(minus, A, WIDE), graph(lambda y, size0: y - size0, A, WIDE)
    assert canonical_facts(one) == canonical_facts(other)
    assert one.facts != other.facts and len(names_of(one).sizes) == len(names_of(other).sizes)


def test_a_dim_with_the_name_of_a_stride_keeps_its_name() -> None:
    """Its place cannot be told by the name."""
    plain = graph(minus, A, WIDE)

    def with_dim(name: str) -> Graph:
        (x, y), symbol = plain.inputs, size_symbol(name)
        nodes = tuple(replace(node, shape=(symbol, 8)) for node in plain.nodes)
        return replace(plain, inputs=(replace(x, shape=(symbol, 8)), replace(y, shape=(symbol, 8))), nodes=nodes)

    assert canonical_facts(with_dim("n")) == canonical_facts(plain)
    assert canonical_facts(with_dim("y_stride0")).startswith("named") and "y_stride0" in canonical_facts(with_dim("y_stride0"))


# Names in launch plans.


def test_a_plan_with_names_of_another_graph() -> None:
    plan = LaunchPlan((), ((0, "x"), (1, "y")), (), (), Numbers(), (size("x_dim0"), size("y_stride0") + size("x_dim0")))
    old, new = GraphNames(("x", "y"), (), ("y_stride0", "x_dim0")), GraphNames(("y", "x"), (), ("x_dim0", "y_stride0"))
    changed = renamed(plan, old, new)
    assert changed.inputs == ((0, "y"), (1, "x"))
    assert changed.counts == (size("y_stride0"), size("x_dim0") + size("y_stride0"))
    with pytest.raises(KeyError):
        renamed(plan, GraphNames(("x", "y"), (), ("y_stride0",)), GraphNames(("a", "b"), (), ("s",)))
    with pytest.raises(ValueError):
        renamed(plan, old, GraphNames(("a",), (), ("s", "t")))


def test_a_size_with_the_name_of_a_loop_s_size_is_refused() -> None:
    inner = LaunchPlan((), (), (), (), Numbers(), (size("rows"), size("n")))
    loop = Loop(inner, "start", "rows", size("n"), (), (), (), formula_of(4), formula_of(0))
    plan = LaunchPlan((), ((0, "x"),), (loop,), (), Numbers())
    old = GraphNames(("x",), (), ("n",))
    (step,) = renamed(plan, old, GraphNames(("y",), (), ("m",))).steps
    assert isinstance(step, Loop) and step.body.counts == (size("rows"), size("m")) and step.rows == "rows"
    with pytest.raises(ValueError, match="loop"):
        renamed(plan, old, GraphNames(("y",), (), ("rows",)))


def test_a_manifest_with_other_places_is_not_taken(
    tmp_path: Path,
    only: Callable[..., None],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build(tmp_path / "kernels", [wanted(*CASES["row"][:2])], "test")
    only(tmp_path / "kernels")
    traced = graph(row, *CASES["row"][2])
    sizes = {"x_dim0": 65}
    assert isinstance(SpecializationCache(traced, target("cpu"), index64=False).at(sizes), BuiltSpecialization)
    shorter = names_of(traced)
    monkeypatch.setattr("fusegen.compiler.compile.names_of", lambda _: replace(shorter, sizes=shorter.sizes[1:]))
    with pytest.warns(RuntimeWarning, match="is damaged: the names of a program"):
        assert not isinstance(SpecializationCache(traced, target("cpu"), index64=False).at(sizes), BuiltSpecialization)
