"""The table of fusions on the CPU target: results and gradients by float64, in a graph of torch.compile, and exported."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fusegen as fg
from fusegen.verify.accuracy import judge
from tests.unit.fusions import attention, elementwise, layout, losses, rows
from tests.unit.fusions.table import FUSIONS, Fusion
from tests.unit.test_operators import Compiled

FILLED = (attention, elementwise, layout, losses, rows)  # importing them fills the table
GATE = {
    "forward": ("bias_gelu_tanh", "layer_norm_with_statistics", "rotary", "attention_causal"),
    "gradients": ("swiglu_packed", "add_rms_norm", "cross_entropy"),
    "compiled": ("gelu_dropout_add",),
    "exported": ("scale_mask_softmax",),
}
UNITS = {torch.float32: 8.0, torch.bfloat16: 2.0, torch.float16: 2.0}
GIVEN_ON = ("add_two",)
"""Entries whose gradients are those that come in: no kernel computes them."""


def each(check: str, names: Iterable[str] = FUSIONS) -> pytest.MarkDecorator:
    """Parametrizes a test by entries: the gate runs a few, the deep suite all."""

    def marked(name: str) -> Any:
        marks = [] if name in GATE[check] else [pytest.mark.deep]
        return pytest.param(name, marks=marks)

    return pytest.mark.parametrize("name", [marked(name) for name in names])


class Wide(TorchFunctionMode):
    """Whatever a function converts to narrower floats stays float64."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        return function(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value in (torch.float32, torch.bfloat16, torch.float16) else value


def in_float64(function: Callable[..., Any], arguments: list[Any]) -> Any:
    """Results of a function that computes in float64 throughout, of floats that were widened."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            return function(*arguments)
    finally:
        torch.set_default_dtype(before)


def listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def leaves(entry: Fusion, arguments: tuple[Any, ...], *, wide: bool = False) -> tuple[list[Any], list[Tensor]]:
    """Copies of the arguments, and those of them that gradients are asked for."""
    copies, by = [], []
    for place, value in enumerate(arguments):
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().to(torch.float64 if wide else value.dtype).clone(memory_format=torch.preserve_format)
            if entry.trained is None or place in entry.trained:
                by.append(value.requires_grad_())
        copies.append(value)
    return copies, by


def gradients(results: Any, by: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients by results that are weighted by the same numbers in each dtype."""
    recorded = [r for r in listed(results) if r.requires_grad]
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(r.shape, generator=generator, dtype=torch.float32).to(torch.bfloat16).to(r.dtype) for r in recorded]
    return torch.autograd.grad(recorded, by, given)


def accurate(got: Tensor, eager: Tensor, exact: Tensor, place: str) -> None:
    """The rule of `fusegen.verify`, or within a few units of the largest: few elements may be exact in eager by chance."""
    if not got.is_floating_point():
        assert got.dtype is eager.dtype and torch.equal(got, eager), f"{place}: {got.tolist()}, torch gives {eager.tolist()}"
        return
    failure = judge(got, eager, exact).failure
    if not failure:
        return
    assert got.dtype is eager.dtype and got.shape == exact.shape, f"{place}: {failure}"
    largest = exact[exact.isfinite()].abs().max() if exact.isfinite().any() else torch.tensor(0.0)
    unit = torch.finfo(got.dtype).eps * largest
    worst = (got.double() - exact).abs().max()
    assert worst <= UNITS[got.dtype] * unit, f"{place}: {failure}; {worst / unit:.1f} units of the largest"


