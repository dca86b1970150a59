"""Several tensors of integers between brackets: each says where along its dim, all of them together where an element is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.errors import TraceError
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Dim, product, same, simplify_dim
from fusegen.lang.functions import pointwise
from fusegen.lang.functions.common import dtype_of
from fusegen.lang.functions.views import permuted, reshaped
from fusegen.lang.values import TracedTensor


def checked(index: TracedTensor, length: Dim, *, wraps: bool) -> TracedTensor:
    """The index, counted from the front, as numbers that are gathered: that says which of them names no element."""
    if dtype_of(index) not in (DType.INT32, DType.INT64):
        raise TraceError(f"an index of {dtype_of(index)}", mend="convert it to torch.int64")
    flat = reshaped(index, (simplify_dim(product(index._node.shape)),))
    places = index._tracer.add(Op.IOTA, shape=(length,), dtype=DType.INT64)
    return reshaped(index._tracer.add(Op.GATHER, places, flat, dim=0, wraps=wraps), index._node.shape)


def _expanded(index: TracedTensor, shape: tuple[Dim, ...]) -> TracedTensor:
    """The index in a shape; itself where it has that already."""
    own = index._node.shape
    is_same = len(own) == len(shape) and all(map(same, own, shape))
    return index if is_same else index._tracer.add(Op.EXPAND, index, shape=shape)


@dataclass(frozen=True)
class Coordinates:
    """Where some indices point.

    Attributes:
        sizes: of the tensor.
        dims: those that are indexed, in order.
        shape: of the indices, which broadcast.
        indices: one for each of the dims, flat; negative numbers count from the end.
    """

    sizes: tuple[Dim, ...]
    dims: tuple[int, ...]
    shape: tuple[Dim, ...]
    indices: tuple[TracedTensor, ...]

    @classmethod
    def of(cls, x: TracedTensor, dims: Sequence[int], indices: Sequence[TracedTensor]) -> Coordinates:
        """The coordinates that an index for each of some dims gives."""
        shape = x._tracer.common_shape(*(index._node.shape for index in indices))
        flat = (simplify_dim(product(shape)),)
        wide = [reshaped(_expanded(index, shape), flat) for index in indices]
        return cls(x._node.shape, tuple(dims), shape, tuple(wide))

    @property
    def count(self) -> Dim:
        """The number of elements of each index."""
        return self.indices[0]._node.shape[0]

    def number(self) -> TracedTensor:
        """The indices as one along all indexed dims, in row-major order, of numbers that are checked."""
        total: TracedTensor | None = None
        for dim, index in zip(self.dims, self.indices, strict=True):
            along = checked(index, self.sizes[dim], wraps=True)
            size = index._tracer.size(self.sizes[dim])
            total = along if total is None else pointwise.add(pointwise.mul(total, size), along)
        assert total is not None
        return total

    @property
    def length(self) -> Dim:
        """The size of the indexed dims as one."""
        return simplify_dim(product(self.sizes[d] for d in self.dims))

    @property
    def others(self) -> tuple[int, ...]:
        """The dims that are not indexed."""
        return tuple(d for d in range(len(self.sizes)) if d not in self.dims)

    def in_front(self, x: TracedTensor) -> TracedTensor:
        """The tensor with the indexed dims as one, before the others."""
        return reshaped(permuted(x, (*self.dims, *self.others)), (self.length, *(self.sizes[d] for d in self.others)))

    def chosen(self, x: TracedTensor) -> TracedTensor:
        """Gathers along one dim after the other: each index chooses among what the one before it chose."""
        pairs = sorted(zip(self.dims, self.indices, strict=True), key=lambda pair: not self._is_every(*pair))
        found = permuted(x, (*(dim for dim, _ in pairs), *self.others))
        for number, (of, index) in enumerate(pairs):
            if not number and self._is_every(of, index):
                continue
            dim = min(number, 1)
            behind = found._node.shape[dim + 1 :]
            along = reshaped(index, (self.count, *(1 for _ in found._node.shape[1:])))
            wide = x._tracer.add(Op.EXPAND, along, shape=(self.count, *(1,) * dim, *behind))
            found = reshaped(x._tracer.add(Op.GATHER, found, wide, dim=dim, wraps=True), (self.count, *behind))
        return self.placed(reshaped(found, (*self.shape, *(self.sizes[d] for d in self.others))))

    def back(self, x: TracedTensor) -> TracedTensor:
        """Brings a value from the order of `in_front` into the tensor's shape."""
        order = (*self.dims, *self.others)
        return permuted(reshaped(x, tuple(self.sizes[d] for d in order)), [order.index(d) for d in range(len(order))])

    def chosen_at_once(self, x: TracedTensor) -> TracedTensor:
        """The same by one index along all indexed dims, so that what two indices name is one element."""
        front = self.in_front(x)
        along = reshaped(self.number(), (self.count, *(1 for _ in self.others)))
        wide = x._tracer.add(Op.EXPAND, along, shape=(self.count, *front._node.shape[1:]))
        found = x._tracer.add(Op.GATHER, front, wide, dim=0, wraps=False)
        return self.placed(reshaped(found, (*self.shape, *front._node.shape[1:])))

    def _is_every(self, dim: int, index: TracedTensor) -> bool:
        """Tells if an index is every number along its dim, as ``torch.arange`` gives them."""
        return index._node.op is Op.IOTA and same(index._node.shape[0], self.sizes[dim])

    def placed(self, chosen: TracedTensor) -> TracedTensor:
        """The chosen elements, with the indices' dims where torch has them: in place of neighbouring indices, else in front."""
        first, rank = self.dims[0], len(self.shape)
        if self.dims != tuple(range(first, first + len(self.dims))):
            return chosen
        before = range(rank, rank + first)
        return permuted(chosen, (*before, *range(rank), *range(rank + first, chosen.ndim)))
