"""``fusegen cache``: it counts and removes what is ours, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fusegen as fg
from fusegen import settings as settings_
from fusegen.cli.main import main
from fusegen.compiler import tuned
from fusegen.emit.environment import environment
from fusegen.errors import SettingsError
from fusegen.jit import cache, nvrtc

ROOT = Path(__file__).resolve().parents[2]
HEX = "0123456789abcdef"

OURS = {
    f"cubin/{HEX * 4}": 30,
    f"cuda/{HEX * 2}.cu": 5,
    f"cpu/{HEX * 4}.so": 20,
    f"cpu/{HEX * 4}.cpp": 7,
    f"native/{HEX * 4}.cpython-311-x86_64-linux-gnu.so": 29,
    f"emulator/{HEX * 4}.so": 11,
    f"extension/{HEX * 4}.so": 23,
    "emitted/sm_90a-gelu-bf16.json": 13,
    f"templates/{HEX * 4}": 19,
    f"plans/{HEX * 4}": 31,
    f"tuned/{HEX * 2}/40x500.json": 17,
}
UNFINISHED = {
    f"cubin/.{HEX * 4}-ab12": 3,
    f"cubin/.{HEX * 4}.lock": 0,
    f"cpu/.{HEX * 4}.so.lock": 0,
    f"native/.{HEX * 4}.cpython-311-x86_64-linux-gnu.so.lock": 0,
    f"cuda/.{HEX * 2}.cu-x1_y2": 3,
    f"cpu/building-ab_1/{HEX * 4}.cpp": 3,
    "extension/building-ab_2/build.ninja": 3,
    f"templates/.{HEX * 4}-x1_y2": 3,
    f"plans/.{HEX * 4}-x1_y2": 3,
}
ENTRIES = {
    "cubin": (1, 30),
    "cuda": (1, 5),
    "cpu": (1, 27),
    "extension": (1, 23),
    "native": (1, 29),
    "emulator": (1, 11),
    "emitted": (1, 13),
    "templates": (1, 19),
    "plans": (1, 31),
    "tuned": (1, 17),
}
"""Entries of each kind, and their bytes."""

THEIRS = (
    ".bashrc", "notes.txt", "thesis/chapter.tex", "cpu/main.cpp", f"cpu/{HEX * 4}.txt", "cuda/kernel.cu", "cubin/readme",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with files of a user's in it."""
    root = tmp_path / "home"
    for name, size in (OURS | UNFINISHED).items():
        _write(root / name, b"x" * size)
    for name in THEIRS:
        _write(root / name, b"precious")
    monkeypatch.setattr(settings_, "settings", lambda: None)
    monkeypatch.setattr("fusegen.cli.doctor.settings", lambda: settings_.Settings(root, False, None))
    return root


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _age(root: Path) -> None:
    for name in UNFINISHED:
        os.utime(root / name, (time.time() - 7200,) * 2)


def test_usage(folder: Path) -> None:
    found = {each.name: (each.entries, each.bytes) for each in cache.usage(folder)}
    assert found == ENTRIES
    assert cache.unknown_names(folder) == (".bashrc", "notes.txt", "thesis")
    assert [each.bytes for each in cache.usage(folder / "nowhere")] == [0] * len(cache.KINDS)


def test_clear_removes_ours_alone(folder: Path) -> None:
    removed = {each.name: (each.entries, each.bytes) for each in cache.clear(folder)}
    assert removed == ENTRIES
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert left == {*THEIRS, *UNFINISHED}, "what others are writing stays as well"
    assert all(each.bytes == 0 for each in cache.clear(folder))


def test_clear_removes_what_a_crash_left(folder: Path) -> None:
    _age(folder)
    assert sum(each.bytes for each in cache.clear(folder)) == sum((OURS | UNFINISHED).values())
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == set(THEIRS)


