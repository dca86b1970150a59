"""Runs that are recorded with their gradients, with stand-ins for a GPU's graphs."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fusegen as fg
from fusegen.errors import FusegenError, GradientError, UnsupportedError
from fusegen.graphs.gradients import GradientRecording, parameters_replaced
from fusegen.graphs.recording import GraphRecording
from tests.unit.tapes import Reruns, Tapes

Run = Callable[[Sequence[Tensor], Sequence[Tensor]], Any]
Tensors = list[Tensor]


def made(seed: int, requires_grad: bool = True) -> tuple[Tensors, Tensors]:
    """Arguments x and y, and parameters w and b."""
    source = torch.Generator().manual_seed(seed)
    shapes = (6, 8), (6, 8), (8, 8), (8,)
    tensors = [torch.randn(shape, generator=source).requires_grad_(requires_grad) for shape in shapes]
    return tensors[:2], [nn.Parameter(tensor.detach()) for tensor in tensors[2:]]


def record(
    run: Run, parameters: Sequence[Tensor], others: Sequence[object] = (), pool: Any = Tapes, **options: Any
) -> GradientRecording:
    return GradientRecording.of(pool(torch.device("cpu")), run, hidden(99), parameters, others, **options)


def hidden(seed: int) -> Tensors:
    """Arguments that another operation has computed."""
    return [tensor * 1 for tensor in made(seed)[0]]


def loss_of(result: Any) -> Tensor:
    """A scalar that weighs the elements of all results."""
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((leaf.float() * torch.arange(leaf.numel()).view_as(leaf).cos()).sum() for leaf in found)  # type: ignore[return-value]


def step(call: Callable[[Sequence[Tensor]], Any], tensors: Tensors, parameters: Tensors) -> list[Any]:
    """The results of a call, whether each requires a gradient, and all gradients."""
    result = call(tensors)
    grads = torch.autograd.grad(loss_of(result), [*tensors, *parameters], allow_unused=True)
    return [*tree_leaves(result), *(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(result)), *grads]


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(other, Tensor) else one == other


def linear(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    (x, y), (w, b) = tensors, parameters
    return F.gelu(x @ w + b) * y


def dropped(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    return F.dropout(linear(tensors, parameters), 0.5)


def several(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Any:
    """Among them are an argument, one result twice, a view of it, and some that have no gradient."""
    z = linear(tensors, parameters)
    return {"z": z, "again": z, "part": z[1:], "y": tensors[1], "index": z.argmax(-1), "off": z.detach(), "plain": 3}


def unused(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    return (tensors[0] @ parameters[0]).tanh()


def checkpointed(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Any:
    return checkpoint(linear, tensors, parameters, use_reentrant=False, preserve_rng_state=False)


KERNEL = fg.kernel(lambda x, w, b, y: fg.dropout(F.gelu(x @ w + b), 0.5) * y)


def fused(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Any:
    return KERNEL(tensors[0], *parameters, tensors[1])


@pytest.mark.parametrize("run", [linear, dropped, several, unused, checkpointed, fused], ids=lambda run: run.__name__)
def test_replays_give_the_values_and_gradients_of_the_run(run: Run) -> None:
    _, parameters = made(0)
    recording = record(run, parameters, pool=Reruns if run is fused else Tapes)
    for seed in range(3):
        tensors, _ = made(seed)
        torch.manual_seed(seed)
        expected = step(lambda given: run(given, parameters), tensors, parameters)
        torch.manual_seed(seed)
        assert_equal(step(lambda given: recording(given, ()), tensors, parameters), expected)
    assert all(parameter.grad is None for parameter in parameters)


def test_recording_leaves_no_trace() -> None:
    _, parameters = made(0)
    total = torch.zeros(8)
    fired: list[Tensor] = []
    for parameter in parameters:
        parameter.register_hook(fired.append)

    def run(tensors: Sequence[Tensor], given: Sequence[Tensor]) -> Tensor:
        z = dropped(tensors, given)
        with torch.no_grad():
            total.add_(z.sum(0))
        return z

    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(run, parameters, state=[total])
        assert torch.is_autocast_cache_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    assert not fired and not total.any() and all(parameter.grad is None for parameter in parameters)
    version = total._version
    z = recording(made(1)[0], ())
    assert torch.equal(total, z.sum(0)) and total._version > version


def test_casts_by_autocast_are_part_of_the_graph() -> None:
    """Not those of an earlier run in the same region; and each as often as in the run."""

    def run(tensors: Sequence[Tensor], given: Sequence[Tensor]) -> Tensor:
        x, (w, b) = tensors[0], given
        with torch.autocast("cpu", enabled=False):
            full = x @ w  # and its gradients are so
        return F.linear(F.linear(x, w, b), w) * F.linear(x, w) * full * tensors[1]

    _, parameters = made(0)
    with torch.autocast("cpu", torch.bfloat16):
        run(hidden(0), parameters)
        recording = record(run, parameters)
        plain = GraphRecording.of(Tapes(torch.device("cpu")).record, lambda tensors: run(tensors, parameters), hidden(99), ())
    for seed in range(3):
        with torch.no_grad():
            parameters[0].mul_(1.25)
        tensors = hidden(seed)
        found = []
        for call in (lambda given: run(given, parameters), lambda given: recording(given, ())):
            with torch.autocast("cpu", torch.bfloat16):
                result = call(tensors)
            found.append([result, *torch.autograd.grad(loss_of(result), [*tensors, *parameters])])
        assert_equal(found[1], found[0])
        assert torch.equal(plain(tensors, ()), found[0][0])


def test_dropout_draws_anew() -> None:
    _, parameters = made(0)
    recording = record(dropped, parameters)
    tensors, _ = made(1)
    assert not torch.equal(recording(tensors, ()), recording(tensors, ()))


def test_gradients_accumulate() -> None:
    _, parameters = made(0)
    recording = record(linear, parameters)
    expected: list[Tensor] = []
    for seed in range(3):
        loss_of(recording(made(seed)[0], ())).backward()
        grads = torch.autograd.grad(loss_of(linear(made(seed)[0], parameters)), parameters)
        expected = [one + other for one, other in zip(expected, grads, strict=True)] if expected else list(grads)
        assert_equal([parameter.grad for parameter in parameters], expected)


def test_results_are_the_callers_own() -> None:
    _, parameters = made(0)
    recording = record(several, parameters, others=())
    tensors, _ = made(1)
    one = recording(tensors, ())
    values = one["off"].clone()
    assert one["y"] is tensors[1] and one["z"] is one["again"]
    recording(made(2)[0], ())
    assert torch.equal(one["off"], values) and torch.equal(one["z"], values)


def test_other_arguments_are_given_back() -> None:
    first, second = object(), object()
    _, parameters = made(0)
    recording = record(lambda tensors, given: (linear(tensors, given), first), parameters, others=[first])
    assert recording(made(1)[0], [second])[1] is second


def test_an_optimizer_changes_parameters_between_replays() -> None:
    found = []
    for graphs in (False, True):
        _, parameters = made(0)
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        recording = record(linear, parameters)
        for seed in range(3):
            result = recording(made(seed)[0], ()) if graphs else linear(made(seed)[0], parameters)
            loss_of(result).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(parameters)
    assert_equal(*found)


def test_a_parameter_that_changed_before_the_backward_pass_raises_as_in_torch() -> None:
    _, parameters = made(0)
    recording = record(linear, parameters)
    loss = loss_of(recording(made(1)[0], ()))
    with torch.no_grad():
        parameters[1].zero_()  # no gradient depends on it
    torch.autograd.grad(loss, parameters, retain_graph=True)
    with torch.no_grad():
        parameters[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, parameters)


def test_a_second_replay_does_not_mix_with_the_first() -> None:
    _, parameters = made(0)
    recording = record(linear, parameters)
    assert not recording.is_busy()
    one = recording(made(1)[0], ())
    assert recording.is_busy()
    two = recording(made(2)[0], ())
    with pytest.raises(GradientError, match="a later call has overwritten"):
        torch.autograd.grad(loss_of(one), parameters)
    assert recording.is_busy()
    assert_equal(
        list(torch.autograd.grad(loss_of(two), parameters)),
        list(torch.autograd.grad(loss_of(linear(made(2)[0], parameters)), parameters)),
    )
    assert not recording.is_busy()


def test_a_replay_may_overwrite_what_a_later_recording_has_saved() -> None:
    """Its temporary values may lie there."""
    _, parameters = made(0)
    pool = Tapes(torch.device("cpu"))
    earlier, later = (record(linear, parameters, pool=lambda _: pool) for _ in range(2))
    loss = loss_of(earlier(made(1)[0], ()))
    assert not later.is_busy()
    loss.backward()
    waiting = loss_of(later(made(2)[0], ()))
    assert earlier.is_busy()
    earlier(made(1)[0], ())
    with pytest.raises(GradientError, match="a later call has overwritten"):
        waiting.backward()


def test_a_replay_that_fails_makes_no_wrong_gradients() -> None:
    _, parameters = made(0)
    recording = record(linear, parameters)
    loss = loss_of(recording(made(1)[0], ()))
    with pytest.raises(RuntimeError):
        recording([torch.ones(6, 8, requires_grad=True), torch.ones(5, 5, requires_grad=True)], ())
    with pytest.raises(GradientError):
        torch.autograd.grad(loss, parameters)
    assert not recording.is_busy()
    assert_equal([recording(made(2)[0], ())], [linear(made(2)[0], parameters)])


def test_a_backward_pass_on_another_thread() -> None:
    _, parameters = made(0)
    recording = record(linear, parameters)
    with ThreadPoolExecutor(1) as other:
        found = other.submit(torch.autograd.grad, loss_of(recording(made(1)[0], ())), parameters).result()
    assert_equal(list(found), list(torch.autograd.grad(loss_of(linear(made(1)[0], parameters)), parameters)))


def test_a_result_that_nobody_has_keeps_nothing_busy() -> None:
    _, parameters = made(0)
    recording = record(linear, parameters)
    loss = loss_of(recording(made(1)[0], ()))
    assert recording.is_busy()
    del loss
    assert not recording.is_busy()


def test_a_graph_that_is_kept_gives_its_gradients_twice() -> None:
    _, parameters = made(0)
    recording = record(linear, parameters)
    loss = loss_of(recording(made(1)[0], ()))
    grads = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert not recording.is_busy()
    assert_equal(list(torch.autograd.grad(loss * 1, parameters, retain_graph=True)), list(grads))
    recording(made(2)[0], ())
    with pytest.raises(GradientError):
        torch.autograd.grad(loss, parameters)


def test_a_pending_backward_pass_keeps_its_recording() -> None:
    _, parameters = made(0)
    recordings = [record(linear, parameters)]
    loss = loss_of(recordings[0](made(1)[0], ()))
    recordings.clear()
    assert_equal(
        list(torch.autograd.grad(loss, parameters)),
        list(torch.autograd.grad(loss_of(linear(made(1)[0], parameters)), parameters)),
    )


def test_what_a_recording_has_saved_is_freed_with_it() -> None:
    saved: list[weakref.ref[Tensor]] = []

    def run(tensors: Sequence[Tensor], _: Sequence[Tensor]) -> Tensor:
        result = tensors[0].exp()  # its node saves it
        saved.append(weakref.ref(result))
        return result * 2

    recording = record(run, [])
    assert not recording.is_busy()
    del recording
    assert [each() for each in saved] == [None, None]


def test_some_results_alone_are_differentiated() -> None:
    _, parameters = made(0)
    run: Run = lambda tensors, given: (linear(tensors, given), tensors[0] @ given[0])  # noqa: E731
    recording = record(run, parameters)
    for number in (0, 1, 0):
        found = [torch.autograd.grad(loss_of(call[number]), parameters[0]) for tensors in [made(number)[0]]
                 for call in (run(tensors, parameters), recording(tensors, ()))]  # fmt: skip
        assert torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("towers", [1, 2])
def test_replays_inside_of_a_checkpoint(is_reentrant: bool, towers: int) -> None:
    """The forward pass that is computed again is a later replay, and may be one of another recording; or it is recorded there."""
    _, parameters = made(0)
    recordings: list[GradientRecording] = []

    def call(*tensors: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return dropped(tensors, parameters)
        if all(each.is_busy() for each in recordings):
            recordings.append(record(dropped, parameters))
        return next(each for each in recordings if not each.is_busy())(tensors, ())

    found = []
    for run in (lambda *tensors: dropped(tensors, parameters), call):
        tensors, _ = made(1)
        torch.manual_seed(7)
        results = [checkpoint(run, *tensors, use_reentrant=is_reentrant) for _ in range(towers)]
        sum(map(loss_of, results)).backward()
        found.append([*results, *(each.grad for each in (*tensors, *parameters))])
        for each in parameters:
            each.grad = None
    assert_equal(found[1], found[0])
    assert len(recordings) == 1  # nothing is kept for the backward pass


def test_gradients_of_gradients_are_refused() -> None:
    _, parameters = made(0)
    recording = record(linear, parameters)
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(loss_of(recording(made(1)[0], ())), parameters, create_graph=True)


def test_several_gradients_at_once_are_refused() -> None:
    _, parameters = made(0)
    result = record(linear, parameters)(made(1)[0], ())
    with pytest.raises(UnsupportedError, match="is_grads_batched"):
        torch.autograd.grad(result, parameters, torch.ones(2, *result.shape), is_grads_batched=True)


def test_other_requirements_of_gradients_are_refused() -> None:
    _, parameters = made(0)
    recording = record(linear, parameters)
    with pytest.raises(FusegenError, match="require a gradient"):
        recording(made(1, requires_grad=False)[0], ())


OUTSIDE = torch.ones(8, requires_grad=True)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda tensors, given: linear(tensors, given) * OUTSIDE, "not an argument or parameter"),
        (lambda tensors, given: (linear(tensors, given), OUTSIDE), "not an argument or parameter"),
        (lambda tensors, given: linear(tensors, given) * given[1].detach().add_(1), "writes to"),
        (lambda tensors, given: linear(tensors, given) * random.random(), "Python's or NumPy's generator"),
        (lambda tensors, given: (linear(tensors, given), object()), "its result holds a object"),
    ],
)
def test_runs_that_a_replay_does_not_repeat_are_refused(run: Run, words: str) -> None:
    _, parameters = made(0)
    random.seed(1)
    state = random.getstate()
    with pytest.raises(UnsupportedError, match=words):
        record(run, parameters)
    assert random.getstate() == state


def test_a_module_holds_other_tensors_while_it_is_recorded() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    module.append(module[0])  # shared
    parameters = list(module.parameters())

    def run(tensors: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
        with parameters_replaced(module, parameters, given):
            return module(tensors[0]) * tensors[1]

    recording = record(run, parameters)
    assert list(map(id, module.parameters())) == list(map(id, parameters))
    for seed in range(2):
        tensors, _ = made(seed)
        expected = step(lambda given: module(given[0]) * given[1], tensors, parameters)
        assert_equal(step(lambda given: recording(given, ()), tensors, parameters), expected)


def _training(kind: str, number: int, wrap: Callable[..., Any]) -> tuple[list[float], Any]:
    """Losses of some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def train(x: Tensor) -> Tensor:
        if kind not in ("zeroed at the end", "zeroed outside", "accumulated"):
            optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if kind == "zeroed at the end":
            optimizer.zero_grad()
        if kind == "scheduler inside":
            scheduler.step()
        return loss

    run, losses = wrap(train), []
    torch.manual_seed(1)
    for n in range(number):
        losses.append(run(torch.full((2 + n % 2 if kind == "two sizes" else 3, 4), 0.1 * n)).item())
        if kind == "zeroed outside":
            optimizer.zero_grad()
        if kind == "loaded" and n == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.param_groups[0]["lr"] = 0.3
        if kind == "scheduler outside" and n % 4 == 3:
            scheduler.step()
    return losses, run


_RECORDED = {
    "zeroed": 1,
    "zeroed at the end": 1,
    "zeroed outside": 1,
    "accumulated": 1,
    "two sizes": 2,
    "loaded": 2,
    "scheduler outside": 3,
    "scheduler inside": 0,
}


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("kind", list(_RECORDED))
def test_a_training_step_is_one_graph(kind: str) -> None:
    expected, _ = _training(kind, 10, lambda train: train)
    losses, run = _training(kind, 10, fg.graph_step)
    assert losses == expected, run
    assert run.recorded == _RECORDED[kind], run


@pytest.mark.usefixtures("tapes")
def test_one_more_recording_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(4, 4)
    run = fg.cuda_graph(module)
    x = torch.ones(2, 4)
    run(x)
    waiting = run(x)

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(Tapes, "record_saving", fails)
    (run(x) + waiting).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((4, 4), 4.0))
    assert "no memory is left" in str(run)
