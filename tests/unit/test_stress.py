"""The cache under stress: many processes, kills, damage, disks that store nothing, and other users.

`.ci/deep cache` runs all of it; the gate runs a tenth (`--stress`).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fusegen as fg
from fusegen import files
from fusegen.compiler import backends
from fusegen.compiler import compile as compiler
from fusegen.compiler.passes import forget_programs
from fusegen.emit import environment
from fusegen.errors import SettingsError
from fusegen.jit import cache, host, nvrtc
from fusegen.settings import cache_folder, settings

ROOT = Path(__file__).resolve().parents[2]
Share = Callable[[int], int]
SECONDS = 120


def chain(x: Tensor) -> Tensor:
    return (x * 3 + 1).softmax(-1)


def is_right(device: str = "cpu") -> bool:
    """Calls the kernel as a process does that has called none."""
    x = torch.linspace(-1, 1, 24, device=device).view(4, 6)
    torch.testing.assert_close(fg.kernel(chain)(x), chain(x))
    return True


def forget() -> None:
    """Forgets all that this process has compiled or read."""
    known = (environment.environment, environment.body, environment._environment, compiler.specializations_of, settings)
    for each in known:
        each.cache_clear()
    backends._LOADED.clear()
    host._IN_MEMORY.clear()
    files._SAID.clear()
    forget_programs()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the test's own, with this process as new as can be."""
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEGEN_NATIVE", "0")
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a byte from each compilation of this process and its children."""
    log = tmp_path / "compilations"
    log.touch()
    for module, name in ((host, "_built"), (nvrtc, "_compile")):
        monkeypatch.setattr(module, name, _counted(getattr(module, name), log))
    return log


def _counted(function: Callable[..., Any], log: Path) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        with log.open("ab") as file:
            file.write(b"x")
        return function(*arguments)

    return counted


def fork(work: Callable[[], object]) -> int:
    """Starts a child that exits with 0 if work returns something true. After too long, an alarm ends it.

    It has one thread of torch's, as a worker of a DataLoader has: those of its parent did not come along, and torch would wait.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    code = 2
    try:
        signal.alarm(SECONDS)
        torch.set_num_threads(1)
        code = 0 if work() else 1
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(code)


def ends(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.startswith((".", "building-"))]


# Processes.


def test_forked_processes_compile_once(folder: Path, compilations: Path, stress: Share, request: pytest.FixtureRequest) -> None:
    device = request.config.getoption("--device")
    count = stress(64)
    assert ends([fork(lambda: is_right(device)) for _ in range(count)]) == [0] * count
    assert compilations.read_bytes() == b"x"
    assert left_over(folder) == []


_STARTS = """
    import torch
    from tests.unit.test_stress import Path, _counted, host, is_right, nvrtc
    for module, name in ((host, "_built"), (nvrtc, "_compile")):
        setattr(module, name, _counted(getattr(module, name), Path({log!r})))
    assert is_right({device!r})
"""


@pytest.mark.deep
@pytest.mark.usefixtures("folder")
def test_started_processes_compile_once(compilations: Path, stress: Share, request: pytest.FixtureRequest) -> None:
    code = textwrap.dedent(_STARTS.format(log=str(compilations), device=request.config.getoption("--device")))
    running = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE) for _ in range(stress(64))]
    errors = [each.communicate()[1] for each in running]
    assert [each.returncode for each in running] == [0] * len(running), b"".join(errors)[-2000:]
    assert b"Traceback" not in b"".join(errors) and compilations.read_bytes() == b"x"


def _library(number: int) -> tuple[str, tuple[str, ...]]:
    return f'extern "C" int number() {{ return {number}; }}', ("-O0",)


def _number(number: int) -> int:
    return int(host.load_compiled(*_library(number), cache_folder("cpu"))[0].number())


