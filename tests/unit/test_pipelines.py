"""Pipelines hold no math: they move tiles and rows, and call functions that the user's graph became.

Allowed in a template: arithmetic on indices and addresses, `min` of indices, `max` of an integer literal and an index (a count
that is at least one), and the names of the functions that the math part defines. Not allowed: a call of a mathematical
function, a name of one of torch's compositions, or a literal that is a constant of some formula (indices are integers; of
floating-point literals only 0.0f, which is the empty accumulator).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "cuda"
PIPELINES = sorted([*TEMPLATES.glob("*.cu.jinja"), *TEMPLATES.glob("rows/*.jinja")])

_FUNCTIONS = "exp|log|sqrt|rsqrt|tanh|erf|sin|cos|pow|sigmoid|maximum|minimum|fmax|fmin|fma|max|reciprocal|divide"
CALL = re.compile(rf"\b_*(?:fast_)?(?!max\((?:\d+|i64\(\d+\)),)(?:{_FUNCTIONS})f?\w*\s*\(", re.IGNORECASE)
WORD = re.compile(r"softmax|gelu|silu|relu|scale|slope|causal|log2e|epsilon", re.IGNORECASE)
LITERAL = re.compile(r"\b\d+\.\d+(?:e[-+]?\d+)?f?\b|\b\d+e[-+]?\d+f?\b")


def math_in(text: str) -> list[str]:
    """What in a template's code is math on values; comments may say what they like."""
    code = re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL)
    code = re.sub(r"//[^\n]*", "", code)
    literals = [m for m in LITERAL.findall(code) if float(m.rstrip("f")) != 0.0]
    return [*CALL.findall(code), *WORD.findall(code), *literals]


def test_a_pipeline_holds_no_math() -> None:
    for path in PIPELINES:
        assert math_in(path.read_text(encoding="utf-8")) == [], path.name


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.name)
def test_block_numbers_are_as_wide_as_indices_before_they_are_multiplied(path: Path) -> None:
    """A grid times its elements may pass 31 bits where the number of blocks does not; no test can launch that many."""
    text = re.sub(r"\{#.*?#\}", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.findall(r"\{\{ block \}\} \*|\* \{\{ block|block_id\(\) \*|\* block_id\(\)", text)
    assert all(f"static_cast<Index>({name})" in text for name in re.findall(r"static_cast<Index>\((\w+)\) \*", text))
    if path.name == "pointwise.cu.jinja":
        assert text.count("static_cast<Index>({{ block }}) *") == text.count("static_cast<Index>(u) *") == 2
