"""Tensors turned round, taken apart and put together anew: each case is what torch gives, here and on the emulated GPU."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError, ShapeError, TraceError, UnsupportedError
from tests.naming import case
from tests.unit.eager import agree, agree_each, randn, refused, same

ARGUMENTS = (randn(4, 6), randn(4, 6), randn(5), randn(3), randn(2, 8, 4, 6), randn(2, 3, 4))
CASES = """
    x.flip(0) | x.flip(0, 1) | x.flip((1,)) | torch.flip(x, [1]) + 1 | torch.fliplr(x) | torch.flipud(x) | x.flip(1) @ y.T
    x.flip(0).sum(0) | x.flip(1).softmax(1) | x.flip(-1).cumsum(1) | x[0].flip(0) | x[:, ::2].flip(1)
    torch.rot90(x) | torch.rot90(x, 2) | torch.rot90(x, 3) | torch.rot90(x, -1) | torch.rot90(x, 4) | torch.rot90(t, 1, (1, 2))
    x.diagonal() | x.diagonal(1) | x.diagonal(-2) | x.diagonal(7) | t.diagonal(0, 1, 2) | t.diagonal(1, 0, 2) | x.T.diagonal(1)
    x.trace() | torch.diag(x) | torch.diag(x, -1) | torch.diag(v) | torch.diag(v, 2) | torch.diag(v, -1) | torch.diag_embed(x)
    torch.diag_embed(x, 1) | torch.diag_embed(x, -1, 0, 2) | torch.rot90(t, 3, (2, 0))
    F.pixel_shuffle(c, 2) | F.pixel_unshuffle(c, 2) | F.channel_shuffle(c, 4) | F.pixel_shuffle(c[0], 2)
    x.diff() | x.diff(dim=0) | x.diff(n=2) | x.diff(prepend=y) | torch.diff(x, append=x[:, :1]) | (x > 0).diff() | x.diff(n=9)
    F.pad(x[None], (2, 3), mode="reflect") | F.pad(c, (1, 2, 3, 0), mode="reflect") | F.pad(x[None], (2, 7), mode="replicate")
    F.pad(c, (1, 2, 3, 9), mode="replicate") | F.pad(x[None], (2, 6), mode="circular") | F.pad(c, (1, 2, 3, 0), mode="circular")
    F.pad(x[None], (0, 0), mode="reflect") | F.pad(x[None], (-1, 3), mode="replicate") | F.pad(c, (1, -2, -1, 1), mode="reflect")
    F.pad(x[None], (2, -3), mode="circular") | x.diff(0, prepend=y) | torch.linalg.diagonal(t, offset=1)
    torch.tensordot(x[:, :1], y, 2) | torch.tensordot(x, y[:1], 2) | torch.atleast_2d([v, w]) | torch.atleast_3d([v])
    x.unfold(1, 2, 1) | x.unfold(0, 3, 1) | x.unfold(1, 2, 3) + 1 | x.unfold(1, 6, 2) | v.unfold(0, 2, 2)
    F.avg_pool1d(x[None], 2) | F.avg_pool2d(c, 2) | F.avg_pool2d(c, 3, 1, 1) | F.max_pool2d(c, 2) | F.max_pool2d(c, 3, 2, 1)
    F.avg_pool2d(c, (3, 2), (2, 1), (1, 0), count_include_pad=False) | F.max_pool1d(x[None], 2, 1) | F.max_pool2d(c, 2, 1, 0, 2)
    F.avg_pool2d(c, 2, divisor_override=3) | F.max_pool1d(x[None], 1) | F.avg_pool3d(c, 2)
    F.interpolate(c, scale_factor=2) | F.interpolate(c, scale_factor=(2, 3)) | F.interpolate(c, size=(8, 18))
    F.interpolate(c, scale_factor=2.0, mode="nearest-exact")
    torch.tensordot(x, y, dims=([1], [1])) | torch.tensordot(x, y.T, 1) | torch.tensordot(x, y, 2)
    torch.tensordot(t, t, dims=([0, 2], [0, 2])) | torch.kron(x, t[0]) | torch.kron(v, x) | torch.linalg.vecdot(x, y)
    torch.linalg.vecdot(x, y, dim=0) | torch.cross(t[:, :, 0], t[:, :, 1], dim=1) | torch.linalg.cross(w, w.flip(0))
    torch.cdist(x, y) | torch.cdist(t, t, p=1.0) | torch.addr(x, x[:, 0], y[0], beta=2, alpha=3)
    torch.linalg.multi_dot([x, y.T, x]) | torch.chain_matmul(x, y.T, x) | torch.addr(x, x[:, 0], y[0], beta=0)
    torch.atleast_1d(x.sum()) | torch.atleast_2d(v) | torch.atleast_3d(x) | torch.atleast_3d(v) | torch.dstack([x, y])
    torch.dstack([v, v]) | torch.column_stack([x, x[:, 0]]) | torch.atleast_2d(v, x) | x.ravel() + 1 | (x > 0).byte() | x.char()
    torch.meshgrid(v, w, indexing="ij") | torch.meshgrid(v, w, indexing="xy") | torch.meshgrid([v, w, x[0]], indexing="xy")
