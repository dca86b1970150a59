"""Whatever is typed: an exit code of ours, one line of error, nothing on stdout beside it, no traceback."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fusegen.cli.main import COMMANDS, main
from fusegen.settings import settings as package_settings
from tests.naming import case

ROOT = Path(__file__).resolve().parents[2]

USER_FILE = """
import sys
from typing import Annotated
import torch
from torch import Tensor
import fusegen as fg

class Mute(BaseException):
    def __str__(self):
        raise SystemExit(5)

@fg.kernel
def pair(x, y): return x + y
@fg.kernel
def nothing(): return torch.zeros(3)
@fg.kernel
def static(x, n: fg.Static[int]): return x * n
@fg.kernel
def scalar(x, n: float): return x * n
@fg.kernel
def mode(x, mode: str): return x + 1 if mode == "up" else x - 1
@fg.kernel
def named(x: Annotated[Tensor, "rows cols"]): return x * 2
@fg.kernel
def strange(x: Annotated[Tensor, "0 -1 é"]): return x * 2
@fg.kernel
def long(x: Annotated[Tensor, " ".join(f"d{i}" for i in range(200))]): return x * 2
@fg.kernel
def outer(x, y): return x[:, None] * y[None, :]
@fg.kernel
def exits(x): sys.exit(0)
@fg.kernel
def mute(x): raise Mute
@fg.kernel
def endless(x): return endless.function(x)
@fg.kernel
def text(x): return "text"
"""


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def check(words: Sequence[str]) -> str:
    """Runs a command, asserts what holds for every command, and returns stderr."""
    code, out, err = run(words)
    assert code in (0, 1, 2), words
    assert "Traceback" not in out + err, words
    if code:
        assert out == "", words
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and err.splitlines()[-1] == errors[0], (words, err)
        assert errors[0].isprintable() and len(errors[0]) < 4000
    return err


@pytest.fixture(scope="module")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with kernels of a user's."""
    path = tmp_path_factory.mktemp("hostile") / "mine.py"
    path.write_text(USER_FILE)
    return str(path)


# Random words. Commands that take long or remove something are drawn with words that they refuse.

NAMES = st.sampled_from(
    ["gelu", "softmax", "gleu", "FILE:pair", "FILE:static", "FILE:named", "FILE:outer", "FILE:text", "FILE:", "FILE", "os:path"]
)
SHAPES = st.builds(
    "{}={}".format, st.sampled_from(["x", "y", "rows", "é", "", "x=x"]), st.from_regex(r"\A[0-9x:-]{0,12}(:(f32|bf16|bool|i9))?\Z")
)
VALUES = st.builds(
    "{}={}".format, st.sampled_from(["n", "mode", "x", ""]), st.text(max_size=20) | st.integers().map(str) | st.floats().map(str)
)
NONSENSE = st.text(max_size=12) | st.sampled_from(
    ["--", "-", "--json", "--target", "\0", "\udcff", "--arg=", "--shape", "--=", "-h=", "..", "/"]
)
OPTIONS = st.one_of(
    st.tuples(st.just("--target"), st.sampled_from(["sm_90a", "cpu", "sm_80", "sm_1", "", "CPU"])),
    st.tuples(st.just("--dtype"), st.sampled_from(["bf16", "f64", "bool", "complex64", ""])),
    st.tuples(st.just("--stage"), st.sampled_from(["trace", "plan", "cuda", "cpp", "asm"])),
    st.tuples(st.just("--shape"), SHAPES),
    st.tuples(st.just("--arg"), VALUES),
    st.tuples(st.just("--json")),
    st.tuples(NONSENSE),
)
KERNEL_WORDS = st.builds(
    lambda command, name, options: [command, name, *(word for option in options for word in option)],
    st.sampled_from(["show", "explain"]), NAMES | NONSENSE, st.lists(OPTIONS, max_size=4),
)  # fmt: skip
OTHER_WORDS = st.builds(
    lambda command, words: [command, *words],
    st.sampled_from([*COMMANDS, "", "shwo", "--json", "--nonsense"]),
    st.lists(st.just("--nonsense") | NONSENSE, min_size=1, max_size=4),
).filter(lambda words: "--nonsense" in words)  # fmt: skip


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=KERNEL_WORDS | OTHER_WORDS)
@example(words=["explain", "FILE:pair", "--shape", "x=4294967296x1", "y=1x4294967296"])
@example(words=["explain", "FILE:outer", "--shape", "x=1152921504606846975", "y=1152921504606846975"])
@example(words=["explain", "FILE:long"])
@example(words=["explain", "FILE:strange"])
@example(words=["show", "FILE:exits", "--shape", "x=4"])
@example(words=["show", "FILE:mute", "--shape", "x=4", "--json"])
@example(words=["show", "FILE:endless", "--shape", "x=4"])
@example(words=["show", "FILE:nothing"])
@example(words=["show", "FILE:named", "--shape", "rows=3x4"])
@example(words=["show", "gelu", "--shape", "x=" + "9" * 5000])
@example(words=["show", "gelu", "--shape", "x=" + "1x" * 5000 + "1"])
@example(words=["show", "gelu", "--shape", "x=4", "x=5"])
@example(words=["show", "gelu", "--shape", "x=٣x٤"])
@example(words=["show", "FILE:scalar", "--shape", "x=4", "--arg=n=" + "-" * 9000 + "1"])
@example(words=["show", "FILE:scalar", "--shape", "x=4", "--arg=n=" + "9" * 5000])
@example(words=["show", "FILE:scalar", "--shape", "x=4", "--arg=n={[]: 1}"])
@example(words=["show", "FILE:scalar", "--shape", "x=4", "--arg=n='\\d'"])
@example(words=["show", "FILE:static", "--shape", "x=4", "--arg", "n=" + "9" * 20_000])
@example(words=["bench", "--show", "/"])
@example(words=["bench", "--show", "/dev/null"])
@example(words=["cache", "clean"])
def test_any_words(user_file: str, words: list[str]) -> None:
    check([word.replace("FILE", user_file) for word in words])


