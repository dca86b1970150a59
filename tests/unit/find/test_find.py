"""`fg.find` on models and graphs: chains with their places and savings, and declarations that run."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusegen as fg
from fusegen.errors import BatchError
from fusegen.integrations.find.finding import Finding, FindingKind
from tests.naming import case
from tests.unit.find.models import WIDTH, Attention, Layers, Mlp

ROWS = 32


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, ROWS, WIDTH, dtype=dtype)


def declared(finding: Finding) -> Any:
    """The kernel that a finding's text declares."""
    names: dict[str, Any] = {}
    exec(finding.declaration, names)
    return names[finding.name]


def chain(x: Tensor, scale: Tensor) -> Tensor:
    y = x * scale + 1
    return F.silu(y) - x / (y.abs() + 2)


def test_equal_layers_are_one_finding_with_all_their_places() -> None:
    found = fg.find(Layers(3), batch())
    gelu = next(finding for finding in found if "tanh" in finding.name)
    assert [place.module for place in gelu.locations] == ["layers.0", "layers.1", "layers.2"]
    assert gelu.locations[0].text.startswith("hidden = 0.5 * hidden")
    assert gelu.locations[0].file.endswith("models.py")


def test_a_finding_counts_launches_and_bytes() -> None:
    x, scale = torch.randn(256, 128), torch.randn(128)
    (finding,) = fg.find(chain, (x, scale))
    assert finding.operations == ("mul", "add", "silu", "abs", "add", "div", "sub")
    assert (finding.launches_before, finding.launches_after) == (7, 1)
    size = x.numel() * 4
    assert finding.bytes_after == 2 * size + 128 * 4  # x and the result once, and the scale
    assert finding.bytes_before == (2 * 5 + 3 * 2) * size + 128 * 4
    assert finding.read_again == size
    assert finding.seconds_saved > 0


def test_what_is_fused_counts_as_one_launch_of_the_model() -> None:
    found = fg.find(chain, (torch.randn(256, 128), torch.randn(128)))
    assert (found.launches_before, found.launches_after) == (7, 1)


def test_the_declaration_runs_and_is_what_the_model_computes() -> None:
    x, scale = torch.randn(16, 64), torch.randn(64)
    (finding,) = fg.find(chain, (x, scale))
    names: dict[str, Any] = {"x": x, "scale": scale}
    exec(f"{finding.declaration}\ninput, input_1 = x, scale\n{finding.call}", names)
    torch.testing.assert_close(names[finding.call.split(" = ")[0]], chain(x, scale))


def test_declarations_of_a_model_compute_what_its_modules_do() -> None:
    model, x = Mlp(), batch()
    gelu = next(finding for finding in fg.find(model, x) if "tanh" in finding.name)
    hidden = model.up(model.norm(x))
    weights = {name: model.get_parameter(origin.rpartition(", ")[2]) for name, origin in gelu.arguments[1:]}
    first = hidden if not weights else model.norm(x)
    want = F.gelu(hidden, approximate="tanh")
    torch.testing.assert_close(declared(gelu)(first, **weights), want, rtol=1e-4, atol=1e-5)


def test_work_behind_a_matmul_becomes_its_epilogue() -> None:
    found = fg.find(Mlp().bfloat16(), torch.randn(8, 1024, WIDTH, dtype=torch.bfloat16))
    finding = next(finding for finding in found if "tanh" in finding.name)
    assert finding.pattern is FindingKind.EPILOGUE
    assert finding.operations[0] == "addmm" and finding.launches_after == 1


def test_operations_that_read_one_tensor_are_found_together() -> None:
    x = torch.randn(512, 1024)
    (finding,) = fg.find(lambda x: (x.amax(dim=-1), x.square().sum(dim=-1)), x)
    assert finding.pattern is FindingKind.SHARED
    assert (finding.launches_before, finding.launches_after) == (3, 1)
    assert finding.read_again == x.numel() * 4
    assert finding.bytes_after == x.numel() * 4 + 2 * 512 * 4


def test_attention_of_matmuls_and_softmax_is_one_kernel() -> None:
    mask = torch.ones(256, 256, dtype=torch.bool).triu(1)
    found = fg.find(Attention().bfloat16(), (torch.randn(2, 256, WIDTH, dtype=torch.bfloat16), mask))
    (finding,) = [each for each in found if each.pattern is FindingKind.ATTENTION]
    assert finding.launches_after == 1
    assert "softmax" in finding.declaration


