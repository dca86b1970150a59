"""Disks and compilers that do not do what they should: an error that says what, where and how to fix it.

Nothing half-written stays, and what was damaged is built again.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegen as fg
from fusegen import files
from fusegen.errors import CompileError, FusegenError, SettingsError, ToolNotFoundError
from fusegen.jit import host, nvrtc
from fusegen.settings import cache_folder, settings
from fusegen.source import Source

TEXT = 'extern "C" int one() { return 1; }'
FLAGS = ("-O0",)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Sets CXX to a command line, or to a script of some lines."""

    def use(text: str) -> None:
        if "\n" in text:
            script = tmp_path / "compiler"
            script.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1.0; exit 0; fi\n{text}')
            script.chmod(0o755)
            text = str(script)
        monkeypatch.setenv("CXX", text)
        settings.cache_clear()

    yield use
    monkeypatch.undo()
    settings.cache_clear()


def names(folder: Path) -> set[str]:
    return {path.suffix or path.name for path in folder.iterdir()} - {"compiler"}


COMPILERS: dict[str, tuple[str, type[FusegenError], str]] = {
    "does-nothing": ("true", CompileError, "built nothing"),
    "fails": ("false", CompileError, "ended with exit code 1, printed nothing"),
    "quote": ("g++ 'x", ToolNotFoundError, "cannot be read as a command line"),
    "absent": ("/no/such/compiler", ToolNotFoundError, "no host C\\+\\+ compiler"),
    "no-program": ("nothing-but-text", ToolNotFoundError, "cannot be started"),
    "crashes": ("kill -SEGV $$\n", CompileError, "ended by SIGSEGV"),
    "bytes": ("printf '\\377\\376'; exit 1\n", CompileError, "rejected the emitted code"),
    "disk": ("echo fatal: No space left on device; exit 1\n", SettingsError, "No space left on device"),
}


@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_that_does_not_work(name: str, compiler: Callable[[str], None], tmp_path: Path) -> None:
    command, error, words = COMPILERS[name]
    if name == "no-program":
        path = tmp_path / "compiler"
        path.write_bytes(b"\x7fELF nothing")
        path.chmod(0o755)
        command = str(path)
    compiler(command)
    with pytest.raises(error, match=words) as caught:
        host.compile_shared(TEXT, FLAGS, tmp_path)
    assert caught.value.hint
    assert names(tmp_path) <= {".cpp"}
    if error is CompileError:
        assert Path(str(caught.value.where)).read_text() == TEXT


def test_a_compiler_that_hangs(compiler: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(f"sleep 60 & echo $! > {tmp_path}/child.pid; wait\n")
    monkeypatch.setattr(host, "_BUILD_SECONDS", 2)
    with pytest.raises(CompileError, match="stopped after 2 s"):
        host.compile_shared(TEXT, FLAGS, tmp_path)
    assert_gone(int((tmp_path / "child.pid").read_text()))
    assert names(tmp_path) == {".cpp", ".pid"}


def assert_gone(pid: int) -> None:
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} is still there")


