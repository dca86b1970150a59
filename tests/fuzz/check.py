"""Checks the results of a program: torch's shapes and dtypes, and values that rounding allows around the float64 oracle."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusegen as fg
from fusegen.errors import FusegenError
from fusegen.families.attention.match import ATTENTION
from fusegen.families.library import LIBRARY_CALL
from fusegen.ir.ops import Op
from fusegen.ir.reference import evaluate, widen
from fusegen.lowered import Lowered
from fusegen.program.call import Role
from fusegen.schedule.names import identifier
from fusegen.schedule.program import LibraryMatmul, LibraryStep
from tests.fuzz.bound import Bound, Value
from tests.fuzz.choices import is_stored_only
from tests.fuzz.enclosure import Exact, Float
from tests.fuzz.program import tensors_of

Function = Callable[..., Any]


@dataclass(frozen=True)
class Refused:
    """The compiler does not take the program, and says why."""

    error: FusegenError


@dataclass(frozen=True)
class Prepared:
    """A program before its first call.

    Attributes:
        kernel: the function as a kernel.
        low: its stages; None where an input is empty, and torch runs the function.
    """

    function: Function
    args: list[Any]
    kernel: Any
    low: Lowered | None


def prepare(function: Function, args: Sequence[Any]) -> Prepared | Refused:
    """Declares and lowers.

    Raises:
        AssertionError: the compiler fails in another way than by saying what, where and how to fix it.
    """
    kernel = fg.kernel(function)
    if any(isinstance(a, Tensor) and not a.numel() for a in args):
        return Prepared(function, list(args), kernel, None)
    try:
        return Prepared(function, list(args), kernel, kernel.lower(*args))
    except FusegenError as error:
        assert error.what and error.hint, f"an error without a hint: {error!r}"
        return Refused(error)


def check(function: Function, args: Sequence[Any]) -> None:
    """Asserts that a function as a kernel gives the right results, or is refused with a proper error."""
    prepared = prepare(function, args)
    if isinstance(prepared, Prepared):
        judge(prepared)


def judge(prepared: Prepared) -> None:
    """Asserts that calls of a kernel give the right results, with other run-time numbers too, which share no memory."""
    got = results_of(prepared.kernel(*prepared.args))
    compare(prepared, got)
    if prepared.low is None:
        return
    others = [_another(a) for a in prepared.args]
    if any(not isinstance(a, Tensor) for a in others):
        compare(
            Prepared(prepared.function, others, prepared.kernel, prepared.kernel.lower(*others)),
            results_of(prepared.kernel(*others)),
        )
    written(got, [a for a in prepared.args if isinstance(a, Tensor)])


def _another(value: Any) -> Any:
    """Another run-time number of its kind."""
    if isinstance(value, Tensor):
        return value
    return value * 0.75 if isinstance(value, float) else value + 1


def written(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Asserts that writing to a result changes no other one, and no input."""
    for number, result in enumerate(results):
        others = [*results[:number], *results[number + 1 :], *inputs]
        before = [other.clone() for other in others]
        _change(result)
        for other, was in zip(others, before, strict=True):
            unchanged = torch.equal(widen(other).nan_to_num(), widen(was).nan_to_num())
            assert unchanged, f"writing to result {number} changes another one, or an input"


def _change(result: Tensor) -> None:
    if result.dtype is torch.bool:
        result.logical_not_()
    elif is_stored_only(result):
        result.view(torch.uint8).add_(1)
    else:
        result.add_(1)


def results_of(returned: Any) -> tuple[Tensor, ...]:
    """The results as a tuple."""
    return tuple(returned) if isinstance(returned, tuple) else (returned,)


def compare(prepared: Prepared, got: tuple[Tensor, ...]) -> None:
    """Asserts that results are right.

    Args:
        got: what the kernel gave.
    """
    try:
        wanted = _eager(prepared)
    except RuntimeError as error:
        if str(error) == "ZeroDivisionError":  # of integers: torch refuses the values, and a kernel may compute something
            return
        raise
    assert len(got) == len(wanted), f"{len(got)} results, torch gives {len(wanted)}"
    for number, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert ours.dtype is theirs.dtype, f"result {number}: {ours.dtype}, torch gives {theirs.dtype}"
        assert ours.shape == theirs.shape, f"result {number}: {tuple(ours.shape)}, torch gives {tuple(theirs.shape)}"
    if prepared.low is None:
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        return
    oracle, loose = claims(prepared)
    _, sharp = claims(prepared, sharp=True)
    wide = all(not n.dtype.is_narrow for n in prepared.low.traced.nodes)  # torch rounds each step of 16 bits
    of_integers = all(not n.dtype.is_float for n in prepared.low.traced.nodes)
    for number, (ours, theirs, exact, around, bound) in enumerate(zip(got, wanted, oracle, loose, sharp, strict=True)):
        inside(exact, around, f"the oracle's result {number} is outside of the bound, which is wrong")
        if wide and not _is_wrong_in_torch(prepared.low, theirs):
            inside(widen(theirs.cpu()), widened(around), f"the graph of result {number} does not mean what torch computes")
        inside(widen(ours.cpu()), bound, f"result {number} {tuple(ours.shape)}", exact)
        assert not of_integers or torch.equal(ours.cpu(), theirs.cpu()), f"result {number}: integers differ from torch's"