def alike(ours: Iterable[Tensor], theirs: Iterable[Tensor], place: str) -> None:
    """Results of one graph that was compiled twice."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        rtol = 4 * torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
        torch.testing.assert_close(
            one, other, rtol=rtol, atol=10 * rtol, equal_nan=True, msg=lambda text, n=number: f"{place} {n}: {text}"
        )


def seeded(function: Callable[..., Any], seed: int = 5) -> Callable[..., Any]:
    """A function that draws the same numbers in each call."""

    def call(*arguments: Any) -> Any:
        torch.manual_seed(seed)
        return function(*arguments)

    return call


@each("forward")
def test_forward(name: str) -> None:
    entry = FUSIONS[name]
    kernel, arguments = fg.kernel(entry.function), entry.inputs()
    if entry.kept is not None:
        drops(entry, kernel, arguments)
        return
    eager = listed(entry.function(*arguments))
    exact = listed(in_float64(entry.function, leaves(entry, arguments, wide=True)[0]))
    for call in range(2):  # the second one is the straight one
        found = listed(kernel(*arguments))
        for number, (got, one, other) in enumerate(zip(found, eager, exact, strict=True)):
            accurate(got, one, other.detach(), f"call {call}, result {number}")


def drops(entry: Fusion, kernel: Callable[..., Tensor], arguments: tuple[Any, ...]) -> None:
    """Each element is what it is where it is dropped, or where it is kept; a seed repeats it."""
    assert entry.kept is not None
    without, within = entry.kept(*arguments)
    found = [seeded(kernel, seed)(*arguments) for seed in (1, 1, 2)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    near = [torch.isclose(found[0], one, rtol=1e-5, atol=1e-6) for one in (without, within)]
    assert bool((near[0] | near[1]).all()) and all(bool(one.any()) for one in near)


@each("gradients", [name for name, entry in FUSIONS.items() if entry.learns])
def test_gradients(name: str) -> None:
    entry = FUSIONS[name]
    kernel, arguments = fg.kernel(entry.function), entry.inputs()
    if entry.kept is not None:
        copies, _ = leaves(entry, arguments, wide=True)
        assert torch.autograd.gradcheck(seeded(kernel), copies, fast_mode=True)
        return
    (ours, by), (plain, by_plain), (wide, by_wide) = (leaves(entry, arguments, wide=wide) for wide in (False, False, True))
    found = gradients(kernel(*ours), by)
    eager = gradients(entry.function(*plain), by_plain)
    exact = gradients(in_float64(entry.function, wide), by_wide)
    for number, (got, one, other) in enumerate(zip(found, eager, exact, strict=True)):
        accurate(got, one, other, f"gradient {number}")


@each("compiled")
def test_compiled(name: str) -> None:
    """One operator forward and one backward, and the same numbers as the calls that no graph holds."""
    entry = FUSIONS[name]
    kernel, arguments = fg.kernel(entry.function), entry.inputs()
    trains = entry.learns
    with warnings.catch_warnings(), torch.set_grad_enabled(trains):
        warnings.filterwarnings("error", message=".*not fused")
        compiled = Compiled(lambda *given: kernel(*given))
        (ours, by), (plain, by_plain) = leaves(entry, arguments), leaves(entry, arguments)
        found, wanted = (seeded(call)(*given) for call, given in ((compiled.call, ours), (kernel, plain)))
        alike(listed(found), listed(wanted), "result")
        if trains:
            alike(gradients(found, by), gradients(wanted, by_plain), "gradient")
    kinds = ["_forward", "_backward"][: 1 if name in GIVEN_ON else 2] if trains else [""]
    assert compiled.operators == [f"fusegen::{name}{kind}" for kind in kinds]


class Model(nn.Module):
    """A model that is one kernel."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, *arguments: Any) -> Any:
        return self.kernel(*arguments)


@each("exported")
def test_exported(name: str) -> None:
    """The program holds one operator, and gives the same numbers."""
    entry = FUSIONS[name]
    kernel, arguments = fg.kernel(entry.function), entry.inputs()
    program = torch.export.export(Model(kernel), arguments)
    nodes = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    ours = [target for target in nodes if target.startswith("fusegen.")]
    assert len(ours) == 1 and ours[0].startswith(f"fusegen.{name}_"), nodes
    found, wanted = (seeded(call)(*arguments) for call in (program.module(), kernel))
    alike(listed(found), listed(wanted), "result")
