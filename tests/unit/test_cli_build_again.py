"""``fusegen build`` into a folder that exists: calls are added, kept or built again."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.bundle.manifest import StoredKernel
from fusegen.bundle.programs import locked, temporary_folder
from fusegen.bundle.update import open_folder
from fusegen.cli import build_folder
from fusegen.errors import ArgumentError, BundleError
from tests.naming import case
from tests.unit.bundles import descriptions, kernels_in, rewrite
from tests.unit.commands import Run

USER = """
import torch.nn.functional as F
from torch import Tensor
import fusegen as fg

@fg.kernel
def norm(x: Tensor, weight: Tensor, eps: float = 1e-5, *, mode: str = "plain") -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.silu(y) if mode == "gated" else y

@fg.kernel
def mlp(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, bias))

@fg.kernel
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

@fg.kernel
def times(x: Tensor, scale) -> Tensor:
    return x * scale
"""
SHAPES = {"norm": "x=7x16 weight=16", "mlp": "x=7x16 w=24x16 bias=24", "attend": "q=2x3x7x8 k=2x3x7x8 v=2x3x7x8"}


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "built"


def build(run: Run, *words: str | Path) -> None:
    done = run("build", *map(str, words), "--arch", "cpu")
    assert done.code == 0, done.err


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_current_folder_is_added_to(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(run, "relu", "--out", out)
    monkeypatch.chdir(out)
    build(run, "silu", "--out", ".")
    assert list(fg.load(".")) == ["relu", "silu"] and [path.name for path in out.parent.iterdir()] == ["built"]


def test_one_build_serves_one_row_and_many(run: Run, user_file: Path, out: Path) -> None:
    for name, shapes in SHAPES.items():
        build(run, f"{user_file}:{name}", "--shape", *shapes.split(), "--out", out)
    kernels = fg.load(out)
    weight, w, bias = torch.randn(16), torch.randn(24, 16), torch.randn(24)
    for rows in (1, 2, 7, 4096):
        with case(rows):
            x, (q, k, v) = torch.randn(rows, 16), torch.randn(3, 1, 2, min(rows, 300), 8)
            torch.testing.assert_close(kernels.norm(x, weight), F.rms_norm(x, (16,), weight, 1e-5))
            torch.testing.assert_close(kernels.mlp(x, w, bias), F.gelu(F.linear(x, w, bias)), rtol=1e-4, atol=1e-4)
            wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.testing.assert_close(kernels.attend(q, k, v), wanted, rtol=1e-4, atol=1e-4)


def test_the_error_of_a_call_names_the_command_that_adds_it(run: Run, user_file: Path, out: Path) -> None:
    build(run, f"{user_file}:norm", "--shape", "x=7x16", "weight=16", "--out", out)
    weight = torch.randn(16)
    calls = [
        (torch.randn(2, 3, 16), {}),
        (torch.randn(2, 16, dtype=torch.float64), {}),
        (torch.randn(2, 16), {"mode": "gated"}),
    ]
    for x, options in calls:
        with pytest.raises(ArgumentError) as refused:
            fg.load(out).norm(x, weight.to(x.dtype), **options)
        assert refused.value.hint is not None
        fusegen, *words = shlex.split(refused.value.hint.partition(";")[0])
        assert fusegen == "fusegen" and words[1] == f"{user_file}:norm" and words[words.index("--out") + 1] == str(out)
        assert run(*words).code == 0
        y = F.rms_norm(x, (16,), weight.to(x.dtype), 1e-5)
        wanted = F.silu(y) if options else y
        torch.testing.assert_close(fg.load(out).norm(x, weight.to(x.dtype), **options), wanted)
    torch.testing.assert_close(fg.load(out).norm(torch.ones(5, 16), weight), F.rms_norm(torch.ones(5, 16), (16,), weight, 1e-5))


def test_the_command_works_in_other_folders_or_is_left_out(
    run: Run, user_file: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(user_file.parent)
    build(run, "mine.py:times", "--shape", "x=7x16", "--arg", "scale=2.0", "--out", "built")
    (user_file.parent / "below").mkdir()
    monkeypatch.chdir(user_file.parent / "below")

    def hint(*args: object) -> str:
        with pytest.raises(ArgumentError) as refused:
            fg.load(out).times(*args)
        return str(refused.value.hint)

    x = torch.ones(2, 2, 16)
    scale = torch.tensor(3.0)
    command = hint(x, scale).partition(";")[0]
    assert run(*shlex.split(command)[1:]).code == 0, command
    torch.testing.assert_close(fg.load(out).times(x, scale), x * scale)
    for value in (math.nan, math.inf, "s" * 20_000):
        assert hint(torch.ones(2, 2, 2, 16), value).startswith("build it for this call too")
    user_file.rename(user_file.with_name("moved.py"))
    assert hint(torch.ones(2, 2, 2, 16), 2.0).startswith("build it for this call too")


def test_the_command_of_a_prebuilt_kernel_gives_all_that_differs_from_its_example(run: Run, out: Path) -> None:
    build(run, "rms_norm", "--out", out)
    x = torch.randn(3, 2, 32)
    with pytest.raises(ArgumentError) as refused:
        fg.load(out).rms_norm(x, (32,))
    assert run(*shlex.split(str(refused.value.hint).partition(";")[0])[1:]).code == 0
    torch.testing.assert_close(fg.load(out).rms_norm(x, (32,)), F.rms_norm(x, (32,)))


def test_strides_are_no_matter_of_a_command(run: Run, user_file: Path, out: Path) -> None:
    build(run, f"{user_file}:norm", "--shape", "x=7x16", "weight=16", "--out", out)
    with pytest.raises(ArgumentError, match=r"pass x\.clone\(memory_format=torch.contiguous_format\)"):
        fg.load(out).norm(torch.randn(16, 7).mT, torch.ones(16))


def test_a_changed_function_is_built_again_for_its_earlier_calls(run: Run, user_file: Path, out: Path) -> None:
    build(run, f"{user_file}:norm", "--shape", "x=7x16", "weight=16", "--out", out)
    build(run, f"{user_file}:mlp", "--shape", "x=7x16", "w=24x16", "bias=24", "--out", out)
    user_file.write_text(USER.replace("return F.silu(y)", "y = y * 3; return F.silu(y)"))
    build(run, f"{user_file}:norm", "--shape", "x=2x7x16", "weight=16", "--out", out)
    kernels, weight = fg.load(out), torch.ones(16)
    for shape in ((5, 16), (2, 5, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(kernels.norm(x, weight), 3 * F.rms_norm(x, (16,), weight, 1e-5))
    assert list(kernels) == ["norm", "mlp"]
    named = "".join(path.read_text() for path in (out / "manifest.json", *descriptions(out)))
    assert all(file in named for file in contents(out) if file != "manifest.json")


def test_nothing_changes_if_nothing_has_changed(run: Run, user_file: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = (f"{user_file}:norm", "--shape", "x=7x16", "weight=16", "--out", out)
    build(run, *own)
    build(run, "rms_norm", "silu", "--out", out)
    before = contents(out)
    build(run, *own)
    assert contents(out) == before
    for owner, name in ((build_folder, "_build"), (StoredKernel, "kernel")):  # nothing is built, and no program is decoded
        monkeypatch.setattr(owner, name, None)
    done = run("build", "RMSNorm", "silu", "--out", str(out), "--arch", "cpu")
    assert "unchanged: norm, rms_norm, silu" in done.out and contents(out) == before


def test_a_folder_that_another_process_created_meanwhile(out: Path) -> None:
    message = "created by another process during this build"
    with pytest.raises(BundleError, match=message), open_folder(out):
        (out / "other").mkdir(parents=True)
    assert [path.name for path in out.parent.iterdir() if path.name.endswith("build")] == []


def test_damaged_files_are_built_again(run: Run, out: Path) -> None:
    build(run, "softmax", "--out", out)
    for library in out.rglob("*.so"):
        library.write_bytes(b"")
    build(run, "softmax", "--out", out)
    x = torch.randn(3, 4096)
    torch.testing.assert_close(fg.load(out).softmax(x), x.softmax(-1))


def test_kernels_of_two_files_with_one_name(run: Run, user_file: Path, out: Path) -> None:
    shapes = ("--shape", "x=7x16", "weight=16", "--out", out)
    build(run, f"{user_file}:norm", *shapes)
    other = user_file.with_name("other.py")
    other.write_text(USER)
    before = contents(out)
    build(run, f"{user_file.parent}/./mine.py:norm", *shapes)
    assert contents(out) == before
    done = run("build", f"{other}:norm", *map(str, shapes), "--arch", "cpu")
    assert done.code == 1 and "has a kernel norm already, of mine.py:norm" in done.err and contents(out) == before


def test_a_folder_that_was_moved_gets_calls_after_it_is_moved_back(run: Run, user_file: Path, out: Path, tmp_path: Path) -> None:
    own = (f"{user_file}:norm", "--shape", "x=7x16", "weight=16", "--arch", "cpu")
    build(run, *own, "--out", out)
    moved = tmp_path / "elsewhere" / "built"
    moved.parent.mkdir()
    out.rename(moved)
    x, weight = torch.randn(5, 16), torch.ones(16)
    torch.testing.assert_close(fg.load(moved).norm(x, weight), F.rms_norm(x, (16,), weight, 1e-5))
    before = contents(moved)
    done = run("build", *own, "--out", str(moved))
    assert done.code == 1 and "or the folder or the file was moved: a folder knows a file by the path" in done.err
    assert "restore the path from the folder to the file" in done.err and contents(moved) == before
    moved.rename(out)
    build(run, *own[:1], "--shape", "x=2x7x16", "weight=16", "--out", out)
    assert len(kernels_in(out)[0].variants) > 1


def test_files_of_one_name_in_two_folders(run: Run, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, factor in (("a", 1), ("b", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(USER.replace("return F.silu(y)", f"y = y * {factor}; return F.silu(y)"))
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    shapes = ("--shape", "x=7x16", "weight=16", "--out", str(out))
    build(run, "a/mine.py:norm", *shapes)
    before, count = contents(out), len(kernels_in(out)[0].variants)
    for folder, name in ((tmp_path, "b/mine.py:norm"), (tmp_path / "b", "mine.py:norm"), (tmp_path, f"{tmp_path}/b/mine.py:norm")):
        with case(name):
            monkeypatch.chdir(folder)
            done = run("build", name, *shapes, "--arch", "cpu")
            assert done.code == 1 and f"of a/mine.py:norm, which is another one than {name}" in " ".join(done.err.split())
            assert contents(out) == before
    for folder, name in (
        (tmp_path, "link/mine.py:norm"),
        (tmp_path / "a", "mine.py:norm"),
        (tmp_path, f"{tmp_path}/a/mine.py:norm"),
    ):
        monkeypatch.chdir(folder)
        build(run, name, *shapes)
        kernel = kernels_in(out)[0]
        assert len(kernel.variants) == count


def test_a_build_removes_no_file_outside_of_its_folder(run: Run, user_file: Path, out: Path) -> None:
    shapes = ("--shape", "x=7x16", "weight=16", "--out", out)
    build(run, f"{user_file}:norm", *shapes)
    victim = out.with_name("victim")
    victim.write_text("mine")

    def name_it(content: Any) -> None:
        content["kernels"][0]["variants"][0]["code"][0]["source"] = "../victim"

    rewrite(out, name_it)
    user_file.write_text(USER.replace("return F.silu(y)", "return F.silu(y * 3)"))
    done = run("build", f"{user_file}:norm", *map(str, shapes), "--arch", "cpu")
    assert done.code == 1 and "'../victim' is outside of the folder" in done.err and victim.read_text() == "mine"


def test_a_folder_of_others_stays_as_it_is(run: Run, tmp_path: Path, out: Path) -> None:
    out.mkdir()
    for name, text in (("notes.txt", "mine"), ("manifest.json", '{"mine": 1}')):
        (out / name).write_text(text)
        before = contents(out)
        done = run("build", "softmax", "--arch", "cpu", "--out", str(out))
        assert done.code == 1 and "exists already, and nothing can be added" in done.err
        assert contents(out) == before and [path.name for path in tmp_path.iterdir()] == ["built"]


def test_two_builds_into_one_folder(run: Run, out: Path) -> None:
    build(run, "softmax", "--out", out)
    with locked(out):
        done = run("build", "silu", "--arch", "cpu", "--out", str(out))
    assert done.code == 1 and "another process builds into" in done.err and list(fg.load(out)) == ["softmax"]


def test_an_interrupted_update_changes_nothing(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(run, "softmax", "--out", out)
    before = contents(out)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build_folder, "built_kernel", interrupted)
    assert run("build", "silu", "--arch", "cpu", "--out", str(out)).code == 1
    assert contents(out) == before and [path.name for path in out.parent.iterdir()] == ["built"]


def test_folders_of_killed_builds_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.bundle.programs._GRACE_SECONDS", -1)
    killed, mine = tmp_path / ".built-0123abcd.fusegen-build", tmp_path / ".built-mine.fusegen-build"
    for folder in (killed, mine):
        folder.mkdir()
    with temporary_folder(tmp_path / "built") as running, temporary_folder(tmp_path / "built"):
        assert running.exists() and mine.exists() and not killed.exists()
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]
    assert re.fullmatch(r"\.built-[0-9a-f]{8}\.fusegen-build", running.name)


def test_one_build_serves_three_ranks(run: Run, user_file: Path, out: Path) -> None:
    calls = [f"x={leading}16,weight=16" for leading in ("7x", "3x7x", "2x3x7x")]
    build(run, f"{user_file}:norm", *[word for call in calls for word in ("--call", call)], "--out", out)
    kernels, weight = fg.load(out), torch.randn(16)
    for shape in ((1, 16), (5, 16), (1, 1, 16), (4, 5, 16), (1, 2, 1, 16), (2, 2, 3, 16)):
        with case(shape):
            x: Tensor = torch.randn(shape)
            torch.testing.assert_close(kernels.norm(x, weight), F.rms_norm(x, (16,), weight, 1e-5))
