"""The derivatives of operations: one table.

A rule gets a node, whose operands are ``y.arg(n)``, and the gradient by it. It gives, for each operand, the gradient by that, in
whatever shape and dtype broadcasting leaves it, or None where there is none. What a composition is made of has rules, so that a
composition needs one of its own only where those would lose accuracy or move more bytes.
"""

from __future__ import annotations

from fusegen.autodiff.rules.arrangements import ARRANGEMENTS
from fusegen.autodiff.rules.compositions import COMPOSITIONS
from fusegen.autodiff.rules.primitives import LIBRARY, POINTWISE, REDUCTIONS, GradientRule
from fusegen.ir.ops import Op

_OF_ROWS = (Op.SORTED, Op.SORT_KEY, Op.SORTED_VALUE, Op.MOMENTS, Op.NORMALIZER)
MADE_LATER = frozenset({*_OF_ROWS, Op.ONE_PLUS_ERF, Op.EXP_BELOW, Op.ATTENTION_BACKWARD, Op.BLOCKS})
"""Operations that no graph has when it is differentiated: the compiler makes them of others."""

RULES: dict[Op, GradientRule] = {**POINTWISE, **ARRANGEMENTS, **REDUCTIONS, **COMPOSITIONS, **LIBRARY}
