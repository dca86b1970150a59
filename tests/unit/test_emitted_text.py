"""What a reader of emitted CUDA meets: names that say what a value is, phases that say what they do, nothing that is not used."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.source import Source
from fusegen.specs import SPECS
from tests.naming import case
from tests.unit.eager import agree, randn
from tests.unit.gate import some
from tests.unit.ptxas import UNREAD_PARAMETER, figures


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],))


def written_out(x: Tensor) -> Tensor:
    average = x.mean(-1, keepdim=True)
    spread = torch.rsqrt((x - average).square().mean(-1, keepdim=True) + 1e-5)
    return (x - average) * spread


def statistics(x: Tensor) -> tuple[Tensor, ...]:
    return x.logsumexp(-1), x.argmax(-1), x.var(-1), *x.max(-1), x.amin(-1)


def columns(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(0), x.square().sum(0)


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.softmax(-1)
    return y, y.sum(0)


def looked_up(x: Tensor) -> Tensor:
    return x[x.to(torch.int32).clamp(0, 3)[:, 0].long()].softmax(-1)


def scanned(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def turned(x: Tensor) -> Tensor:
    return x[0].expand(x.shape).T + 1


def tiled(x: Tensor) -> Tensor:
    return x.T + 1


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.1, training=True) + x.softmax(-1)


CASES: dict[str, tuple[Callable[..., object], tuple[int, ...]]] = {
    "a warp holds a row": (norm, (5, 70)),
    "several warps hold a row": (norm, (5, 4096)),
    "a row with a rest": (norm, (5, 4095)),
    "a staged row": (norm, (5000, 49152)),
    "a row that blocks share": (norm, (5, 400_000)),
    "a row that is read again": (norm, (5, 4_000_000)),
    "written out": (written_out, (5, 256)),
    "statistics": (statistics, (5, 300)),
    "columns": (columns, (500, 70)),
    "rows and columns": (both, (500, 300)),
    "indices that are data": (looked_up, (5, 256)),
    "a scan": (scanned, (5, 300)),
    "a pointwise kernel": (turned, (6, 33)),
    "tiles": (tiled, (70, 300)),
    "what is drawn": (dropped, (5, 300)),
}
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
WARNINGS = (
    "a row with a rest",
    "a staged row",
    "statistics",
    "rows and columns",
    "indices that are data",
    "a scan",
    "a pointwise kernel",
    "tiles",
)


def sources(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Source, ...]:
    function, shape = CASES[name]
    return fg.kernel(function).lower(torch.empty(shape, dtype=dtype, device="meta"), target="sm_90a").sources


@pytest.mark.parametrize("dtype", some(DTYPES, [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name", some(CASES, WARNINGS))
def test_the_compiler_has_nothing_to_say(name: str, dtype: torch.dtype) -> None:
    """Of a variable, say, that nothing uses."""
    assert [w for source in sources(name, dtype) for w in figures(source).warnings] == []


READ_IN_FULL = ("cached_attention", "flash_attention", "layer_norm_invertible_backward", "linear_quant", "swiglu_linear")


@pytest.mark.parametrize("name", some(SPECS, READ_IN_FULL))
def test_each_variable_and_parameter_with_a_name_is_read(name: str) -> None:
    found = (figures(source, "sm_90a", UNREAD_PARAMETER) for source in SPECS[name].lower(torch.bfloat16, "sm_90a").sources)
    assert [warning for each in found for warning in each.warnings] == []


def test_no_function_gives_what_it_is_given() -> None:
    for name in CASES.keys() - {"a scan", "a pointwise kernel", "tiles"}:
        with case(name):
            for source in sources(name):
                functions = re.findall(r" \w+\(([^)]*)\) \{\n(.*?)\n\}", source.math, re.DOTALL)
                assert functions or not source.math
                for parameters, body in functions:
                    given = {p.split()[-1] for p in parameters.split(",") if p and "&" not in p}
                    assert given.isdisjoint(re.findall(r"^    (?:return|\w+ =) (\w+);", body, re.MULTILINE))


def test_results_that_are_there_already() -> None:
    """Of the row itself, and of its statistics; stored, and reduced once more."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        largest = x.amax(-1, keepdim=True)
        return x.clone(), largest.expand_as(x).clone(), x.sum(-1), x.sum(0), (x - largest).sum(-1)

    agree(function, (randn(6, 70),), (randn(300, 5),))


