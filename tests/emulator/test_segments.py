"""Segments of a row that are reduced together with it, in every kind of plan of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler import specialize
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.schedule.kernel import Plan
from fusegen.schedule.program import Launch
from tests.naming import case
from tests.unit.eager import agree, randn

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("own_cache", "emulated", "made_up_times")


def scaled(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    groups = F.rms_norm(x, x.shape[-1:], eps=1e-6).unflatten(-1, (-1, size))
    largest = groups.abs().amax(-1, keepdim=True)
    return (groups / largest).flatten(-2), largest.squeeze(-1)


def softmax_of_heads(x: Tensor, size: int) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]).unflatten(-1, (-1, size)).softmax(-1)


def norm_of_norms(x: Tensor, size: int) -> Tensor:
    heads = x.unflatten(-1, (-1, size))
    normed = F.layer_norm(heads, heads.shape[-1:])
    return F.rms_norm(normed + heads.std(-1, keepdim=True), normed.shape[-2:], eps=1e-5)


def places(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    heads = x.softmax(-1).unflatten(-1, (-1, size)) - 0.5
    return heads.argmax(-1), heads.var(-1)


def of_three_dims(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    parts = x.reshape(x.shape[0], 2, -1, size)
    total = parts.sum((1, 2, 3), keepdim=True)
    sums = (parts - total / x.shape[-1]).logsumexp(-1, keepdim=True)
    return parts - sums, sums


CASES: dict[str, tuple[Callable[[Tensor, int], Any], Tensor, int]] = {
    "a part of a warp": (scaled, randn(5, 64, dtype=BF16), 16),
    "a warp": (scaled, randn(3, 256), 32),
    "rows that are no multiple of a warp": (scaled, randn(3, 352, dtype=BF16), 32),
    "a block": (scaled, randn(3, 1152, dtype=BF16), 128),
    "segments of a warp": (scaled, randn(2, 768), 256),
    "segments of a thread": (scaled, randn(5, 24), 4),
    "segments of two": (scaled, randn(3, 6), 2),
    "several that follow each other": (softmax_of_heads, randn(3, 352), 32),
    "before the row": (norm_of_norms, randn(3, 160, dtype=BF16), 32),
    "states of several components": (places, randn(3, 96), 16),
    "three dims": (of_three_dims, randn(3, 192), 32),
}


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("name", CASES)
def test_every_plan(name: str) -> None:
    function, x, size = CASES[name]
    (launch,) = fg.tune(fg.kernel(lambda x: function(x, size)), x).launches
    assert not [each.error for each in launch.candidates if each.error]
    agree(lambda x: function(x, size), (x,))


def residual(x: Tensor) -> tuple[Tensor, ...]:
    hidden = x + x.flip(-1)
    return *scaled(hidden, 8), hidden


def beside_columns(x: Tensor) -> tuple[Tensor, ...]:
    parts = x.unflatten(-1, (-1, 16))
    largest = (parts - parts.sum((1, 2), keepdim=True) / x.shape[-1]).abs().amax(-1, keepdim=True)
    return parts / largest, largest, parts.sum(0)


def chained(x: Tensor) -> tuple[Tensor, ...]:
    heads = F.rms_norm(x, x.shape[-1:], eps=1e-5).unflatten(-1, (-1, 16))
    weights = (F.layer_norm(heads, (16,)) * heads).softmax(-1)
    shares = weights / weights.amax(-1, keepdim=True)
    shares = shares / shares.sum((1, 2), keepdim=True)
    return shares, shares.amin(-1), (shares * heads).sum((1, 2))


def test_what_stands_around_segments() -> None:
    nan = torch.tensor([[torch.nan] + [1.0] * 31, [torch.inf] * 32, [0.0] * 32])
    cases: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
        "a sum that is a result": (residual, randn(3, 5, 64, dtype=BF16)),
        "sums of columns": (beside_columns, randn(5, 64)),
        "rows that start anywhere": (lambda x: scaled(x[:, 3:99], 32), randn(5, 103)),
        "phases between segments": (chained, randn(3, 96)),
        "no number": (lambda x: scaled(x, 8), nan),
        "one segment a row": (lambda x: scaled(x, 8), randn(5, 8)),
        "no rows": (lambda x: scaled(x, 8), randn(0, 64)),
        "float64": (lambda x: scaled(x, 8), randn(3, 64, dtype=torch.float64)),
    }
    for name, (function, x) in cases.items():
        with case(name):
            agree(function, (x,))


def test_rows_are_worked_on_in_place() -> None:
    def normalize(x: Tensor) -> Tensor:
        values, largest = scaled(x, 16)
        x.copy_(values)
        return largest

    x = randn(5, 64)
    wanted, largest = scaled(x, 16)
    found = fg.kernel(mutates=("x",))(normalize)(x)
    torch.testing.assert_close((x, found), (wanted, largest))


def test_segments_that_no_warp_holds_are_a_kernel_of_their_own() -> None:
    for name, (columns, size) in {"too many": (1024, 512), "no power of two": (480, 48)}.items():
        with case(name):
            x = randn(2, columns)
            assert len(fg.kernel(lambda x, size=size: scaled(x, size)).lower(x, target="sm_90a").program.launches) > 1
            agree(lambda x, size=size: scaled(x, size), (x,))


@pytest.mark.usefixtures("small_clusters")
def test_rows_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that share a row, in registers or staged: each holds whole segments."""
    for name, persistence in {"held": Persistence.REGISTERS, "staged": Persistence.STAGED}.items():

        def preferred(launch: Launch, *_: object, persistence: Persistence = persistence) -> Plan:
            plans = (plan for plan in launch.candidates if isinstance(plan, RowPlan) and plan.persistence is persistence)
            return next(plan for plan in plans if plan.cluster > 1)

        with case(name):
            monkeypatch.setattr(specialize, "preferred", preferred)
            agree(lambda x: scaled(x, 128), (randn(3, 32768, dtype=BF16),))


def test_parameters_named_as_what_reduces_segments() -> None:
    def norm(segment_amax_f32: Tensor, norm_1_segment_0: Tensor) -> Tensor:
        largest = (F.rms_norm(segment_amax_f32, (256,)) + norm_1_segment_0).unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
        return segment_amax_f32.unflatten(-1, (-1, 32)) / largest

    agree(norm, (randn(3, 256), randn(256)))
