"""Kernels: what is launched, with the buffers, sizes and scalars that it gets."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.dtypes import DType
from fusegen.schedule.bodies import Body


@dataclass(frozen=True)
class Pointer:
    """A buffer that a kernel gets.

    Attributes:
        buffer: its key.
        name: in the text.
        dtype: of its elements.
        stream: of random bits, which of those of one key they are: the address is that of the key. None of what lies in memory.
    """

    buffer: int
    name: str
    dtype: DType
    writable: bool
    stream: int | None = None


@dataclass(frozen=True, repr=False)
class Kernel:
    """All that emission needs of one kernel.

    Attributes:
        name: the user's name for it; the symbol is ``fg_`` and the name.
        pointers: buffers, in the order of the parameters.
        sizes: names of sizes and strides, in the order of the parameters.
        scalars: run-time scalars, in the order of the parameters.
        body: the math and the pipeline's particulars.
        wide: whether indices need 64 bits.
        checks: whether it checks indices that it reads.
    """

    name: str
    pointers: tuple[Pointer, ...]
    sizes: tuple[str, ...]
    scalars: tuple[tuple[str, DType], ...]
    body: Body
    wide: bool = False
    checks: bool = False

    def __repr__(self) -> str:
        return f"<kernel {self.name}: {type(self.body).__name__}>"
