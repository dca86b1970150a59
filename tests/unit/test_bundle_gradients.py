"""Built kernels are recorded by autograd: their gradients are those of declared kernels, bit by bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen.bundle.load import BuiltFunction
from fusegen.errors import GradientError
from tests.unit.bundles import CASES, built, equal, numbers, row
from tests.unit.eager import randn

ROOT = Path(__file__).resolve().parents[2]

layer = nn.Linear(8, 4)


def of_layer(x: Tensor) -> Tensor:
    return torch.tanh(layer(x))


def dropped(x: Tensor) -> Tensor:
    return F.dropout(torch.relu(x), 0.5)


def shortened(x: Tensor, length: int, scale: float) -> Tensor:
    return torch.tanh(x[:length] * scale)


def transposed(x: Tensor) -> Tensor:
    return x.exp().t()


def one_of_two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sin(x) * 2, torch.exp(y)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> BuiltFunction:
    return built(tmp_path_factory.mktemp("row") / "kernels", row, (randn(7, 100), randn(100)))


def leaves(arguments: tuple[Any, ...]) -> list[Any]:
    return [a.detach().clone().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in arguments]


def gradients(function: Any, arguments: tuple[Any, ...]) -> list[Tensor | None]:
    """The results of a call, and the gradients by its tensors."""
    given = leaves(arguments)
    results = torch.utils._pytree.tree_leaves(function(*given))
    torch.autograd.backward([r for r in results if r.requires_grad], [torch.cos(r.detach()) for r in results if r.requires_grad])
    return [*(r.detach() for r in results), *(a.grad for a in given if isinstance(a, Tensor) and a.requires_grad)]


@pytest.mark.parametrize("name", ["pointwise", "row", "product", "several", "embedded", "attended", "numbers"])
def test_gradients_are_a_kernel_s(name: str, tmp_path: Path) -> None:
    function, made, other = CASES[name]
    loaded = built(tmp_path / "kernels", function, made)
    for arguments in (made, other, other):
        assert equal(gradients(loaded, arguments), gradients(fg.kernel(function), arguments))


def test_a_call_decides_which_gradients_are_wanted(kernel: BuiltFunction) -> None:
    x, weight = randn(9, 100).requires_grad_(), randn(100)
    kernel(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None
    assert not kernel(x.detach(), weight).requires_grad
    kernel(x.detach(), weight.requires_grad_()).sum().backward()
    assert weight.grad is not None


def test_a_result_without_a_derivative_by_the_wanted_inputs_requires_none(tmp_path: Path) -> None:
    loaded = built(tmp_path / "kernels", one_of_two, (randn(5, 8), randn(6, 8)))
    first, second = loaded(randn(5, 8).requires_grad_(), randn(7, 8))
    assert first.requires_grad and not second.requires_grad


@pytest.mark.parametrize("layout", ["expanded", "transposed", "misaligned"])
def test_incoming_gradients_lie_in_memory_as_they_like(layout: str, kernel: BuiltFunction) -> None:
    gradient = {
        "expanded": torch.ones(1, 1).expand(9, 100),
        "transposed": randn(100, 9).mT,
        "misaligned": randn(901)[1:].view(9, 100),
    }[layout]
    x, weight = randn(9, 100).requires_grad_(), randn(100)
    for _ in range(2):
        (ours,) = torch.autograd.grad(kernel(x, weight), x, gradient)
        (theirs,) = torch.autograd.grad(kernel(x, weight), x, gradient.clone(memory_format=torch.contiguous_format))
        assert equal(ours, theirs)


def test_rows_of_transposed_results_may_be_of_any_length(tmp_path: Path) -> None:
    """The length is the stride of their gradients: built for a multiple of 16 bytes, it may be another."""
    loaded = built(tmp_path / "kernels", transposed, (randn(8, 16),))
    x = randn(5, 16)
    assert equal(gradients(loaded, (x,)), gradients(fg.kernel(transposed), (x,)))


def test_captured_tensors_have_gradients(tmp_path: Path) -> None:
    loaded, x = built(tmp_path / "kernels", of_layer, (randn(5, 8),)), randn(7, 8)
    wrt = (layer.weight, layer.bias)
    ours = torch.autograd.grad(loaded(x, layer_weight=layer.weight, layer_bias=layer.bias).sum(), wrt)
    assert equal(ours, torch.autograd.grad(fg.kernel(of_layer)(x).sum(), wrt))


def test_the_backward_pass_has_the_random_key_of_the_forward_pass(tmp_path: Path) -> None:
    loaded, x = built(tmp_path / "kernels", dropped, (randn(5, 64),)), torch.ones(9, 64, requires_grad=True)
    torch.manual_seed(3)
    result = loaded(x)
    result.sum().backward()
    assert x.grad is not None and equal(x.grad, result.detach())
    torch.manual_seed(3)
    assert equal(result, fg.kernel(dropped)(x))


def test_sizes_and_numbers_reach_the_backward_pass(tmp_path: Path) -> None:
    loaded = built(tmp_path / "kernels", shortened, (randn(12, 8), 5, 0.5))
    for arguments in ((randn(9, 8), 4, 0.25), (randn(20, 8), 7, 3.0)):
        assert equal(gradients(loaded, arguments), gradients(fg.kernel(shortened), arguments))


def test_conditions_of_numbers_are_guards_of_recorded_calls(tmp_path: Path) -> None:
    loaded, x = built(tmp_path / "kernels", numbers, (randn(5, 8), 0.5, 3)), randn(5, 8).requires_grad_()
    loaded(x, 0.5, 3)
    with pytest.raises(fg.FusegenError, match=r"built for lr > 0\.25"):
        loaded(x, 0.125, 3)


def test_a_kernel_without_a_derivative_is_built_and_refuses_gradients(tmp_path: Path) -> None:
    def largest(x: Tensor) -> Tensor:
        return x.argmax(-1)

    loaded, x = built(tmp_path / "kernels", largest, (randn(5, 8),)), randn(6, 8)
    assert equal(loaded(x), x.argmax(-1))
    with pytest.raises(GradientError, match="'x' requires a gradient"):
        loaded(x.requires_grad_())


def test_second_derivatives_are_refused(kernel: BuiltFunction) -> None:
    x = randn(9, 100).requires_grad_()
    (gradient,) = torch.autograd.grad(kernel(x, randn(100)).square().sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="differentiated again"):
        gradient.sum().backward()


def test_the_default_dtype_may_change_before_the_backward_pass(kernel: BuiltFunction) -> None:
    x = randn(9, 100).requires_grad_()
    result = kernel(x, randn(100))
    torch.set_default_dtype(torch.float64)
    try:
        result.backward(torch.ones(9, 100, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert x.grad is not None and x.grad.dtype is torch.float32


ALONE = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sympy", "jinja2") or name in ("fusegen.jit.nvrtc", "cuda.bindings.nvrtc"):
            raise ImportError(f"{name} cannot be imported here")

sys.meta_path.insert(0, Refuses())
import torch
import fusegen as fg
x, weight = torch.load(sys.argv[2], weights_only=True)
result = fg.load(sys.argv[1]).row(x.requires_grad_(), weight.requires_grad_())
result.sum().backward()
torch.save((x.grad, weight.grad), sys.argv[3])
print(sorted(name for name in sys.modules if name.split(".")[0] in ("sympy", "jinja2") or "nvrtc" in name))
"""


def test_a_process_without_sympy_jinja_and_nvrtc_trains(tmp_path: Path) -> None:
    built(tmp_path / "kernels", row, (randn(7, 100), randn(100)))
    x, weight = randn(9, 100), randn(100)
    torch.save((x, weight), tmp_path / "tensors")
    command = [sys.executable, "-c", ALONE, *(str(tmp_path / name) for name in ("kernels", "tensors", "gradients"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[]"
    x.requires_grad_(), weight.requires_grad_()
    fg.kernel(row)(x, weight).sum().backward()
    assert equal(torch.load(tmp_path / "gradients", weights_only=True), (x.grad, weight.grad))


def test_a_folder_for_cuda_holds_the_passes(tmp_path: Path) -> None:
    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return torch.sigmoid(x) * weight

    built(tmp_path / "kernels", scaled, (randn(7, 64).bfloat16(), randn(64).bfloat16()), "sm_90a")
    folders = {path.parent.name for path in (tmp_path / "kernels").rglob("*.cubin") if path.read_bytes()[:4] == b"\x7fELF"}
    assert folders == {"sm_90a-0", "sm_90a-0-forward-0", "sm_90a-0-backward-0"}
