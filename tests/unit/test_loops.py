"""Values that are too large to lie in memory whole: scores of attention and logits, in blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.compiler import specialize
from fusegen.errors import BundleError
from fusegen.extension import call_text
from fusegen.families.gemm.plan import ContractionPlan
from fusegen.families.library import LOOP
from fusegen.program import call
from fusegen.program.call import Role
from fusegen.schedule.program import LoopStep, Program
from tests.unit.bundles import built, rewrite
from tests.unit.eager import randn
from tests.unit.lowering import meta
from tests.unit.test_scatter import trained

Q, K, V = randn(2, 3, 21, 8), randn(2, 3, 37, 8), randn(2, 3, 37, 8)
H, W = randn(45, 8), randn(64, 8)
T = torch.randint(0, 64, (45,), generator=torch.Generator().manual_seed(0))
T[7] = -100


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for a few rows of the cases."""
    monkeypatch.setattr(specialize, "_LARGE", 0)
    for module in (call, call_text, specialize):
        monkeypatch.setattr(module, "MAX_BLOCK_BYTES", 16 << 10)
        monkeypatch.setattr(module, "ROW_MULTIPLE", 4, raising=False)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(5 * torch.tanh(q @ k.mT / 5), -1) @ v


def of_a_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries, keys = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    return torch.softmax((q @ k.mT).masked_fill((queries - keys).abs() > 4, -torch.inf), -1) @ v


def with_a_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    scores = torch.cat([q @ k.mT, sink[:, None, None].expand(2, 3, 21, 1)], -1)
    return torch.softmax(scores, -1)[..., :-1] @ v


def softcapped_loss(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    logits = 30 * torch.tanh(F.linear(h, w) / 30)
    return F.cross_entropy(logits, t) + 1e-4 * logits.logsumexp(-1).square().mean()


def of_tokens(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h.view(5, 9, 8), w).view(-1, 64), t)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a soft cap": (capped, (Q, K, V)),
    "a soft cap, one head": (capped, (Q[0, 0], K[0, 0], V[0, 0])),
    "a window": (of_a_window, (Q, K, V)),
    "a sink": (with_a_sink, (Q, K, V, randn(3))),
    "a bias of heads": (lambda q, k, v, b: torch.softmax(q @ k.mT + b, -1) @ v, (Q, K, V, randn(3, 1, 37))),
    "a bias of queries": (lambda q, k, v, b: torch.softmax(q @ k.mT + b, -1) @ v, (Q, K, V, randn(21, 1))),
    "dropout of a seed": (lambda q, k, v: fg.dropout(torch.softmax(q @ k.mT, -1), 0.5, seed=3) @ v, (Q, K, V)),
    "shared keys": (lambda q, k, v: capped(q.view(2, 3, 1, 21, 8), k[:, :, None], v[:, :, None]), (Q, K, V)),
    "a loss": (lambda h, w, t: F.cross_entropy(F.linear(h, w), t), (H, W, T)),
    "a sum of losses": (lambda h, w, t: F.cross_entropy(F.linear(h, w), t, reduction="sum") / 100, (H, W, T)),
    "losses": (lambda h, w, t: F.cross_entropy(F.linear(h, w), t, reduction="none"), (H, W, T)),
    "smooth labels": (lambda h, w, t: F.cross_entropy(F.linear(h, w), t, label_smoothing=0.1), (H, W, T)),
    "weighed classes": (lambda h, w, t, c: F.cross_entropy(F.linear(h, w), t, weight=c.detach()), (H, W, T, randn(64).abs())),
    "a bias of classes": (lambda h, w, t, b: F.cross_entropy(F.linear(h, w, b), t), (H, W, T, randn(64))),
    "a cap and a z-loss": (softcapped_loss, (H, W, T)),
    "tokens": (of_tokens, (H, W, T)),
    "losses with a bias": (lambda h, w, t, b: F.cross_entropy(F.linear(h, w, b), t, reduction="none"), (H, W, T, randn(64))),
    "halves": (lambda h, w, t: F.cross_entropy(F.linear(h, w), t), (H.bfloat16(), W.bfloat16(), T)),
}


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name: str) -> None:
    function, arguments = CASES[name]
    kernel = fg.kernel(function)
    exact = trained(kernel.function, *(a.double() if a.is_floating_point() else a for a in arguments))
    found = trained(kernel, *arguments)
    bounds = {"rtol": 2e-2, "atol": 2e-2} if name == "halves" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close([f.double() for f in found], exact, **bounds)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("name", [name for name, (f, arguments) in CASES.items() if arguments[2] is T and f is not of_tokens])
