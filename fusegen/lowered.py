"""The stages of a kernel, for inspection: graphs, groups, programs, source text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusegen.compiler.backends import device_of
from fusegen.compiler.compile import BuiltSpecialization, CompiledGraph
from fusegen.compiler.lower import Specialization
from fusegen.compiler.tuned import records_text
from fusegen.describe import SavedValue, Stages, explain, explain_saved, summary
from fusegen.eager_cost import EagerCost
from fusegen.errors import ArgumentError
from fusegen.families.gemm.choice import MatmulChoice
from fusegen.fusion import Group
from fusegen.ir.graph import Graph
from fusegen.jit import nvrtc
from fusegen.page import Machine, framed, page
from fusegen.program.call import bytes_of
from fusegen.schedule.choices import Measured
from fusegen.schedule.program import Program
from fusegen.source import Source
from fusegen.target import Target
from fusegen.threads import cached_property


class Lowered:
    """Every stage of a kernel for given arguments.

    A terminal prints a summary, a notebook shows an HTML page.

    Attributes:
        traced: the graph before simplification.
        sizes: values of the symbolic sizes and strides of the example arguments.
    """

    def __init__(
        self,
        compiled: CompiledGraph,
        sizes: Mapping[str, int],
        saved: Sequence[SavedValue] | None = None,
        eager: Callable[[], EagerCost | None] = lambda: None,
    ) -> None:
        self._compiled, self._saved, self._eager = compiled, saved, eager
        self.traced: Graph = compiled.traced
        self.sizes = dict(sizes)

    @property
    def target(self) -> Target:
        return self._compiled.target

    @property
    def graph(self) -> Graph:
        """The simplified graph of primitive operations."""
        return self._planned.graph

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of nodes; each is one step."""
        return self._planned.groups

    @property
    def program(self) -> Program:
        return self._planned.program

    def program_by(self, measured: Measured) -> Program:
        """The program with measured or pinned candidates of its choices, in place of those that are expected to be the fastest.

        Args:
            measured: returns one of the candidates of a choice, or None for the expected one; anything else is ignored.
        """
        return self._compiled.specializer.at(self.sizes, measured).program

    @property
    def step_count(self) -> int:
        """The number of launches and library calls of a call."""
        return len(self._compiled.call.steps)

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._compiled.sources

    @cached_property
    def choices(self) -> Mapping[int, MatmulChoice]:
        """Maps the position of each matmul in the graph to its selected implementation and the expected times."""
        return self._compiled.specializer.choices(self.sizes)

    @cached_property
    def asm(self) -> Assembly:
        """The text of all launches by language: ``cuda`` or ``cpp``, ``ptx``, ``sass``."""
        return Assembly(self.sources, self.target)

    @property
    def _planned(self) -> Specialization:
        return self._compiled.planned

    def explain(self) -> str:
        """Describes the kernels that run: layout, bytes, FLOPs and bound of each, and the values that a forward pass saves.

        A pointwise operation of `graph` is one FLOP per element: an addition, a comparison, an exponential. A multiply-add is two.
        A reduction is one per reduced element; moments and the normalizer of a softmax are four. A matmul is 2mnk; attention is its
        two matmuls, over the keys up to the last that a query sees. A value counts once. Conversions, copies, integers, logic,
        random bits and the softmax of attention do not count.

        The expected time, in µs, is an estimate of the cost model, printed with that of the best other candidate. The default
        candidate stays if no other one is more than 3 % faster: a smaller gain is not worth another kernel. A step without a model
        gets the time at peak rates. A warning marks a launch with much work and so few blocks that most SMs idle.

        A kernel below the GPU's ridge point is bound by bandwidth, above it by arithmetic. It is bound by launch latency if its
        work at peak rates takes less time than a launch.

        Records of `fg.tune` that apply to these sizes on this machine come last: calls use them. So does the folder of
        ``FUSEGEN_BUNDLE_PATH`` whose kernels calls run instead.
        """
        parts = explain(self.program, self.sizes, self.choices), self._measured_text(), self._saved_text()
        return "\n".join(part for part in parts if part)

    def _measured_text(self) -> str:
        built = self._compiled.specialization
        if isinstance(built, BuiltSpecialization):
            return f"calls of these sizes run kernels built into {built.kernels.folder}, which may have other plans"
        text = records_text(self._compiled, self.sizes, device_of(self.target))
        return f"measured by fg.tune; calls of these sizes use:\n{text}" if text else ""

    @property
    def workspace_bytes(self) -> int:
        """The bytes that a `fg.Workspace` needs for a call of these sizes."""
        return bytes_of(self._compiled.call, self.sizes)

    def __repr__(self) -> str:
        return summary(self._stages())

    def html(self, *, sass: bool = False) -> str:
        """Returns a page as one HTML document: the graph, the memory traffic, the plan, and the emitted text beside your lines.

        The page loads nothing. `fusegen show NAME --html FILE` writes it.

        Args:
            sass: True compiles the kernels, and adds their registers and spills, and their machine code, which lights up with your
                lines.

        Raises:
            ArgumentError: ``sass`` is for the targets of GPUs.
            ToolNotFoundError: with ``sass``, NVRTC or nvdisasm is not installed.
        """
        if sass and "sass" not in self.target.languages:
            raise ArgumentError(f"{self.target.name} has no SASS", hint="lower for a GPU: target='sm_90a'")
        return page(self._stages(), {each: self._machine(each) for each in self.sources} if sass else None)

    def _machine(self, source: Source) -> Machine:
        cubin = nvrtc.compile_cubin(source, self.target.name).cubin
        return Machine(nvrtc.instructions(source, self.target.name), nvrtc.resources(cubin))

    def _repr_html_(self) -> str:
        return framed(self.html())

    def _stages(self) -> Stages:
        saved = self._saved_text().partition("\n")[0]
        return Stages(self.traced, self.program, self.sources, self.sizes, self.choices, tuple(self.asm), saved, self._eager)

    def _saved_text(self) -> str:
        return "" if self._saved is None else explain_saved(self._saved, self.sizes)

    @property
    def plans(self) -> tuple[LoweredSpecialization, ...]:
        """The programs of the kernel, one for each range of matmul row counts; built on first use.

        The layouts are those for the sizes of this call. Ranges in which a declared plan is no candidate are left out: calls raise.
        """
        specializations = self._compiled.specializer.all(self.sizes)
        return tuple(
            LoweredSpecialization({str(dim): numbers for dim, numbers in rows.items()}, f.program, f.sources)
            for rows, f in specializations
        )


