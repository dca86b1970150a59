"""What a call depends on: a kernel that was compiled for one call must not serve another that differs in one respect only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen import target as targets
from tests.naming import case
from tests.unit.eager import agree, ints, randn

X = randn(8, 8)

DIFFERENT: dict[str, Callable[[], Tensor]] = {
    "dtype": lambda: ints(8, 8, dtype=torch.int32),
    "strides": lambda: randn(8, 8).T,
    "gap": lambda: randn(8, 16)[:, :8],
    "broadcast": lambda: randn(8, 1).expand(8, 8),
    "rows": lambda: randn(9, 8),
    "columns": lambda: randn(8, 9),
    "rank": lambda: randn(2, 4, 8),
    "offset": lambda: randn(65)[1:].view(8, 8),
}


def test_a_tensor_that_differs_in_one_respect() -> None:
    for respect, make in DIFFERENT.items():
        with case(respect):
            other = make()
            agree(lambda x: (x * 2 + 1, x.sum(-1)), (X,), (other,), (X,), (other,))


def test_the_second_of_two_tensors_that_differs() -> None:
    agree(lambda x, y: x - y, *((X, make()) for name, make in DIFFERENT.items() if name not in ("rows", "columns", "rank")))


def test_a_tensor_that_is_no_tensor_in_the_next_call() -> None:
    def function(x: Tensor, y: Tensor | float | None) -> Tensor:
        return x if y is None else x * y

    agree(function, (X, randn(8)), (X, 2.0), (X, None), (X, 3), (X, randn(8)), (X, True))


def test_a_number_of_another_kind() -> None:
    agree(lambda x, s: x * s, *((ints(5), s) for s in (3, 2.5, 7, 0.5)))
    agree(lambda x, s: x // s, *((ints(5), s) for s in (2, 1.5, 4)))


def test_one_function_for_several_targets() -> None:
    kernel = fg.kernel(lambda x: x * 2)
    texts = {name: kernel.lower(X, target=name).sources[0].text for name in ("sm_90a", "sm_80", "cpu", "sm_90a")}
    assert "for sm_80" in texts["sm_80"] and "for sm_90a" in texts["sm_90a"] and "__global__" not in texts["cpu"]
    agree(kernel, (X,))


def test_wide_variants_are_apart() -> None:
    kernel = fg.kernel(lambda x: x * 2)
    machine, device = targets.target("sm_90a"), torch.device("cuda")
    texts = [
        kernel._dispatcher.variants._variant([X], machine, device, index64=wide)[0].sources[0].text for wide in (False, True, False)
    ]
    assert texts[0] == texts[2] and "using Index = i32;" in texts[0] and "using Index = i64;" in texts[1]


@pytest.mark.parametrize(("size", "index"), [(2**31 - 2**22 - 1, "i32"), (2**31 - 2**22, "i64"), (2**31 + 8, "i64")])
def test_indices_get_64_bits_where_a_launch_may_pass_31(size: int, index: str) -> None:
    large = torch.empty(size, dtype=torch.int8, device="meta")
    assert f"using Index = {index};" in fg.kernel(lambda x: x + 1).lower(large, target="sm_90a").sources[0].text


def test_the_span_of_a_view_counts_not_its_elements() -> None:
    strided = torch.empty(1, dtype=torch.int8, device="meta").expand(2, 2).as_strided((2, 64), (2**31, 1))
    assert "using Index = i64;" in fg.kernel(lambda x: x + 1).lower(strided, target="sm_90a").sources[0].text


def test_products_of_views_at_an_offset() -> None:
    base = randn(20, 24)
    a, b = base[3:9, 4:12], base[8:16, 1:6]
    agree(lambda x, y: x @ y, (a, b), (a.contiguous(), b.contiguous()), (base[1:7, :8], base[:8, 2:7]))
    agree(lambda x, y: (x[1:, 2:] @ y[2:, 1:] + 1, x.T @ x), (a, b))


def test_results_of_one_call_are_no_memory_of_the_next() -> None:
    kernel = fg.kernel(lambda x: (x * 2, x.sum(0)))
    first = kernel(X)
    kept = [t.clone() for t in first]
    kernel(X + 1)
    assert all(map(torch.equal, first, kept))


def test_torch_s_default_dtype_is_part_of_what_a_call_depends_on() -> None:
    kernel = fg.kernel(lambda x: x * torch.ones(8))
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            agree(kernel, (ints(8, 8),))
    finally:
        torch.set_default_dtype(before)
