"""The command line as a user meets it, most of all where the user is wrong: one line, the hint, an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fusegen import FusegenError, __version__
from fusegen.cli import demo, show
from fusegen.cli.demo import FUSIONS
from fusegen.cli.main import COMMANDS
from fusegen.jit import nvrtc
from fusegen.specs import SPECS
from tests.naming import case
from tests.unit.commands import Result, Run

ROOT = Path(__file__).resolve().parents[2]

USER_FILE = '''
from typing import Annotated
import torch
from torch import Tensor
import fusegen as fg

WEIGHT = torch.ones(64)

@fg.kernel
def shift(x: Annotated[Tensor, "rows 64"], by: float, twice: bool = False):
    """x + by"""
    return x * WEIGHT + (2 * by if twice else by)

@fg.kernel
def tied(a: Annotated[Tensor, "rows cols"], b: Annotated[Tensor, "cols rows"]):
    return a + b.T

@fg.kernel
def bare(x):
    return x + 1

@fg.kernel
def chosen(x, mode: str):
    return x + 1 if mode == "up" else x - 1

@fg.kernel
def wrong(x):
    return x / (1 // 0)

@fg.kernel
def untraceable(x):
    return x.nonzero()

def plain(x):
    return x
'''


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    """A file with kernels of a user's."""
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return str(path)


def refused(result: Result, *parts: str, code: int = 2) -> None:
    """Asserts that a command failed as it should."""
    assert result.code == code, result.out + result.err
    assert result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1, result.err
    assert "Traceback" not in result.err
    for part in parts:
        assert part in result.err


# list, show, explain.


def test_list(run: Run) -> None:
    result = run("list")
    assert result.code == 0
    for spec in SPECS.values():
        assert spec.name in result.out and spec.formula in result.out
    assert "H200" in result.out and "gemma" in result.out
    family = run("list", "--family", "rotary")
    assert "rotary_position_ids" in family.out and "layer_norm" not in family.out


def test_show_leaves_primitives_to_the_stage_that_can_be_piped(run: Run) -> None:
    for target, stage, definition in (("sm_90a", "cuda", "load_vec(T (&dst)[N]"), ("cpu", "cpp", "widen(bf16 x)")):
        with case(target):
            everything = run("show", "gelu", "--target", target, "--dtype", "bf16").out
            assert "return input * " in everything and f"left out: --stage {stage} prints the complete" in everything
            assert definition not in everything
            assert definition in run("show", "gelu", "--target", target, "--dtype", "bf16", "--stage", stage).out


def test_show_prints_every_stage_up_to_the_source(run: Run) -> None:
    result = run("show", "layer_norm_gelu_add")
    assert result.code == 0
    titles = [line for line in result.out.splitlines() if line.startswith("== ")]
    assert titles == ["== trace ==", "== graph ==", "== groups ==", "== plan ==", "== cuda (sm_90a) =="]
    for part in ("layer_norm(x, weight, bias", "row reduction over", "RowPlan: threads=", "fg_layer_norm_gelu_add("):
        assert part in result.out


def test_each_stage_of_each_kind_of_kernel(run: Run) -> None:
    for name in ("layer_norm_backward", "linear_rotary", "flash_attention_alibi"):
        for stage in ("groups", "cuda"):
            with case((name, stage)):
                result = run("show", name, "--stage", stage, "--target", "sm_90a")
                assert result.code == 0 and result.out.strip() and "== " not in result.out.split("\n")[0], result.err


def test_a_stage_alone_is_what_a_compiler_takes(run: Run) -> None:
    result = run("show", "gelu", "--stage", "cuda", "--target", "sm_80")
    gelu = SPECS["gelu"]
    assert result.out.rstrip("\n") == gelu.lower(gelu.dtypes[-1].torch, "sm_80").asm["cuda"].rstrip("\n")


def test_variants_and_other_names(run: Run) -> None:
    shown = run("show", "rms_norm:gemma", "--stage", "cuda", "--target", "sm_90a")
    assert shown.code == 0 and "1.0f" in shown.out, shown.err
    assert "== plan ==" in run("show", "FusedQKVLinear").out
    refused(run("explain", "rms_norm:gema"), "gemma")


def test_ptx(run: Run) -> None:
    result = run("show", "gelu", "--stage", "ptx", "--target", "sm_120")
    assert result.code == 0 and ".target sm_120" in result.out