def test_literals_that_look_alike(user_file: str) -> None:
    """A text stays a text where the annotation says so; words for numbers are numbers."""
    code, out, _ = run(["show", f"{user_file}:mode", "--shape", "x=4", "--stage", "graph", "--arg", "mode=true"])
    assert code == 0 and "sub" in out
    code, out, _ = run(["show", f"{user_file}:static", "--shape", "x=4", "--stage", "graph", "--arg", "n=inf"])
    assert code == 0 and "inf" in out


# Files.


def test_places_that_cannot_be_written_are_refused_before_anything_is_timed() -> None:
    for out in ("", "/", "/dev/null/x.json", "/proc/x.json"):
        with case(out):
            assert "timing" not in check(["bench", "gelu", "--device", "cpu", "--quick", "--out", out])


FILES = [
    (b"x = 1\n" * 200_000 + b"def f(:\n", "SyntaxError"),
    (b"(" * 100_000, ""),
    (b"\xff\xfe\x00", "importing"),
    (b"raise KeyboardInterrupt\n", "interrupted"),
    (b"class E(BaseException):\n    def __str__(self): raise ValueError\nraise E\n", "E"),
    (b"raise RuntimeError('\\x1b[2J\\udcff' * 1000)\n", "\\x1b[2J\\udcff"),
    (b"import os; os.chdir('/'); raise OSError(5, 'five')\n", "five"),
    (b"input()\n", ""),
    (b"__getattr__ = lambda name: 1 / 0\n", ""),
]


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, (text, part) in enumerate(FILES):
        with case(text[:80]):
            path = tmp_path / f"hostile{number}.py"
            path.write_bytes(text)
            err = check(["show", f"{path}:f"])
            assert part in err and err.startswith("error: ")


def test_a_file_that_closes_stdout(tmp_path: Path) -> None:
    path = tmp_path / "hostile.py"
    path.write_text("import sys; sys.stdout.close(); sys.stderr.write('loud\\n')\n")
    done = process("show", f"{path}:f")
    assert done.returncode in (1, 2) and done.stdout == "" and "Traceback" not in done.stderr


def test_modules() -> None:
    names = ("/", "/.py", "..", "a..b", ".a", "a b", "\0", "a\0.py", "é.ü", "-", "1", "json.")
    for name in (*(f"{each}:f" for each in names), "fusegen:kernel"):
        with case(name):
            check(["show", name, "--shape", "x=4"])


def test_folders_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    for name in ("folder.py", "pipe.py"):
        assert "no file" in check(["show", f"{tmp_path / name}:f"])


# What surrounds the process.


def process(*words: str, shell: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, with variables set, and the shell's redirections."""
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-m", "fusegen", *words]
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=120, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip


def test_a_process_without_streams() -> None:
    done = process("show", "gelu", "--stage", "trace", shell="<&- >&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_a_terminal_for_ascii_and_nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "printed"
    with path.open("w", encoding="ascii") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        code = main(["explain", "gelu_new"])
    assert code == 0 and "9.0\\xd7 less traffic" in path.read_text(encoding="ascii")


@pytest.mark.filterwarnings("ignore:kernels are compiled by each process")
def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, environment, wanted in (
        (("cache", "info"), {"FORCE_COLOR": "1", "COLUMNS": "1"}, 0),
        (("cache", "info"), {"FORCE_COLOR": "1", "COLUMNS": "-3", "TERM": "dumb"}, 0),
        (("cache", "--help"), {"COLUMNS": "1"}, 0),
        (("cache", "info"), {"FUSEGEN_CACHE_DIR": "~nobody-of-this-name"}, 1),
        (("cache", "clear"), {"FUSEGEN_CACHE_DIR": "/dev/null"}, 1),
        (("cache", "info"), {"FUSEGEN_CACHE_MIB": "-1"}, 1),
        (("show", "gelu", "--stage", "sass"), {"FUSEGEN_CACHE_DIR": "/proc/nowhere"}, 0),
    ):
        with monkeypatch.context() as patch, case((words, environment)):
            for name, value in environment.items():
                patch.setenv(name, value)
            package_settings.cache_clear()
            code, out, _ = run(words)
            check(words)
            assert code == wanted and bool(out) is not bool(wanted)
    package_settings.cache_clear()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(("words", "unbuffered"), [(("--help",), ""), (("cache", "info", "--json"), "1")])
def test_a_full_disk(words: Sequence[str], unbuffered: str) -> None:
    """One error, with and without buffering by Python."""
    done = process(*words, shell="> /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "No space left" in done.stderr


def test_words_that_are_no_text() -> None:
    command = [os.fsencode(sys.executable), b"-m", b"fusegen", b"\xff\xfe"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1