def test_gradients_of_so_few_rows_that_logits_are_saved(name: str) -> None:
    function, (h, w, t, *others) = CASES[name]
    arguments = h[:4], w, t[4:8], *others
    exact = trained(function, *(a.double() if a.is_floating_point() else a for a in arguments))
    found = [f.double() for f in trained(fg.kernel(function), *arguments)]
    bounds = {"rtol": 2e-2, "atol": 2e-2} if name == "halves" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, exact, **bounds)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("name", CASES)
def test_no_pass_has_memory_for_all(name: str) -> None:
    function, arguments = CASES[name]
    passes = fg.vjp(fg.kernel(function), *arguments)
    whole = 2 * 3 * 21 * 37 if arguments[0].dim() == 4 else 21 * 37 if arguments[0].shape[0] == 21 else 45 * 64
    for low in (passes.forward.lower(), passes.backward.lower()):
        memory = (b for b in low.program.call.buffers if b.role is not Role.RANDOM)
        assert max(math.prod(extent(low.sizes) for extent in b.shape) for b in memory) < whole


@pytest.mark.usefixtures("few_rows")
def test_blocks_write_a_large_result() -> None:
    """Only the logits, which are no result, are computed for one block at a time."""

    def probabilities(h: Tensor, w: Tensor) -> Tensor:
        return F.linear(h, w).softmax(-1)

    torch.testing.assert_close(fg.kernel(probabilities)(H, W), probabilities(H, W), rtol=1e-5, atol=1e-6)
    low = fg.kernel(probabilities).lower(H, W)
    assert not any(buffer.role is Role.TEMPORARY and buffer.shape for buffer in low.program.call.buffers)
    assert any(isinstance(step, LoopStep) for step in low.program.steps)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("length", [None, 9])
def test_numbers_of_rows_may_change(length: int | None) -> None:
    """Targets have the rows of the logits, also where both have a dim for sequences."""

    def loss(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w).view(-1, 64), t.view(-1))

    kernel = fg.kernel(loss)
    for rows in (36, 45):
        shape = (rows,) if length is None else (rows // length, length)
        arguments = randn(*shape, 8).bfloat16(), W.bfloat16(), torch.randint(0, 64, shape)
        passes = fg.vjp(kernel, *arguments)
        for low in (passes.forward.lower(), passes.backward.lower()):
            memory = (b for b in low.program.call.buffers if b.role is not Role.RANDOM)
            assert max(math.prod(extent(low.sizes) for extent in b.shape) for b in memory) < rows * 64
        torch.testing.assert_close(trained(kernel, *arguments), trained(loss, *arguments), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("is_before", [False, True])
def test_a_cache_is_read_before_or_after_it_is_written(is_before: bool) -> None:
    def attend(q: Tensor, k: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        before = capped(q, cache, cache) if is_before else None
        cache[:, :, at] = k
        return capped(q, cache, cache) if before is None else before

    memory = randn(2, 3, 37, 20)
    ours, theirs = (memory.clone()[..., 5:13] for _ in range(2))
    at = torch.tensor([3, 30, 7])
    found = fg.kernel(attend, mutates=("cache",))(Q, K[:, :, :3], ours, at)
    torch.testing.assert_close(found, attend(Q, K[:, :, :3], theirs, at))
    assert torch.equal(ours, theirs)


def test_gradients_of_a_loss_come_from_the_forward_pass() -> None:
    """Logits are computed once: in blocks of what there is room for, with gradients beside the loss."""
    h, w, t = (
        torch.empty(4096, 512, device="meta"),
        torch.empty(32000, 512, device="meta"),
        torch.empty(4096, dtype=torch.long, device="meta"),
    )
    passes = fg.vjp(fg.kernel(CASES["a loss"][0]), h, w, t, wrt=("h", "w"), target="sm_90a")
    forward, backward = passes.forward.lower().explain(), passes.backward.lower().explain()
    assert "blocks of up to" in forward and forward.count("torch.matmul") + forward.count("product with") == 3
    assert "matmul" not in backward and "loop" not in backward


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("rows", [45, 8])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 2.0**15), (torch.bfloat16, 2.0**-20)])
def test_the_gradient_by_a_loss_may_be_large_or_small(dtype: torch.dtype, scale: float, rows: int) -> None:
    """As a GradScaler's factor is, which keeps gradients in float16 from 0. The logits of 8 rows are saved."""
    function, (h, *others, t) = CASES["a loss"]
    arguments = h[:rows], *others, t[:rows]
    given = [(a / 64).to(dtype) if a.is_floating_point() else a for a in arguments]

    def scaled(h: Tensor, w: Tensor, t: Tensor, loss: Callable[..., Tensor]) -> list[Tensor]:
        found = [x.clone().requires_grad_() for x in (h, w)]
        result = loss(*found, t)
        return list(torch.autograd.grad(result, found, torch.full_like(result, scale)))

    exact = scaled(*(a.double() if a.is_floating_point() else a for a in given), function)
    for one, other in zip(scaled(*given, fg.kernel(function)), exact, strict=True):
        assert (one.double() - other).norm() < 4e-3 * other.norm()