def test_sass_without_a_disassembler(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find_nvdisasm", lambda: None)
    refused(run("show", "gelu", "--stage", "sass"), "nvdisasm", "pip install", code=1)
    everything = run("show", "gelu", "--stage", "all")
    assert everything.code == 0 and "== ptx (sm_90a) ==" in everything.out and "nvdisasm is not" in everything.out


def test_sass_with_a_disassembler(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\necho MUFU.EX2\n")
    tool.chmod(0o755)
    monkeypatch.setattr(nvrtc, "find_nvdisasm", lambda: str(tool))
    assert "MUFU.EX2" in run("show", "gelu", "--stage", "sass").out


def test_without_nvrtc(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise nvrtc._missing()

    monkeypatch.setattr(nvrtc, "_nvrtc", missing)
    refused(run("show", "gelu", "--stage", "ptx"), "NVRTC is not installed", "pip install", code=1)


def test_cpu_target(run: Run) -> None:
    result = run("show", "softmax", "--target", "cpu")
    assert result.code == 0 and "== cpp (cpu) ==" in result.out and "f32[" in result.out and "softmax_of_" in result.out
    refused(run("show", "softmax", "--target", "cpu", "--stage", "cuda"), "no stage 'cuda'", "cpp")
    refused(run("show", "softmax", "--target", "sm_80", "--stage", "cpp"), "no stage 'cpp'", "cuda")


def test_shapes_and_dtypes(run: Run) -> None:
    result = run("show", "bias_gelu_add", "--stage", "trace", "--shape", "x=4x96:f16", "bias=96", "residual=4x96:f32")
    assert result.code == 0
    assert "x: f16[" in result.out and "bias: bf16[" in result.out and "residual: f32[" in result.out
    assert "input: f64[" in run("show", "gelu", "--stage", "trace", "--dtype", "float64").out


def test_explain_counts_slices_of_one_tensor_once(run: Run) -> None:
    explained = json.loads(run("explain", "bias_split_heads", "--target", "sm_90a", "--json").out)
    tokens, columns = 4 * 4096, (32 + 8 + 8) * 128
    assert [step["read_bytes"] for step in explained["steps"]] == [2 * (tokens + 1) * n * 128 for n in (32, 8, 8)]
    assert explained["fusegen"] == {"launches": 1, "moved_bytes": 2 * (2 * tokens + 1) * columns}
    assert explained["eager"]["moved_bytes"] == 2 * (4 * tokens + 1) * columns, "a sum, and a copy of each part"


def test_explain_says_what_is_saved(run: Run) -> None:
    result = run("explain", "gelu_new")
    assert result.code == 0
    assert "torch eager: 8 launches" in result.out and "fusegen: 1 launch," in result.out and "9.0× less traffic" in result.out
    assert "1 library matmul" in run("explain", "linear_bias_gelu", "--target", "cpu").out
    assert "fusegen: 1 launch," in run("explain", "qk_norm", "--target", "sm_90a").out, "two parts are one launch"


# A user's kernels.


def test_a_file(run: Run, user_file: str) -> None:
    result = run("explain", f"{user_file}:shift", "--target", "sm_90a")
    assert result.code == 0, result.err
    assert "shift for sm_90a: 1 kernel" in result.out
    assert "torch eager: 2 launches (mul, add)" in result.out, "the closed-over weight is counted on meta tensors"


def test_annotations_give_shapes_and_options_override_them(run: Run, user_file: str) -> None:
    assert "rows=1024" in run("explain", f"{user_file}:shift").out
    assert "rows=77" in run("explain", f"{user_file}:shift", "--shape", "rows=77").out
    assert "rows=5" in run("explain", f"{user_file}:shift", "--shape", "x=5x64").out
    assert run("show", f"{user_file}:tied", "--stage", "trace").code == 0


def test_arguments_select_code(run: Run, user_file: str) -> None:
    words = ("show", f"{user_file}:shift", "--stage", "graph", "--arg")
    once, twice = (run(*words, f"twice={value}").out for value in ("false", "True"))
    assert once != twice
    for mode, operation in (("up", "add"), ("down", "sub")):
        assert operation in run("show", f"{user_file}:chosen", "--shape", "x=3x4", "--arg", f"mode={mode}", "--stage", "trace").out


def test_a_module(run: Run, user_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(user_file).parent)
    result = run("show", "mine:shift", "--stage", "groups")
    assert result.code == 0 and result.out.startswith("1. pointwise")
    sys.modules.pop("mine")


def test_a_file_with_one_kernel_needs_no_name(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("import fusegen as fg\n@fg.kernel\ndef only(x):\n    return x * 2\n")
    assert run("show", str(path), "--shape", "x=8", "--stage", "trace").out.startswith("only(")


# Mistakes.


MISTAKES = [
    ((), ("COMMAND", "--help")),
    (("shwo", "gelu"), ("'shwo'", "fusegen show")),
    (("show",), ("NAME", "show --help")),
    (("show", ""), ("no kernel",)),
    (("show", "gelu", "--stage", "asm"), ("--stage", "'asm'", "cuda")),
    (("show", "gelu", "--target", "sm_42"), ("sm_42", "sm_90a")),
    (("show", "gelu", "--dtype", "bf17"), ("bf17", "bf16")),
    (("show", "gelu", "--shape", "x=3xx4"), ("x=3xx4", "--shape x=")),
    (("show", "gelu", "--shape", "x=0x4"), ("empty",)),
    (("show", "gelu", "--shape", "x=9999999999x9999999999"), ("is too large",)),
    (("show", "gelu", "--shape", "y=4"), ("no parameter 'y'", "x")),
    (("show", "gelu", "--arg", "y=4"), ("no parameter 'y'", "input")),
    (("show", "no/such.py:f"), ("no file", "path/to/file.py:kernel")),
    (("show", "os:path"), ("no kernel 'path'", "@fusegen.kernel")),
    (("show", "os:getcwd"), ("not a kernel", "@fusegen.kernel")),
    (("bench", "add_rms_norm", "--device", "cpu"), ("no cases", "rms_norm")),
    (("bench", "--show", "no/such.json"), ("cannot read", "--out")),
]


def test_mistakes(run: Run) -> None:
    for words, parts in MISTAKES:
        with case(words):
            refused(run(*words), *parts)


def test_mistakes_in_a_users_file(run: Run, user_file: str) -> None:
    refused(run("show", f"{user_file}:plain"), "plain", "function", "@fusegen.kernel")
    refused(run("show", f"{user_file}:shfit"), "no kernel 'shfit'", "shift")
    refused(run("show", user_file), "several kernels", ":shift")
    refused(run("show", f"{user_file}:bare"), "x of bare", "--shape x=")
    refused(run("show", f"{user_file}:chosen", "--shape", "x=4"), "mode of chosen", "--arg mode=")
    refused(run("show", f"{user_file}:untraceable", "--shape", "x=4"), "nonzero", "mine.py", code=1)
    refused(run("show", f"{user_file}:wrong", "--shape", "x=4"), "ZeroDivisionError", "mine.py:28", code=1)


BROKEN_FILES = [
    ("raise ValueError('two\\nlines')\n", "two lines"),
    ("raise SystemExit(3)\n", "SystemExit"),
    ("import fusegen as fg\n@fg.kernel(mutates=('y',))\ndef f(x):\n    return x\n", "mutates= names 'y'"),
    ("", "no kernel"),
]


def test_files_that_do_not_import(run: Run, tmp_path: Path) -> None:
    for number, (text, part) in enumerate(BROKEN_FILES):
        with case(text):
            path = tmp_path / f"broken{number}.py"
            path.write_text(text)
            refused(run("show", f"{path}:f"), part)


# What goes wrong in the middle.


def _fails_with(error: BaseException) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise error

    return fail


class _Mute(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("mute")


FAILURES: list[tuple[BaseException, str]] = [
    (KeyboardInterrupt(), "interrupted"),
    (RuntimeError("one\ntwo"), "RuntimeError: one two"),
    (FusegenError("first\nsecond\nthird", where="a.cu", hint="hint it"), "first … · at: a.cu · try: hint it"),
    (RuntimeError("\x1b[2J\0\udcff"), r"RuntimeError: \x1b[2J\x00\udcff"),
    (RuntimeError("long " * 10_000), "long …"),
    (_Mute(), "_Mute"),
]


def test_failures_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, part in FAILURES:
        with case(type(error).__name__):
            monkeypatch.setattr(show, "run_show", _fails_with(error))
            refused(run("show", "gelu"), part, code=1)


def test_traceback_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "run_show", _fails_with(RuntimeError("inside")))
    result = run("--traceback", "show", "gelu")
    assert result.code == 1 and "Traceback" in result.err
    assert result.err.splitlines()[-1].startswith("error: RuntimeError: inside")


def test_help(run: Run) -> None:
    for words in (("--help",), ("--version",), *((name, "--help") for name in COMMANDS)):
        result = run(*words)
        assert result.code == 0 and result.err == ""
        assert ("usage: fusegen" if words[-1] == "--help" else f"fusegen {__version__}") in result.out


# demo, small.


def test_demo_without_nvrtc_still_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise nvrtc._missing()

    monkeypatch.setattr(nvrtc, "nvrtc_version", missing)
    small = replace(FUSIONS[0], shapes={"x": (2, 8, 32)})
    monkeypatch.setattr(demo, "FUSIONS", (small,))
    result = run("demo", "--device", "cpu")
    assert result.code == 0 and "NVRTC is not installed" in result.out and "speed-up" in result.out


# The real thing, in a process of its own.


def _process(*words: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "fusegen", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "PYTHONUTF8": "1"} | environment,
    )


def test_a_closed_pipe_is_no_traceback() -> None:
    """In the middle of what a command prints, and at its end, where Python has held it back."""
    for unbuffered in ("1", ""):
        process = _process("cache", "info", PYTHONUNBUFFERED=unbuffered)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 1


def test_module_entry_and_plain_output() -> None:
    process = _process("show", "gelu", "--stage", "cuda")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err == ""
    assert "\x1b" not in out and "fg_gelu(" in out


def test_colour_when_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run("show", "gelu", "--stage", "cuda").out


def test_a_mistake_is_said_with_what_was_meant(run: Run) -> None:
    message = "error: no kernel is called 'gleu' · try: did you mean glu or gelu or reglu?\n"
    assert run("show", "gleu").err == message


_COUNTS_COLLECTIONS = """
import gc, torch
collections = lambda: gc.get_stats()[2]["collections"]
from fusegen.cli.main import main
before = collections()
main(["list"])
print(collections() - before, gc.isenabled())
"""


def test_commands_load_without_searching_modules_for_garbage() -> None:
    done = subprocess.run([sys.executable, "-c", _COUNTS_COLLECTIONS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 True"
