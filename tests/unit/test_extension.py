"""Kernels as C++ operators of torch, which `torch.utils.cpp_extension` and ninja build."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.errors import ArgumentError, CompileError, IndexRangeError, ToolNotFoundError
from fusegen.extension.native import LibrarySources, library_of
from tests.unit.eager import randn

TINY = LibrarySources("tiny", {"binding.cpp": 'extern "C" int seven() { return 7; }\n'}, ())

IDS = torch.arange(40) * 7 % 6


def block(x: Tensor, w: Tensor, b: Tensor, scale: float, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a table, a product with memory of the call's own before it, a number of run time, random bits."""
    h = F.gelu(F.layer_norm(F.embedding(ids, x), (x.shape[-1],), b, b)) * scale
    return fg.dropout(h, 0.25) @ w, h.sum(-1)


def both(*given: Tensor | float) -> list[list[Tensor]]:
    """Results and gradients of the two ways, of the same random bits."""
    found = []
    for compiler in ("nvrtc", "extension"):
        torch.manual_seed(3)
        tensors = [g.clone().requires_grad_(g.requires_grad) if isinstance(g, Tensor) else g for g in given]
        results = fg.kernel(block, compiler=compiler)(*tensors)
        by = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
        found.append([*results, *(torch.autograd.grad([r.square().sum() for r in results], by) if by else ())])
    return found


def test_values_are_those_of_the_other_way_in_every_bit() -> None:
    for rows in (6, 9):
        ours, theirs = both(randn(rows, 32), randn(32, 16), randn(32), 0.7, IDS)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.deep
def test_gradients_are_those_of_the_other_way_in_every_bit() -> None:
    given = [t.requires_grad_() for t in (randn(6, 32), randn(32, 16), randn(32))]
    ours, theirs = both(*given, 0.7, IDS)
    assert len(ours) == 5
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def store(cache: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    cache[slots] = x * 2
    return cache


def test_writes_in_place_and_refuses_what_is_out_of_range_or_shared() -> None:
    kernel = fg.kernel(store, mutates=("cache",), compiler="extension")
    cache, x = torch.zeros(8, 4), randn(3, 4)
    version = cache._version
    assert kernel(cache, x, torch.tensor([5, 0, 2])) is cache
    assert torch.equal(cache[torch.tensor([5, 0, 2])], x * 2) and cache._version == version + 1
    with pytest.raises(IndexRangeError, match=r"\[-8, 8\)"):
        kernel(cache, x, torch.tensor([5, 0, 8]))
    with pytest.raises(TypeError, match="'cache' is written to, but shares memory with 'x'"):
        kernel(cache, cache[1:4], torch.tensor([5, 0, 2]))


@pytest.mark.deep
def test_a_damaged_library_is_built_again_and_a_refused_text_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.extension.native.cache_folder", lambda name: tmp_path)
    library = library_of(TINY)
    whole = library.read_bytes()
    library.write_bytes(whole[:1000])
    assert library_of(TINY).read_bytes() == whole
    with pytest.raises(CompileError, match=r"was not built(.|\n)*seven"):
        library_of(LibrarySources("tiny", {"binding.cpp": 'extern "C" int seven() { return "7"; }\n'}, ()))


@pytest.mark.deep
def test_modules_of_the_current_folder_take_no_part_in_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.extension.native.cache_folder", lambda name: tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise RuntimeError('not the json of Python')\n")
    assert library_of(TINY).is_file()


def test_no_ninja_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.extension.native.cache_folder", lambda name: tmp_path)
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(ToolNotFoundError, match=r"ninja cannot be used(.|\n)*pip install ninja"):
        library_of(TINY)


@pytest.mark.deep
def test_a_build_that_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    program = (
        "from fusegen.extension.native import LibrarySources, library_of\n"
        "text = '#include <torch/library.h>\\nextern \"C\" int seven() { return 7; }\\n'\n"
        "library_of(LibrarySources('tiny', {'binding.cpp': text}, ()))\n"
    )
    environment = {"FUSEGEN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, start_new_session=True)
    while not list(tmp_path.glob("extension/building-*/binding.cpp")) and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = subprocess.run(
        [sys.executable, "-c", program.replace("#include <torch/library.h>\\n", "")], env=environment, check=False
    )
    assert done.returncode == 0
    assert len(list((tmp_path / "extension").glob("*.so"))) == 1


def test_a_way_that_there_is_not_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"compiler is 'gcc'.*\n.*'nvrtc', 'extension'"):
        fg.kernel(block, compiler="gcc")
