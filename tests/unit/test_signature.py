"""What the compiler is told of tensors: literal and run-time sizes, strides, alignment."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fusegen.errors import FusegenError
from fusegen.ir.graph import InputSpec
from fusegen.runtime.signature import History, Sizes, input_specs
from fusegen.runtime.tensors import span
from tests.naming import case


def specs(
    history: History | None = None, names: dict[str, Sequence[str]] | None = None, **tensors: Tensor
) -> tuple[dict[str, InputSpec], Sizes]:
    found, sizes = input_specs(tensors, history or History(), names or {})
    return {s.name: s for s in found}, sizes


def text(spec: InputSpec) -> tuple[str, str]:
    return str(tuple(map(str, spec.shape))), str(tuple(map(str, spec.strides)))


def test_rows_are_run_time_and_features_literal() -> None:
    found, sizes = specs(x=torch.ones(5, 7, 64))
    assert text(found["x"]) == ("('x_dim0', 'x_dim1', '64')", "('64*x_dim1', '64', '1')")
    assert dict(sizes.hints) == {"x_dim0": 5, "x_dim1": 7} and dict(sizes.sources)["x_dim1"] == ("x", 1)
    assert not sizes.bounds and not sizes.multiples


def test_equal_rows_share_a_symbol_and_rows_equal_to_a_feature_are_literal() -> None:
    found, _ = specs(x=torch.ones(5, 64), y=torch.ones(5, 8), z=torch.ones(64, 3))
    assert [str(found[n].shape[0]) for n in "xyz"] == ["x_dim0", "x_dim0", "64"]


def test_sizes_of_one_are_literal() -> None:
    found, _ = specs(x=torch.ones(1, 64), y=torch.ones(5, 1))
    assert found["x"].shape == (1, 64) and str(found["y"].shape) == "(y_dim0, 1)"
    assert found["x"].strides[0] == 0 and found["y"].strides[1] == 0


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


def test_a_feature_of_one_says_nothing_of_the_others() -> None:
    history = History()
    specs(history, x=torch.ones(5, 64))
    found, _ = specs(history, x=torch.ones(5, 1))
    assert found["x"].shape[1] == 1
    found, sizes = specs(history, x=torch.ones(5, 64))
    assert found["x"].shape[1] == 64 and not sizes.bounds


def test_rows_that_were_asked_for_are_literal() -> None:
    found, _ = specs(History(literal={("x", 0)}), x=torch.ones(5, 64), y=torch.ones(5, 8))
    assert found["x"].shape == (5, 64) and found["y"].shape == (5, 8)


def test_names_of_dims() -> None:
    found, _ = specs(None, {"x": ["rows", "cols"], "y": ["rows"]}, x=torch.ones(5, 64), y=torch.ones(6, 64))
    assert [str(found[n].shape[0]) for n in "xy"] == ["rows", "y_dim0"]


def test_hidden_tensors_are_literal() -> None:
    (spec,), sizes = input_specs({"w": torch.ones(5, 64)}, History(), {}, frozenset({"w"}))
    assert spec.shape == (5, 64) and spec.hidden and not sizes.hints


def test_dtypes_that_are_not_known() -> None:
    with pytest.raises(FusegenError, match="complex64"):
        specs(x=torch.ones(3, dtype=torch.complex64))


def test_span() -> None:
    assert span(torch.ones(4, 8)) == 32 and span(torch.ones(1).expand(9)) == 1 and span(torch.ones(4, 8)[:, ::2]) == 31
    assert span(torch.ones(0, 8)) == 0 and span(torch.ones(())) == 1