def test_a_model_that_asks_for_a_value_runs_on_the_batch() -> None:
    def asking(x: Tensor) -> Tensor:
        return F.silu(x) * 2 if x.sum() > 0 else x

    found = fg.find(asking, torch.ones(64, 64))
    assert ("silu", "mul") in [finding.operations for finding in found]


@pytest.mark.parametrize("asks", [False, True])
def test_the_model_stays_as_it_was(asks: bool) -> None:
    class Model(nn.Module):
        last: Tensor | None = None
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.norm(x)
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return x if asks and x.sum() > 1e9 else torch.sigmoid(x) * x + self.last

    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert fg.find(model, torch.randn(ROWS, WIDTH))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.last is None


def test_a_write_in_place_is_not_crossed() -> None:
    def writing(x: Tensor) -> Tensor:
        y = x * 2
        z = F.silu(y) + 1
        y.add_(1)
        return torch.exp(z) * torch.sin(y)

    found = fg.find(writing, torch.randn(64, 64))
    assert sorted(finding.operations for finding in found) == [("exp", "sin", "mul"), ("mul", "silu", "add")]
    assert ("add_", "it writes in place", 1) in [(f"{name}_", reason, count) for name, reason, count in found.refused]


def test_graphs_are_sources_as_well() -> None:
    x = torch.randn(64, 128)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.softmax(x * 0.5, dim=-1)
            return F.gelu(y.transpose(0, 1)[:64] + 1)

    exported = torch.export.export(Model(), (x,), strict=False)
    graphs = {
        "exported": exported,
        "exported, its module": exported.module(),
        "exported, with meta": exported,
        "ATen with meta": exported.run_decompositions().graph_module,
        "FX": torch.fx.symbolic_trace(Model()),
    }
    for name, graph in graphs.items():
        with case(name):
            found = fg.find(graph, None if "meta" in name else x)
            launches = {operation for finding in found for operation in finding.operations}
            assert {"mul", "_softmax", "add", "gelu"} <= launches
            for finding in found:
                declared(finding)


def test_a_batch_is_a_tensor_a_tuple_or_a_dict() -> None:
    x, scale = torch.randn(64, 128), torch.randn(128)
    for given in ((x, scale), {"x": x, "scale": scale}, [x.to("meta"), scale.to("meta")]):
        with case(type(given)):
            assert fg.find(chain, given)[0].launches_before == 7


def test_nothing_worth_fusing_is_said() -> None:
    found = fg.find(nn.Linear(64, 64), torch.randn(8, 64))
    assert len(found) == 0
    assert str(found).startswith("no chain worth fusing was found")


def test_a_report_has_the_table_and_each_declaration() -> None:
    found = fg.find(chain, (torch.randn(256, 128), torch.randn(128)))
    text = str(found)
    assert found[0].declaration.splitlines()[-1].strip() in text
    assert "7 → 1" in text.splitlines()[1]
    document = json.loads(found.to_json())
    assert document["findings"][0]["launches_after"] == 1 and document["target"] == "sm_90a"


def test_sources_that_cannot_be_looked_at_are_refused() -> None:
    wrong = [
        (lambda: fg.find(Mlp()), "the arguments of Mlp are unknown"),
        (lambda: fg.find(Mlp(), torch.randn(3)), "Mlp does not run on this batch"),
        (lambda: fg.find(3), "needs a model"),
        (lambda: fg.find(Mlp(), batch(), target="cpu"), "compares launches on GPUs"),
    ]
    for call, text in wrong:
        with case(text), pytest.raises(fg.FusegenError, match=text):
            call()


def test_a_batch_that_does_not_fit_is_logged_by_nobody() -> None:
    logged: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record)

    handler, logger = Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with pytest.raises(BatchError, match="Linear does not run on this batch"):
            fg.find(nn.Linear(8, 8), torch.randn(4, 9))
    finally:
        logger.removeHandler(handler)
    assert not logged and not logger.disabled


def test_a_matmul_before_a_write_is_not_moved_behind_it() -> None:
    weight = torch.randn(64, 64)

    def writing(x: Tensor) -> Tensor:
        hidden = x @ weight
        x.add_(1)
        return F.silu(hidden) * 2 + 1

    (finding,) = fg.find(writing, torch.randn(64, 64))
    assert finding.operations == ("silu", "mul", "add")
