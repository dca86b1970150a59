"""Names in emitted text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fusegen as fg
from fusegen.schedule.names import Namer, identifier, plain

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
PRIMITIVES = sorted({p.name.partition(".")[0] for folder in ("cuda", "cpu") for p in (TEMPLATES / folder / "primitives").iterdir()})


@pytest.mark.parametrize("name", PRIMITIVES)
def test_names_of_primitives_are_not_given_to_users(name: str) -> None:
    assert identifier(name) != name, "add it to _PRIMITIVES in fusegen/schedule/names.py"


SKELETONS = [*TEMPLATES.glob("cuda/*.cu*.jinja"), *TEMPLATES.glob("cpu/*.jinja")]
OF_LANES = ("contraction.cu.jinja", "attention.cu.jinja")
"""Their pipelines call wrappers, and user's names occur in these alone."""

IN_FUNCTIONS = {"mask", "value"}
"""Names in a pipeline's own small functions, which hold no name of a user's."""


def words_of(template: Path) -> set[str]:
    """The identifiers that a template writes as they stand."""
    text = re.sub(r"\{#.*?#\}|\{%.*?%\}|//[^\n]*|\"[^\"\n]*\"", "", template.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"[\w@]*@[\w@]*", " ", re.sub(r"\{\{.*?\}\}", "@", text, flags=re.DOTALL))
    return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", text))


@pytest.mark.parametrize("template", [t for t in SKELETONS if t.name not in OF_LANES], ids=lambda t: f"{t.parent.name}-{t.name}")
def test_names_of_skeletons_are_not_given_to_users(template: Path) -> None:
    free = {word for word in words_of(template) if identifier(word) == word} - IN_FUNCTIONS - {"result"}  # taken by the lowering
    assert not free, "add them to _PIPELINES in fusegen/schedule/names.py"


ATTENTION = (
    "def kernel(q, k, v, {name}):\n    return (torch.softmax(q @ k.mT * 0.125 + {name}, -1).to(v.dtype) @ v) * {name}[:, :64]"
)
PRODUCT = "def kernel(x, w, {name}):\n    return torch.relu(x @ w) * {name}"


def of_lanes(source: str, name: str) -> str:
    """The math of a kernel on tensor cores, with its wrappers, and with an operand of a name."""
    names: dict[str, object] = {"torch": torch}
    exec(source.format(name=name), names)
    shapes = {ATTENTION: [(2, 4, 256, 64)] * 3 + [(256, 256)], PRODUCT: [(256, 256), (256, 512), (256, 512)]}[source]
    tensors = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes]
    return fg.kernel(names["kernel"]).lower(*tensors, target="sm_90a").sources[0].math  # type: ignore[arg-type]


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


@pytest.mark.parametrize(("name", "safe"), [("größe", "groe"), ("x.y", "x_y"), ("1st", "n1st"), ("__a__b", "a_b"), ("λ", "value")])
def test_names_become_ascii_identifiers(name: str, safe: str) -> None:
    assert plain(name) == safe


def test_a_namer_gives_each_name_once() -> None:
    names = Namer()
    assert [names.take(name) for name in ("x", "x", "for", "for")] == ["x", "x_2", "for_", "for__2"]
