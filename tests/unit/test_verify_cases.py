"""The cases reach every form that a plan can take, and are what they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusegen.dtypes import DType
from fusegen.specs import SPECS, Spec
from fusegen.specs.spec import tensor
from fusegen.verify.cases import CANONICAL, Case, DataValues, TensorLayout, cases, draw, is_meta, row_major
from tests.naming import case as named

CPU = torch.device("cpu")


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_every_spec_has_all_classes_of_cases(spec: Spec) -> None:
    assert spec.sizes, "the example must take its sizes as parameters: `def _example(dtype, rows: int = 16384, …)`"
    found = {case.name: case for case in cases(spec, spec.dtypes[-1])}
    general = {CANONICAL, "odd", "unaligned", "padded rows", "transposed", "every second element", "expanded", "empty", "64-bit"}
    assert general | {values.value for values in DataValues if values is not DataValues.ORDINARY} <= set(found)
    canonical = {name: TensorLayout.of(v) for name, v in spec.example(spec.dtypes[-1].torch).items() if is_meta(v)}
    assert {name: found[CANONICAL].arguments[name] for name in canonical} == canonical


def test_an_example_without_sizes_has_cases_all_the_same() -> None:
    gelu = SPECS["gelu"]
    plain = Spec("gelu", gelu.kernel, "elementwise", {"input": tensor("16 64")})
    assert {CANONICAL, "unaligned", "nan"} <= {case.name for case in cases(plain, DType.FLOAT32)}


# Layouts.

SHAPE = (2, 3, 4, 8)
PLAIN = TensorLayout(torch.float32, SHAPE, row_major(SHAPE))
LAYOUTS = {
    "shifted": (PLAIN.shifted(), (96, 32, 8, 1)),
    "padded": (PLAIN.padded(8), (192, 64, 16, 1)),
    "stepped": (PLAIN.stepped(), (192, 64, 16, 2)),
    "swapped": (PLAIN.swapped(-3, -2), (96, 8, 24, 1)),
    "expanded": (PLAIN.expanded(), (0, 32, 8, 1)),
    "far apart": (PLAIN.far_apart(1000), (1000, 32, 8, 1)),
}


def test_a_tensor_lies_as_its_layout_says() -> None:
    for layout, strides in LAYOUTS.values():
        with named((layout, strides)):
            tensor = layout.tensor(lambda shape: torch.arange(float(torch.Size(shape).numel())).view(shape), CPU)
            assert (tuple(tensor.shape), tensor.stride()) == (SHAPE, strides)
            assert TensorLayout.of(tensor) == layout == TensorLayout.of(layout.stand_in())
            storage = torch.empty(0).set_(tensor.untyped_storage())
            used = len({float(x) for x in tensor.flatten()})
            assert int(storage.isnan().sum()) == storage.numel() - used, "what is not used is NaN"
            assert layout.stored == storage.numel()


# Values.


def test_values_are_the_same_each_time() -> None:
    for values in DataValues:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            with named((values, dtype)):
                first, second = (draw(values, (9, 40), dtype, CPU, torch.Generator().manual_seed(3)) for _ in range(2))
                assert first.dtype is dtype and first.shape == (9, 40)
                assert torch.equal(first.nan_to_num(7), second.nan_to_num(7))
                assert bool(first.isinf().any()) is (values is DataValues.INFINITE)
                assert bool(first.isnan().any()) is (values is DataValues.NAN)
                assert bool(first[-1].isfinite().all()), "some rows are as always"


def test_hard_values_are_hard() -> None:
    def drawn(values: DataValues) -> Tensor:
        return draw(values, (64, 512), torch.float32, CPU, torch.Generator().manual_seed(0)).double()

    assert 80 < drawn(DataValues.MEAN_100).mean() / drawn(DataValues.MEAN_100).std() < 120
    assert 0 < drawn(DataValues.TINY_VARIANCE).std() < 1e-9
    assert drawn(DataValues.NEAR_OVERFLOW).abs().min() > 1.7e38
    assert drawn(DataValues.LARGE).square().sum(-1).max() < torch.finfo(torch.float32).max


def test_a_case_says_what_came_before() -> None:
    (case,) = (case for case in cases(SPECS["softmax"], DType.BFLOAT16) if case.name == "another length, odd")
    assert isinstance(case, Case) and str(case) == "input: bf16 67x2049, after input: 67x2048"
