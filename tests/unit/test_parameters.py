"""A kernel's parameters: annotations, defaults, names that emitted text cannot have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.compiler.parameters import Parameters
from fusegen.errors import ArgumentError
from tests.naming import case
from tests.unit.eager import agree, randn

if TYPE_CHECKING:
    from nowhere import Unknown  # type: ignore[import-not-found]


def declared(
    x: Annotated[Tensor, "rows cols"],
    w: Annotated[Tensor, "cols"] | None = None,
    y: Optional[Annotated[Tensor, "rows n"]] = None,  # noqa: UP045 - the old spelling must work as well
    *,
    flag: bool = False,
    mode: str = "a",
    n: fg.Static[int] = 2,
    m: fg.Static[int] | None = None,
    p: float = 0.5,
) -> Tensor:
    return x if flag or mode or n or m or p or w is y else x * 2


def test_what_annotations_say() -> None:
    parameters = Parameters.of(declared)
    assert parameters.emitted_names == ("x", "w", "y", "flag", "mode", "n", "m", "p")
    assert parameters.static == {"flag", "mode", "n", "m"}
    assert parameters.dim_names == {"x": ("rows", "cols"), "w": ("cols",), "y": ("rows", "n_size")}
    assert parameters.defaults["p"] == 0.5 and "x" not in parameters.defaults


def test_one_annotation_that_cannot_be_resolved_leaves_the_others() -> None:
    def function(x: Unknown, n: fg.Static[int], flag: bool) -> Unknown:
        return x * n if flag else x

    assert Parameters.of(function).static == {"n", "flag"}


def test_binding() -> None:
    parameters = Parameters.of(declared)
    assert parameters.bind((1,), {"p": 2.0}) == [1, None, None, False, "a", 2, None, 2.0]
    with pytest.raises(TypeError, match="declared: missing a required argument: 'x'") as caught:
        parameters.bind((), {})
    assert isinstance(caught.value, ArgumentError) and "declared(x" in (caught.value.hint or "")


def kernel_with(name: str, body: str = "torch.exp({n}) + other * s") -> fg.Kernel[..., Any]:
    """A kernel whose first parameter has some name."""
    scope: dict[str, Any] = {"torch": torch}
    results = f"h / h.sum(-1, keepdim=True), h.sum(0), torch.maximum({name}, other) % 3"
    source = f"def ker({name}, other, s):\n    h = {body.format(n=name)}\n    return {results}\n"
    exec(source, scope)
    return fg.kernel(scope["ker"])


SCALAR_NAMES = ["c", "x_raw", "x_ptr", "expf", "v", "x_dim0", "out", "lanes", "struct_"]
DIM_NAMES = ("row column", "i0 i1", "v lanes", "part group", "x y", "row_count column_count", "a-b c.d", "n n", "1 2")


def test_any_name_of_a_tensor() -> None:
    for name in ["c", "i0", "expf", "NULL", "x_ptr", "row"]:
        with case(name):
            agree(kernel_with(name), (randn(3, 8), randn(1, 8), 2.0))


def test_any_name_of_a_scalar() -> None:
    for name in SCALAR_NAMES:
        scope: dict[str, Any] = {"torch": torch}
        exec(
            f"def ker(x, y, {name}):\n    h = torch.exp(x) + y * {name}\n    return h / h.sum(-1, keepdim=True), h.sum(0)\n", scope
        )
        agree(scope["ker"], (randn(3, 8), randn(3, 8), 2.0))


@pytest.mark.parametrize("part", range(2))
def test_any_name_of_a_dim(part: int) -> None:
    for names in DIM_NAMES[part::2]:
        with case(names):

            def function(x: Tensor, y: Tensor) -> Tensor:
                return x.softmax(-1).T + y.T

            function.__annotations__["x"] = Annotated[Tensor, names]
            agree(function, (randn(6, 8), randn(6, 8)), (randn(5, 7), randn(5, 7)))
