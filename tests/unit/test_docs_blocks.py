"""Every block of code of the documents is run, or says why it is not.

`test_docs.py` runs blocks of ``python`` and makes the output that is shown. The blocks of a section in another language run here,
in order and in one folder that has the files they name. ``<!-- run by FILE -->`` above a block names the file that
runs it, and ``<!-- not run: REASON -->`` gives the reason why nothing does. A parser of Markdown finds all blocks: one
that this file's pattern misses fails.
"""

from __future__ import annotations

import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt
from torch import nn

from fusegen.cli.main import main
from tests.unit.test_docs import DOCUMENTS, ROOT

_FENCE = re.compile(r"^(?P<mark> *<!--[^\n]*-->)?\n(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
_RUN_BY = re.compile(r"run by (tests/unit/\w+\.py|\.ci/run)")
_NOT_RUN = re.compile(r"not run: (\w.*)")
_IN_OTHER_TESTS = re.compile(r"<!-- (shown( \w+)?: |into \S+ (before|after): |then runs -->)")  # test_docs.py and test_adding.py

_HEAD = """
from typing import Annotated
import torch
import torch.nn.functional as F
from torch import Tensor, nn
import fusegen as fg
"""
_LLAMA = """
import transformers

class LlamaForCausalLM:
    def from_pretrained(name):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2))
"""
_FILES = {
    "mine.py": """
@fg.kernel
def scaled(x: Tensor, by: float) -> Tensor:
    return F.gelu(x * by)

@fg.kernel
def bias_gelu(x: Annotated[Tensor, "rows 4096"], bias: Annotated[Tensor, "4096"]) -> Tensor:
    return F.gelu(x + bias)
""",
    "path/to/file.py": """
@fg.kernel
def mine(x: Annotated[Tensor, "rows 4096"]) -> Tensor:
    return F.gelu(x)
""",
    "model.py": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.up = nn.Embedding(2, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, input_ids, attention_mask=None):
        x = self.table(input_ids)
        x = x if attention_mask is None else x * attention_mask[..., None]
        return F.gelu(self.up(self.norm(x))) + x

model, batch = Model(), torch.zeros(8, 1024, dtype=torch.int64)
""",
    "models.py": """
def make():
    return nn.Sequential(nn.LayerNorm(64), nn.GELU()), (torch.zeros(4, 64),)
""",
    "serve.py": "import mine\nmine.scaled(torch.ones(2, 8), 0.5)\n",
    "trace.py": """
import model
with torch.profiler.profile(record_shapes=True, with_stack=True) as profiled:
    model.model(model.batch)
profiled.export_chrome_trace("trace.json.gz")
""",
}
_LONG = {
    "Your own kernels",
    "`fusegen build`",
    "Built kernels in place of compilation",
    "Folders for `kernels` of Hugging Face",
    "Benchmarks of your kernels",
}
"""Sections that take more than 5 s."""


@dataclass(frozen=True)
class Block:
    section: str
    line: int
    mark: str
    language: str
    code: str

    @property
    def is_elsewhere(self) -> bool:
        return bool(_RUN_BY.search(self.mark) or _NOT_RUN.search(self.mark)) or bool(_IN_OTHER_TESTS.search(self.mark))


def blocks(name: str) -> list[Block]:
    """The fenced blocks of a document, without those of ``python`` that begin a line: test_docs.py runs these."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        if fence["language"] == "python" and not fence["indent"]:
            continue
        titles = re.findall(r"^## (.*)$", text[: fence.start()], re.MULTILINE)
        line, code = text.count("\n", 0, fence.start("code")), textwrap.dedent(fence["code"])
        found.append(Block(titles[-1] if titles else "", line, fence["mark"] or "", fence["language"], code))
    return found


def sections() -> Iterator[Any]:
    for name in DOCUMENTS:
        for section in dict.fromkeys(block.section for block in blocks(name) if not block.is_elsewhere):
            yield pytest.param(name, section, marks=[pytest.mark.deep] if section in _LONG else [], id=f"{name}: {section}")


@pytest.mark.skipif(sys.platform != "linux", reason="the documents' commands are for a shell of Linux")
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(("name", "section"), list(sections()))
def test_a_section_runs(name: str, section: str, folder: Path) -> None:
    x, bias = torch.randn(8, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    names: dict[str, Any] = {"x": x.requires_grad_(), "bias": bias, "weight": bias + 1, "model": nn.LayerNorm(64)}
    exec(_HEAD + "from mine import bias_gelu\n", names)
    for block in blocks(name):
        if block.section == section and not block.is_elsewhere:
            run(block, names, folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the files that documents name."""
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(_HEAD + text, encoding="utf-8")
    for name in ("new.json", "run.json"):
        shutil.copy(ROOT / "docs/bench/h100.json", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for option, value in {"TARGET": str(tmp_path), "NO_DEPS": "1", "NO_INDEX": "1"}.items():
        monkeypatch.setenv(f"PIP_{option}", value)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    yield tmp_path
    for module in [key for key, value in sys.modules.items() if str(tmp_path) in str(getattr(value, "__file__", ""))]:
        del sys.modules[module]


def run(block: Block, names: dict[str, Any], folder: Path) -> None:
    """Runs a block of a language; a block of Python that names a file first is written to it."""
    if block.language in ("sh", "console"):
        for line in block.code.splitlines():
            command(line.removeprefix("$ "))
    elif block.language == "toml":
        (folder / "pyproject.toml").write_text(block.code, encoding="utf-8")
        command("fusegen build")
    elif block.language == "py" and (file := re.match(r"# (\w+\.py)\n", block.code)):
        (folder / file[1]).write_text(_HEAD + _LLAMA + block.code, encoding="utf-8")
    elif block.language == "py":
        exec(compile(block.code, f"line {block.line}", "exec"), names)
    else:
        pytest.fail(f"line {block.line}: no test runs a block of {block.language!r}")


def command(line: str) -> None:
    """Runs a line: a command of fusegen's in this process, anything else in a shell."""
    words = shlex.split(line, comments=True)
    if "trace.json.gz" in words:
        runpy.run_path("trace.py")
    if words[0] == "fusegen":
        assert main(words[1:]) == 0, line
    else:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], capture_output=True, text=True, check=False)
        assert done.returncode == 0, line + done.stdout + done.stderr


@pytest.mark.parametrize("name", [*DOCUMENTS, "CONTRIBUTING.md"])
def test_every_block_runs_or_says_why_not(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    parsed = [token for token in MarkdownIt().parse(text) if token.type in ("fence", "code_block")]
    codes = [textwrap.dedent(fence["code"]) for fence in _FENCE.finditer(text)]
    for token, code in itertools.zip_longest(parsed, codes):
        where = f"{name}:{token.map[0] + 1}" if token and token.map else name
        assert token and textwrap.dedent(token.content) == code, f"{where}: write the block between lines of three backticks"
    assert not re.search("<(pre|code)", text), f"{name} has code in HTML, which nothing runs"
    for block in blocks(name):
        where = f"{name}:{block.line}"
        runs = block.language in ("sh", "console", "toml", "py")
        assert runs or block.is_elsewhere, f"{where} is not run; add a line above it: <!-- not run: REASON -->"
        if by := _RUN_BY.search(block.mark):
            assert Path(name).name in (ROOT / by[1]).read_text(encoding="utf-8"), f"{where}: {by[1]} does not name the document"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_everything_shown_has_an_end(name: str) -> None:
    """Otherwise nothing compares it with what comes out."""
    marks = re.findall(r"^ *<!-- (shown|end)\b", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert marks == ["shown", "end"] * (len(marks) // 2)


def test_docstrings_have_no_blocks_of_code() -> None:
    """The site shows docstrings, and nothing would run the code in them."""
    code = re.compile(r"^\s*(>>> |```)|::$", re.MULTILINE)
    assert not [str(path) for path in (ROOT / "fusegen").rglob("*.py") if code.search(path.read_text(encoding="utf-8"))]