def _is_wrong_in_torch(low: Lowered, result: Tensor) -> bool:
    """True if torch's vectorized gelu on CPUs may have made NaN of an infinity."""
    return any(node.op is Op.GELU for node in low.traced.nodes) and bool(widen(result.cpu()).isnan().any())


def widened(bound: Value) -> Value:
    """Where torch's own result lies, which may be less accurate than a kernel's: not just there, but no other number."""
    if isinstance(bound, Exact):
        return bound
    slack = 4 * (bound.hi - bound.lo) + 1e-5 * bound.magnitude + 1e-30
    finite = slack.isfinite()
    return Float.of(
        torch.where(finite, bound.lo - slack, bound.lo), torch.where(finite, bound.hi + slack, bound.hi), bound.nan, bound.num
    )


def _eager(prepared: Prepared) -> tuple[Tensor, ...]:
    """Returns torch's results; on the CPU where its functions for the device do not take the dtypes.

    Attention is in matmuls and a softmax: torch's kernel for CPUs gives 0 for a query whose scores are all NaN.
    """
    with sdpa_kernel(SDPBackend.MATH):
        try:
            return results_of(prepared.function(*prepared.args))
        except RuntimeError:
            moved = [a.cpu() if isinstance(a, Tensor) else a for a in prepared.args]
            return results_of(prepared.function(*moved))


def claims(prepared: Prepared, *, sharp: bool = False) -> tuple[tuple[Tensor, ...], tuple[Value, ...]]:
    """What the oracle gives, rounded to the results' dtypes, and what it may give, or, if sharp, what a kernel may give."""
    low = prepared.low
    assert low is not None
    names = list(inspect.signature(prepared.function).parameters)
    inputs = {k: v for k, v in tensors_of(prepared.function, prepared.args, names).items() if _is_input(low, k)}
    scalars = {n: v for n, v in zip(names, prepared.args, strict=True) if not isinstance(v, Tensor)}
    scalars |= {identifier(n): v for n, v in scalars.items()}
    device = next(iter(inputs.values())).device.type
    exact = evaluate(low.traced, inputs, scalars)
    read = read_by(low)
    stored = any(s.dtype.is_half and s.role is not Role.INPUT and s.key in read for s in low.program.buffers)
    kinds = {group.kind for group in low.groups}
    bound = Bound(
        low.traced,
        inputs,
        scalars,
        approximate=low.target.name != "cpu",
        stored=stored,
        streamed=bool(kinds & {ATTENTION, LIBRARY_CALL}),
        masked_by_sums=LIBRARY_CALL in kinds,
        factor=4.0 if device == "cuda" else 1.0,
        sharp=sharp,
    )
    outputs = [low.traced.nodes[o].dtype for o in low.traced.outputs]
    return tuple(_in_dtype(x, d.torch) for x, d in zip(exact, outputs, strict=True)), bound.enclosures()


def _is_input(low: Lowered, name: str) -> bool:
    return any(spec.name == name for spec in low.traced.inputs)


def read_by(low: Lowered) -> set[int]:
    """The buffers that some step reads."""
    library = {view.buffer for step in low.program.steps if isinstance(step, LibraryMatmul) for view in (step.a, step.b)}
    library |= {each.buffer for step in low.program.steps if isinstance(step, LibraryStep) for each in step.operands}
    pointers = {p.buffer for step in low.program.launches for p in step.kernel.pointers if not p.writable}
    return library | pointers | {m.buffer for step in low.program.launches for m in step.tensor_maps if not m.writable}


def _in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    return widen(value.float().to(dtype)) if dtype.is_floating_point and dtype is not torch.float64 else value


def inside(values: Tensor, bound: Value, what: str, oracle: Tensor | None = None) -> None:
    """Asserts that values lie in an enclosure."""
    if isinstance(bound, Exact):
        right = (values == bound.value) | ~bound.sure
    else:
        right = torch.where(values.isnan(), bound.nan, bound.num & (bound.lo <= values) & (values <= bound.hi))
    if right.all():
        return
    wrong = (~right).nonzero()
    at = tuple(wrong[0].tolist())
    allowed = bound.value[at].item() if isinstance(bound, Exact) else f"{bound.lo[at].item()} … {bound.hi[at].item()}"
    nan = "" if isinstance(bound, Exact) or not bound.nan[at] else " or nan" if bound.num[at] else " no: nan"
    exact = "" if oracle is None else f", the oracle {oracle[at].item()}"
    found = f"{len(wrong)} of {values.numel()} wrong; at {at} it is {values[at].item()}"
    raise AssertionError(f"{what}: {found}, allowed {allowed}{nan}{exact}")
