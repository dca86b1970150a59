"""Costly math that is the same along an axis is computed once for several points along it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen import ops
from fusegen.families.pointwise.plan import PointwisePlan
from tests.unit.eager import agree, ints, randn

pytestmark = pytest.mark.usefixtures("emulated", "first_plans")


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w.cos() + w.sin() ** 2.5


def launch(function: object, *args: Tensor):  # type: ignore[no-untyped-def]
    (found,) = fg.kernel(function).lower(*args, target="sm_90a").program.launches
    return found


@pytest.mark.parametrize("heads", [1, 3, 8, 33])
@pytest.mark.parametrize("channels", [16, 6, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_along_rows(heads: int, channels: int, dtype: torch.dtype) -> None:
    agree(scaled, (randn(heads, 3, channels, dtype=dtype), randn(3, channels).abs().to(dtype)))


def test_every_plan() -> None:
    x, w = randn(5, 3, 16), randn(3, 16).abs()
    kernel = fg.kernel(scaled)
    low = kernel.lower(x, w, target="sm_90a")
    (first,) = low.program.launches
    assert {plan.repeats for plan in first.candidates if isinstance(plan, PointwisePlan)} >= {1, 2, 8}


@pytest.mark.parametrize("scaling", [None, "llama3"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_of_positions(scaling: str | None, interleaved: bool) -> None:
    q, k, ids = randn(2, 9, 3, 16), randn(2, 1, 3, 16), ints(2, 3, low=0, high=999, dtype=torch.int64)
    kernel = fg.kernel(ops.rotary_position_ids.function)
    agree(kernel, (q, k, ids), scaling=scaling, factor=8.0 if scaling else 1.0, interleaved=interleaved)


def test_angles_are_computed_before_the_loop() -> None:
    q, k, ids = (t.to(torch.bfloat16) for t in (randn(2, 9, 3, 16), randn(2, 1, 3, 16), randn(2, 3)))
    text = fg.kernel(ops.rotary_position_ids.function).lower(q, k, ids.to(torch.int64), target="sm_90a").asm["cuda"]
    assert text.count("sincosf(") == 2 and "_once(" in text


def test_a_value_that_is_the_same_for_all() -> None:
    agree(lambda x, s: x * s.cos() ** s.sin(), (randn(5, 7), torch.tensor(0.3)))


def test_conditions_on_the_axis_stay_in_the_loop() -> None:
    def half(x: Tensor, w: Tensor) -> Tensor:
        return torch.where(torch.arange(x.shape[0])[:, None] < 3, x, w.cos() ** w.sin())

    agree(half, (randn(5, 16), randn(16).abs() * 0.3))


def test_what_costs_little_is_computed_at_each_point() -> None:
    assert launch(lambda x, w: x * w.exp(), randn(5, 3, 16), randn(3, 16)).kernel.body.hoisted is None


@pytest.mark.parametrize("base", [2.0, 10000.0, 0.37, 1e-30, 3.0e38, 1.0, 0.0, -2.0])
def test_powers_of_a_number(base: float) -> None:
    """Within three units of the last place, and at the ends of what float32 holds."""
    x = torch.cat([torch.linspace(-40, 40, 4001), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30])])
    got, wanted = fg.kernel(lambda x: base**x)(x), (base ** x.double()).float()
    torch.testing.assert_close(got, wanted, rtol=3 * 2**-23, atol=2**-149, equal_nan=True)


def test_sine_and_cosine_of_one_value_are_one_call() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin() + x.cos(), x.cos() * 2

    agree(both, (randn(3, 7) * 99,))
    text = fg.kernel(both).lower(randn(3, 7), target="sm_90a").asm["cuda"]
    assert "sincosf(" in text and " sinf(" not in text and " cosf(" not in text


@pytest.mark.parametrize("columns", [64, 61])
def test_lanes_share_a_division_under_a_condition(columns: int) -> None:
    def function(x: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        return x.exp() * torch.where(counts != 0, rows / counts, 0.0) - torch.where(counts > 1, x, rows / 3)

    x, rows, counts = randn(6, columns, dtype=torch.bfloat16), randn(6, 1, dtype=torch.bfloat16), ints(6, 1, high=3)
    agree(function, (x, rows, counts))
    (source,) = fg.kernel(function).lower(x, rows, counts, target="sm_90a").sources
    assert ("_common(" in source.text) is (columns == 64)  # vectors of 61 columns continue in the next row
