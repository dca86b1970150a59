"""Names in emitted text."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusegen as fg
from fusegen.jit.nvrtc import compile_ptx
from fusegen.schedule.names import identifier

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
PRIMITIVES = sorted({p.name.partition(".")[0] for folder in ("cuda", "cpu") for p in (TEMPLATES / folder / "primitives").iterdir()})


def test_names_of_primitives_are_not_given_to_users() -> None:
    free = [name for name in PRIMITIVES if identifier(name) == name]
    assert not free, "add them to _PRIMITIVES in fusegen/schedule/names.py"


PIPELINES = [*TEMPLATES.glob("cuda/*.cu*.jinja"), *TEMPLATES.glob("cpu/*.jinja"), *TEMPLATES.glob("*/rows/*.jinja")]
OF_LANES = (
    "contraction.cu.jinja",
    "chunks.cuh.jinja",
    "few_rows.cu.jinja",
    "mma.cu.jinja",
    "products.cuh.jinja",
    "attention.cu.jinja",
    "few_queries.cu.jinja",
    "pages.cuh.jinja",
    "copied_heads.cuh.jinja",
    "loaded_heads.cuh.jinja",
    "joined_sums.cuh.jinja",
)
"""Their pipelines call wrappers, and user's names occur in these alone."""

IN_FUNCTIONS = {"mask", "value", "distance", "through", "before", "carry", "earlier", "warps"} | set(
    ["a", "b", "far", "high", "key", "keys", "low", "near", "other", "rises", "run", "step", "values"]
)
"""Names in a pipeline's own small functions, which hold no name of a user's."""


def words_of(template: Path) -> set[str]:
    """The identifiers that a template writes as they stand."""
    text = re.sub(r"\{#.*?#\}|\{%.*?%\}|//[^\n]*|\"[^\"\n]*\"", "", template.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"[\w@]*@[\w@]*", " ", re.sub(r"\{\{.*?\}\}", "@", text, flags=re.DOTALL))
    return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", text))


def test_names_of_pipelines_are_not_given_to_users() -> None:
    words = {word for template in PIPELINES if template.name not in OF_LANES for word in words_of(template)}
    free = {word for word in words if identifier(word) == word} - IN_FUNCTIONS - {"result", "loaded"}  # taken by the lowering
    assert not free, "add them to _PIPELINES in fusegen/schedule/names.py"


ATTENTION = (
    "def kernel(q, k, v, {name}):\n    return (torch.softmax(q @ k.mT * 0.125 + {name}, -1).to(v.dtype) @ v) * {name}[:, :64]"
)
PRODUCT = "def kernel(x, w, {name}):\n    return torch.relu(x @ w) * {name}"


def of_lanes(source: str, name: str) -> str:
    """The math of a kernel on tensor cores, with its wrappers, and with an operand of a name."""
    names: dict[str, Any] = {"torch": torch}
    exec(source.format(name=name), names)
    of_attention: list[tuple[int, ...]] = [*[(2, 4, 256, 64)] * 3, (256, 256)]
    shapes = of_attention if source is ATTENTION else [(256, 256), (256, 512), (256, 512)]
    tensors = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes]
    return fg.kernel(names["kernel"]).lower(*tensors, target="sm_90a").sources[0].math


def test_what_templates_append_to_names_is_not_given_to_users() -> None:
    """Else a user's `x_raw` would be the raw `x`."""
    text = "\n".join(template.read_text(encoding="utf-8") for template in PIPELINES)
    found = set(re.findall(r"(?:name|\]) *\}\}_([a-z]+)\b", text)) | set(re.findall(r"name *~ *\"_([a-z]+)\"", text))
    assert not {suffix for suffix in found if identifier(f"x_{suffix}") == f"x_{suffix}"}


@pytest.mark.parametrize("name", ["total_lanes", "x_staged"])
def test_a_parameter_named_as_a_temporary(name: str) -> None:
    scope: dict[str, object] = {}
    exec(f"def function({name}, y, z):\n    return ({name} * y).softmax(-1) * z", scope)  # the name is the point
    arguments = torch.randn(3, 4, 40).unbind()
    torch.testing.assert_close(fg.kernel(scope["function"])(*arguments), scope["function"](*arguments))


@pytest.mark.parametrize("source", [ATTENTION, PRODUCT], ids=["attention", "product"])
def test_wrappers_do_not_declare_a_name_twice(source: str) -> None:
    """Whatever a wrapper's parameters and variables are called, a user's operand of that name gets another one."""
    neutral = of_lanes(source, "neutral")
    heads = re.findall(r"void \w+\(const Operands& operands,(.*?)\) \{", neutral, re.DOTALL)
    words = set(re.findall(r"(\w+)\)?(?:\[2\])?(?:,|$)", "\n".join(heads), re.MULTILINE)) | {"operands", "result"}
    assert {"operands", "out"} < words
    for word in words:
        assert not re.search(
            rf"^ +(const )?float {word}(\[2\])?(;| =)", of_lanes(source, word).replace("float result[2];", ""), re.MULTILINE
        )