"""


EMULATED = """
    x.flip(1) @ y.T | x.flip(0).softmax(1) | torch.rot90(x) | x.diagonal(-2) | torch.diag_embed(x, 1) | F.pixel_shuffle(c, 2)
    F.pad(c, (1, 2, 3, 0), mode="reflect") | F.pad(x[None], (2, 6), mode="circular") | x.unfold(1, 2, 3) + 1
    F.max_pool2d(c, 3, 2, 1) | torch.kron(x, t[0]) | torch.cdist(x, y)
"""


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("part", range(2))
def test_is_what_torch_gives(part: int) -> None:
    agree_each("x, y, v, w, c, t", "\n".join(CASES.splitlines()[part::2]), ARGUMENTS)


@pytest.mark.usefixtures("emulated")
def test_is_what_torch_gives_on_a_gpu() -> None:
    agree_each("x, y, v, w, c, t", EMULATED, ARGUMENTS)


def test_what_is_turned_round_has_memory_of_its_own() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 1
        z = y.flip(0)
        z.mul_(2)
        return y, z

    agree(function, (randn(4, 6),))


def diagonal_cleared(x: Tensor) -> Tensor:
    x.diagonal().zero_()
    return x.sum()


def flat_doubled(x: Tensor) -> Tensor:
    x.ravel().mul_(2)
    return x.sum()


def cut_before(x: Tensor) -> Tensor:
    y = F.pad(x, (-1, -1))
    x.mul_(2)
    return y


def at_least_two(x: Tensor) -> tuple[Tensor, Tensor]:
    torch.atleast_2d(x).mul_(2)
    return x.sum(), x * 1


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.ones(5, 5),
    "of wider rows": lambda: torch.ones(5, 8)[:, :5],
    "turned": lambda: torch.ones(5, 5).T,
    "every other": lambda: torch.ones(5, 10)[:, ::2],
}


def test_what_shares_memory_does_so_however_that_is_arranged() -> None:
    functions: list[Callable[[Tensor], Any]] = [diagonal_cleared, flat_doubled, cut_before, at_least_two]
    for function, layout in itertools.product(functions, LAYOUTS):
        with case((function.__name__, layout)):
            ours, torchs = LAYOUTS[layout](), LAYOUTS[layout]()
            same(fg.kernel(mutates=("x",))(function)(ours), function(torchs))
            assert torch.equal(ours, torchs)


def test_windows_are_views() -> None:
    """Of which some elements are shown several times: what is written to one, or to what it shows, is not known to the other."""

    def written(x: Tensor) -> Tensor:
        y = x * 1
        y.unfold(1, 2, 2).mul_(2)
        return y

    def changed(x: Tensor) -> Tensor:
        y = x * 1
        windows = y.unfold(1, 2, 2)
        y.mul_(2)
        return windows

    for function in (written, changed):
        refused(function, randn(4, 6), error=UnsupportedError, says="changed in place")
    with pytest.raises(UnsupportedError, match="unfold of a parameter that the kernel writes to"):
        fg.kernel(mutates=("x",))(lambda x: x.unfold(1, 2, 2).mul_(2).sum())(randn(4, 6))


def test_strides_of_run_time_are_never_below_zero() -> None:
    x, y = randn(3, 7)[:, :4], randn(4, 3)
    agree(lambda x, y: (x.flip(0) @ y, x.flip(0).T @ x, F.linear(x.flip(0), y.T), F.linear(x, y[:, 0])), (x, y))
    q = randn(1, 2, 5, 9)[..., :8]
    agree(lambda q: F.scaled_dot_product_attention(q.flip(2), q, q.flip(1)), (q,))


def test_the_first_dim_of_three_is_crossed() -> None:
    agree(lambda x, y: torch.linalg.cross(x, y, dim=0), (randn(3, 4), randn(3, 4)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using torch.cross without specifying the dim")  # torch says so once in a process
        agree(lambda x, y: torch.cross(x, y), (randn(3, 4), randn(3, 4)))


def test_one_chunk_is_the_whole() -> None:
    agree(lambda x: (*x.chunk(1), *x.chunk(1, 1)), (randn(3, 4),), (randn(5, 4),))


def test_sizes_of_run_time() -> None:
    table = "x.flip(0) | x.diagonal() | x.diagonal(-1) + 1 | x.diff(dim=0) | torch.rot90(x)"
    agree_each("x", table, *[(randn(n, 4),) for n in (3, 5, 7, 4)])


def test_borders_of_run_time_sizes() -> None:
    agree(lambda x: F.pad(x, (2, 2, 1, 1), mode="reflect"), *[(randn(1, n, m),) for n, m in ((3, 4), (5, 4), (7, 9))])


WRONG: list[tuple[Callable[..., Any], type[FusegenError], str]] = [
    (lambda x: F.pad(x, (6, 0), mode="reflect"), ShapeError, "6 padding elements"),
    (lambda x: F.pad(x, (1, 0), mode="nothing"), TraceError, "mode='nothing'"),
    (lambda x: x.flip(0, 0), ShapeError, "twice"),
    (lambda x: x[0].diagonal(), ShapeError, "has 1 dims"),
    (lambda x: x.diff(n=-1), ShapeError, "n=-1"),
    (lambda x: torch.tensordot(x, x, 3), ShapeError, "tensordot over 3 dims"),
    (lambda x: F.avg_pool2d(x[None], 2, divisor_override=0), TraceError, "divisor_override is 0"),
    (lambda x: F.interpolate(x[None, None], scale_factor=(2,)), ShapeError, "1 numbers for 2 dims"),
    (lambda x: x.unfold(1, 9, 1), ShapeError, "windows of 9 elements"),
    (lambda x: F.avg_pool1d(x[None], 2, padding=2), ShapeError, "padding of"),
    (lambda x: torch.cross(x, x), ShapeError, "no dim has size 3"),
    (lambda x: torch.meshgrid(x, x, indexing="ij"), ShapeError, "has several dims"),
]


@pytest.mark.filterwarnings("ignore:Using torch.cross without")
def test_what_torch_refuses() -> None:
    for function, error, says in WRONG:
        x = randn(1, 4, 6) if "more" in says else randn(4, 6)
        with case(says):
            with pytest.raises((RuntimeError, IndexError, ValueError)):
                function(x)
            refused(function, x, error=error, says=says)


NOT_YET: list[tuple[Callable[..., Any], str]] = [
    (lambda x: F.interpolate(x[None], scale_factor=1.5), "scale_factor=1.5"),
    (lambda x: F.interpolate(x[None], size=9), "from 6 to 9"),
    (lambda x: F.interpolate(x[None], scale_factor=2, mode="linear"), "mode='linear'"),
    (lambda x: F.avg_pool1d(x[None], 4, ceil_mode=True), "ceil_mode=True"),
]


def test_what_is_not_supported() -> None:
    for function, says in NOT_YET:
        with case(says):
            refused(function, randn(4, 6), error=TraceError, says=says)


def test_a_window_of_one_number() -> None:
    agree(lambda x: (x.unfold(0, 1, 1), x.unfold(-1, 1, 3)), (torch.tensor(2.0),))
