"""What the compiler is told of tensors: literal and run-time sizes, strides, alignment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusegen.compiler.signature import History, SymbolicSizes, input_specs
from fusegen.ir.graph import InputSpec
from tests.naming import case


def specs(
    history: History | None = None, names: dict[str, Sequence[str]] | None = None, **tensors: Tensor
) -> tuple[dict[str, InputSpec], SymbolicSizes]:
    found, sizes = input_specs(tensors, history or History(), names or {})
    return {s.name: s for s in found}, sizes


def text(spec: InputSpec) -> tuple[str, str]:
    return str(tuple(map(str, spec.shape))), str(tuple(map(str, spec.strides)))


def test_strides_that_the_sizes_imply_are_no_symbols() -> None:
    for view, strides in [
        (lambda b: b[:, :32], "('x_stride0', '1')"),
        (lambda b: b.T, "('1', 'x_stride1')"),
        (lambda b: b[:, ::2], "('32*x_stride1', 'x_stride1')"),
        (lambda b: b[:, :60:2], "('x_stride0', 'x_stride1')"),
        (lambda b: b[:1].expand(40, 64), "('0', '1')"),
        (lambda b: b[:, :1].expand(40, 64), "('x_stride0', '0')"),
        (lambda b: b[3:9], "('64', '1')"),
        (lambda b: torch.as_strided(b, (6, 8), (3, 2)), "('x_stride0', 'x_stride1')"),
    ]:
        with case(view):
            found, _ = specs(x=view(torch.ones(40, 64)))
            assert text(found["x"])[1] == strides


def test_alignment_is_of_the_address() -> None:
    for offset, width, alignment in [(0, 64, 16), (1, 64, 2), (2, 64, 4), (4, 64, 8), (8, 64, 16), (0, 65, 16), (4, 65, 8)]:
        with case(offset):
            base = torch.ones(4 * width + 8, dtype=torch.bfloat16)
            found, _ = specs(x=base[offset : offset + 4 * width].view(4, width))
            assert found["x"].alignment == alignment


def test_alignment_is_also_of_strides_that_nothing_implies() -> None:
    found, _ = specs(x=torch.ones(4, 66, dtype=torch.bfloat16)[:, :64], y=torch.ones(4, 72, dtype=torch.bfloat16)[:, :64])
    assert (found["x"].alignment, found["y"].alignment) == (4, 16)


def test_a_feature_that_changes_becomes_a_size_with_a_bound_and_a_divisor() -> None:
    history = History()
    specs(history, x=torch.ones(5, 64))
    found, sizes = specs(history, x=torch.ones(5, 72))
    assert (
        str(found["x"].shape) == "(x_dim0, x_dim1)"
        and dict(sizes.bounds) == {"x_dim1": 128}
        and dict(sizes.multiples) == {"x_dim1": 8}
    )
    found, sizes = specs(history, x=torch.ones(5, 64))
    assert dict(sizes.bounds) == {"x_dim1": 64} and dict(sizes.multiples) == {"x_dim1": 16}
