"""Checks that the wiring of passes that was read from a file names only values that are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fusegen.errors import BundleError
from fusegen.program.call import Call
from fusegen.program.signature import ExtentArgument, Signature
from fusegen.program.wiring import Wiring


def check_wiring(
    wiring: Wiring,
    parameters: Sequence[str],
    signature: Signature,
    derivatives: Sequence[Sequence[str]],
    forward: Sequence[Call],
    backward: Sequence[Call],
    where: str,
) -> None:
    """Refuses passes that cannot be connected.

    Args:
        wiring: of the passes.
        parameters: of the kernel, by name.
        signature: of the call.
        derivatives: for each result, the inputs by which it has a derivative.
        forward: calls of the forward pass.
        backward: calls of the backward pass.
        where: for messages.

    Raises:
        BundleError: naming what does not fit.
    """
    extents = [argument.size for argument in signature.arguments if isinstance(argument, ExtentArgument)]
    problems = (
        *_call_problems(forward, backward),
        *_input_problems(wiring, {*parameters, *extents}, signature),
        *_source_problems(wiring, forward, backward),
        *_derivative_problems(wiring, derivatives),
    )
    for problem in problems:
        raise BundleError(f"{where}: {problem}", mend="build it again")


def _call_problems(forward: Sequence[Call], backward: Sequence[Call]) -> Iterator[str]:
    for name, calls in (("forward", forward), ("backward", backward)):
        if len({len(call.results) for call in calls}) != 1:
            yield f"programs of the {name} pass have different results, or there is none"
        if any(call.written for call in calls):
            yield f"the {name} pass writes to its inputs"


def _input_problems(wiring: Wiring, known: set[str], signature: Signature) -> Iterator[str]:
    yield from _twice("input", wiring.inputs)
    yield from _twice("tensor", wiring.taken)
    given = [name for name in wiring.inputs if name != wiring.key]
    yield from (f"the forward pass takes {name!r}, which no call has" for name in given if name not in known)
    if wiring.key is not None and (wiring.key in known or wiring.key not in wiring.inputs):
        yield f"{wiring.key!r} is no key of random bits"
    sizes = signature.sizes
    yield from (f"the backward pass takes the size {name!r}, which no call has" for name in wiring.sizes if name not in sizes)
    yield from (f"the backward pass takes {name!r}, which no call has" for name in wiring.numbers if name not in given)


def _source_problems(wiring: Wiring, forward: Sequence[Call], backward: Sequence[Call]) -> Iterator[str]:
    made, gradients = min((len(c.results) for c in forward), default=0), min((len(c.results) for c in backward), default=0)
    yield from (f"there is no saved {source!r}" for source in wiring.saved if not _is_there(source, wiring.inputs, made))
    if not 0 < wiring.results <= made:
        yield f"{made} results of the forward pass for {wiring.results} of the kernel"
    if list(wiring.floats) != sorted(set(wiring.floats) & set(range(wiring.results))):
        yield "gradients by other results than there are"
    if len(wiring.tensors) != len(wiring.saved) + len(wiring.floats):
        yield "the backward pass takes other tensors than the forward pass leaves"
    passing = wiring.tensors[len(wiring.saved) :]
    for name, source in wiring.gradients:
        if name not in wiring.inputs or name == wiring.key:
            yield f"a gradient by {name!r}, which no call has"
        if not _is_there(source, passing, gradients):
            yield f"there is no gradient {source!r}"


def _derivative_problems(wiring: Wiring, derivatives: Sequence[Sequence[str]]) -> Iterator[str]:
    names = [name for name, _ in wiring.gradients]
    yield from _twice("gradient", names)
    if len(derivatives) != wiring.results:
        yield f"derivatives of {len(derivatives)} results, of which there are {wiring.results}"
    yield from (f"a derivative by {name!r}, which has none" for each in derivatives for name in each if name not in names)


def _is_there(source: str | int, names: Sequence[str], count: int) -> bool:
    return source in names if isinstance(source, str) else 0 <= source < count


def _twice(kind: str, names: Iterable[str]) -> Iterator[str]:
    every = list(names)
    yield from (f"the {kind} {name!r} is there twice" for name in dict.fromkeys(every) if every.count(name) > 1)