def test_an_interrupt_ends_the_compiler_and_what_it_has_started(tmp_path: Path) -> None:
    child = tmp_path / "pid"

    def interrupt(*_: object) -> None:
        if child.is_file() and child.read_text().endswith("\n"):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            host.run(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"], 30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert_gone(int(child.read_text()))


# Files.


def test_a_cache_folder_that_goes_away(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = host.compile_shared(TEXT, FLAGS, folder)
    shutil.rmtree(folder)
    assert host.load_shared(host.compile_shared(TEXT, FLAGS, folder)).one() == 1 and first.exists()


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, whose files may have 4 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.filterwarnings("ignore:kernels are compiled by each process")
def test_a_disk_that_is_full(full_disk: Path) -> None:
    kernel, x = fg.kernel(lambda x: x.softmax(-1)), torch.ones(4, 4)
    for call in (lambda: kernel(x), lambda: kernel.lower(x, target="sm_90a").asm["sass"]):
        with pytest.raises(SettingsError, match="File") as caught:
            call()
        assert caught.value.where and caught.value.hint
    assert not [
        path
        for path in full_disk.rglob("*")
        if path.is_file() and path.suffix != ".cpp" and path.parent.name not in ("templates", "plans")
    ]


def test_a_library_that_the_system_does_not_load(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    files.write_sealed(library, b"no library")
    with pytest.raises(SettingsError, match="cannot be used"):
        host.load_shared(library)


# Damage.


def test_what_a_seal_notices() -> None:
    content = bytes(range(256)) * 8
    whole = files.sealed(content, "name")
    assert files.unsealed(whole, "name") == content and files.unsealed(files.sealed(b"", "name"), "name") == b""
    assert files.unsealed(whole, "another") is None
    damaged = [whole[:end] for end in (0, 1, 40, len(content), len(whole) - 1)]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (0, 1000, len(content) + 2, len(whole) - 1)]
    assert [files.unsealed(d, "name") for d in (*damaged, content, whole + b"\0")] == [None] * (len(damaged) + 2)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "flipped": lambda whole: whole[:700] + bytes([whole[700] ^ 16]) + whole[701:],
    "zeros": lambda whole: bytes(len(whole)),
    "of-an-older-version": lambda whole: whole[: whole.rindex(files._MARK)],
}


def test_a_pipe_in_place_of_a_library_is_not_waited_for(tmp_path: Path) -> None:
    library = host.compile_shared(TEXT, FLAGS, tmp_path)
    library.unlink()
    os.mkfifo(library)
    assert host.load_shared(host.compile_shared(TEXT, FLAGS, tmp_path)).one() == 1


def test_a_library_of_another_name_is_not_loaded(tmp_path: Path) -> None:
    one, two = (host.compile_shared(text, FLAGS, tmp_path) for text in (TEXT, TEXT.replace("1", "2")))
    one.unlink()
    two.rename(one)
    assert host.load_shared(host.compile_shared(TEXT, FLAGS, tmp_path)).one() == 1


def test_a_library_that_is_removed_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanishing(*arguments: Any) -> Path:
        library = compile_shared(*arguments)
        library.unlink()
        return library

    compile_shared = host.compile_shared
    monkeypatch.setattr(host, "compile_shared", vanishing)
    monkeypatch.setattr(files, "_SAID", set())
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert host.load_compiled(TEXT, FLAGS, tmp_path)[0].one() == 1


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_built_again(damage: str, tmp_path: Path) -> None:
    library = host.compile_shared(TEXT, FLAGS, tmp_path)
    whole = library.read_bytes()
    broken = DAMAGE[damage](whole)
    library.unlink()
    library.write_bytes(broken)
    assert host.load_shared(host.compile_shared(TEXT, FLAGS, tmp_path)).one() == 1
    assert files.is_undamaged(library) and names(tmp_path) == {".so", ".cpp"}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cubin_is_compiled_again(damage: str) -> None:
    source: Source = fg.kernel(lambda x: x * 2.625).lower(torch.empty(4, 64, device="meta"), target="sm_80").sources[0]
    nvrtc.compile_cubin(source, "sm_80")
    entry = cache_folder("cubin") / nvrtc._key(source, "sm_80")
    entry.write_bytes(DAMAGE[damage](entry.read_bytes()))
    again = nvrtc.compile_cubin(source, "sm_80")
    assert not again.from_cache and again.cubin.startswith(b"\x7fELF")
    assert nvrtc.compile_cubin(source, "sm_80").from_cache


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_template_is_compiled_again(damage: str, lowers_first: Callable[[], str]) -> None:
    text = lowers_first()
    kept = {path: path.read_bytes() for path in cache_folder("templates").iterdir()}
    for path, whole in kept.items():
        path.write_bytes(DAMAGE[damage](whole))
    assert lowers_first() == text
    assert {path: path.read_bytes() for path in cache_folder("templates").iterdir()} == kept


@pytest.mark.parametrize("damage", ["files-are-folders", "folder-is-a-file", "cache-is-a-file", "cache-has-no-home"])
def test_a_cache_that_keeps_no_templates(damage: str, lowers_first: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    text, folder = lowers_first(), cache_folder("templates")
    entries = [path.name for path in folder.iterdir()]
    shutil.rmtree(folder)
    if damage == "files-are-folders":
        for name in entries:
            (folder / name).mkdir(parents=True)
    elif damage == "folder-is-a-file":
        folder.write_text("precious")
    elif damage == "cache-is-a-file":
        shutil.rmtree(folder.parent)
        folder.parent.write_text("precious")
    else:
        monkeypatch.setenv("FUSEGEN_CACHE_DIR", "~nobody-of-this-name")
        settings.cache_clear()
    assert lowers_first() == text


@pytest.mark.deep
def test_processes_that_race_for_a_damaged_library(tmp_path: Path) -> None:
    library = host.compile_shared(TEXT, FLAGS, tmp_path)
    library.write_bytes(b"damaged")
    text = f"""
        from pathlib import Path
        from fusegen.jit import host
        assert host.load_shared(host.compile_shared({TEXT!r}, {FLAGS!r}, Path({str(tmp_path)!r}))).one() == 1
    """
    running = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)]) for _ in range(3)]
    assert [each.wait() for each in running] == [0, 0, 0]
    assert names(tmp_path) == {".so", ".cpp"}
