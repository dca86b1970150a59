"""Folders that are not as they were built: each is refused in words, and none runs anything."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fusegen as fg
from fusegen.bundle.build import build
from fusegen.bundle.load import load
from fusegen.bundle.update import open_folder
from fusegen.errors import ArgumentError, BundleError
from tests.naming import case
from tests.unit.bundles import Change, built, descriptions, nested, numbers, rewrite, rewrite_manifest, wanted
from tests.unit.eager import randn


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a kernel that has numbers, conditions and keyword parameters."""
    folder = tmp_path_factory.mktemp("bundle") / "kernels"
    built(folder, numbers, (randn(5, 8), 0.5, 3))
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "kernels"))


def refusal(folder: Path) -> str:
    """The error of a folder, or of a call of the kernel in it, without gradients and with them."""
    with pytest.raises(BundleError) as error:
        kernel, x = (kernels := load(folder))[next(iter(kernels))], randn(4, 8)
        kernel(x, 0.5, 3)
        kernel(x.requires_grad_(), 0.5, 3).sum().backward()
    return str(error.value)


def refused_build(folder: Path) -> str:
    """The error of a build into a folder."""
    with pytest.raises(BundleError) as error, open_folder(folder) as opened:
        for kernel in opened.kernels.values():
            _ = kernel.kernel
    return str(error.value)


def test_a_copy_is_as_good(folder: Path) -> None:
    x = randn(4, 8)
    assert load(folder).numbers(x, 0.5, 3).equal(fg.kernel(numbers)(x, 0.5, 3))


# Files.


def test_there_is_no_manifest(tmp_path: Path, folder: Path) -> None:
    assert "no built kernels in" in refusal(tmp_path / "nowhere")
    assert "no built kernels in" in refusal(folder / "manifest.json")


def test_what_is_no_path() -> None:
    for given in (b"/tmp", None, 3, "a\0b"):
        with case(given), pytest.raises(ArgumentError, match=r"(?s)is.*try: give the"):
            load(given)


@pytest.mark.parametrize("damage", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"1" * 5000])
def test_a_manifest_that_is_no_json(folder: Path, damage: bytes) -> None:
    (folder / "manifest.json").write_bytes(damage)
    assert "is damaged" in refusal(folder)


@pytest.mark.parametrize("document", ["null", "[]", "{}", '{"content": {}}'])
def test_json_that_is_no_manifest(folder: Path, document: str) -> None:
    (folder / "manifest.json").write_text(document)
    assert "is not a manifest" in refusal(folder)


@pytest.mark.parametrize("version", [1, 2, "3", None, [1], 10**30])
def test_an_unknown_format(folder: Path, version: object) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(document | {"format": version}))
    assert "has format" in (text := refusal(folder)) and "update fusegen" in text


def test_a_byte_of_the_manifest_has_changed(folder: Path) -> None:
    changes = [(path, '"block":', '"block":1') for path in descriptions(folder)]
    for path, known, other in (*changes, (folder / "manifest.json", '"name": "', '"name": "x')):
        with case(path):
            text = path.read_text()
            assert known in text
            path.write_text(text.replace(known, other, 1))
            assert f"{path} was modified after the build: its hash differs" in refusal(folder)
            path.write_text(text)


def library(folder: Path) -> Path:
    """The binary of the only kernel, without those of its passes."""
    (found,) = (path for path in folder.rglob("*.so") if path.parent.name == "cpu-0")
    return found


