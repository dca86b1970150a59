"""Kinds of calls that an operator is built for, with their programs, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.extension.program_text import CallGuards
from fusegen.program.call import LaunchPlan
from fusegen.program.formula import Formula
from fusegen.source import Source


@dataclass(frozen=True)
class Built:
    """A program of an operator.

    Attributes:
        call: what is done.
        assumed: the calls that it is good for.
        sources: of its launches.
        cubins: their machine code; None on the CPU.
        capability: of the GPU, such as 90; 0 is the CPU.
    """

    call: LaunchPlan
    assumed: CallGuards
    sources: tuple[Source, ...]
    cubins: tuple[bytes, ...] | None
    capability: int


@dataclass(frozen=True)
class Shaped:
    """A tensor that an operator gives: its shape, of the sizes of a kind, and its dtype."""

    shape: tuple[Formula, ...]
    dtype: DType


@dataclass(frozen=True)
class OperatorPasses:
    """The two passes of a kind.

    Attributes:
        forward, backward: their programs, for each machine in order of preference.
        kept: where the backward pass's first tensors come from: an input of the forward pass by its place, or a result by `~place`.
        sizes: names of the sizes that the backward pass takes.
        numbers: names of the numbers that it takes.
        gradients: for each input its gradient: a result of the backward pass, a given gradient by `~place`, or None.
        given: places of the results by which it takes gradients.
        outputs: what the forward pass gives: results, and what it leaves.
        wanted: what the backward pass gives.
        dims: its inputs' shapes, in order.
        draws: whether the forward pass takes a key of random bits behind its tensors.
    """

    forward: tuple[Built, ...]
    backward: tuple[Built, ...]
    kept: tuple[int, ...]
    sizes: tuple[str, ...]
    numbers: tuple[str, ...]
    gradients: tuple[int | None, ...]
    given: tuple[int, ...]
    outputs: tuple[Shaped, ...]
    wanted: tuple[Shaped, ...]
    dims: tuple[tuple[Formula, ...], ...]
    draws: bool


@dataclass(frozen=True)
class CallKind:
    """A kind of calls.

    Attributes:
        on_gpu: where they run.
        tensors: dtypes and shapes, one a tensor, captured ones behind.
        constants: values of the parameters that selected code, by name.
        sizes: names of the sizes that no tensor has.
        programs: without gradients, in order of preference.
        results: what they give that is fresh.
        passes: for gradients; None where there is no derivative.
        description: in words, for messages.
    """

    on_gpu: bool
    tensors: tuple[Shaped, ...]
    constants: tuple[tuple[str, object], ...]
    sizes: tuple[str, ...]
    programs: tuple[Built, ...]
    results: tuple[Shaped, ...]
    passes: OperatorPasses | None
    description: str


@dataclass(frozen=True)
class OperatorParameter:
    """A parameter of an operator.

    Attributes:
        name: in the schema.
        role: ``tensor``, ``written``, ``size``, ``int``, ``float``, or ``constant``.
        default: of a constant; where it has one.
    """

    name: str
    role: str
    default: object = None


@dataclass(frozen=True)
class OperatorSpec:
    """An operator.

    Attributes:
        name: in its library.
        parameters: in order.
        kinds: of calls.
    """

    name: str
    parameters: tuple[OperatorParameter, ...]
    kinds: tuple[CallKind, ...]

    def of(self, *roles: str) -> Sequence[OperatorParameter]:
        """The parameters of some roles."""
        return [parameter for parameter in self.parameters if parameter.role in roles]