def test_a_statement_with_one_name_gives_it() -> None:
    """To the last value of its line; an argument by name gives none."""
    lines = {
        "a = x.sum(-1)": "a",
        "a: Tensor = x.sum(-1)": "a",
        "a = torch.sum(\n        x, -1)": "a",
        "a, b = x.sum(-1), 1": "total",
        "y = x + 1; a = x.sum(-1)": "total",
        "a = y = x.sum(-1) + 1": "total",
        "if not x.requires_grad: a = x.sum(-1)": "total",
        "a = torch.mul(\n        input = x.sum(-1),\n        other = 2)": "total",
    }
    for line, name in lines.items():
        with case(line):
            space: dict[str, Callable[..., object]] = {}
            exec(with_lines(f"def f(x):\n    {line}\n    return x - a[:, None]"), {"Tensor": Tensor, "torch": torch}, space)
            (source,) = fg.kernel(space["f"]).lower(torch.empty(5, 256, device="meta"), target="sm_90a").sources
            assert re.findall(r"float (\w+)_of\[PARTIALS\]", source.pipeline) == [name]


def with_lines(text: str) -> CodeType:
    """Code whose lines can be shown."""
    name = f"<{text}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return compile(text, name, "exec")


PRIMITIVES = ("tma_load_2d", "random_bits", "load_wide", "wgmma", "round_bf16", "maximum", "load_lanes<16>", "mbarrier_wait")


def test_the_users_line_is_no_code() -> None:
    """It stands beside the math: it is no trigraph, and what it mentions is not used."""
    for remark in ("why??/ and \\", *(f"{name}(x)" for name in PRIMITIVES)):
        with case(remark):
            told, silent = (with_remark(text) for text in (f"  # {remark}", ""))
            assert remark.replace("??", "? ?").rstrip("\\ ") in told.math and told.digest == silent.digest
    assert not figures(with_remark("  # why??/ and \\")).warnings


def with_remark(remark: str) -> Source:
    space: dict[str, Callable[..., object]] = {}
    exec(with_lines(f"def f(x):\n    return x.sum(-1) * 2{remark}"), space)
    return fg.kernel(space["f"]).lower(torch.empty(5, 256, device="meta"), target="sm_90a").sources[0]


def test_a_value_of_a_line_whose_last_is_of_another_kernel() -> None:
    space: dict[str, Callable[..., object]] = {}
    exec(with_lines("def f(x, w):\n    y = x.mean(-1, keepdim=True).relu() @ w\n    return y"), space)
    arguments = (torch.empty(s, device="meta", dtype=torch.bfloat16) for s in ((512, 256), (1, 256)))
    low = fg.kernel(space["f"]).lower(*arguments, target="sm_90a")
    (name,) = re.findall(r"const float (\w+) = (\w+)_of\(", low.sources[0].pipeline)
    assert name == ("clamped", "clamped")


class Exponential(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x) + x
        return y * torch.cos(y)