def test_a_binary_is_missing(folder: Path) -> None:
    library(folder).unlink()
    assert re.search(r"kernels-\w+\.so cannot be read", refusal(folder))


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:100], lambda b: b[:200] + b"\x90" + b[201:], lambda _: b""])
def test_a_binary_has_changed(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    path = library(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert re.search(r"kernels-\w+\.so was modified after the build", refusal(folder))


def test_pipes_are_refused_at_once(folder: Path) -> None:
    for path in (library(folder), *descriptions(folder), folder / "manifest.json"):
        path.unlink()
        os.mkfifo(path)
        assert "cannot be read: not a regular file" in refusal(folder)


def test_a_binary_that_changes_after_the_folder_was_loaded(folder: Path) -> None:
    kernel, path = load(folder).numbers, library(folder)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BundleError, match="modified after the build"):
        kernel(randn(4, 8), 0.5, 3)


def test_other_binaries_may_be_missing_until_a_call_needs_them(folder: Path) -> None:
    for path in folder.rglob("*.so"):
        if path != library(folder):
            path.unlink()
    kernel, x = load(folder).numbers, randn(4, 8)
    assert kernel(x, 0.5, 3).equal(fg.kernel(numbers)(x, 0.5, 3))
    with pytest.raises(BundleError, match="cannot be read"):
        kernel(x.requires_grad_(), 0.5, 3)


# Manifests that somebody wrote.


def variant(content: Any) -> Any:
    return content["kernels"][0]["variants"][0]


def put(*place: str | int, value: object) -> Change:
    """Puts a value into a variant."""

    def change(content: Any) -> None:
        at = variant(content)
        for step in place[:-1]:
            at = at[step]
        assert not isinstance(at, dict) or place[-1] in at
        at[place[-1]] = value

    return change


def arguments(content: Any) -> Any:
    """Those of the first launch."""
    return variant(content)["call"]["steps"][0]["KernelLaunch"]["arguments"]


def called(function: str) -> Change:
    """One more step: a function of torch."""
    made = {"number": 0, "buffer": 2, "order": [1, 1]}
    step = {"LibraryCall": {"function": function, "settings": [], "sizes": [], "operands": [], "results": [made]}}
    return lambda content: variant(content)["call"]["steps"].append(step)


LAUNCH = ("call", "steps", 0, "KernelLaunch")
PASSES = ("passes", "BuiltPasses")
WIRING = (*PASSES, "wiring")
CODE = "__import__('os').system('touch HACKED')"

HOSTILE: dict[str, tuple[Change, str]] = {
    "code in a formula": (put(*LAUNCH, "grid", value=CODE), "compiled for another call"),
    "a formula without operands": (put(*LAUNCH, "grid", value=["+"]), "is not a formula"),
    "a formula that is true": (put(*LAUNCH, "grid", value=True), "is not a formula"),
    "a formula of great depth": (put(*LAUNCH, "grid", value=json.loads('["-", ' * 900 + "1" + "]" * 900)), ""),
    "code in a shape": (put("signature", "arguments", 0, "TensorArgument", "shape", 0, value=CODE), ""),
    "torch's functions": (put("call", "scalars", "lines", -1, "Operation", "name", value="save"), "unknown operation 'save'"),
    "code in a number's name": (put("call", "scalars", "lines", 0, value={"Scalar": {"name": CODE}}), "compiled for another call"),
    "code in a constant": (put("call", "scalars", "lines", 0, value={"float": CODE}), "is not a float"),
    "code in a named tuple": (
        put("structure", value={"kind": "NAMED_TUPLE", "parts": [{"kind": "TENSOR", "parts": [], "keys": [], "name": ""}],
                                "keys": [{"str": CODE}], "name": "Pair"}), "valid identifiers"),
    "more keys than parts": (
        put("structure", value={"kind": "DICT", "parts": [], "keys": [{"str": "a"}], "name": ""}), "1 keys for 0 parts"),
    "a buffer that is not there": (put("call", "results", 0, value=77), "compiled for another call"),
    "a name that no system has": (put("code", 0, "file", value="\ud800"), "is not a file name"),
    "a scalar that is not there": (
        put(*LAUNCH, "arguments", -1, value={"ScalarArgument": {"name": "q", "is_float": True}}), "compiled for another call"),
    "an unknown kind of step": (put("call", "steps", 0, value={"Shell": {}}), "one of KernelLaunch"),
    "another function of torch": (called("save"), "unknown function 'save'"),
    "a field too many": (put(*LAUNCH, value={}), "an object of tensor_maps"),
    "an unknown dtype": (put("call", "buffers", 0, "dtype", value="FLOAT7"), "is not a DType"),
    "a truth in place of a number": (put(*LAUNCH, "block", value=True), "int expected"),
    "a binary too few": (put("code", value=[]), "0 binaries for 1 launches"),
    "a file outside": (put("code", 0, "file", value="../../secret"), "outside of the folder"),
    "a file of the system": (put("code", 0, "file", value="/etc/hostname"), "outside of the folder"),
    "a file that is a folder": (put("code", 0, "file", value="numbers"), "cannot be read"),
    "a file with a null in its name": (put("code", 0, "file", value="a\0b"), "is not a file name"),
    "a relation of no sign": (
        put("signature", "relations", value=[{"left": 1, "sign": "or", "right": 1}]), "'or' is not one of"),
    "parameters without order": (lambda content: content["kernels"][0]["parameters"].reverse(), ""),
    "a parameter that is no name": (lambda content: content["kernels"][0]["parameters"][0].update(name="x y"), "parameter names"),
    "a launch plan that is not there": (put("call", value="0" * 64), "has no line"),
    "a launch plan in its program": (lambda content: variant(content).update(call=dict(variant(content)["call"])), "str expected"),
    "two kernels of one name": (lambda content: content["kernels"].append(content["kernels"][0]), "twice"),
    "an argument twice": (lambda content: arguments(content).append(arguments(content)[0]), "compiled for another call"),
    "an argument less": (lambda content: arguments(content).pop(), "compiled for another call"),
    "arguments in another order": (lambda content: arguments(content).reverse(), "compiled for another call"),
    "a larger grid": (put(*LAUNCH, "grid", value=1000), "compiled for another call"),
    "a smaller result": (put("call", "buffers", 1, "shape", value=[1]), "compiled for another call"),
    "another entry": (put("code", 0, "entry", value="fg_other"), "compiled for another call"),
    "another processor": (put("machine", value="m0123456789abcdef"), "another kind of processor"),
    "passes that nobody knows": (put("passes", value={"Shell": {}}), "one of BuiltPasses"),
    "no backward pass": (put(*PASSES, "backward", value=[]), "compiled for another call"),
    "another name of the backward pass": (put(*WIRING, "name", value="other"), "compiled for another call"),
    "a saved input that is not there": (put(*WIRING, "saved", value=[{"str": CODE}]), "compiled for another call"),
    "a saved result that is not there": (put(*WIRING, "saved", value=[{"int": 77}]), "compiled for another call"),
    "a binary of a pass outside": (put(*PASSES, "forward", 0, "code", 0, "file", value="../../secret"), "outside of the folder"),
    "passes of another call": (put(*PASSES, "backward", 0, "call", "counts", value=[1]), "compiled for another call"),
    "a captured parameter that was none": (
        lambda content: content["kernels"][0]["parameters"][0].update(captured=True), "compiled for another call"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_that_somebody_wrote(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("link").symlink_to("..")
    change, text = HOSTILE[name]
    rewrite(folder, change)
    assert text in refusal(folder)
    assert not list(folder.rglob("HACKED"))


SOURCES: dict[str, tuple[Change, str]] = {
    "a source outside": (put("code", 0, "source", value="../victim"), "outside of the folder"),
    "a source behind a link": (put("code", 0, "source", value="link/victim"), "outside of the folder"),
    "a source on a way out and back": (put("code", 0, "source", value="x/../../kernels/a.cpp"), "outside of the folder"),
    "a source of a pass outside": (put(*PASSES, "backward", 0, "code", 0, "source", value="/victim"), "outside of the folder"),
    "the manifest as a source": (put("code", 0, "source", value="./manifest.json"), "is the manifest itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_a_build_would_remove(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls read no source texts, so that loading does not look at them."""
    monkeypatch.chdir(folder)
    Path("link").symlink_to("..")
    change, text = SOURCES[name]
    rewrite(folder, change)
    assert text in refused_build(folder)


def retold(folder: Path, **changes: object) -> None:
    """Changes the summary of the only kernel, with a hash that fits."""
    (path,) = descriptions(folder)
    first, _, rest = path.read_text().partition("\n")
    summary = json.loads(first)
    assert changes.keys() <= summary.keys()
    path.write_text(f"{json.dumps(summary | changes)}\n{rest}")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite_manifest(folder, lambda content: content["kernels"][0].update(sha256=sha256))


MANIFESTS: dict[str, tuple[Change, str]] = {
    "no kernels at all": (lambda content: content.update(kernels=None), "a list expected"),
    "a description outside": (lambda content: content["kernels"][0].update(file="../victim"), "outside of the folder"),
    "itself as a description": (lambda content: content["kernels"][0].update(file="manifest.json"), "is the manifest itself"),
    "a description that is missing": (lambda content: content["kernels"][0].update(file="other.json"), "cannot be read"),
    "another name": (lambda content: content["kernels"][0].update(name="other"), "describes the kernel numbers, not other"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_names_other_files(name: str, folder: Path) -> None:
    change, text = MANIFESTS[name]
    rewrite_manifest(folder, change)
    assert text in refusal(folder)


SUMMARIES: dict[str, tuple[dict[str, object], str]] = {
    "a file outside": ({"files": [["../victim", ""]]}, "outside of the folder"),
    "the manifest as a file": ({"files": [["manifest.json", ""]]}, "is the manifest itself"),
    "a file less": ({"files": []}, "its summary is that of another kernel"),
    "another graph": ({"graphs": ["0"]}, "its summary is that of another kernel"),
    "no calls": ({"calls": []}, "its summary is that of another kernel"),
    "a number as a graph": ({"graphs": [0]}, "str expected"),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_that_somebody_wrote(name: str, folder: Path) -> None:
    changes, text = SUMMARIES[name]
    retold(folder, **changes)
    assert text in refused_build(folder)


@pytest.mark.parametrize("document", ["null", "{}", "[]", "{", "1" * 5000, "{}\nnull", "{}\n{", "{}\n{}\n"])
def test_a_description_of_no_kernel(document: str, folder: Path) -> None:
    (path,) = descriptions(folder)
    path.write_text(document)
    sha256 = hashlib.sha256(document.encode()).hexdigest()
    rewrite_manifest(folder, lambda content: content["kernels"][0].update(sha256=sha256))
    assert re.search("does not describe a kernel|is damaged|an object of name", refusal(folder))


def test_a_kernel_is_read_when_it_is_looked_up(tmp_path: Path) -> None:
    requests = [wanted(numbers, (randn(5, 8), 0.5, 3)), wanted(nested, (randn(5, 40),))]
    build(tmp_path / "kernels", requests, "test")
    for path in (tmp_path / "kernels" / "nested").rglob("*"):
        path.unlink() if path.is_file() else None
    kernels, x = load(tmp_path / "kernels"), randn(4, 8)
    assert list(kernels) == ["numbers", "nested"] and kernels.numbers is kernels["numbers"]
    assert kernels.numbers(x, 0.5, 3).equal(fg.kernel(numbers)(x, 0.5, 3))
    with pytest.raises(BundleError, match="cannot be read"):
        kernels.nested  # noqa: B018


def test_a_library_of_another_processor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.bundle.kernels.runs_here", lambda _: False)
    for here, text in (("x86-64-v2", "has x86-64-v2"), ("", "has other instructions")):
        monkeypatch.setattr("fusegen.bundle.kernels.level_here", lambda here=here: here)
        with pytest.raises(BundleError, match=f"was built for another kind of processor; this processor {text}") as refused:
            load(folder).numbers(randn(4, 8), 0.5, 3)
        assert str(refused.value.hint).endswith("--cpu x86-64-v2" if here else "like this one")


def test_a_named_tuple_needs_no_class_of_the_user_s(tmp_path: Path) -> None:
    kernel = built(tmp_path / "kernels", nested, (randn(5, 40),))
    assert "tests.unit" not in (tmp_path / "kernels" / "manifest.json").read_text()
    pair = kernel(randn(3, 40))["both"][0]
    assert type(pair).__name__ == "Pair" and pair.high.shape == (3,)
