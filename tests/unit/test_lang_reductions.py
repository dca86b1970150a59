"""Reductions over any dims, several in one kernel, of views and of what is broadcast; softmax and the norms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ShapeError
from tests.unit.eager import agree, agree_each, ints, randn, refused

X, X3, X4 = randn(6, 8), randn(4, 6, 8), randn(2, 3, 4, 8)


def test_any_dims_kept_or_not() -> None:
    agree_each(
        "x",
        """
        x.sum(0) | x.sum(1) | x.sum((0, 1)) | x.sum(-1, keepdim=True) | x.sum((0, 2)) | x.sum((1, 2)) | x.sum()
        x.sum([0, -1], True)
        """,
        (X3,),
    )
    agree_each(
        "x",
        """
        x.sum((0, 2)) | x.sum((1, 3)) | x.mean((1, 2)) | x.amax((0, 1), keepdim=True) | x.sum((0, 2, 3)) | x.sum(())
        x.sum(axis=1)
        """,
        (X4,),
    )


def test_reductions_over_different_dims_in_one_result() -> None:
    agree_each(
        "x",
        """
        (x - x.mean(0, keepdim=True)) / (x.var(1, keepdim=True) + 1) | (x / x.sum(0)).sum(-1)
        x.softmax(-1).sum(0).softmax(-1) | (x - x.mean()).pow(2).mean().sqrt() * x | x.sum(-1).sum(-1)
        """,
        (X.abs() + 1,),
    )


def test_reductions_of_what_is_broadcast() -> None:
    agree(lambda x, b: ((x + b).sum(-1), (x + b).sum(0), b[None].expand(5, 8).sum(0), (x * b).mean()), (randn(6, 1), randn(8)))


def test_reductions_of_views() -> None:
    agree_each(
        "x",
        """
        x.T.mean(-1) | x[:, 1:].mean(-1) | x[1:].mean(0) | x[:, ::2].sum(-1) | x.reshape(-1, 2, 4).mean(-1)
        torch.cat([x, x[:, :3]], -1).sum(-1) | torch.cat([x, x[:, :3]], -1).softmax(-1)
        """,
        (X,),
    )
    agree(
        lambda x: (x.permute(0, 2, 1).softmax(-1), F.layer_norm(x.mT, (x.shape[1],)), x.softmax(1), x.softmax(0) * x.softmax(-1)),
        (X3,),
    )


def test_dims_of_size_one() -> None:
    agree(
        lambda x: (x.sum(0), x.softmax(-1), x.mean(), x.amax(1), x.var(1, correction=0)),
        (randn(1, 1),),
        (randn(1, 5),),
        (randn(4, 1),),
    )
    agree(lambda x: (x.sum(1), x.sum((0, 1)), x.sum(1, keepdim=True) + x), (randn(4, 1, 9),), (randn(1, 1, 9),))


def test_variance() -> None:
    agree_each(
        "x",
        """
        x.var() | x.var(0) | x.var(-1, correction=0) | x.var(1, unbiased=False) | x.std(-1) | x.var((0, 1), keepdim=True)
        x.std(0)
        """,
        (X,),
    )


def test_variance_does_not_cancel() -> None:
    agree(lambda x: x.var(-1), (1e4 + randn(4, 1000),))


def test_sums_of_many_elements_are_as_near_as_torch_s() -> None:
    """Of one row, and of an inner dim so short that each chunk is a piece of it."""
    for x, dims in ((randn(1 << 21), 0), (randn(2, 1 << 17, 6)[..., :3], (1, 2))):
        kernel, wide = fg.kernel(lambda x, d=dims: (x.sum(d), x.var(d), x.logsumexp(d))), x.double()
        for got, eager, exact in zip(
            kernel(x),
            (x.sum(dims), x.var(dims), x.logsumexp(dims)),
            (wide.sum(dims), wide.var(dims), wide.logsumexp(dims)),
            strict=True,
        ):
            assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6 * exact.abs().max().clamp(min=100)


def test_infinities_and_nan() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([[-inf] * 3, [0, inf, 1], [1, 2, nan], [-inf, 0, 1], [inf, -inf, 0], [inf, inf, inf]])
    agree_each(
        "x",
        """
        x.softmax(-1) | x.log_softmax(-1) | x.logsumexp(-1) | x.amax(-1) | x.amin(-1) | x.sum(-1) | x.mean(-1) | x.amax()
        x.amin(0)
        """,
        (x,),
    )


def test_integers_and_bools_sum_in_64_bits() -> None:
    agree(
        lambda x: (x.sum(0), x.sum(-1), x.sum(dtype=torch.float64), x.sum(dtype=torch.int32), x.amax(0), x.amin(1), x.amax()),
        (torch.full((30, 40), 100, dtype=torch.int8),),
        (ints(5, 6),),
    )
    agree(lambda x: ((x > 0).sum(0), (x > 0).sum(1), (x > 0).sum(), (x > 0).sum(dtype=torch.float32)), (X,))
    agree(lambda x: (x.amax(), x.amin()), (torch.full((5,), -(2**63)),), (torch.full((5,), 2**63 - 1),))


def test_products_of_elements() -> None:
    agree(
        lambda x: (x.prod(), x.prod(0), x.prod(-1, keepdim=True), torch.prod(x, 1, dtype=torch.float64)),
        (X,),
        (ints(3, 7, low=-3, high=4),),
        (torch.tensor([[math.inf, 0.0], [math.nan, 1.0], [-math.inf, 2.0]]),),
    )
    agree(lambda x: x.prod(0), (X > 0,), (torch.tensor(1.5),))


def test_16_bits_are_summed_wide() -> None:
    agree(lambda x: (x.float().sum(0), x.sum(0), x.mean(-1)), (torch.full((3000, 3), 2.0).half(),))


def test_rows_of_every_length() -> None:
    agree(lambda x: (x.softmax(-1), x.sum(-1)), *[(randn(2, length),) for length in (3, 33, 1024, 5000, 70000)])


def test_columns() -> None:
    agree(lambda x: (x.sum(0), x.sum(-1)), (randn(3, 20000),), (randn(700, 5),))
    agree(lambda x: x.sum(1), (randn(3, 50, 7),))
    agree(lambda x: x.amax((0, 1)), (randn(3, 5, 70),))


def test_statistics_and_views_of_them_as_results() -> None:
    agree_each(
        "x",
        """
        x.sum(0) | x.sum(0)[None] | x.sum(0).reshape(2, 4) | x.sum(1) | x.sum(1, keepdim=True) | x.sum(1) * 2
        x.mean(1).unsqueeze(0)
        """,
        (X,),
    )

    def softmaxes(x: Tensor) -> tuple[Tensor, ...]:
        y = x.softmax(-1)
        return y, y.T, y.reshape(-1), y[1:], x == x.amax(-1, keepdim=True)

    agree(softmaxes, (X,))


def test_norms() -> None:
    agree_each(
        "x, w",
        """
        F.rms_norm(x, (8,), w, 1e-6) | F.rms_norm(x, (8,)) | F.layer_norm(x, (8,), None, w) | F.layer_norm(x, x.shape[1:])
        """,
        (X, randn(8)),
    )
    agree(lambda x, w: (F.layer_norm(x, (6, 8), w), F.rms_norm(x, (6, 8), w)), (X3, randn(6, 8)))


def test_wide_weights_do_not_widen_the_result_of_a_norm() -> None:
    agree(lambda x, w: F.layer_norm(x, (64,), w, w), (randn(6, 64, dtype=torch.bfloat16), randn(64)))


def test_softmax_in_another_dtype() -> None:
    agree(lambda x: (F.softmax(x, dim=1, dtype=torch.float32), F.softmax(x, 1), F.log_softmax(x, dim=-1)), (X.bfloat16(),))


def test_places_of_extreme_values() -> None:
    nan, inf = math.nan, math.inf
    hard = torch.tensor([[1.0, nan, 3, nan], [3, 3, 1, -inf], [-inf, -inf, -inf, -inf], [inf, 0, inf, -0.0]])
    agree(
        lambda x: (
            x.argmax(-1),
            x.argmax(0),
            x.argmin(-1, keepdim=True),
            x.argmax(),
            x.argmin(keepdim=True),
            *x.max(-1),
            *x.min(0, keepdim=True),
        ),
        (hard,),
        (randn(5, 4),),
        (ints(3, 7),),
    )
    agree(lambda x: (x.max(dim=1).values, torch.max(x, 1)[1], *torch.aminmax(x), *torch.aminmax(x, dim=1)), (X3,))
    agree(lambda x: (x.argmax(), *x.max(0), x.any()), (torch.tensor(1.5),))


def test_any_and_all() -> None:
    x = randn(6, 8)
    agree(lambda x: ((x > 0).any(), (x > -9).all(), (x > 0).all(-1), (x > 1).any(0, keepdim=True), x.isnan().any()), (x,))
    agree(
        lambda x: (x.any(-1), x.all(0), x.any(), x.count_nonzero(), torch.count_nonzero(x, 1)), (ints(5, 3, low=0, high=3),), (x,)
    )
    agree(lambda x: (x.any(-1), x.all(0)), (ints(5, 3, low=0, high=3, dtype=torch.uint8),))


def test_norms_of_vectors() -> None:
    agree_each(
        "x",
        """
        x.norm() | x.norm(dim=-1, keepdim=True) | x.norm(p=1) | x.norm(3, dim=1) | x.norm(p=math.inf, dim=0)
        x.norm(p=-math.inf, dim=0) | x.norm(0, dim=1) | torch.norm(x, dim=1) | torch.linalg.norm(x, dim=1)
        torch.linalg.norm(x) | torch.linalg.vector_norm(x, ord=2, dim=(0, 1)) | F.normalize(x, dim=-1)
        F.normalize(x, p=1.0, dim=0) | F.cosine_similarity(x, x + 1, dim=-1)
        """,
        (X,),
        (X.double(),),
    )


def test_squares_of_16_bits_that_overflow_stay_inside() -> None:
    """Also where the sum that overflows is a result itself."""
    x = (randn(64, 48) * 300).half()
    agree(lambda x: (x.norm(dim=-1), (x * x).sum(-1), F.normalize(x, dim=0), F.cosine_similarity(x, x * 0.5, dim=0)), (x,))
    agree(lambda x: (x.sum(0), x.std(0), F.layer_norm(x, (48,))), ((randn(64, 48) + 2000).half(),))


def test_variance_with_its_mean() -> None:
    agree(lambda x: (*torch.var_mean(x, -1), *torch.std_mean(x, (0, 1), keepdim=True), *torch.var_mean(x, 0, unbiased=False)), (X,))


def test_norms_over_groups_and_channels() -> None:
    agree_each(
        "x, w, b, m, v",
        """
        F.group_norm(x, 2, w, b) | F.group_norm(x, 4) | F.instance_norm(x, weight=w, bias=b) | F.batch_norm(x, m, v, w, b)
        F.batch_norm(x, m, v)
        """,
        (randn(2, 4, 5, 3), randn(4), randn(4), randn(4), randn(4).abs()),
        (randn(3, 4, 6), randn(4), randn(4), randn(4), randn(4).abs()),
    )


def test_products_of_vectors() -> None:
    agree(lambda x, y: (torch.dot(x[0], y[0]), torch.outer(x[0], y[:, 0]), torch.mv(x, y[0]), F.softmin(x, -1)), (X, X * 2))


def test_batch_norm_by_the_batch() -> None:
    for shape, dtype in (((5, 3), torch.bfloat16), ((4, 3, 6), torch.float32), ((2, 3, 4, 5), torch.float32)):
        x, w, b = (randn(*shape) * 3 + 10).to(dtype), randn(3, dtype=dtype), randn(3, dtype=dtype)
        agree_each(
            "x, w, b",
            "F.batch_norm(x, None, None, training=True) | F.batch_norm(x, None, None, w, b, True, 0.1, 1e-3)",
            (x, w, b),
        )


def test_sums_to_a_shape() -> None:
    x = randn(2, 3, 4)
    agree(lambda x: [x.sum_to_size(size) for size in ((2, 1, 4), (3, 4), (1, 1), (), (2, 3, 4))], (x,), (ints(2, 3, 4),))
    agree(lambda x: x.sum_to_size(1, 4), (x,))
    refused(lambda x: x.sum_to_size(2, 4), x, error=ShapeError, says="cannot be summed to shape", line="sum_to_size")


def test_logsumexp_of_integers() -> None:
    agree(lambda x: x.logsumexp(-1), (ints(3, 5),))
