"""The table of derivative rules.

A rule gets a node, whose operands are ``y.arg(n)``, and its gradient. It returns one gradient per operand, before sums over
broadcast dims, or None. A composition is differentiated through its primitives, unless a rule of its own is more accurate or moves
fewer bytes.
"""

from __future__ import annotations

from fusegen.autodiff.rules.arrangements import ARRANGEMENTS
from fusegen.autodiff.rules.compositions import COMPOSITIONS
from fusegen.autodiff.rules.primitives import LIBRARY, POINTWISE, REDUCTIONS, GradientRule
from fusegen.ir.ops import Op

_OF_KEYS = (Op.SORTED, Op.SORT_KEY, Op.DESCENDING_KEY, Op.SORTED_VALUE, Op.DESCENDING_VALUE, Op.KEY_INDEX)
_OF_ROWS = (*_OF_KEYS, Op.MOMENTS, Op.NORMALIZER)
CREATED_LATER = frozenset({*_OF_ROWS, Op.ONE_PLUS_ERF, Op.EXP_BELOW, Op.ATTENTION_BACKWARD, Op.BLOCKS, Op.RUN_SUM})
"""Operations that the compiler creates after differentiation."""

RULES: dict[Op, GradientRule] = {**POINTWISE, **ARRANGEMENTS, **REDUCTIONS, **COMPOSITIONS, **LIBRARY}