NASTY = """
    lr lr_ α β eps _eps result x_1 __x _ __ x_dim0 x_stride0 x_ptr x_raw out out_ptr sum_2 sum_f32_identity row_sum_f32 row_value
    value value_2 s f f_ f_0 mean_of_f fg_f coordinate condition position product total mass key channel query head batch
    exp min max half int32 i32 Index lane std errno blockIdx printf main
"""
BODIES = {
    "scalars": "{tensors[0]} * {scalars[0]} + {scalars[1]} - {tensors[1]}",
    "rows": "torch.softmax({tensors[0]} * {scalars[0]} + {tensors[1]}, -1) * {scalars[1]} + {tensors[1]}.sum()",
}


def of_names(names: Sequence[str], body: str) -> fg.Kernel[..., Tensor]:
    """A kernel ``f`` of two tensors and two run-time scalars of these names."""
    text = BODIES[body].format(tensors=names[:2], scalars=names[2:])
    space: dict[str, object] = {"torch": torch}
    exec(f"def f({', '.join(names)}):\n    return {text}", space)
    return fg.kernel(space["f"])


@pytest.mark.parametrize("name", ["threadIdx", "gridDim", "warpSize", "dim3", "size_t"])
def test_a_kernel_named_like_a_builtin_compiles(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def {name}(x):\n    return x * 2 + 1", space)
    low = fg.kernel(space[name]).lower(torch.empty(4, 64, device="meta"), target="sm_90a")
    assert ".entry" in compile_ptx(low.sources[0], "sm_90a")


def refusal(text: str) -> str:
    """What the host compiler says of a text."""
    command = ["g++", "-std=c++20", "-fopenmp", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=False).stderr


@settings(max_examples=3, deadline=None, derandomize=True)
@given(names=st.lists(st.sampled_from(NASTY.split()), min_size=4, max_size=4, unique=True), body=st.sampled_from(sorted(BODIES)))
@example(names=["x", "y", "lr", "lr_"], body="rows")
@example(names=["α", "β", "_eps", "eps"], body="scalars")
@example(names=["__x", "x_1", "f", "mean_of_f"], body="rows")
def test_no_names_of_a_user_meet_in_a_text(names: list[str], body: str) -> None:
    arguments = (torch.randn(6, 40).T.contiguous().T, torch.randn(6, 40)[::2].repeat(2, 1), 2.5, 3.25)
    for source in of_names(names, body).lower(*arguments, target="cpu").sources:
        assert not refusal(source.text)
    for source in of_names(names, body).lower(*arguments, target="sm_90a").sources:
        compile_ptx(source, "sm_90a")
        assert not re.search(r"(?<!\w)(?!__)\w+__", source.kernel_text), "two underscores are reserved in C++"


@pytest.mark.parametrize("names", [("x", "y", "lr", "lr_"), ("α", "β", "γ", "δ")])
def test_each_name_means_its_own_argument(names: tuple[str, ...]) -> None:
    x, y = torch.randn(6, 40)[::2], torch.randn(40, 3).T
    kernel = of_names(names, "scalars")
    torch.testing.assert_close(kernel(x, y, 2.5, 3.25), kernel.function(x, y, 2.5, 3.25))
    torch.testing.assert_close(kernel(**dict(zip(names, (x, y, 0.5, -1.0), strict=True))), kernel.function(x, y, 0.5, -1.0))


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("names", [("gate", "up"), ("y_0", "held"), ("a", "b"), ("tile", "product"), ("b_map", "second_b")])
def test_two_weights_of_one_tile_keep_their_names(names: tuple[str, str], target: str) -> None:
    gate, up = names
    space: dict[str, Any] = {"F": F}
    exec(f"def f(x, {gate}, {up}, bias):\n    return F.silu(F.linear(x, {gate}, bias)) * F.linear(x, {up})", space)
    tensors = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((4096, 64), (512, 64), (512, 64), (512,))]
    (source,) = fg.kernel(space["f"]).lower(*tensors, target=target).sources
    assert ".entry" in compile_ptx(source, target)
    assert ("gate_product" in source.math) == ("up_product" in source.math) == (names == ("gate", "up"))


@pytest.mark.parametrize("name", ["exp", "sum_f32_combine", "main", "_"])
def test_a_kernel_of_any_name(name: str) -> None:
    space: dict[str, object] = {"torch": torch}
    exec(f"def {name}(x, s):\n    return torch.softmax(x * s, -1) + x.amax(-1, keepdim=True)", space)
    kernel = fg.kernel(space[name])
    assert not any(refusal(source.text) for source in kernel.lower(torch.randn(6, 40), 2.0, target="cpu").sources)
    for source in fg.kernel(space[name]).lower(torch.randn(6, 40), 2.0, target="sm_90a").sources:
        compile_ptx(source, "sm_90a")