def test_kills_at_random_moments(folder: Path, stress: Share) -> None:
    draw, count = random.Random(7), stress(200)
    for number in range(count):
        child = fork(lambda number=number: _number(number % 10))
        time.sleep(draw.uniform(0, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [_number(number) for number in range(10)] == list(range(10))
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (0, 0))
    cache.clear(folder)
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_a_stopped_builder_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is waited for as long as a build may take."""
    path = cache_folder("cpu") / "library"
    with files.one_builder(path, 1), files.one_builder(path, 0.1):
        pass
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError("no locks")))
    with files.one_builder(path, 60):
        pass
    assert left_over(folder) == []


@pytest.mark.usefixtures("folder")
def test_a_killed_parent_s_lock_is_free(tmp_path: Path) -> None:
    """A process forked while another thread compiles does not hold the lock when its parent has been killed."""
    path, ready = cache_folder("cpu") / "library", tmp_path / "ready"

    def parent() -> None:
        def hold() -> None:
            with files.one_builder(path, 1):
                held.set()
                time.sleep(SECONDS)

        held = threading.Event()
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        ready.write_text(str(fork(lambda: time.sleep(SECONDS))))
        time.sleep(SECONDS)

    child = fork(parent)
    while not (ready.exists() and ready.read_text()):
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    start = time.monotonic()
    with files.one_builder(path, 30):
        assert time.monotonic() - start < 15
    os.kill(int(ready.read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("folder")
def test_threads_compile_once(compilations: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: is_right(), range(8))) == [True] * 8
    assert compilations.read_bytes() == b"x"


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return fg.kernel(chain)(torch.full((2, 3), float(index)))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
@pytest.mark.parametrize("is_used_before", [False, True])
@pytest.mark.usefixtures("folder")
def test_workers_of_a_loader(method: str, is_used_before: bool) -> None:
    if is_used_before:
        is_right()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = list(DataLoader(Rows(), batch_size=3, num_workers=2, multiprocessing_context=method))
    torch.testing.assert_close(torch.cat(found), torch.full((6, 2, 3), 1 / 3))


_ENDS = """
    import sys, threading, time, torch, fusegen as fg
    from fusegen.jit import host, nvrtc
    def work():
        if {is_late}:
            threading.main_thread().join()
        if {is_late}:
            sources = [fg.kernel(f).lower(torch.empty(4, 6, device="meta"), target="sm_90a").sources[0]
                       for f in (lambda x: x + 1, lambda x: x + 2)]
            assert len(nvrtc.compile_cubins(sources, "sm_90a")) == 2
        fg.kernel(lambda x: (x * 3).softmax(-1))(torch.ones(4, 6))
    threading.Thread(target=work, daemon={is_daemon}).start()
    while not {is_late} and not host._running:
        time.sleep(0.001)
"""


@pytest.mark.deep
@pytest.mark.parametrize(("is_daemon", "is_late"), [(True, False), (False, False), (False, True)])
def test_the_interpreter_ends_during_a_compilation(folder: Path, is_daemon: bool, is_late: bool) -> None:
    code = textwrap.dedent(_ENDS.format(is_daemon=is_daemon, is_late=is_late))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [name for name in left_over(folder) if name.startswith("building-")] == [] or is_daemon


# Damage.


def _flipped(whole: bytes, draw: random.Random, _: list[bytes]) -> bytes:
    at = draw.randrange(len(whole)) if whole else 0
    return whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :] if whole else b"x"


DAMAGE: dict[str, Callable[[bytes, random.Random, list[bytes]], bytes]] = {
    "truncated": lambda whole, draw, _: whole[: draw.randrange(len(whole) or 1)],
    "flipped": _flipped,
    "longer": lambda whole, *_: whole + b"\0",
    "zeros": lambda whole, *_: bytes(len(whole)),
    "foreign": lambda _, draw, others: draw.choice(others),
    "random": lambda whole, draw, _: draw.randbytes(len(whole)),
}


def _damage(path: Path, draw: random.Random, others: list[bytes]) -> None:
    whole = path.read_bytes() if path.is_file() else b""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    kind = draw.choice([*DAMAGE, "pipe", "folder", "link", "circle"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "inside").mkdir(parents=True)
    elif kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "circle":
        path.symlink_to(path)
    else:
        path.write_bytes(DAMAGE[kind](whole, draw, others))


def _compiles() -> bool:
    """Emits and compiles a GPU's kernel as a process does that has compiled none."""
    forget()
    low = fg.kernel(chain).lower(torch.empty(4, 6, device="meta"), target="sm_90a")
    return all(nvrtc.compile_cubin(source, "sm_90a").cubin.startswith(b"\x7fELF") for source in low.sources)


def _runs() -> bool:
    forget()
    return is_right()


@pytest.mark.filterwarnings("ignore:kernels are compiled by each process")
@pytest.mark.parametrize("works", [_runs, _compiles])
def test_damaged_entries(works: Callable[[], bool], folder: Path, stress: Share) -> None:
    """Nothing that lies in the cache is believed, waited for, or fatal."""
    draw, left = random.Random(11), stress(500)
    assert ends([fork(works)]) == [0]
    while left > 0:
        entries = sorted(path for kind in cache.KINDS for path in (folder / kind.name).glob("*") if path.suffix != ".lock")
        others = [path.read_bytes() for path in entries if path.is_file()]
        hit = draw.sample(entries, min(len(entries), left, 40))
        for path in hit:
            _damage(path, draw, others)
        left -= len(hit)
        assert ends([fork(works)]) == [0]


def test_no_path_leaves_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_right()
    read: list[Path] = []
    for path in (folder / "plans").iterdir():
        files.write_sealed(path, b"../../../../etc/passwd")
    monkeypatch.setattr(compiler, "read_sealed", lambda path: (read.append(path), files.read_sealed(path))[1])
    forget()
    is_right()
    assert read and {path.parent for path in read} == {folder / "plans"} and not [path for path in read if ".." in path.parts]


# Disks that store nothing.


def _no_home(patch: pytest.MonkeyPatch, _: Path) -> None:
    def fails() -> Path:
        raise RuntimeError("Could not determine home directory.")

    patch.delenv("FUSEGEN_CACHE_DIR")
    patch.delenv("XDG_CACHE_HOME", raising=False)
    patch.setattr(Path, "home", fails)


def _full(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Writes to the cache fail; the compiler's own, too."""
    write, built = files.write_atomically, host._built

    def writes(path: Path, content: bytes) -> None:
        if folder in path.parents:
            raise OSError(28, "No space left on device")
        write(path, content)

    def builds(*arguments: Any) -> bytes:
        if folder in arguments[3].parents:
            raise OSError(28, "No space left on device")
        return built(*arguments)

    for module in (files, host, nvrtc):
        patch.setattr(module, "write_atomically", writes)
    patch.setattr(host, "_built", builds)


UNUSABLE: dict[str, Callable[[pytest.MonkeyPatch, Path], object]] = {
    "no-home": _no_home,
    "full": _full,
    "a-file": lambda patch, folder: folder.write_text("precious"),
    "cannot-be-created": lambda patch, folder: patch.setenv("FUSEGEN_CACHE_DIR", "/proc/fusegen"),
}


@pytest.mark.parametrize("why", UNUSABLE)
def test_a_cache_that_stores_nothing(why: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run from memory, and one warning says so."""
    UNUSABLE[why](monkeypatch, folder)
    forget()
    with pytest.warns(RuntimeWarning, match="kernels are compiled by each process") as caught:
        assert is_right()
        assert torch.equal(fg.kernel(lambda x: x * 5)(torch.ones(3)), torch.full((3,), 5.0))
        low = fg.kernel(chain).lower(torch.empty(4, 6, device="meta"), target="sm_90a")
        assert nvrtc.compile_cubin(low.sources[0], "sm_90a").cubin.startswith(b"\x7fELF")
    assert len(caught) == 1 and "FUSEGEN_CACHE_DIR" in str(caught[0].message)
    assert not folder.is_dir() or not [path for path in folder.rglob("*") if path.suffix == ".so"]


_MOUNTED = """
    import sys, warnings, torch, fusegen as fg
    from tests.unit.test_stress import is_right
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert is_right()
        assert is_right()
        assert torch.equal(fg.kernel(lambda x: x * 5)(torch.ones(3)), torch.full((3,), 5.0))
    print(len([each for each in caught if "compiled by each process" in str(each.message)]))
"""


@pytest.mark.deep
@pytest.mark.parametrize("options", ["size=48k", "ro", "noexec", "size=400k"])
def test_mounted_disks(options: str, tmp_path: Path) -> None:
    """Real file systems, in a mount namespace of the test's own: full, read-only, without execution, nearly full."""
    folder = tmp_path / "cache"
    folder.mkdir()
    mount = f'mount -t tmpfs -o {options},mode=700 tmpfs {folder} && exec {sys.executable} -c "$CODE"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
    if subprocess.run([*command[:4], "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no user namespaces here")
    variables = {"CODE": textwrap.dedent(_MOUNTED), "FUSEGEN_CACHE_DIR": str(folder), "FUSEGEN_NATIVE": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.strip() in (("0", "1") if options == "size=400k" else ("1",))


@pytest.mark.usefixtures("folder")
def test_the_least_recently_used_entries_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_MIB", "1")
    forget()
    monkeypatch.setattr(cache, "_room", 0.0)
    kept = cache_folder("tuned") / ("0" * 32) / "4.json"
    files.write_atomically(kept, bytes(200_000))
    entries = [cache_folder("cubin") / f"{number:064x}" for number in range(16)]
    for number, entry in enumerate(entries):
        files.write_sealed(entry, bytes(100_000))
        os.utime(entry, (number, number))
        files.read_sealed(entries[0])
        cache.keep_within_size(entry)
    stay = [number for number, entry in enumerate(entries) if entry.exists()]
    assert stay == [0, *range(16 - len(stay) + 1, 16)] and 7 <= len(stay) <= 10 and kept.exists()


# Other users.


def test_folders_are_the_owner_s(folder: Path) -> None:
    before = os.umask(0)
    try:
        is_right()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (folder, folder / "cpu", folder / "plans")} == {0o700}


@pytest.mark.parametrize("name", [".", "cpu"])
@pytest.mark.parametrize("mode", [0o770, 0o703, None])
def test_a_folder_that_others_can_write_to(name: str, mode: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).mkdir(parents=True)
    if mode is None:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    else:
        (folder / name).chmod(mode)
    with pytest.raises(SettingsError, match=r"is refused: (other users can write|it belongs to another)") as caught:
        is_right()
    assert "empty it" in (hint := str(caught.value.hint)) and "FUSEGEN_SHARED_CACHE=1" in hint and not list(folder.rglob("*.so"))
    monkeypatch.setenv("FUSEGEN_SHARED_CACHE", "1")
    forget()
    assert is_right() and list(folder.rglob("*.so"))


def test_new_folders_above_the_cache_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "a" / "b" / "cache"))
    forget()
    before = os.umask(0o002)
    try:
        folder = cache_folder("cpu")
    finally:
        os.umask(before)
        monkeypatch.undo()
        forget()
    assert {path.stat().st_mode & 0o777 for path in (folder, *list(folder.parents)[:3])} == {0o700}


def test_a_group_shares_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGEN_SHARED_CACHE", "1")
    before = os.umask(0o002)
    try:
        assert _runs() and _compiles()
    finally:
        os.umask(before)
    entries = [path for kind in ("cpu", "cubin", "plans") for path in (folder / kind).iterdir()]
    assert len(entries) > 3 and all(path.stat().st_mode & 0o060 == 0o060 for path in (folder, folder / "cpu", *entries))


# Upgrades.


@pytest.mark.parametrize("part", ["compiler", "machine", "torch", "templates"])
def test_an_upgrade_finds_no_old_binary(part: str, folder: Path, compilations: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_right()
    plans = set((folder / "plans").iterdir())
    if part == "compiler":
        known = host.find_compiler(settings().cxx)
        monkeypatch.setattr(host, "find_compiler", lambda _: host.HostCompiler(known.command, "another version"))
    elif part == "machine":
        monkeypatch.setattr(backends, "host_flags", lambda: (*backends._HOST_FLAGS, "-DFG_MACHINE=another"))
    elif part == "torch":
        monkeypatch.setattr(torch, "__version__", "99.9")
    else:
        monkeypatch.setattr(compiler, "generator", lambda: "other templates")
    environment.generator.cache_clear()
    forget()
    is_right()
    is_new = {"compiler": compilations.read_bytes() == b"xx", "machine": compilations.read_bytes() == b"xx"}
    assert is_new.get(part, len(set((folder / "plans").iterdir()) - plans) >= 1)
    monkeypatch.undo()
    environment.generator.cache_clear()
