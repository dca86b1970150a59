"""Views: index maps of every kind, over literal and over run-time sizes, alone and under what reads them."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import FusegenError
from tests.unit.eager import agree, agree_each, expressions, function_of, ints, randn, same

X, X3 = randn(6, 8), randn(4, 6, 8)


def test_indices_and_slices_from_both_ends() -> None:
    agree(lambda x: (x[-1], x[2, -3], x[:, -1], x[..., 0], x[0:1], x[None], x[:, None], x[..., None] + 1, x[1:-1, 2:]), (X,))


def test_slices_with_steps_and_beyond_the_ends() -> None:
    agree(lambda x: (x[:, ::2], x[:, 1::3], x[::2] * 2, x[1::4], x[:, 5:2], x[:, 2:100], x[:, -100:3], x[:0], x[:, 3:3]), (X,))


def test_slices_of_a_run_time_size_are_cut_off_as_torch_cuts_them() -> None:
    """What a slice means depends on the size: the sizes of one call must not decide for the next."""
    agree(lambda x: (x[1:] + 1, x[:10] * 2, x[-3:], x[5:], x[2:-2]), *[(randn(n, 4),) for n in (20, 3, 5, 8, 2, 1, 12)])


def test_halves_of_sizes_that_may_be_odd() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        n, m = x.shape[0] // 2, x.shape[-1] // 2
        return x[:n], x[n:], x[..., :m], x[..., m:]

    agree(function, *[(randn(n, m),) for n in (4, 5, 2) for m in (4, 6, 9, 5)])


def test_narrow_select_and_parts() -> None:
    agree(lambda x: (x.narrow(1, 2, 3), x.narrow(0, 1, 2), x.narrow(-1, -3, 2), x.select(0, -1), x.select(1, 3)), (X,))
    agree(lambda x: (*x.chunk(2, -1), *x.chunk(3, -1), *x.chunk(2, 0), *x.split(3, -1), *x.split(2), *x.split([1, 3, 4], -1)), (X,))
    agree(lambda x: (*x.unbind(-1), *x.unbind(0), torch.stack(list(x))), (randn(3, 4),))


def test_concatenation_of_unequal_parts() -> None:
    agree(
        lambda a, b: (torch.cat([a, b * 2, a[:, :1]], 1), torch.cat([a, b], -1).exp(), torch.cat([a, a], -1), torch.cat([a])),
        (X, randn(6, 3)),
    )
    agree(
        lambda a, b: (torch.cat([a, b]), torch.cat([a, b, -a]).exp(), torch.cat([b[1:], a[:2]])),
        (X, randn(3, 8)),
        (randn(2, 8), randn(2, 8)),
    )


def test_concatenation_takes_the_common_dtype() -> None:
    agree(lambda a, b, c: (torch.cat([a, b], 1), torch.cat([a, c], 1), torch.cat([b, c], 1)), (X, randn(6, 3).half(), ints(6, 2)))


def test_concatenation_under_vectors() -> None:
    for left, right in ((64, 32), (5, 11), (1, 63)):
        agree(
            lambda a, b: (torch.cat([a, b], -1) * 2, torch.cat([b, a], -1).softmax(-1), torch.cat([a.sum(1, keepdim=True), b], 1)),
            (randn(6, left, dtype=torch.bfloat16), randn(6, right, dtype=torch.bfloat16)),
        )


def test_stacks() -> None:
    agree(
        lambda a, b: (torch.stack([a, b]), torch.stack([a, b], -1), torch.stack((a, b, a), 1), torch.stack([a.sum(), b.mean()])),
        (X, X * 2),
    )


def test_rotations_of_halves_and_of_pairs() -> None:
    def function(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        h = x.shape[-1] // 2
        halves = x * cos + torch.cat((-x[..., h:], x[..., :h]), -1) * sin
        a, b, c, s = x[..., 0::2], x[..., 1::2], cos[..., :h], sin[..., :h]
        return halves, torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)

    agree(function, (randn(2, 3, 16), randn(3, 16), randn(3, 16)), (randn(2, 5, 6), randn(5, 6), randn(5, 6)))


def test_expansion_and_reshapes_of_what_was_expanded() -> None:
    agree(lambda x: (x[:1].expand(5, 8), x[0].expand(3, 8), x[:, :1].expand(-1, 4), x[0].expand(2, 3, -1), x[0].expand_as(x)), (X,))
    agree(lambda x: (x[:, None].expand(6, 3, 8).reshape(18, 8), x[:, :, None].expand(6, 8, 2).reshape(6, 16) * 2), (X,))


def test_reshapes_that_merge_and_that_do_not() -> None:
    agree_each(
        "x",
        """
        x.permute(0, 2, 1).reshape(4, 48) | x.permute(2, 0, 1).reshape(-1, 6) + 1 | x.flatten() | x.flatten(1)
        x.reshape(-1, 16) | x.unflatten(-1, (2, 4)) | x.unflatten(0, (2, -1)) | x.transpose(0, 1).reshape(24, 8)
        x.view(2, -1, 3, 8).sum(1)
        """,
        (X3,),
    )


def test_orders_of_dims() -> None:
    agree(lambda x: (x.T, x.mT + 1, x.t() * 2, x.transpose(0, 1).exp()), (X,))
    agree(lambda x: (x.mT, x.movedim(0, -1), x.movedim(-1, 1), x.movedim((0, 1), (1, 0)), torch.exp(x).permute(2, 0, 1)), (X3,))


def test_dims_of_size_one() -> None:
    agree(
        lambda x: (x.squeeze(), x.squeeze(1), x.squeeze(0), x.squeeze((0, 1)), x.unsqueeze(-1), x.unsqueeze(1)),
        (randn(1, 1, 5),),
        (randn(4, 1, 5),),
    )
    agree(lambda a, b, c: (a + b * c, b.expand(4, 6, 8) + a), (randn(4, 1, 8), randn(1, 6, 1), randn(8)))
    agree(lambda a, b: a + b, (randn(1), randn(4, 5)), (randn(3, 1), randn(1, 5)), (randn(1, 1), randn(1)), (randn(()), randn(2)))


def test_reshapes_with_sizes_from_shapes_and_from_numbers() -> None:
    agree_each(
        "x",
        """
        x.view(x.shape[0], 2, x.shape[1] // 2).transpose(1, 2) | x.view(2, -1) | x.reshape(x.shape[:-1] + (2, -1))
        x.reshape((*x.shape[:-1], -1, 2)) | x.reshape(x.numel())
        """,
        *[(randn(n, m),) for n in (4, 6) for m in (4, 6)],
    )
    agree(lambda x: x.reshape(-1, x.shape[-1]).softmax(-1), (randn(2, 3, 4),), (randn(3, 3, 5),))
    agree(lambda x: x.reshape(math.prod(x.shape[:1]), -1), (randn(3, 4),))


# Layouts of inputs.

BASE = randn(40, 40)
LAYOUTS = {
    "row-major": X,
    "transposed": randn(8, 6).T,
    "steps": BASE[::2, ::3][:6, :8],
    "unaligned": randn(49)[1:].view(6, 8),
    "expanded-rows": randn(1, 8).expand(6, 8),
    "expanded-columns": randn(6, 1).expand(6, 8),
    "expanded-scalar": torch.tensor(2.0).expand(6, 8),
    "window": BASE[3:9, 5:13],
    "strange": torch.as_strided(BASE, (6, 8), (3, 2), 1),
    "overlapping": torch.as_strided(BASE, (6, 8), (1, 1)),
    "one-row": randn(1, 8),
    "one-column": randn(6, 1),
}


def test_every_layout_of_an_input_by_one_kernel() -> None:
    """A kernel that was compiled for one layout must notice the next."""
    agree(
        lambda x, w: ((x * w).exp(), x.sum(-1), x.sum(0), x.softmax(-1), x.T + 1, x.reshape(-1)),
        *[(x, randn(x.shape[1])) for x in LAYOUTS.values()],
    )


def test_every_offset_of_16_bit_tensors() -> None:
    x = randn(64, dtype=torch.bfloat16)
    agree(lambda x, y: x * 2 + y, *[(x[i : i + 32], x[j : j + 32]) for i in range(4) for j in range(3)])


# Sizes that change from call to call.


def test_last_dims_that_change() -> None:
    agree(lambda x: (x.softmax(-1), x * 2, x.sum(0)), *[(randn(3, n),) for n in (8, 16, 17, 18, 64, 100, 1, 2, 1000)])


def test_many_last_dims_share_few_compiled_forms() -> None:
    kernel = agree(lambda x: x.softmax(-1), *[(randn(3, n),) for n in range(129, 161, 3)])
    assert len(kernel._dispatcher.variants.known) <= 8


def test_one_new_position_beside_a_cache_that_grows() -> None:
    """The keys that a mask is of are the sum of two sizes, one of which is 1 here: that sum does not become a number."""

    def attended(q: Tensor, k: Tensor, past: Tensor, mask: Tensor) -> Tensor:
        keys = torch.cat([past, k], 1)
        return (q @ keys.mT + mask).softmax(-1) @ keys

    lengths = ((4, 5), (4, 9), *((1, past) for past in range(9, 19)))
    calls = [(randn(2, n, 8), randn(2, n, 8), randn(2, past, 8), randn(1, n, n + past)) for n, past in lengths]
    assert len(agree(attended, *calls)._dispatcher.variants.known) <= 4


def test_sizes_that_are_equal_by_chance() -> None:
    sizes = ((5, 5), (5, 6), (6, 5), (8, 3), (8, 8), (1, 5), (5, 1), (2, 2))
    agree(lambda x, y: (x.sum(0) + y.sum(0), torch.cat([x, y])), *[(randn(n, 8), randn(m, 8)) for n, m in sizes])
    agree(lambda a, b: a[:, None] * b[None], *[(randn(n), randn(m)) for n, m in ((5, 5), (5, 6), (6, 5), (1, 7), (7, 1))])
    shapes = ((5, 5, 5, 5), (5, 6, 5, 6), (5, 6, 6, 5), (6, 6, 5, 5), (5, 7, 6, 8))
    agree(lambda x, y: (x[:, None] * y[None, :, :1]).sum((0, 1)), *[(randn(n, m), randn(p, q)) for n, m, p, q in shapes])


def test_a_broadcast_between_a_run_time_size_and_a_number_is_settled_by_the_call() -> None:
    table = randn(6, 8)
    agree(lambda x: (x + table, x.expand(2, 6, 8) * 2 if x.ndim == 2 else x), (randn(6, 8),), (randn(2, 6, 8),), (randn(3, 6, 8),))


# Functions of sizes.


def test_branches_and_loops_over_sizes() -> None:
    def branch(x: Tensor) -> Tensor:
        if x.shape[0] > 8:
            return x * 2
        return x * 3 if x.shape[0] % 2 == 0 and x.shape[1] > 4 else x[: max(1, x.shape[0] // 3)]

    agree(branch, *[(randn(n, m),) for n in (4, 8, 9, 20, 3) for m in (4, 6)])

    def loop(x: Tensor) -> Tensor:
        total = x[0]
        for i in range(1, x.shape[0]):
            total = total + x[i] * i
        return total

    agree(loop, *[(randn(n, 4),) for n in (4, 5, 4, 2)])


def test_sizes_in_arithmetic() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        n, m = x.shape
        return (
            x.sum(0) / n,
            x * n,
            x - n,
            n - x,
            x.sum() / x.numel(),
            x * (1.0 / n),
            x * 2.0 * n,
            x / len(x),
            n**2 + x,
            x * m**-0.5,
            x * (n / 2),
            x * int(n),
            x * n % 3,
            x * m * n,
            x * (-n),
            x * math.sqrt(m),
        )

    agree(function, *[(randn(n, m),) for n in (4, 5) for m in (4, 6, 9)])


@pytest.mark.parametrize("seed", range(2))
def test_random_arithmetic_of_sizes(seed: int) -> None:
    random_ = random.Random(seed)

    def expression(depth: int) -> str:
        if not depth:
            return random_.choice(["n", "m", str(random_.randint(-5, 9))])
        sign = random_.choice(["+", "-", "*", "//", "%"])
        divisor = random_.choice(["n", "m", "2", "3", "(n + m)", "-3", "(-m)"])
        return f"({expression(depth - 1)} {sign} {expression(depth - 1) if sign in '+-*' else divisor})"

    text = ", ".join(f"zeros + {expression(3)}" for _ in range(8))
    function = eval(f"lambda x, y: (lambda zeros, n, m: ({text}))(x.long(), x.shape[0], y.shape[0])")
    agree(function, *[(torch.zeros(n, 2), torch.zeros(m, 2)) for n, m in ((5, 7), (8, 4), (4, 4), (3, 9))])


def test_sizes_where_only_a_number_will_do() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        chosen = {4: 2.0}.get(n, 3.0)
        return (
            x * chosen,
            x * int(n / 2.0),
            x * (n & 1),
            x * (n >> 1),
            x * 2**n,
            x * (n - 1).bit_length(),
            x[: math.ceil(n / 2)],
            x if n / 2 > 3 else -x,
        )

    agree(function, *[(randn(n, 3),) for n in (5, 8, 7, 4, 9)])


def test_ranges_over_sizes_are_one_variant() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        n, column = x.shape[0], (-1, 1)
        return (
            x + torch.arange(n).view(column),
            x + torch.arange(1, n + 1, dtype=torch.float32).view(column),
            x[1:] * torch.arange(end=n - 1).view(column),
            x[::2] + torch.arange(0, n, 2).view(column),
            x + torch.arange(x.shape[-1]),
            x * torch.full_like(x, n),
            x * torch.sym_max(n, 6) + torch.sym_min(6, n),
            torch.arange(n * x.shape[1]).view(x.shape) + x.view(torch.Size((n, x.shape[1]))),
        )

    agree(function, *[(randn(n, 8),) for n in (5, 4, 9, 1, 2)])
    kernel = fg.kernel(lambda x: x * torch.arange(x.shape[0])[:, None])
    assert len({kernel.lower(randn(n, 8)).sources[0].text for n in (5, 4, 9)}) == 1


def test_evenly_spaced_over_a_size() -> None:
    agree(lambda x: x * torch.linspace(0, 0.5, x.shape[0])[:, None], *[(randn(n, 8),) for n in (5, 4, 9)])


def test_a_size_that_is_kept_is_no_number_of_torch_s() -> None:
    kept: list[int] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x.shape[0])
        return x + 1

    fg.kernel(function).lower(randn(4, 8))
    with pytest.raises((FusegenError, TypeError)):
        torch.ones(3) * kept[0]


def test_reductions_of_slices_without_elements() -> None:
    agree_each(
        "x",
        """
        x[:, 3:3].sum(-1) | x[:, :0].mean(-1) | x[:, 3:3].softmax(-1) | x[:0].sum(0) + x | x[:, :0].logsumexp(-1)
        torch.cat([x[:, :0], x], -1).softmax(-1) | x[:, :0] @ x[:0]
        """,
        (X,),
    )


def test_repetitions() -> None:
    agree_each(
        "x",
        """
        x.repeat(2, 1, 3) | x.repeat(3, 1, 1, 1) | x.tile((2,)) | x.repeat_interleave(2, 0) | x.repeat_interleave(3, -1)
        x.repeat_interleave(2)
        """,
        (X3,),
        (randn(3, 2, 5),),
    )


def test_rolled_tensors() -> None:
    agree(
        lambda x: (x.roll(1, 0), x.roll((2, -1), (0, 1)), x.roll(3), x.roll(-9, -1), x.roll(0, 0)),
        (X,),
        (randn(5, 8),),
        (randn(1, 3),),
    )


def test_padding() -> None:
    agree_each(
        "x",
        """
        F.pad(x, (1, 2)) | F.pad(x, (-1, 2, 1, 0)) | F.pad(x, (0, 0, 1, -1), value=-1.5) | F.pad(x, (2, 0)).softmax(-1)
        F.pad(x > 0, (1, 1))
        """,
        (X,),
        (randn(5, 8),),
    )
    agree(lambda x: F.pad(x, (0, 0, 0, -x.shape[0] % 4)).reshape(-1, 4, 3).mean(1), *[(randn(n, 3),) for n in (5, 8, 3)])


def test_stacks_of_rows_and_columns_and_common_shapes() -> None:
    agree(
        lambda x: (torch.hstack([x, x]), torch.vstack([x, x[0]]), torch.hstack([x[0], x[1]]), *torch.broadcast_tensors(x, x[0])),
        (X,),
    )


def test_parts_of_flattened_views_whose_row_length_is_known_at_run_time() -> None:
    """Where a row of the input ends is found by a division, whose rest must not be negative."""
    base = randn(40, 64)
    calls = [(base[:n, :m],) for n, m in ((4, 8), (5, 7), (3, 6), (6, 9), (1, 5))]
    agree(lambda x: (x.reshape(-1)[-3:] * 2, x.T.reshape(-1)[-4:] * 2, x.reshape(-1)[-4:].sum()), *calls)
    agree(lambda x: (x.roll(3), torch.cat([x.reshape(-1)[-3:], x.reshape(-1)[:-3]]).reshape(x.shape) * 2), *calls)


def test_column_sums_over_an_outer_size_that_is_a_difference() -> None:
    agree(lambda x: (x[1:].mT[..., None].sum(0), x[1:].mT[..., None].amax(0)), (X,), (randn(5, 7),))


def test_concatenations_of_parts_of_concatenations_beside_a_reduction() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.stack([x, -x], -1)
        swapped = torch.cat([pairs[..., 1:], pairs[..., :1]], -1)
        return swapped * 2, swapped.softmax(-1)

    agree(function, (X,), (randn(5, 7),))


def test_a_size_that_turns_out_to_be_one_is_squeezed_out() -> None:
    agree(
        lambda x: (x[..., x.shape[-1] // 2 :][..., 1:].squeeze(), x[1:].squeeze(0) * 2),
        *[(randn(n, m),) for n, m in ((4, 6), (5, 4), (2, 3), (3, 7))],
    )


AT_OTHER_SHAPES = """
    x[..., :c.shape[-1] * 2].chunk(2, -1) | x.flatten().chunk(2) | x.flatten(0, 1).chunk(c.shape[0]) | x.flatten(1).chunk(len(c), 1)
    x.view(len(x), -1).split([c.shape[-1], x[0].numel() - c.shape[-1]], 1) | x[..., :c.shape[-1] * 2].unflatten(-1, (2, -1))
    x.narrow(-1, c.shape[-1], c.shape[-1]) | x.unfold(-1, c.shape[-1], c.shape[-1]) | x[:, :1].expand(-1, c.shape[0] * 3, -1)
    c.expand(x.shape[0], *c.shape) | c.repeat(x.shape[0], 2) | x.movedim(-1, 0).flatten(1) | x.reshape(-1, x.shape[-1] // 2)
    x.roll(c.shape[-1] - 1, -1) | torch.cat([x[..., c.shape[-1]:], x[..., :c.shape[-1]]], -1)
"""


@pytest.mark.parametrize("text", expressions(AT_OTHER_SHAPES))
def test_views_by_sizes_at_other_shapes(text: str) -> None:
    """A kernel that was called before takes the shapes that a new one takes."""
    kernel = fg.kernel(function_of(text, "x, c"))
    for extents in ((2, 4, 32, 4), (2, 4, 64, 16), (1, 4, 8, 4), (4, 4, 16, 8), (3, 6, 32, 4)):
        outer, rows, width, short = extents
        x, c = randn(outer, rows, width), randn(rows, short)
        same(kernel(x, c), kernel.function(x, c), str(extents))
