"""Which pointwise kernels work tile by tile, on what, and how a tile lies in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusegen as fg
from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Axes, Index, axis_symbol, size_symbol
from fusegen.schedule.bodies import PointwiseBody, TileBody
from fusegen.schedule.indices import Loaded
from fusegen.schedule.lower.crossing import crossing_of, in_memory_order
from fusegen.schedule.lower.leaves import Leaves
from fusegen.schedule.lower.points import Points
from fusegen.schedule.plan import PointwisePlan, TilePlan
from fusegen.schedule.program import Launch
from fusegen.schedule.ranking import expected_times
from fusegen.schedule.terms import Read, Terms
from fusegen.target import target

BF16 = torch.bfloat16
MACHINE = target("sm_90a")
N = size_symbol("n")
ROW, COLUMN = axis_symbol("i0"), axis_symbol("i1")
AXES = Axes((ROW, COLUMN), (64, N))
ACROSS, ALONG = ROW + COLUMN * 64, ROW * N + COLUMN


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_of(function: Callable[..., Any], *tensors: torch.Tensor, on: str = "sm_90a") -> Launch:
    (launch,) = fg.kernel(function).lower(*tensors, target=on).program.launches
    return launch


def points(read: Read, *stores: tuple[int, Index]) -> Points:
    return Points(Terms(), (0,) * len(stores), Leaves({0: read}, {}, ()), stores, AXES)


# What lies across.


@pytest.mark.parametrize(
    ("read", "stores"),
    [
        (Read(0, ALONG), [ALONG]),
        (Read(0, ROW), [ALONG]),
        (Read(0, ROW * 2 + COLUMN * 128), [ALONG]),
        (Read(0, ACROSS), [ALONG, ACROSS]),
        (Read(0, ACROSS), [ROW * N * 2 + COLUMN * 2]),
        (Read(1, ACROSS), [ALONG]),
        (Read(0, ACROSS, drawn=True), [ALONG]),
        (Read(0, ACROSS, (Bounds(COLUMN, 3, None),)), [ALONG]),
        (Read(0, ACROSS, (Bounds(ROW, None, 8),)), [ALONG]),
        (Read(0, ACROSS + Loaded(2, ROW) * 64), [ALONG]),
        (Read(0, ACROSS), [ALONG + Loaded(2, ROW) * 64]),
    ],
    ids=["along", "a row's", "strided", "two ways", "strided result", "written", "drawn", "column", "row", "index", "place"],
)
def test_what_does_not_go_by_tiles(read: Read, stores: list[Index]) -> None:
    assert crossing_of(points(read, *((1, offset) for offset in stores))) is None


def test_kernels_of_operands_that_lie_across() -> None:
    cases: list[tuple[Callable[..., Any], list[tuple[int, ...]]]] = [
        (lambda x: x.t().contiguous(), [(512, 256)]),
        (lambda x: F.gelu(x).transpose(1, 2).contiguous(), [(8, 512, 256)]),
        (lambda x, y: x.t() + y, [(512, 256), (256, 512)]),
        (lambda x: x + x.t(), [(512, 512)]),
    ]
    for function, shapes in cases:
        launch = launch_of(function, *(tensor(*shape) for shape in shapes))
        assert isinstance(launch.kernel.body, TileBody) and launch.plan in launch.candidates
        kinds = [type(plan) for plan in launch.candidates]
        assert kinds == sorted(kinds, key=lambda kind: kind is PointwisePlan) and set(kinds) == {TilePlan, PointwisePlan}
        assert not expected_times(launch, {"x_dim0": 512, "x_dim1": 512}, MACHINE)  # nobody has measured tiles
    assert isinstance(launch_of(lambda x: x.t().contiguous(), tensor(512, 256), on="cpu").plan, PointwisePlan)


@pytest.mark.parametrize(("shape", "tiled"), [((512, 31), False), ((512, 32), True), ((31, 512), False), ((32, 512), True)])
def test_short_axes_need_no_tiles(shape: tuple[int, int], tiled: bool) -> None:
    """Columns are known when the kernel is made, rows at the call."""
    launch = launch_of(lambda x: x.t().contiguous(), tensor(*shape))
    assert isinstance(launch.plan, TilePlan) is tiled


# How they are laid out.


def test_accesses_are_as_wide_on_either_side_as_sizes_allow() -> None:
    body = launch_of(lambda x: x.t().contiguous(), tensor(512, 256)).kernel.body
    assert isinstance(body, TileBody)
    assert [a.width for a in (*body.crossing, *body.writes)] == [8, 8] and body.multiples == (size_symbol("x_dim0"),)
    body = launch_of(lambda x, y: x.t() + y, tensor(512, 258), tensor(258, 512)).kernel.body
    assert isinstance(body, TileBody) and not body.multiples
    assert [a.width for a in (*body.crossing, *body.reads, *body.writes)] == [2, 8, 8]


@pytest.mark.parametrize("on", ["sm_90a", "cpu"])
def test_what_lies_across_the_axes_alone_is_gone_through_as_it_lies(on: str) -> None:
    def doubled(x: torch.Tensor) -> None:
        x.mT.mul_(2)

    low = fg.kernel(mutates=("x",))(doubled).lower(tensor(4, 512, 256), target=on)
    (launch,) = low.program.launches
    assert isinstance(launch.kernel.body, PointwiseBody) and [s.name for s in launch.kernel.body.axes.symbols] == ["position"]


def test_axes_keep_their_order_where_something_lies_along_the_last_one() -> None:
    assert in_memory_order(AXES, [ACROSS], [ACROSS]).symbols == (COLUMN, ROW)
    for reads, stores in [([ALONG], [ACROSS]), ([ACROSS], [ALONG]), ([ACROSS], [ROW * 2]), ([ACROSS], [ACROSS, ALONG])]:
        assert in_memory_order(AXES, reads, stores) == AXES
