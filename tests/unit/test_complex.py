"""Complex numbers within kernels: of arguments, and of pairs of floats; rotations as transformers write them, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError, FusegenError, TraceError, UnsupportedError
from tests.naming import case
from tests.unit.bundles import built
from tests.unit.eager import agree, agree_each, expressions, randn, refused

BF16 = torch.bfloat16


def complexes(*shape: int, dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def angles(positions: int, width: int) -> Tensor:
    return torch.outer(torch.arange(positions).float(), 1e4 ** -(torch.arange(0, width, 2) / width))


def rotated(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """As Llama writes it."""
    pairs = [torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) for x in (q, k)]
    assert freqs_cis.shape == (pairs[0].shape[1], pairs[0].shape[-1])
    shape = [d if i in (1, pairs[0].ndim - 1) else 1 for i, d in enumerate(pairs[0].shape)]
    freqs_cis = freqs_cis.view(*shape)
    return tuple(torch.view_as_real(z * freqs_cis).flatten(3).type_as(x) for z, x in zip(pairs, (q, k), strict=True))  # type: ignore[return-value]


@pytest.mark.usefixtures("either")
def test_rotations_of_heads() -> None:
    freqs = torch.polar(torch.ones(7, 8), angles(7, 16))
    for dtype in (BF16, torch.float32):
        agree(rotated, (randn(2, 7, 4, 16, dtype=dtype), randn(2, 7, 2, 16, dtype=dtype), freqs))


@pytest.mark.usefixtures("either")
def test_rotations_by_angles() -> None:
    def function(x: Tensor, t: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(t), t)
        return torch.view_as_real(z).flatten(-2)

    agree(function, (randn(3, 7, 16), angles(7, 16)))


def test_what_complex_numbers_know() -> None:
    table = """
        z * w | z + w | z - w | 2 * z | z * (1 + 2j) | z / 4 | z * x | x * z | z + x | x - z | 1 - z | -z | z.conj().resolve_conj()
        torch.complex(x, z.real) | torch.polar(x, z.imag) | z.T.reshape(-1)[::2] | z[None, 1:].expand(2, 2, 5) | z.unsqueeze(0)
        z.transpose(0, 1).flatten() | (z + 1j).permute(1, 0) | torch.add(z, w) | z.clone().contiguous()
        torch.cat([z, z * 2], 1) | torch.stack([z, w.expand(3, 5)])
    """
    texts = [*expressions(table), "z.abs()", "abs(z)", "z.angle()", "torch.imag(z)", "z.real * x", "(z * z.conj()).real"]
    for dtype, parts in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        agree_each("z, w, x", "\n".join(texts), (complexes(3, 5, dtype=dtype), complexes(5, dtype=dtype), randn(3, 5).to(parts)))


def test_a_complex_argument_lies_anywhere() -> None:
    def function(z: Tensor, x: Tensor) -> Tensor:
        assert z.is_complex() and torch.is_complex(z) and not x.is_complex() and z.dtype is torch.complex64
        return torch.view_as_real(z.resolve_conj()).sum(-1) * x

    kernel = fg.kernel(function)
    z = complexes(6, 8)
    agree(
        kernel,
        (z, randn(6, 8)),
        (z.T.contiguous().T.conj(), randn(6, 8)),
        (z[:, ::2], randn(6, 4)),
        (complexes(0, 8), randn(0, 8)),
    )
    assert kernel(z=z, x=randn(6, 8)).shape == (6, 8)
    assert "view" not in kernel.lower(z, randn(6, 8)).explain()


def test_the_same_parameter_may_be_real() -> None:
    agree(lambda z: abs(z * 2), (complexes(3, 4),), (randn(3, 4),), (complexes(3, 4),))


def test_gradients() -> None:
    def function(x: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        y = torch.view_as_complex(x.reshape(3, 4, 2))
        w = (y * z.conj() + 2 * z - y / 3) * (1 + 2j)
        return torch.view_as_real(w).flatten(-2), w.abs(), w.real * w.imag

    x, z = randn(3, 8).requires_grad_(), complexes(3, 4).requires_grad_()
    found = []
    for each in (fg.kernel(function), function):
        total = sum((t * t).sum() for t in each(x, z))
        found.append(torch.autograd.grad(total, (x, z)))
    torch.testing.assert_close(found[0], found[1])


def test_results_are_complex() -> None:
    def function(x: Tensor, z: Tensor) -> dict[str, Any]:
        return {"turned": z.T * 2j, "all": (z * x[:, :4], None, x.sum(-1))}

    x, z = randn(3, 8).requires_grad_(), complexes(3, 4).requires_grad_()
    kernel = fg.kernel(function)
    found, wanted = (each(x, z) for each in (kernel, function))
    torch.testing.assert_close(found, wanted)
    for each in (found, wanted):
        each["gradients"] = torch.autograd.grad((each["turned"].abs() + 1).sum() + each["all"][0].real.sum(), (x, z))
    torch.testing.assert_close(found["gradients"], wanted["gradients"])


def test_a_complex_result_under_torch_compile() -> None:
    kernel = fg.kernel(lambda size, angle: torch.polar(size, angle))
    compiled = torch.compile(lambda size, angle: kernel(size, angle) * 2, backend="aot_eager", fullgraph=True)
    size, angle = randn(5, 6).abs(), randn(5, 6)
    torch.testing.assert_close(compiled(size, angle), torch.polar(size, angle) * 2)


def test_a_complex_result_of_a_built_kernel(tmp_path: Path) -> None:
    def polar(size: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        return torch.polar(size, angle), size + angle

    size, angle = randn(5, 6).abs(), randn(5, 6)
    torch.testing.assert_close(built(tmp_path / "k", polar, (size, angle))(size, angle), polar(size, angle))


def test_a_module_takes_complex_arguments() -> None:
    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
            z = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * freqs
            return torch.view_as_real(z * self.scale).flatten(-2)

    module = Rotary()
    x, freqs = randn(5, 8), complexes(5, 4)
    torch.testing.assert_close(fg.kernel(module)(x, freqs), module(x, freqs))


CLOSED = complexes(3, 4)
REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], type[FusegenError]]] = {
    "'exp' of complex numbers": (lambda z, x: z.exp().abs(), UnsupportedError),
    "division by complex": (lambda z, x: torch.view_as_real(1 / z), UnsupportedError),
    "'matmul' of complex": (lambda z, x: (z @ z.T).abs(), UnsupportedError),
    "complex and real tensors": (lambda z, x: torch.stack([z, x]).abs(), UnsupportedError),
    "'eq' of complex": (lambda z, x: z == x, UnsupportedError),
    "a complex cannot be used": (lambda z, x: x * 1j, TraceError),
    "add:": (lambda z, x: torch.add(z, z, alpha=2).abs(), TraceError),
    "needs a last dim of size 2": (lambda z, x: torch.view_as_complex(x).abs(), TraceError),
    "complex64 is not supported": (lambda z, x: (z * CLOSED).abs(), ArgumentError),
}


def test_what_is_refused() -> None:
    for says, (function, error) in REFUSED.items():
        with case(says):
            refused(function, complexes(3, 4), randn(3, 4), error=error, says=says)
