"""Kernels built into folders, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusegen.bundle import manifest
from fusegen.bundle.build import BuildRequest, build
from fusegen.bundle.load import BuiltFunction, load
from fusegen.bundle.manifest import BuiltKernel, read_kernel, read_manifest
from fusegen.compiler.parameters import Parameters
from fusegen.options import Options
from fusegen.program.codec import Line
from fusegen.target import target
from tests.unit.eager import ints, randn

Function = Callable[..., Any]
Change = Callable[[Any], object]


class Pair(NamedTuple):
    """Two results."""

    low: Tensor
    high: Tensor


def pointwise(x: Tensor, bias: Tensor, scale: float = 0.5) -> Tensor:
    return F.gelu(x + bias) * scale


def row(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight) + x


def product(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x @ w.mT + bias)


def several(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    hidden = (x - x.mean(0)) @ w
    return hidden.softmax(-1), (hidden * 2).sum(0), (hidden @ w.mT).amax(1)


def embedded(ids: Tensor, table: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(ids, table), table.shape[-1:])


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def nested(x: Tensor) -> dict[str, Any]:
    return {"both": [Pair(x.amin(-1), x.amax(-1)), (x * 2,)], "sum": x.sum()}


def numbers(x: Tensor, lr: float, step: int, *, mode: str = "plain") -> Tensor:
    factor = lr / (1 - 0.9**step)
    return x * factor if lr > 0.25 else x - factor * (2 if mode == "plain" else 3)


def sized(x: Tensor, y: Tensor) -> Tensor:
    return x.sum(0) + (y.sum(0) if y.shape[0] > 4 * x.shape[0] else y.amax(0))


CASES: dict[str, tuple[Function, tuple[Any, ...], tuple[Any, ...]]] = {
    "pointwise": (pointwise, (randn(7, 24), randn(24)), (randn(33, 24), randn(24), 2.5)),
    "row": (row, (randn(7, 100), randn(100)), (randn(65, 100), randn(100))),
    "product": (product, (randn(8, 64), randn(32, 64), randn(32)), (randn(17, 64), randn(32, 64), randn(32))),
    "several": (several, (randn(9, 6), randn(6, 5)), (randn(40, 6), randn(6, 5))),
    "embedded": (embedded, (ints(4, 9, low=0, high=7), randn(7, 24)), (ints(3, 9, low=0, high=11), randn(11, 24))),
    "attended": (
        attended,
        (randn(2, 4, 9, 8), randn(2, 4, 13, 8), randn(2, 4, 13, 8)),
        (randn(3, 2, 7, 8), randn(3, 2, 13, 8), randn(3, 2, 13, 8)),
    ),
    "nested": (nested, (randn(5, 40),), (randn(3, 40),)),
    "numbers": (numbers, (randn(5, 8), 0.5, 3), (randn(2, 8), 0.75, 11)),
    "sized": (sized, (randn(2, 8), randn(9, 8)), (randn(3, 8), randn(14, 8))),
}
"""Functions with the arguments for which they are built, and others for which that is good."""


def built(
    folder: Path, function: Function, arguments: tuple[Any, ...], architecture: str = "cpu", mutates: Sequence[str] = ()
) -> BuiltFunction:
    """A function that was built for a call, loaded."""
    name = function.__name__
    build(folder, [wanted(function, arguments, architecture, mutates)], "test")
    return load(folder)[name]


def wanted(function: Function, arguments: tuple[Any, ...], architecture: str = "cpu", mutates: Sequence[str] = ()) -> BuildRequest:
    """A function for a kind of calls."""
    given = dict(zip(Parameters.of(function).user_names, arguments, strict=False))
    meta = {
        name: value.to("meta") if isinstance(value, Tensor) and value.is_contiguous() else value for name, value in given.items()
    }
    return BuildRequest(function.__name__, function, meta, target(architecture), Options(tuple(mutates)))


def equal(one: Any, other: Any) -> bool:
    """True if results are the same bits in the same structure."""
    if one is None:
        return other is None
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    is_alike = type(one) is type(other) or (
        isinstance(one, Pair) and type(other).__name__ == "Pair" and other._fields == one._fields
    )
    return is_alike and len(one) == len(other) and all(map(equal, one, other))


def kernels_in(folder: Path) -> list[BuiltKernel]:
    """The kernels that were built into a folder."""
    return [read_kernel(folder, file).kernel for file in read_manifest(folder).kernels]


def descriptions(folder: Path) -> list[Path]:
    """The files that describe the kernels of a folder."""
    return [folder / file.file for file in read_manifest(folder).kernels]


class _Shared(dict[str, Any]):
    """A value on a line of its own."""


def _whole(path: Path) -> Any:
    """A kernel as JSON, with the values of all lines at their places."""
    _, first, *lines = path.read_bytes().splitlines()
    texts = {manifest.digest(line): line for line in lines}

    def placed(value: Any) -> Any:
        if isinstance(value, str) and value in texts:
            return _Shared(placed(json.loads(texts[value])))
        if isinstance(value, list):
            return list(map(placed, value))
        return {key: placed(each) for key, each in value.items()} if isinstance(value, dict) else value

    return placed(json.loads(first))


def _shared(value: Any) -> Any:
    """The opposite of `_whole`, for `Line`."""
    if isinstance(value, list):
        return list(map(_shared, value))
    if not isinstance(value, dict):
        return value
    shared = {key: _shared(each) for key, each in value.items()}
    return Line(shared) if isinstance(value, _Shared) else shared


def text_of(kernel: Any) -> str:
    """The file of a kernel as JSON."""
    line = Line(_shared(kernel))
    texts = [json.dumps(_summary(kernel)).encode(), line.text, *(text for text in line.lines.values() if text != line.text)]
    return b"\n".join(texts).decode()


def rewrite(folder: Path, change: Change) -> None:
    """Changes the kernels as JSON, with summaries and hashes that fit."""
    content: Any = {"kernels": [_whole(path) for path in descriptions(folder)]}
    change(content)
    texts = [text_of(kernel) for kernel in content["kernels"]]
    files = []
    for number, text in enumerate(texts):
        (folder / f"{number}.json").write_text(text)
        name, model = (content["kernels"][number][key] for key in ("name", "model"))
        files.append({"name": name, "file": f"{number}.json", "sha256": manifest.digest(text.encode()), "model": model})
    rewrite_manifest(folder, lambda document: document.update(kernels=files))


def rewrite_manifest(folder: Path, change: Change) -> None:
    """Changes the manifest, with a hash that fits."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document["content"])
    document["sha256"] = manifest.digest(manifest._canonical(document["content"]))
    path.write_text(json.dumps(document))


def _summary(kernel: Any) -> Any:
    programs = [*kernel["variants"]]
    for variant in kernel["variants"]:
        passes = (variant["passes"] or {}).get("BuiltPasses", {"forward": [], "backward": []})
        programs += [*passes["forward"], *passes["backward"]]
    codes = [code for program in programs for code in program["code"]]
    calls = [variant["requested"] for variant in kernel["variants"]]
    files = {code["source"]: "" for code in codes} | {code["file"]: code["sha256"] for code in codes}
    return {
        "name": kernel["name"],
        "calls": [call for number, call in enumerate(calls) if call not in calls[:number]],
        "graphs": list(dict.fromkeys(program["graph"] for program in programs)),
        "files": list(files.items()),
    }
