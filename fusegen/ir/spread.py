"""How many elements of a graph's values kernels compute, and when that is too many.

A kernel computes everything between memory and a result at each point. Where values are read at several places and these
again (a stencil of a stencil, a network of sorting), elements multiply, and so does the text that a compiler must take.
"""

from __future__ import annotations

from fusegen.errors import UnsupportedError
from fusegen.ir.graph import Graph

# Measured with g++ -O3 and NVRTC: 1400 to 1500 elements of 35 values (four steps of a stencil, prefix sums of 256) take half a
# minute to compile, and the time grows with the square.
_MOST = 1600
_MOST_IN_ALL = 4000  # over all kernels of a program, which are compiled as one text
_MOST_A_VALUE = 8  # what is long without multiplying compiles in time proportional to its length


def check_spread(graph: Graph, elements: int) -> None:
    """Refuses a kernel whose values are needed at too many places.

    Args:
        graph: in primitives.
        elements: pairs of a value and an index that were seen up to now.

    Raises:
        UnsupportedError: they are too many.
    """
    values = len(graph.nodes)
    _refuse_above(
        _MOST,
        elements,
        values,
        f"{graph.name} needs more than {elements - 1} elements of its {values} values at each point:"
        " values that are read at several places are made of values that are read at several places",
    )


def check_repetition(graph: Graph, computed: int) -> None:
    """Refuses a program whose kernels compute the same values over and over.

    Args:
        graph: in primitives.
        computed: nodes that the kernels found up to now compute, each as often as it is computed.

    Raises:
        UnsupportedError: they are too many.
    """
    values = len(graph.nodes)
    _refuse_above(
        _MOST_IN_ALL,
        computed,
        values,
        f"{graph.name} needs more than {computed - 1} values in its kernels, though it has {values}: each kernel computes again"
        " what those before it have computed",
    )


def _refuse_above(most: int, count: int, values: int, what: str) -> None:
    if count > most and count > _MOST_A_VALUE * values:
        raise UnsupportedError(what, mend="split it into several kernels, so that values in between lie in memory")