@dataclass(frozen=True, repr=False)
class LoweredSpecialization:
    """The program for calls with certain row counts.

    Attributes:
        rows: maps each row count that is known only at the call to its range; the last range is open-ended.
    """

    rows: Mapping[str, range]
    program: Program
    sources: tuple[Source, ...]

    def __repr__(self) -> str:
        ranges = ", ".join(f"{name} from {numbers[0]} to {numbers[-1]}" for name, numbers in self.rows.items())
        return f"<program for {ranges or 'all sizes'}: {', '.join(map(repr, self.program.steps))}>"


class Assembly(Mapping[str, str]):
    """The text of all launches of a program in each language; compiled on first use."""

    def __init__(self, sources: tuple[Source, ...], target: Target) -> None:
        self.sources = sources
        self.target = target

    def __getitem__(self, language: str) -> str:
        """Returns the text in a language.

        Raises:
            KeyError: the target has no such language.
            ToolNotFoundError: NVRTC or nvdisasm is not installed.
        """
        if language not in self.target.languages:
            raise KeyError(f"no {language!r} for {self.target.name}; there is {', '.join(self.target.languages)}")
        return "\n".join(self._text(source, language) for source in self.sources)

    def __iter__(self) -> Iterator[str]:
        return iter(self.target.languages)

    def __len__(self) -> int:
        return len(self.target.languages)

    def __repr__(self) -> str:
        entries = ", ".join(source.entry for source in self.sources) or "no kernel"
        return f"<asm of {entries} for {self.target.name}: {', '.join(self.target.languages)}>"

    def _text(self, source: Source, language: str) -> str:
        if language == "ptx":
            return nvrtc.compile_ptx(source, self.target.name)
        if language == "sass":
            return nvrtc.sass(nvrtc.compile_cubin(source, self.target.name).cubin)
        return source.text
