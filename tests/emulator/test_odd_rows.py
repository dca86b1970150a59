"""Rows that do not start where an access is aligned: groups of lanes do all the same, in every plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler.passes import forget_programs
from fusegen.families.rows.plan import Persistence, RowPlan
from fusegen.schedule import context
from tests.unit.eager import agree, randn

BF16, F16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.usefixtures("own_cache", "emulated", "made_up_times")


@pytest.fixture
def at_aligned_places(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernels take the plans that these tests are about, though others come first; those that were taken."""
    taken: list[Any] = []

    def choose(self: context.Context, candidates: tuple[Any, ...]) -> Any:
        self.candidates = candidates
        taken.append(next(p for p in candidates if getattr(p, "unaligned", False) or getattr(p, "wraps", False)))
        return taken[-1]

    monkeypatch.setattr(context.Context, "choose", choose)
    return taken


def norm_gelu_add(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, x.shape[-1:], w, b), approximate="tanh") + r


def weighted(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.softmax(x.float(), -1) * w + r


def several(x: Tensor) -> tuple[Tensor, ...]:
    p = F.softmax(x, -1)
    return p, x.argmax(-1), (x * 2).float(), torch.logsumexp(x.float(), -1)


def causal(x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[-1], device=x.device)
    rows = torch.arange(x.shape[0], device=x.device)
    return F.softmax(torch.where(positions <= rows[:, None] + 200, x, -torch.inf), -1)


def of_two_parts(x: Tensor, y: Tensor) -> Tensor:
    return F.rms_norm(torch.cat([x, y], -1), (x.shape[-1] + y.shape[-1],))


def of_two_tensors(x: Tensor, y: Tensor) -> Tensor:
    rows = torch.stack([x, y])
    return rows - rows.amax(-1, keepdim=True)


def dropped(x: Tensor) -> Tensor:
    return F.dropout(F.softmax(x, -1), 0.3, training=True)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a norm": (
        norm_gelu_add,
        (randn(5, 331, dtype=BF16), randn(331, dtype=BF16), randn(331, dtype=BF16), randn(5, 331, dtype=BF16)),
    ),
    "weights of another type": (weighted, (randn(3, 777, dtype=BF16), randn(777), randn(3, 777, dtype=F16))),
    "rows that lie apart": (norm_gelu_add, (randn(4, 344)[:, 1:334], randn(333), randn(334)[1:], randn(4, 400)[:, :333])),
    "rows that overlap": (lambda x, y: x.sum(-1) + y.sum(-1), (randn(339).as_strided((5, 335), (1, 1)), randn(335).expand(5, -1))),
    "several results": (several, (randn(3, 259, dtype=F16),)),
    "a mask of positions": (causal, (randn(7, 261, dtype=BF16),)),
    "two parts": (of_two_parts, (randn(3, 200), randn(3, 201))),
    "rows of two tensors": (of_two_tensors, (randn(3, 331, dtype=BF16), randn(3, 331, dtype=BF16))),
    "the sum of a part": (lambda x, y: (F.pad(x, (3, 0)) + y).sum(-1), (randn(3, 330), randn(3, 333))),
    "doubles": (lambda x: F.layer_norm(x, x.shape[-1:]), (randn(3, 333, dtype=torch.float64),)),
    "a bias": (lambda x, b: F.gelu(x + b), (randn(9, 333, dtype=BF16), randn(333, dtype=BF16))),
    "a number a row": (lambda x, s, b: x * s + b, (randn(40, 13), randn(40, 1), randn(13))),
    "rows shorter than a group": (lambda x, b: x * b, (randn(100, 3, dtype=BF16), randn(3, dtype=BF16))),
    "points under a mask of positions": (lambda x: x.tril(2), (randn(31, 37, dtype=BF16),)),
    "columns": (lambda x, y: x + y.T, (randn(37, 31), randn(31, 37))),
}


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("name", CASES)
def test_every_plan(name: str, request: pytest.FixtureRequest) -> None:
    """With all others the first, and with torch this one and the first at aligned places."""
    function, inputs = CASES[name]
    (launch,) = fg.tune(fg.kernel(function), *inputs).launches
    assert not any(each.error for each in launch.candidates)
    agree(function, inputs)
    taken = request.getfixturevalue("at_aligned_places")
    forget_programs()
    agree(function, inputs)
    assert taken and taken[-1] in [each.plan for each in launch.candidates]


def test_in_place(at_aligned_places: list[Any]) -> None:
    """Neighbours of other rows are brought along while others write them."""

    def normalised(x: Tensor) -> Tensor:
        x.copy_(F.softmax(x, -1))
        return x

    x = randn(5, 333)
    wanted = F.softmax(x, -1)
    fg.kernel(normalised, mutates=("x",))(x)
    torch.testing.assert_close(x, wanted)
    assert at_aligned_places


def test_indices_of_other_rows_are_not_checked(at_aligned_places: list[Any]) -> None:
    """Those in front of a row and behind it lead nowhere."""

    def looked_up(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        return F.softmax(x + table.gather(1, ids), -1)

    around = torch.full((5, 400), -99)
    around[:, 11:344] = 0
    agree(looked_up, (randn(5, 333), around[:, 11:344], randn(5, 1)))
    assert at_aligned_places


def test_a_mask_depends_on_the_seed_alone(request: pytest.FixtureRequest) -> None:
    """Not on how lanes are grouped."""
    x = torch.zeros(4, 333)
    torch.manual_seed(3)
    alone = fg.kernel(lambda x: F.dropout(x, 0.3, training=True))(torch.ones(4, 333)) != 0
    taken = request.getfixturevalue("at_aligned_places")
    torch.manual_seed(3)
    kept = fg.kernel(dropped)(x) != 0
    assert taken and torch.equal(kept, alone)
    assert 0.6 < kept.float().mean().item() < 0.8


def test_no_row_that_is_written_over_is_staged_at_aligned_places() -> None:
    """Its first group would bring the end of the row before, which another block may just write."""

    def in_place(x: Tensor) -> None:
        x.copy_(F.softmax(x, -1))

    x = torch.empty(4, 20001, device="meta")
    (launch,) = fg.kernel(in_place, mutates=("x",)).lower(x, target="sm_90a").program.launches
    (other,) = fg.kernel(lambda x: F.softmax(x, -1)).lower(x, target="sm_90a").program.launches
    staged = [
        [p for p in each.candidates if isinstance(p, RowPlan) and p.unaligned and p.persistence is Persistence.STAGED]
        for each in (launch, other)
    ]
    assert not staged[0] and staged[1]
