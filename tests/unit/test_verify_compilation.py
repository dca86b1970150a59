"""Sources are compiled while others are lowered: each text once, and one that NVRTC refuses is no error yet."""

from __future__ import annotations

from dataclasses import replace

import torch

from fusegen.specs import SPECS
from fusegen.verify.run import Compilation


def test_equal_texts_are_compiled_once_and_a_wrong_one_is_left_out() -> None:
    (source,) = SPECS["gelu"].lower(torch.bfloat16, "sm_90a", rows=8, features=64).sources
    wrong = replace(source, math="no C++")
    with Compilation("sm_90a") as compilation:
        compilation.add([source, wrong])
        compilation.add([source])
        assert list(compilation.finish()) == [1, 2]


def test_nothing_to_compile() -> None:
    with Compilation("sm_90a") as compilation:
        assert not list(compilation.finish())
