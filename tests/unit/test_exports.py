"""What others may rely on: public names, their attributes, the commands. A change here is a change for every user."""

from __future__ import annotations

import pytest
import torch

import fusegen as fg
from fusegen import nn
from fusegen.cli.main import COMMANDS

NAMES = [
    "FusegenError",
    "Kernel",
    "Lowered",
    "Static",
    "Vjp",
    "Workspace",
    "__version__",
    "benchmark",
    "cuda_graph",
    "dropout",
    "find",
    "graph_step",
    "invertible_layer_norm",
    "kernel",
    "load",
    "patch",
    "tune",
    "unpatch",
    "vjp",
]

MODULES = [
    "GEGLU",
    "GELU",
    "GLU",
    "MLP",
    "AddLayerNorm",
    "AddRMSNorm",
    "Attention",
    "BiasDropoutAdd",
    "BiasGELU",
    "CrossEntropyLoss",
    "Embedding",
    "FusedQKVLinear",
    "FusedTransformerLayer",
    "GatedMLP",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "LinearCrossEntropyLoss",
    "LogSoftmax",
    "RMSNorm",
    "ReGLU",
    "SiLU",
    "Softmax",
    "SwiGLU",
]


def public(value: object) -> set[str]:
    """Names of an object that do not begin with an underscore."""
    return {name for name in dir(value) if not name.startswith("_")}


def test_the_package() -> None:
    assert fg.__all__ == NAMES
    assert set(NAMES) <= set(dir(fg))
    for name in NAMES:
        assert getattr(fg, name) is not None
    with pytest.raises(AttributeError, match="'fusegen' has no attribute 'nonsense'"):
        getattr(fg, "nonsense")  # noqa: B009 - a type checker refuses the other spelling, as it should


def test_a_star_gives_the_public_names() -> None:
    scope: dict[str, object] = {}
    exec("from fusegen import *", scope)
    assert {name for name in scope if name != "__builtins__"} == set(NAMES)


def test_modules() -> None:
    assert nn.__all__ == MODULES


def test_kernels() -> None:
    kernel = fg.kernel(lambda x: x + 1)
    assert isinstance(kernel, fg.Kernel)
    assert public(kernel) == {
        "backward",
        "fresh",
        "function",
        "lower",
        "op",
        "operator",
        "options",
    }
    lowered = kernel.lower(torch.empty(4, 8, device="meta"), target="sm_90a")
    assert isinstance(lowered, fg.Lowered)
    stages = {"traced", "graph", "groups", "choices", "program", "plans", "sources", "asm"}
    assert public(lowered) == stages | {"explain", "html", "program_by", "sizes", "step_count", "target", "workspace_bytes"}
    assert set(lowered.asm) == {"cuda", "ptx", "sass"}
    assert set(kernel.lower(torch.empty(4, 8, device="meta"), target="cpu").asm) == {"cpp"}


def test_errors_have_their_parts() -> None:
    assert {"what", "where", "hint", "one_line"} <= public(fg.FusegenError("it went wrong"))


def test_the_commands() -> None:
    assert list(COMMANDS) == ["list", "show", "explain", "find", "build", "demo", "bench", "tune", "verify", "doctor", "cache"]