def test_links_are_not_ours(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.so"
    target.write_bytes(b"precious")
    link = folder / "cpu" / f"{HEX * 3}{HEX[::-1]}.so"
    link.symlink_to(target)
    cache.clear(folder)
    assert link.is_symlink() and target.read_bytes() == b"precious"


@pytest.mark.parametrize("action", [cache.usage, cache.clear])
def test_a_file_in_place_of_the_folder(tmp_path: Path, action: object) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(SettingsError, match="cannot be read") as caught:
        action(path)
    assert caught.value.hint and path.read_text() == "precious"


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info"]) == 0
    shown = capsys.readouterr().out
    assert str(folder) in shown and "3 other entries" in shown and re.search(r"all +10 +205 B", shown)
    assert main(["cache", "clear", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] == 205 and told["action"] == "clear" and told["not_ours"] == [".bashrc", "notes.txt", "thesis"]
    assert [kind["name"] for kind in told["kinds"]] == [kind.name for kind in cache.KINDS]
    assert main(["cache", "info", "--json"]) == 0 and json.loads(capsys.readouterr().out)["bytes"] == 0


def test_every_folder_of_the_package_is_known() -> None:
    used = {name for path in (ROOT / "fusegen").rglob("*.py") for name in re.findall(r'cache_folder\("(\w+)"\)', path.read_text())}
    assert used == {kind.name for kind in cache.KINDS}


def _makes() -> None:
    """Compiles a kernel for the CPU and for a GPU, and keeps a measurement."""
    kernel = fg.kernel(lambda x: x * 3 + 1)
    assert torch.equal(kernel(torch.ones(4)), torch.full((4,), 4.0))
    tuned.write_record(tuned.TuningKey("launch", "device", (4, 4)), tuned.TuningRecord((4, 4), {}, ()))
    low = kernel.lower(torch.empty(4, device="meta"), target="sm_90a")
    for source in low.sources:
        assert nvrtc.compile_cubin(source, low.target.name).cubin[:4] == b"\x7fELF"


def test_what_is_really_made_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in a folder of its own leaves nothing that `clear` would not find, and works again afterwards."""
    with monkeypatch.context() as patch:
        patch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
        settings_.settings.cache_clear()
        environment.cache_clear()
        _makes()
        found = {each.name: each.entries for each in cache.usage(tmp_path)}
        assert found.pop("templates") > 0 and found.pop("plans") > 0
        assert found == {"cubin": 1, "cuda": 1, "cpu": 1, "extension": 0, "native": 0, "emulator": 0, "emitted": 0, "tuned": 1}
        cache.clear(tmp_path)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        _makes()
    settings_.settings.cache_clear()


_COMPILES = """
import torch, fusegen as fg
from fusegen.jit.host import compile_shared
from fusegen.jit.nvrtc import compile_cubin
from fusegen.settings import cache_folder
low = fg.kernel(lambda x: x * 3 + 1).lower(torch.empty(4, device="meta"), target="sm_90a")
for _ in range(30):
    assert compile_cubin(low.sources[0], "sm_90a").cubin[:4] == b"\\x7fELF"
    compile_shared("extern \\"C\\" int f() { return 1; }", ("-O0",), cache_folder("cpu"))
"""


@pytest.mark.deep
def test_clearing_while_others_write(tmp_path: Path) -> None:
    """Whoever compiles while the cache is cleared again and again gets a result each time."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FUSEGEN_CACHE_DIR": str(tmp_path)}
    worker = subprocess.Popen([sys.executable, "-c", _COMPILES], env=environment, stderr=subprocess.PIPE, text=True)
    removed = 0
    while worker.poll() is None:
        removed += sum(each.entries for each in cache.clear(tmp_path))
        time.sleep(0.01)
    assert worker.stderr is not None
    assert worker.returncode == 0, worker.stderr.read()
    assert removed, "nothing was cleared meanwhile"


def test_a_folder_that_goes_away_while_the_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu" / "building-gone").mkdir(parents=True)
    (tmp_path / "cpu" / f"{'0' * 64}.so").write_bytes(b"1234")
    scandir = os.scandir

    def vanishing(folder: str | Path) -> object:
        if str(folder).endswith("building-gone"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert {each.name: (each.entries, each.bytes) for each in cache.usage(tmp_path)}["cpu"] == (1, 4)
