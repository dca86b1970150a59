"""`fg.Workspace`: calls take their temporaries from memory that is allocated once."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

import fusegen as fg

_UNTOUCHED = 255


@fg.kernel
def two_products(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.tanh(x @ first) @ second


def operands(rows: int = 8, width: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, width), torch.randn(width, width), torch.randn(width, width)


def workspace(size: int) -> fg.Workspace:
    found = fg.Workspace(size, device="cpu")
    found.memory.fill_(_UNTOUCHED)
    return found


def is_used(space: fg.Workspace) -> bool:
    return bool((space.memory != _UNTOUCHED).any())


def test_calls_take_their_temporaries_from_it() -> None:
    given = operands()
    space = workspace(two_products.lower(*given).workspace_bytes)
    with space:
        result = two_products(*given)
    assert torch.equal(result, two_products(*given))
    assert is_used(space)


def test_large_temporaries_are_in_it_too() -> None:
    given = operands(rows=1 << 17)  # 32 MiB a value
    space = workspace(two_products.lower(*given).workspace_bytes)
    assert space.size >= 1 << 25
    with space:
        result = two_products(*given)
    assert torch.equal(result, two_products(*given))
    assert is_used(space)


def test_a_backward_pass_uses_that_of_its_call() -> None:
    x, first, second = (tensor.requires_grad_() for tensor in operands())
    (wanted,) = torch.autograd.grad(two_products(x, first, second).sum(), first)
    space = workspace(1 << 20)
    with space:
        result = two_products(x, first, second)
    space.memory.fill_(_UNTOUCHED)
    (found,) = torch.autograd.grad(result.sum(), first)
    assert torch.equal(found, wanted)
    assert is_used(space)


def test_the_innermost_one_is_used_by_its_own_thread() -> None:
    given = operands()
    outer, inner = workspace(1 << 20), workspace(1 << 20)
    with outer, inner:
        thread = threading.Thread(target=two_products, args=given)
        thread.start()
        thread.join()
        assert not is_used(outer) and not is_used(inner)
        two_products(*given)
    assert is_used(inner) and not is_used(outer)


def test_threads_take_turns() -> None:
    given = operands()
    wanted, space = two_products(*given), workspace(1 << 20)
    found: list[Tensor] = []

    def call() -> None:
        with space:
            found.extend(two_products(*given) for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 150
    assert all(torch.equal(each, wanted) for each in found)


def test_one_that_inference_mode_used_first_serves_training() -> None:
    x, first, second = operands()
    with torch.inference_mode():
        space = workspace(1 << 20)
        with space:
            wanted = two_products(x, first, second)
    with space:
        assert torch.equal(two_products(x, first.requires_grad_(), second), wanted)


def test_its_memory_ends_with_it() -> None:
    space = workspace(1 << 20)
    with space:
        two_products(*operands())
    memory = weakref.ref(space.memory)
    del space
    gc.collect()
    assert memory() is None


def test_one_that_is_too_small_names_the_bytes() -> None:
    given = operands()
    needed = two_products.lower(*given).workspace_bytes
    with pytest.raises(fg.FusegenError, match=rf"two_products needs a workspace of {needed} bytes"), workspace(needed - 1):
        two_products(*given)


def test_one_on_another_device_is_refused() -> None:
    with pytest.raises(fg.FusegenError, match="its workspace is on meta"), fg.Workspace(1 << 20, device="meta"):
        two_products(*operands())


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_size_is_a_number_of_bytes(size: int) -> None:
    with pytest.raises(fg.FusegenError, match="its size is"):
        fg.Workspace(size, device="cpu")


def test_explain_prints_its_formula() -> None:
    text = two_products.lower(*operands(), target="sm_90a").explain()
    assert "workspace: 4.0 KiB, peak 512 * x_dim0 bytes" in text
