"""The approximate functions of the hardware in float32, which a kernel uses that was declared with ``fast_math=True``.

Errors are documented maxima. Those of instructions are in NVIDIA, PTX ISA, "Floating Point Instructions"; those of accurate
functions in CUDA C++ Programming Guide, "Mathematical Functions", "Single-Precision Mathematical Standard Library Functions with
Maximum ULP Error". nvcc's ``--use_fast_math`` takes the same instructions, but for angles, which are reduced first, for powers,
of which it loses negative bases, and for divisors beyond 2^126, by which it gives 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.emit.spelling import Form, Precedence, function
from fusegen.ir.graph import Graph
from fusegen.ir.ops import Op
from fusegen.ir.reductions import REDUCTIONS
from fusegen.passes.fuse import Group
from fusegen.passes.fuse.groups import computed


@dataclass(frozen=True)
class Approximation:
    """An operation by an approximate function.

    Attributes:
        form: the function's call.
        error: the maximum error; "ulp" are units in the last place of float32.
        accurate: that of the function that is used otherwise.
    """

    form: Form
    error: str
    accurate: str


FAST_MATH = {
    Op.EXP: Approximation(function("fast_exp"), "2 + |1.2 x| ulp", "1 ulp"),
    Op.EXP2: Approximation(function("fast_exp2"), "2 ulp", "2 ulp"),
    Op.EXPM1: Approximation(function("fast_expm1"), "2^-18 + 2^-22.7 |x| relative", "1 ulp"),
    Op.LOG: Approximation(function("fast_log"), "2^-22 absolute for 0.5 < x < 2, 3 ulp elsewhere", "1 ulp"),
    Op.LOG1P: Approximation(function("fast_log1p"), "2^-18 relative", "1 ulp"),
    Op.LOG2: Approximation(function("fast_log2"), "2^-22 absolute for 0.5 < x < 2, 2^-22 relative elsewhere", "1 ulp"),
    Op.SIN: Approximation(function("fast_sin"), "2^-20 absolute for |x| < 2^17", "2 ulp"),
    Op.COS: Approximation(function("fast_cos"), "2^-20 absolute for |x| < 2^17", "2 ulp"),
    Op.TANH: Approximation(function("fast_tanh"), "2^-11 relative", "2 ulp"),
    Op.SQRT: Approximation(function("fast_sqrt"), "2^-23 relative", "0.5 ulp"),
    Op.RSQRT: Approximation(function("fast_rsqrt"), "2^-22.9 relative", "2 ulp"),
    Op.DIV: Approximation(function("fast_divide", 2), "2 ulp", "0.5 ulp"),
    Op.SIGMOID: Approximation(
        Form("fast_reciprocal(1.0f + fast_exp(-{0}))", Precedence.ATOM, (Precedence.ATOM,)), "4 + |1.2 x| ulp", "3 ulp"
    ),
    Op.ONE_PLUS_ERF: Approximation(function("fast_one_plus_erf"), "2^-19 + 2^-22 x^2 relative", "2^-23 absolute"),
}
"""The operations that have one."""


def approximated(graph: Graph, group: Group) -> tuple[Op, ...]:
    """The operations of a group that are approximate because its kernel asks for it."""
    if not graph.fast_math:
        return ()
    nodes = [graph.nodes[position] for position in sorted(computed(graph, group))]
    single = [node.op for node in nodes if node.args and graph.nodes[node.args[-1]].dtype.compute is DType.FLOAT32]
    if any(node.op in REDUCTIONS and REDUCTIONS[node.op].approximable for node in nodes):
        single.append(Op.EXP)  # combines normalizers
    return tuple(op for op in FAST_MATH if op in single)
