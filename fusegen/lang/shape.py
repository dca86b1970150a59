"""The sizes of a traced tensor, as a tuple that behaves like ``torch.Size``."""

from __future__ import annotations

import math
from typing import Any

from fusegen.errors import IndexRangeError
from fusegen.lang.places import here


class Shape(tuple[Any, ...]):
    """The sizes of a traced tensor: a ``torch.Size`` whose elements may be run-time sizes."""

    __slots__ = ()

    def numel(self) -> Any:
        """The product of the sizes."""
        return math.prod(self)

    def __getitem__(self, key: Any) -> Any:
        try:
            found = super().__getitem__(key)
        except IndexError:
            what = f"the size of dim {key} of a tensor of {len(self)} dims"
            raise IndexRangeError(what, where=here(), mend="give a tensor that has the dim") from None
        return Shape(found) if isinstance(key, slice) else found

    def __add__(self, other: Any) -> Any:
        return Shape(super().__add__(tuple(other))) if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return Shape((*other, *self)) if isinstance(other, tuple) else NotImplemented

    def __mul__(self, count: Any) -> Any:
        return Shape(super().__mul__(count))

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"torch.Size([{', '.join(map(repr, self))}])"
