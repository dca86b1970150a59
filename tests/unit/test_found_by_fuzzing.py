"""Programs that random drawing once found wrong, each reduced."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import TraceError
from tests.naming import case
from tests.unit.eager import agree, randn, refused


def test_a_result_below_a_view_that_a_product_reads_is_written() -> None:
    """The product wants the transpose in memory; the result is what was transposed, and lies there as well."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.stack([x + 1, x + 1], 0)
        return pair, ((x + 1) @ pair.mT) * 0.5

    agree(function, (randn(9),))


def test_temporaries_without_elements() -> None:
    def function(x: Tensor) -> Tensor:
        none = x[:0]
        return (none @ (none - none.mean(0, keepdim=True)).mT) * 0.5

    agree(function, (randn(8, 5),))


def test_several_results_that_read_nothing() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        three = torch.full_like(x, 3).to(torch.bfloat16)
        return three, three.float()

    agree(function, (randn(4, 4),))


def test_integers_are_finite() -> None:
    x = torch.tensor([0, 1, 3, 250])
    agree(lambda x: (torch.isfinite(x), torch.isinf(x), torch.isnan(x)), (x,))


def test_alpha_does_not_change_the_dtype() -> None:
    x, flags = torch.arange(6, dtype=torch.int32), torch.tensor([True, False] * 3)
    agree(lambda x, flags: torch.add(x, flags, alpha=2), (x, flags))
    agree(lambda x, flags: torch.add(x, flags, alpha=2), (randn(6, dtype=torch.float16), flags))
    refused(lambda x: torch.add(x, x, alpha=2), flags, error=TraceError, says="bools cannot be scaled")
    refused(lambda x: torch.add(x, x, alpha=0.5), x, error=TraceError, says="integers cannot be scaled")


def test_a_number_beside_a_statistic() -> None:
    """Both are stored once a row."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.sum(-1, keepdim=True)
        return total, torch.full_like(total, 3).to(torch.bfloat16)

    agree(function, (randn(4),), (randn(3, 70),))
    assert "constant_of()" in fg.kernel(function).lower(randn(3, 70), target="sm_90a").asm["cuda"]


def test_indices_divide_by_products_of_one_size() -> None:
    """Equal run-time sizes share a symbol, whose powers then stand behind a division."""
    agree(lambda x: -x.reshape(-1, x.shape[-1]), (randn(2, 2, 2, 4),), (randn(3, 3, 3, 4),))
    agree(lambda x: -x.permute(2, 0, 1, 3).reshape(-1, x.shape[-1]), (randn(3, 3, 3, 4),))


def test_numbers_wrap_to_the_integers_that_they_meet() -> None:
    x = torch.tensor([0, 1, 2, 3, 100, 127], dtype=torch.uint8)
    agree(lambda x: (x <= -1, x == -1, x > 250, torch.where(x > 1, x, -1).abs(), (~x).abs()), (x,))
    agree(lambda x, n: (x <= n, torch.where(x > 1, x, n)), (x, -1), (x, 5))


def test_one_less_than_the_least_integer_wraps() -> None:
    x, n = torch.tensor([0, 5, -(2**63)]), torch.tensor([-(2**63), 2**63 - 1, 0])
    agree(lambda x, n: (x <= n - 1, n - 1 >= x, x <= n.clamp(min=0) - 1, n.clamp(min=0) - 1 >= x, x + 0), (x, n))


def test_parts_without_elements() -> None:
    agree(lambda x: F.scaled_dot_product_attention(x, x, x)[:, :0].select(0, 0), (randn(4, 4, 4, 4),))


def test_values_in_64_bits_do_not_hide_the_functions_that_compute_them() -> None:
    x = randn(5, 8, dtype=torch.float64).sigmoid()
    for function in (torch.tanh, torch.erf, torch.ceil, torch.expm1, torch.lgamma, torch.atan):
        with case(function.__name__):
            agree(lambda x, f=function: (f(x) + 1.5) * f(x) / (f(x) * x + 2) + f(x), (x,))