@pytest.mark.usefixtures("few_rows")
def test_a_folder_trains_in_blocks(tmp_path: Path) -> None:
    function, arguments = CASES["a soft cap"]
    kernel = built(tmp_path / "kernels", capped, arguments)
    torch.testing.assert_close(trained(kernel, *arguments), trained(fg.kernel(function), *arguments), rtol=0, atol=0)


@pytest.mark.usefixtures("few_rows")
def test_a_folder_with_another_loop_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    built(folder, capped, CASES["a soft cap"][1])
    rewrite(folder, lambda content: next(loops_of(content)).update(rows="q"))
    with pytest.raises(BundleError, match="block_rows_0"):
        trained(fg.load(folder).capped, *CASES["a soft cap"][1])


def loops_of(content: Any) -> Iterator[dict[str, Any]]:
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    if isinstance(content, dict) and "zeros" in content:
        yield content
    for part in parts:
        yield from loops_of(part)


@pytest.mark.usefixtures("few_rows")
def test_names_of_the_caller_s_and_of_a_loop_are_apart() -> None:
    def loss(result_0: Tensor, operand_0: Tensor, operand_1: Tensor) -> Tensor:
        rows = torch.where(operand_1 != 3, operand_1, 5)
        return F.cross_entropy(F.linear(result_0.sin(), operand_0), rows) + F.cross_entropy(
            F.linear(result_0, operand_0.cos()), rows
        )

    exact = trained(loss, H.double(), W.double(), T.clamp(0))
    torch.testing.assert_close([f.double() for f in trained(fg.kernel(loss), H, W, T.clamp(0))], exact, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("few_rows")
def test_random_bits_of_a_key_that_a_call_draws_are_drawn_once() -> None:
    """Blocks would draw others than what else reads the bits."""

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = fg.dropout(torch.softmax(5 * torch.tanh(q @ k.mT / 5), -1), 0.5)
        return weights @ v, (weights != 0).sum(1)

    low = fg.kernel(dropped).lower(Q, K, V)
    assert LOOP not in {group.kind for group in low.groups}


@pytest.mark.deep
@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("name", ["a soft cap", "a cap and a z-loss"])
def test_an_extension_gives_the_same_bits(name: str) -> None:
    function, arguments = CASES[name]
    one, other = (fg.kernel(function, compiler=compiler) for compiler in ("extension", "nvrtc"))
    torch.testing.assert_close(trained(one, *arguments), trained(other, *arguments), rtol=0, atol=0)


@pytest.mark.usefixtures("few_rows")
def test_blocks_take_their_values_from_a_workspace() -> None:
    kernel, inputs = fg.kernel(capped), [x.clone().requires_grad_() for x in (Q, K, V)]
    passes = fg.vjp(kernel, *inputs)
    size = max(each.lower().workspace_bytes for each in (passes.forward, passes.backward))
    wanted = torch.autograd.grad(kernel(*inputs).sum(), inputs)
    with fg.Workspace(size, device="cpu") as workspace:
        workspace.memory.fill_(255)
        found = torch.autograd.grad(kernel(*inputs).sum(), inputs)
    assert all(map(torch.equal, found, wanted))
    assert (workspace.memory != 255).any()


def test_loads_of_a_body_cover_the_rows_of_all_blocks() -> None:
    """A program for all sizes loads all rows of a tile, other programs those of their class."""

    def peaks(x: Tensor, w: Tensor) -> Tensor:
        return (torch.tanh(F.linear(x, w) / 30) * 30).softmax(-1).amax(-1)

    def loaded(program: Program) -> list[int]:
        bodies = [step.body for step in program.steps if isinstance(step, LoopStep)]
        plans = [launch.plan for body in bodies for launch in body.launches]
        return [plan.loaded_rows for plan in plans if isinstance(plan, ContractionPlan)]

    kernel, weight = fg.kernel(peaks), meta(1 << 20, 64)
    lows = [kernel.lower(meta(rows, 64), weight, target="sm_90a") for rows in (73, 70, 100)]
    assert [loaded(low.program) for low in lows] == [[96], [96], [0]]
    forms = [form.program for _, form in lows[1]._compiled.specializer.all(lows[1].sizes, is_general=True)]
    assert forms and all(loaded(program) == [0] for program in forms)
