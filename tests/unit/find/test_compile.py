"""The backend ``fusegen`` of torch.compile: right results, gradients, sizes that change, and what is left to torch."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn

import fusegen as fg
from fusegen.integrations.torch_compile.backend import FusedRegion, fused
from fusegen.integrations.torch_compile.backend import fusegen as backend
from fusegen.target import target
from tests.unit.find.models import WIDTH, Attention, Layers

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Dynamo, without what other tests compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Seen:
    """A backend that keeps the graphs with their regions, and runs them."""

    def __init__(self) -> None:
        self.modules: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.modules.append(fused(module, target("cpu"), torch.device("cpu")))
        return self.modules[-1].forward

    @property
    def regions(self) -> list[FusedRegion]:
        """The regions of all graphs."""
        return [each for module in self.modules for each in module.modules() if isinstance(each, FusedRegion)]


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """A function under the backend, which leaves the rest to eager."""
    return torch.compile(function, backend=backend, options={"fallback": "eager"}, **options)


def chain(x: Tensor, scale: Tensor) -> Tensor:
    return F.silu(x * scale + 1) - x


def test_a_chain_is_one_region_and_right() -> None:
    x, scale = torch.randn(8, 32), torch.randn(32)
    seen = Seen()
    torch.testing.assert_close(torch.compile(chain, backend=seen)(x, scale), chain(x, scale))
    assert [region.name for region in seen.regions] == ["mul_silu_sub"]


def test_gradients_are_those_of_eager() -> None:
    x, scale = torch.randn(8, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    got = torch.autograd.grad(compiled(chain)(x, scale).square().sum(), (x, scale))
    torch.testing.assert_close(got, torch.autograd.grad(chain(x, scale).square().sum(), (x, scale)))


def test_sizes_may_change() -> None:
    function = compiled(chain, dynamic=True)
    scale = torch.randn(32)
    for rows in (8, 5, 13):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(function(x, scale), chain(x, scale))


def test_a_length_that_changes_leaves_the_matmuls_to_torch() -> None:
    model, seen = Attention(), Seen()
    function = torch.compile(model, backend=seen, dynamic=True)
    for length in (8, 12):
        x, mask = torch.randn(2, length, WIDTH), torch.ones(length, length, dtype=torch.bool).triu(1)
        torch.testing.assert_close(function(x, mask), model(x, mask))
    assert [region.name for region in seen.regions] == ["mul_masked_fill_softmax"]


def test_equal_layers_share_a_kernel() -> None:
    seen = Seen()
    model, x = Layers(3), torch.randn(4, WIDTH)
    module: fx.GraphModule | None = None

    def keep(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal module
        module = fused(graph, target("cpu"), torch.device("cpu"))
        return graph.forward

    torch.compile(model, backend=keep)(x)
    assert module is not None
    seen.modules = [module]
    assert len(seen.regions) == 3
    assert len({id(region.kernel) for region in seen.regions}) == 1


def test_what_fusegen_does_not_trace_stays_torchs() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.linalg.inv(torch.tanh(x) * 0.1 + 2 * torch.eye(8))
        return F.silu(y) * y + 1

    seen = Seen()
    x = torch.randn(8, 8)
    torch.testing.assert_close(torch.compile(function, backend=seen)(x), function(x))
    targets = [getattr(node.target, "__name__", "") for node in seen.modules[0].graph.nodes]
    assert "linalg_inv" in targets and len(seen.regions) == 2


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Lines that the backend logs."""
    logger, lines = logging.getLogger("fusegen.integrations.torch_compile"), Lines()
    logger.addHandler(lines)
    yield lines.lines
    logger.removeHandler(lines)


def test_a_region_that_is_refused_when_it_is_called_runs_as_torch_runs_it(logged: list[str]) -> None:
    seen = Seen()
    x, scale = torch.randn(8, 32), torch.randn(32)
    torch.compile(chain, backend=seen)(x, scale)
    got = seen.regions[0](x.to(torch.complex64), scale)  # this kernel takes no such dtype
    torch.testing.assert_close(got, chain(x.to(torch.complex64), scale))
    assert any("is run by torch" in line for line in logged)


def test_an_index_out_of_range_is_the_callers_mistake(logged: list[str]) -> None:
    def looked_up(table: Tensor, ids: Tensor) -> Tensor:
        return F.silu(F.embedding(ids, table) * 2 + 1)

    table, ids, seen = torch.randn(5, 8), torch.tensor([0, 4]), Seen()
    run = torch.compile(looked_up, backend=seen)
    with pytest.raises(IndexError):
        run(table, ids + 1)
    torch.testing.assert_close(run(table, ids), looked_up(table, ids))
    assert len(seen.regions) == 1 and not logged, "later calls are kernels"


def test_writes_in_place_stay_where_they_are() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x * 2 + 1
        flat = hidden.view(-1)
        after = torch.sin(flat) + 1
        flat.add_(1)
        return hidden, after * torch.cos(flat)

    x = torch.randn(4, 8)
    torch.testing.assert_close(compiled(function)(x), function(x))


def test_autocast_and_no_grad_inside_hold() -> None:
    linear = nn.Linear(8, 8)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            low = F.silu(linear(x)) + 1
        with torch.no_grad():
            fixed = torch.exp(x) * 2
        return low, fixed * x + 1

    x = torch.randn(4, 8, requires_grad=True)
    got, want = compiled(function)(x), function(x)
    assert [each.dtype for each in got] == [each.dtype for each in want]
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(*(torch.autograd.grad(each[1].sum(), x) for each in (got, want)))


@pytest.mark.deep
def test_the_rest_goes_to_inductor() -> None:
    model, x = Layers(1), torch.randn(4, WIDTH, requires_grad=True)
    got = torch.compile(model, backend=backend)(x)
    torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (got, model(x))), rtol=1e-4, atol=1e-4)


def test_options_that_do_not_exist_are_refused() -> None:
    for options in ({"fallback": "tvm"}, {"mode": "fast"}):
        with pytest.raises(fg.FusegenError, match="does not accept the options"):
            backend(fx.symbolic_trace(nn.Identity()), [], options=options)


def test_torch_finds_the_backend_by_its_name() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    ((name, value),) = groups["torch_dynamo_backends"].items()
    assert name == "fusegen"
    assert EntryPoint(name, value, "torch_dynamo_backends").load() is backend


def several(x: Tensor) -> tuple[Tensor, ...]:
    values, places = torch.max(x * 2 + 1, dim=-1)
    left, right = (x + 1).chunk(2, dim=-1)
    return values * 2 + 1, places, F.silu(left) * right


def detached(x: Tensor) -> tuple[Tensor, ...]:
    fixed = (x * 2 + 1).detach()
    return fixed * x + 1, fixed


def viewed(x: Tensor) -> tuple[Tensor, ...]:
    y = (torch.exp(x) * 2).view(-1)
    return y, y.view(x.shape) + 1


def checkpointed(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.utils.checkpoint.checkpoint(lambda x: F.silu(x) * 2 + x, torch.tanh(x) + 1, use_reentrant=False)
    return (torch.exp(-y * y) + y,)


@pytest.mark.parametrize("function", [several, detached, viewed, checkpointed])
def test_results_are_eagers(function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    x = torch.randn(4, 16, requires_grad=True)
    got, want = compiled(function)(x), function(x)
    torch.testing.assert_close(got, want)
    assert [each.requires_grad for each in got] == [each.requires_grad for each in want]
    assert [each.stride() for each in got] == [each.stride() for each in want]
    torch.testing.assert_close(*(torch.autograd.grad(each[0].sum(), x) for each in (got, want)))
