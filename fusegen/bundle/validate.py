"""Checks that the parts of what was read from a file fit each other: what is named exists, what is counted is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fusegen.errors import BundleError
from fusegen.program.call import (
    Call,
    CallStep,
    KernelLaunch,
    LibraryCall,
    Loop,
    MapArgument,
    MatrixProduct,
    Role,
    ScalarArgument,
    SizeArgument,
    StridedOperand,
    TensorMapSpec,
)
from fusegen.program.formula import SIGNS, Formula
from fusegen.program.numbers import Numbers, Operation, Scalar, arity
from fusegen.program.signature import ExtentArgument, NumberArgument, Signature, TensorArgument, Wiring
from fusegen.runtime.library import FUNCTIONS, Function
from fusegen.schedule.names import stride_name


def check_call(parameters: Sequence[str], signature: Signature, call: Call, where: str) -> None:
    """Refuses a call that cannot run.

    Args:
        parameters: names, in order.
        signature: what is assumed of them.
        call: what runs.
        where: for messages.

    Raises:
        BundleError: naming what does not fit.
    """
    for problem in _problems(parameters, signature, call):
        raise BundleError(f"{where}: {problem}", mend="build it again")


def _problems(parameters: Sequence[str], signature: Signature, call: Call) -> Iterator[str]:
    if len(signature.arguments) != len(parameters):
        yield f"{len(signature.arguments)} arguments for {len(parameters)} parameters"
        return
    arguments = dict(zip(parameters, signature.arguments, strict=True))
    tensors = {name for name, argument in arguments.items() if isinstance(argument, TensorArgument)}
    numbers = {name for name, argument in arguments.items() if isinstance(argument, NumberArgument)}
    sizes = signature.sizes | {stride for name in tensors for stride in _strides(name, arguments[name])}
    yield from (f"the tensor {name!r} has other strides than dims" for name in tensors if not _is_whole(arguments[name]))
    yield from (f"there is no tensor {name!r}" for _, name in call.inputs if name not in tensors)
    yield from _signature_problems(signature, sizes)
    yield from _missing("size", (s for f in _signature_formulas(signature) for s in f.sizes), sizes)
    yield from _call_problems(call, sizes, {name for name, _ in call.scalars.results})
    yield from (
        f"no relation is written {relation.sign!r}"
        for relation in (*signature.relations, *signature.rows)
        if relation.sign not in SIGNS
    )
    for program in (call.scalars, signature.conditions):
        yield from _program_problems(program, numbers, sizes)


def _call_problems(call: Call, sizes: frozenset[str], scalars: set[str]) -> Iterator[str]:
    yield from _role_problems(call)
    yield from _library_problems(call)
    yield from _missing("buffer", _buffers_of(call), {buffer.key for buffer in call.buffers})
    yield from _missing("size", (s for f in _formulas(call) for s in f.sizes), sizes)
    launches = [step for step in call.steps if isinstance(step, KernelLaunch)]
    for launch in launches:
        named = (argument.number for argument in launch.arguments if isinstance(argument, MapArgument))
        yield from _missing("tensor map", named, range(len(launch.tensor_maps)))
    named_scalars = (a.name for launch in launches for a in launch.arguments if isinstance(a, ScalarArgument))
    yield from _missing("scalar", named_scalars, scalars)
    for step in call.steps:
        if isinstance(step, Loop):
            yield from _loop_problems(call, step)
            yield from _call_problems(step.body, sizes | {step.start, step.rows}, scalars)


def _loop_problems(call: Call, loop: Loop) -> Iterator[str]:
    """Buffers that are not what the body takes, and results that it does not write to."""
    of_call, of_body = ({buffer.key: buffer for buffer in each.buffers} for each in (call, loop.body))
    taken = [of_body[key] for key, _ in loop.body.inputs if key in of_body]
    given = [of_call[key] for key in loop.operands if key in of_call]
    if [(b.dtype, b.shape) for b in taken] != [(b.dtype, b.shape) for b in given]:
        yield "a loop is given other buffers than it takes"
    if loop.body.results or {loop.operands[place] for place in loop.body.written if place < len(loop.operands)} != set(
        loop.results
    ):
        yield "a loop writes to other buffers than its results"
    yield from _missing("result of a loop", loop.zeros, loop.results)


def _signature_problems(signature: Signature, sizes: frozenset[str]) -> Iterator[str]:
    yield from _missing("size", (name for name, _ in (*signature.multiples, *signature.bounds)), sizes)
    yield from (f"{name} cannot be a multiple of {value}" for name, value in signature.multiples if value < 1)
    for argument in signature.arguments:
        if isinstance(argument, TensorArgument) and argument.alignment < 1:
            yield f"no address is a multiple of {argument.alignment}"


def _role_problems(call: Call) -> Iterator[str]:
    """Buffers that nobody gives, makes or asks for."""
    keys = {role: {buffer.key for buffer in call.buffers if buffer.role is role} for role in Role}
    given = {key for key, _ in call.inputs}
    touched = {key for step in call.steps for key in step.touched}
    if sum(map(len, keys.values())) < len(call.buffers):
        yield "two buffers have one number"
    keyed = [key.buffer for key in call.keys]
    yield from (f"the buffer {key} has one key, or none, where it should not" for key in keys[Role.RANDOM] ^ set(keyed))
    yield from (f"the buffer {key} has several keys" for key in {key for key in keyed if keyed.count(key) > 1})
    yield from (f"the buffer {key} is an input, or not, in one place alone" for key in keys[Role.INPUT] ^ given)
    written = {call.inputs[place][0] for place in call.written if place < len(call.inputs)}
    yield from (f"the buffer {key} is no result" for key in set(call.results) - keys[Role.OUTPUT] - written)
    yield from (f"the buffer {key} is used by no step" for key in keys[Role.TEMPORARY] - touched)


def _library_problems(call: Call) -> Iterator[str]:
    """Functions of torch that there are not, or with other arguments, and results of theirs that are there before."""
    touched = {key for key, _ in call.inputs}
    for step in call.steps:
        if isinstance(step, LibraryCall):
            yield from _missing("function", [step.function], FUNCTIONS)
            function, made = FUNCTIONS.get(step.function), {result.buffer for result in step.results}
            yield from (f"{step.function} gives the buffer {key}, which is there before" for key in made & touched)
            if function is not None and not _is_called_so(function, step):
                yield f"{step.function} takes other arguments, or gives other results"
        touched |= step.touched.keys()


def _is_called_so(function: Function, call: LibraryCall) -> bool:
    counts = (len(call.settings), len(call.sizes)) == (function.settings, function.sizes)
    dims = dict(enumerate(function.results))
    ranks = [(result.order, dims.get(result.number, 0)) for result in call.results]
    are_results = all(sorted(order) == list(range(len(order) if rank is None else rank)) for order, rank in ranks)
    return counts and len(call.operands) in function.operands and are_results and bool(call.results)


def _strides(name: str, argument: object) -> tuple[str, ...]:
    return tuple(stride_name(name, dim) for dim in range(len(argument.shape))) if isinstance(argument, TensorArgument) else ()


def _is_whole(argument: object) -> bool:
    return isinstance(argument, TensorArgument) and len(argument.shape) == len(argument.strides)


def _missing(kind: str, named: Iterable[object], known: Iterable[object]) -> Iterator[str]:
    yield from (f"there is no {kind} {name!r}" for name in set(named) - set(known))


def _buffers_of(call: Call) -> Iterator[int]:
    yield from (key for key, _ in call.inputs)
    yield from call.results
    for step in call.steps:
        yield from step.touched


def _signature_formulas(signature: Signature) -> Iterator[Formula]:
    for argument in signature.arguments:
        yield from (*argument.shape, *argument.strides) if isinstance(argument, TensorArgument) else ()
    for relation in (*signature.relations, *signature.rows):
        yield from (relation.left, relation.right)


def _formulas(call: Call) -> Iterator[Formula]:
    yield from call.counts
    for buffer in call.buffers:
        yield from buffer.shape
    for step in call.steps:
        if isinstance(step, KernelLaunch):
            yield step.grid
            yield from (argument.formula for argument in step.arguments if isinstance(argument, SizeArgument))
        yield from step.sizes if isinstance(step, LibraryCall) else ()
        yield from (step.extent, step.row_bytes, step.sum_bytes) if isinstance(step, Loop) else ()
        yield from (step.adds,) if isinstance(step, MatrixProduct) else ()
        for view in _views(step):
            yield from _view(view)


def _views(step: CallStep) -> tuple[TensorMapSpec | StridedOperand, ...]:
    if isinstance(step, KernelLaunch):
        return step.tensor_maps
    if isinstance(step, Loop):
        return ()
    return step.operands if isinstance(step, LibraryCall) else (step.a, step.b, step.out)


def _view(view: TensorMapSpec | StridedOperand) -> Iterator[Formula]:
    yield from (*view.shape, *view.strides, view.offset)


def _program_problems(program: Numbers, scalars: set[str], sizes: frozenset[str]) -> Iterator[str]:
    yield from _missing("number", program.names, scalars)
    yield from _missing("size", program.sizes, sizes)
    for position, line in enumerate(program.lines):
        if isinstance(line, Operation) and arity(line.name) != len(line.operands):
            yield f"no operation {line.name!r} of {len(line.operands)} numbers"
        if isinstance(line, Operation) and not all(0 <= place < position for place in line.operands):
            yield f"a number that comes later is an operand of {line.name!r}"
        if isinstance(line, Scalar) and not line.name:
            yield "a number without a name"
    yield from (f"the result {name!r} is no line" for name, place in program.results if not 0 <= place < len(program.lines))


# The wiring of passes, which names only values that are there.


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
        *_pass_problems(forward, backward),
        *_input_problems(wiring, {*parameters, *extents}, signature),
        *_source_problems(wiring, forward, backward),
        *_derivative_problems(wiring, derivatives),
    )
    for problem in problems:
        raise BundleError(f"{where}: {problem}", mend="build it again")


def _pass_problems(forward: Sequence[Call], backward: Sequence[Call]) -> Iterator[str]:
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