class Tangent(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return y - y * y


def test_equal_lines_of_two_functions_are_quoted_apart() -> None:
    one, other = Exponential(), Tangent()
    text = fg.kernel(lambda x: one(x).abs() + other(x)).lower(torch.ones(4, 64)).sources[0].math
    quoted = re.findall(r"^// (\S+) in test_emitted_text\.py; its def is line 1:\n//    2: (.*)$", text, re.MULTILINE)
    assert quoted == [("Exponential.forward", "y = torch.exp(x) + x"), ("Tangent.forward", "y = torch.tanh(x)")]
    assert {"// Exponential.forward, line 2", "// Tangent.forward, line 2"} <= set(re.findall(r"// \S+, line 2", text))


def test_a_decorator_is_not_counted() -> None:
    def documented(_text: str) -> Callable[[Any], Any]:
        return lambda function: function

    @fg.kernel
    @documented("""
def nothing():
    pass
""")
    def function(x: Tensor) -> Tensor:
        return torch.exp(x) * 2

    text = function.lower(torch.ones(4, 64)).sources[0].math
    assert "its def is line 1:\n//    2: return torch.exp(x) * 2\n" in text


def test_a_long_line_is_quoted_whole() -> None:
    def function(first_of_both: Tensor, second_of_both: Tensor) -> Tensor:
        return (first_of_both * second_of_both + first_of_both - second_of_both + first_of_both) / (second_of_both * first_of_both)

    text = fg.kernel(function).lower(torch.ones(4, 64), torch.ones(4, 64)).sources[0].math
    quoted = re.findall(r"^//    2: .*\n//       .*$", text, re.MULTILINE)
    assert [re.sub(r"\s*\n//\s+", " ", each) for each in quoted] == [
        "//    2: return (first_of_both * second_of_both + first_of_both - second_of_both + first_of_both) / "
        "(second_of_both * first_of_both)"
    ]


def test_outputs_have_the_names_of_the_returned_variables_in_their_order() -> None:
    def function(x: Tensor, early: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        peak = x.amax(-1)
        total = x.sum(-1)
        return (total.to(x.dtype), peak) if not early else total

    text = fg.kernel(function).lower(torch.ones(4, 64)).sources[0].pipeline
    assert re.findall(r"float\* (\w+)_ptr", text)[-2:] == ["total", "peak"]


def _swapped(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    @wraps(function)
    def wrapped(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = function(x)
        return second, first

    return wrapped


@_swapped
def _powers(x: Tensor) -> tuple[Tensor, Tensor]:
    square, cube = x * x, x * x * x
    return square, cube


def test_results_have_the_names_that_a_decorator_returns() -> None:
    (source,) = fg.kernel(_powers).lower(torch.empty(64), target="sm_90a").sources
    assert "float* second_ptr, float* first_ptr" in source.pipeline


def test_an_output_that_is_no_variable_has_a_number() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + 1
        return x, x.sum(-1)

    text = fg.kernel(function).lower(torch.ones(4, 64)).sources[0].pipeline
    assert {"out_0_ptr", "out_1_ptr"} <= set(re.findall(r"\w+_ptr", text))


def test_outputs_in_a_tuple_beside_none_have_no_names_of_others() -> None:
    def function(x: Tensor) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
        hidden = x + 1
        weights = None
        cache = (x * 2, x * 3)
        return hidden, weights, cache

    (source,) = fg.kernel(function).lower(torch.empty(64), target="sm_90a").sources
    assert "weights" not in source.pipeline and "cache" not in source.pipeline


def test_the_header_says_which_tensors_the_text_is_valid_for() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (64,), weight)

    low = fg.kernel(function).lower(torch.ones(4, 128)[:, :64], torch.ones(64), target="sm_90a")
    header = " ".join(line.removeprefix("// ") for line in low.sources[0].banner.splitlines())
    assert "x: float [x_dim0, 64], strides [x_stride0, 1], 16-byte aligned; " in header
    assert "weight: float [64], contiguous, 16-byte aligned; " in header


def test_the_header_says_which_launch_reads_a_temporary() -> None:
    low = SPECS["rms_norm_linear"].lower(torch.bfloat16, "sm_90a")
    assert "A launch of its own reads rms_normalized: " in low.sources[0].banner
    assert "// rms_normalized in fusegen/specs/normalization.py; its def is line 1:" in low.sources[0].math


def test_a_value_has_the_name_of_the_variable_that_holds_it_alone() -> None:
    def squared(x: Tensor) -> Tensor:
        return x * x + x

    def function(x: Tensor, y: Tensor) -> Tensor:
        power = squared(x + y)
        scaled = (power * 3).float() if x.is_floating_point() else power
        return torch.exp(scaled) + torch.sin(scaled) + power

    text = fg.kernel(function).lower(torch.ones(4, 64), torch.ones(4, 64)).sources[0].math
    assert "const float sum = x + y;" in text and "const float scaled = " in text and "float power" not in text


def test_code_without_source_has_no_quotes() -> None:
    space: dict[str, Callable[..., object]] = {}
    exec("def f(x):\n    return x * 2 + 1", space)
    text = fg.kernel(space["f"]).lower(torch.ones(4, 64)).sources[0].math
    assert "line" not in text and text.isascii() and all(c.isprintable() or c == "\n" for c in text)


def test_numbers_of_dropout_have_names() -> None:
    (source,) = SPECS["dropout"].lower(torch.bfloat16, "sm_90a").sources
    assert re.search(r"i64 threshold,\s+double keep_scale\)", source.pipeline) and "i64>(static_cast<i16>" not in source.math
    assert not any(primitive.label.startswith("load_wide") for primitive in source.primitives)


def test_a_users_threshold_keeps_its_name() -> None:
    def function(x: Tensor, threshold: float, p: float) -> Tensor:
        return F.dropout(x, p) * threshold

    (source,) = fg.kernel(function).lower(torch.ones(8, 64), 0.5, 0.25, target="sm_90a").sources
    assert {"threshold", "threshold_1", "keep_scale"} <= set(re.findall(r"\w+", source.math))


def test_offsets_use_the_position() -> None:
    """A row or element number is not split into indices and put together again."""
    (source,) = SPECS["merge_heads"].lower(torch.bfloat16, "sm_90a").sources
    assert "load_lanes<LANES>(q_raw, q_ptr, position);" in source.pipeline
    (source,) = SPECS["modulated_rms_norm"].lower(torch.bfloat16, "sm_90a").sources
    assert "x_ptr, row * COLUMNS + column)" in source.pipeline and "i1" not in source.pipeline


def test_an_index_that_is_a_value_too_is_loaded_once() -> None:
    """The mean of a cross entropy reads each target as a value and as an index, in its last kernel of one block."""
    *_, last = SPECS["cross_entropy"].lower(torch.bfloat16, "sm_90a").sources
    assert last.pipeline.count("target_ptr") == len(("the parameter", "its load"))


def test_a_conversion_is_no_copy() -> None:
    """A kernel that only converts elements may not move them as they are stored."""
    agree(lambda x: x.to(torch.bfloat16), (randn(8, 64),))
    (source,) = fg.kernel(lambda x: x.to(torch.bfloat16)).lower(torch.ones(8, 64), target="sm_90a").sources
    assert "widen_vec(" in source.pipeline and "narrow_vec(" in source.pipeline


def test_one_block_leaves_no_room_for_others() -> None:
    *_, last = SPECS["binary_cross_entropy_with_logits"].lower(torch.bfloat16, "sm_90a").sources
    assert re.search(r"__launch_bounds__\(\w+\)", last.pipeline)


def test_the_text_of_topk_does_not_grow_with_k() -> None:
    few, more = (fg.kernel(lambda x, k=k: x.topk(k)).lower(torch.ones(32, 64), target="sm_90a") for k in (4, 8))
    assert len(few.sources) == len(more.sources) == 1
    assert more.sources[0].kernel_text.count("\n") == few.sources[0].kernel_text.count("\n")


def test_parts_that_differ_in_names_alone_are_written_once() -> None:
    inputs = torch.ones(8, 64), torch.ones(24, 64)
    equal = fg.kernel(lambda x, y: (x.exp() * 2, y.exp() * 2)).lower(*inputs, target="sm_90a")
    different = fg.kernel(lambda x, y: (x.sin() * 2, y.cos() * 2)).lower(*inputs, target="sm_90a")
    for low, count in ((equal, 1), (different, 2)):
        (source,) = low.sources
        assert "Parts" in source.pipeline and len(re.findall(r"^namespace ", source.text, re.MULTILINE)) == count


@pytest.mark.parametrize(
    "function, comment",
    [(lambda x: F.gelu(x, approximate="tanh"), "gelu in its tanh form"), (F.mish, "mish, x tanh")],
    ids=["gelu", "mish"],
)
def test_a_rewritten_function_has_its_formula_in_a_comment(function: Callable[[Tensor], Tensor], comment: str) -> None:
    def activated(x: Tensor) -> Tensor:
        return function(x)

    (source,) = fg.kernel(activated).lower(torch.ones(8, 64), target="sm_90a").sources
    assert len(re.findall(f"^// {comment}", source.math, re.MULTILINE)) == 1


def test_primitives_have_the_types_and_widths_of_their_calls() -> None:
    """Of a kernel that reads bf16 in 16 bytes and one float, and writes f8e4m3 in 8 bytes."""

    def converted(x: Tensor, scale: Tensor) -> Tensor:
        return (x.float() * scale).to(torch.float8_e4m3fn)

    (source,) = fg.kernel(converted).lower(torch.ones(8, 64, dtype=torch.bfloat16), torch.ones(1), target="sm_90a").sources
    variants = {p.name: p.variant for p in source.primitives}
    assert variants["load"] == ("float",) and variants["load_vec"] == ("16",) and variants["store_vec"] == ("8",)
    assert variants["widen"] == ("bf16", "float") and variants["narrow"] == ("f8e4m3",)


def test_elements_at_fixed_places_are_named_by_their_index() -> None:
    (source,) = fg.kernel(lambda x, weight: x * weight[0] + weight[2]).lower(randn(8, 64), randn(3), target="sm_90a").sources
    assert re.search(r"\bweight_0\b", source.math) and re.search(r"\bweight_2\b", source.math)
