"""`fg.find` on profiles: a trace of an H100, one of this machine, and files that are none.

``h100.json.gz`` is the start of a trace of `examples/find_fusions.py` at width 768 and 8×1024 tokens, without the events and fields
that are not read.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fusegen as fg
from fusegen.integrations.find.finding import FindingKind
from tests.naming import case

H100 = Path(__file__).with_name("h100.json.gz")


def chain(x: Tensor, scale: Tensor) -> Tensor:
    return F.silu(torch.exp(x * scale)).sum(-1)


def profiled() -> profile:
    x, scale = torch.randn(64, 128), torch.randn(128)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        chain(x, scale)
    return found


def test_a_trace_of_a_gpu_shows_its_chains_with_their_times() -> None:
    found = fg.find(H100)
    attention = next(finding for finding in found if finding.pattern is FindingKind.ATTENTION)
    gelu = next(finding for finding in found if "tanh" in finding.name)
    assert (attention.count, gelu.count) == (2, 2)
    assert attention.launches_before == 11 and attention.launches_after == 1  # cuBLAS clears its workspace
    assert gelu.launches_before == 10 and gelu.launches_after == 1
    for finding in (attention, gelu):
        assert finding.seconds_before is not None
        assert 0 < finding.seconds_saved < finding.seconds_before
    assert gelu.locations[0].module == "Block_0" and gelu.locations[0].file == "find_fusions.py"
    assert gelu.note


def test_a_trace_of_a_gpu_says_what_binds_it() -> None:
    found = fg.find(H100)
    titles = {each.title: each.detail for each in found.observations}
    assert titles.keys() == {"bound by the host", "bound by memory"}
    assert "65 kernels" in titles["bound by the host"]
    assert found.target == "sm_90a" and found.launches_before == 65


def test_a_declaration_of_a_trace_runs() -> None:
    (finding,) = fg.find(profiled())
    names: dict[str, Any] = {}
    exec(finding.declaration, names)
    x, scale = torch.randn(8, 16), torch.randn(16)
    torch.testing.assert_close(names[finding.name](x, scale), chain(x, scale), rtol=1e-4, atol=1e-4)


def test_conversions_of_a_trace_are_part_of_a_chain() -> None:
    x, scale = torch.randn(64, 128, dtype=torch.bfloat16), torch.randn(128)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        (torch.tanh(x.to(torch.float32) * scale)).to(torch.bfloat16)
    (finding,) = fg.find(found)
    assert finding.operations == ("_to_copy", "mul", "tanh", "_to_copy")


def test_a_file_is_read_as_its_profile_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    profiled().export_chrome_trace(str(path))
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for each in (path, str(path), packed):
        with case(each):
            (finding,) = fg.find(each)
            assert finding.operations == ("mul", "exp", "silu", "sum")


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    texts = {
        "nothing.json": "",
        "list.json": "[1, 2]",
        "other.json": '{"a": 1}',
        "shapeless.json": json.dumps(
            {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mul", "ts": 1, "dur": 1, "args": {}}]}
        ),
        "timeless.json": '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mul", "ts": null}]}',
        "deep.json": "[" * 100_000,
        "half.json.gz": "\x1f",
        "damaged.json.gz": "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x00\xff\xff",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text, encoding="latin-1")
        with case(name), pytest.raises(fg.FusegenError):
            fg.find(path)
    with pytest.raises(fg.FusegenError, match="cannot read"):
        fg.find(tmp_path / "missing.json")


def test_a_profile_is_looked_at_again_and_after_another_run() -> None:
    x = torch.randn(64, 128)
    with (found := profile(activities=[ProfilerActivity.CPU], record_shapes=True)):
        torch.tanh(torch.exp(x))
    assert [fg.find(found)[0].operations for _ in range(2)] == [("exp", "tanh")] * 2
    with found:
        torch.sin(torch.cos(x))
    assert fg.find(found)[0].operations == ("cos", "sin")


def test_a_profile_that_was_exported_is_refused(tmp_path: Path) -> None:
    found = profiled()
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    with pytest.raises(fg.FusegenError, match="cannot be exported"):
        fg.find(found)
