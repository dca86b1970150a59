"""Caches: what a binary's key depends on, and that nobody reads what is half written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch

import fusegen as fg
from fusegen import files
from fusegen.jit import host
from fusegen.settings import cache_folder
from fusegen.source import Primitive, Source

nvrtc = pytest.importorskip("fusegen.jit.nvrtc", reason="needs cuda-bindings")


def source() -> Source:
    return fg.kernel(lambda x: x.exp() * 2).lower(torch.empty(4, 64, device="meta"), target="sm_90a").sources[0]


def test_what_a_binary_s_key_depends_on() -> None:
    one = source()
    primitives = (*one.primitives, Primitive("added", (), "int added;"))
    sources = [one, replace(one, primitives=primitives), replace(one, math="int added;"), replace(one, pipeline="int added;")]
    keys = {nvrtc._key(each, architecture) for each in sources for architecture in ("sm_80", "sm_90a")}
    assert len(keys) == len(sources) * 2
    assert nvrtc._key(replace(one, banner="// another", name="other"), "sm_80") in keys


def test_the_compiler_s_version_is_part_of_a_binary_s_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = nvrtc._key(source(), "sm_90a")
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "99.9")
    assert nvrtc._key(source(), "sm_90a") != before


def test_the_size_of_nvrtc_and_the_command_of_nvcc_are_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = nvrtc._key(source(), "sm_90a")
    monkeypatch.setattr(nvrtc, "_nvrtc_bytes", lambda: 1)
    assert nvrtc._key(source(), "sm_90a") != before
    monkeypatch.setattr(nvrtc, "find_nvcc", lambda name: nvrtc.Nvcc(tuple(name.split()), "13.0"))
    assert nvrtc._compiler_identity("nvcc") != nvrtc._compiler_identity("nvcc -G")


def test_the_flags_are_part_of_a_binary_s_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = nvrtc._key(source(), "sm_90a")
    monkeypatch.setattr(nvrtc, "FLAGS", nvrtc.FLAGS[:-1])
    assert nvrtc._key(source(), "sm_90a") != before


def test_templates_are_compiled_once(lowers_first: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = lowers_first()
    with monkeypatch.context() as patch:
        patch.setattr(jinja2.Environment, "compile", lambda *_: pytest.fail("a template was compiled again"))
        assert lowers_first() == text


@pytest.mark.parametrize("changed", ["jinja2.__version__", "sys.version"])
def test_what_a_compiled_template_s_key_depends_on(
    changed: str, lowers_first: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowers_first()
    one = len(list(cache_folder("templates").iterdir()))
    monkeypatch.setattr(changed, "99.9")
    lowers_first()
    assert len(list(cache_folder("templates").iterdir())) == 2 * one


def test_a_template_that_has_changed_is_compiled_again(lowers_first: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    text, read = lowers_first(), jinja2.FileSystemLoader.get_source

    def changed(self: jinja2.FileSystemLoader, environment: jinja2.Environment, name: str) -> Any:
        source, *rest = read(self, environment, name)
        return (source + "// another line\n", *rest)

    monkeypatch.setattr(jinja2.FileSystemLoader, "get_source", changed)
    assert len(lowers_first()) > len(text)


def test_a_reader_never_sees_a_part_of_a_file(tmp_path: Path) -> None:
    path, contents = tmp_path / "file", [bytes([65 + n]) * 400_000 for n in range(4)]
    files.write_atomically(path, contents[0])
    seen: set[bytes] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(50):
        files.write_atomically(path, contents[n % 4])
    stop.set()
    reader.join()
    assert seen <= set(contents) and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_atomically(path, b"old")
    with pytest.raises(TypeError):
        files.write_atomically(path, "text")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_library_appears_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler writes elsewhere: the library's own name is taken by a rename."""
    written: list[list[str]] = []
    compile_now = host.run

    def noted(command: list[str], *rest: Any, **named: Any) -> Any:
        written.append(command)
        return compile_now(command, *rest, **named)

    monkeypatch.setattr(host, "run", noted)
    library = host.compile_shared("int one() { return 1; }", ("-O0",), tmp_path)
    assert written and all(str(library) not in command for command in written)
    assert library.exists()
