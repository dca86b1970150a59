"""The stages of a kernel to inspect: graphs, groups, programs, texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusegen.compiler.compile import CompiledGraph
from fusegen.compiler.specialize import GraphPlanner, Specialization
from fusegen.describe import SavedValue, Stages, explain, explain_saved, page, summary
from fusegen.families.gemm.heuristics import ProductChoice
from fusegen.fusion import Group
from fusegen.ir.graph import Graph
from fusegen.jit import nvrtc
from fusegen.program.call import bytes_of
from fusegen.schedule.program import Program
from fusegen.source import Source
from fusegen.target import Target
from fusegen.threads import cached_property


class Lowered:
    """Every stage of a kernel for some arguments.

    A terminal prints a summary of it, a notebook shows a page with collapsible sections.

    Attributes:
        traced: the graph as the function was traced.
        sizes: values of the symbolic sizes and strides of the example arguments.
    """

    def __init__(self, compiled: CompiledGraph, sizes: Mapping[str, int], saved: Sequence[SavedValue] | None = None) -> None:
        self._compiled, self._saved = compiled, saved
        self.traced: Graph = compiled.traced
        self.sizes = dict(sizes)

    @property
    def target(self) -> Target:
        """The machine."""
        return self._compiled.target

    @property
    def graph(self) -> Graph:
        """The graph in primitives, simplified."""
        return self._planned.graph

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of nodes, one a step."""
        return self._planned.groups

    @property
    def program(self) -> Program:
        """The steps, with sizes as formulas."""
        return self._planned.program

    @property
    def step_count(self) -> int:
        """The number of steps of a call: launches, and calls of libraries."""
        return len(self._compiled.call.steps)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The text of each launch."""
        return self._compiled.sources

    @cached_property
    def choices(self) -> Mapping[int, ProductChoice]:
        """For products, by their positions in the graph, what was chosen for these sizes, with the expected times."""
        return self._planner.choices(self.sizes)

    @cached_property
    def asm(self) -> Assembly:
        """The text of all launches: ``cuda`` or ``cpp``, ``ptx``, ``sass``."""
        return Assembly(self.sources, self.target)

    @property
    def _planned(self) -> Specialization:
        return self._compiled.planned

    @property
    def _planner(self) -> GraphPlanner:
        return self._compiled.specializer.planner(self.sizes)

    def explain(self) -> str:
        """The kernels that run, with the layout, the bytes, the FLOPs and the bound of each; of a forward pass also the
        values that it saves for its backward pass.

        A pointwise operation of `graph` is one FLOP an element: an addition, a comparison, an exponential. A
        multiplication and an addition are two. A reduction is one an element that it reduces; moments and the normalizer
        of a softmax are four. A matmul is 2mnk; attention is its two matmuls, over the keys up to the last that a query
        sees. A value counts once. Conversions, copies, integers, logic, random bits and the softmax of attention are not
        counted.

        The expected time is that of a model of plans, in µs, beside the best other plan's; of a step without a model it is the
        time at peak rates. A warning says where a launch of much work has so few blocks that most of the GPU idles.

        Bandwidth binds a kernel below the GPU's ridge point, arithmetic one above it. Launch latency binds a kernel whose
        work at peak rates takes less time than a launch.
        """
        text = explain(self.program, self.sizes, self.choices)
        saved = self._saved_text()
        return f"{text}\n{saved}" if saved else text

    @property
    def workspace_bytes(self) -> int:
        """The bytes of a `fg.Workspace` for a call of these sizes."""
        return bytes_of(self._compiled.call, self.sizes)

    def __repr__(self) -> str:
        return summary(self._stages())

    def _repr_html_(self) -> str:
        """The page that a notebook shows."""
        return page(self._stages())

    def _stages(self) -> Stages:
        saved = self._saved_text().partition("\n")[0]
        return Stages(self.traced, self.program, self.sources, self.sizes, self.choices, tuple(self.asm), saved)

    def _saved_text(self) -> str:
        return "" if self._saved is None else explain_saved(self._saved, self.sizes)

    @property
    def plans(self) -> tuple[LoweredForm, ...]:
        """The programs of all numbers of rows that products can have, with rows and points laid out for these sizes; made when they
        are asked for."""
        forms = self._planner.all(self.sizes)
        return tuple(LoweredForm({str(dim): numbers for dim, numbers in rows.items()}, f.program, f.sources) for rows, f in forms)


@dataclass(frozen=True, repr=False)
class LoweredForm:
    """The program of calls with some numbers of rows.

    Attributes:
        rows: for each number of rows that is known at the call only, from where to where; the last range has no end, in fact.
        program: the steps.
        sources: the text of each launch.
    """

    rows: Mapping[str, range]
    program: Program
    sources: tuple[Source, ...]

    def __repr__(self) -> str:
        ranges = ", ".join(f"{name} from {numbers[0]} to {numbers[-1]}" for name, numbers in self.rows.items())
        return f"<program for {ranges or 'all sizes'}: {', '.join(map(repr, self.program.steps))}>"


class Assembly(Mapping[str, str]):
    """The text of a program's launches in each language; compiled only when asked for.

    Args:
        sources: of the launches.
        target: the machine.
    """

    def __init__(self, sources: tuple[Source, ...], target: Target) -> None:
        self.sources = sources
        self.target = target

    def __getitem__(self, language: str) -> str:
        """The text.

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
