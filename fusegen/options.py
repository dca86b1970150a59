"""The options of a kernel's declaration, as one value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fusegen.autodiff.keep import RECOMPUTES, Recompute
from fusegen.errors import ArgumentError
from fusegen.settings import COMPILERS, Compiler


class Options(NamedTuple):  # torch.compile can look into one, and not into every dataclass
    """The rules that a kernel was declared with, as `fusegen.kernel` describes them."""

    mutates: tuple[str, ...] = ()
    recompute: Recompute = "auto"
    compiler: Compiler | None = None
    fast_math: bool = False

    def checked(self) -> Options:
        """The same, with names in a tuple.

        Raises:
            ArgumentError: an unknown rule, or a name in place of names.
        """
        if isinstance(self.mutates, str):
            raise ArgumentError(f"mutates is {self.mutates!r}", hint=f"give a tuple of names: mutates=({self.mutates!r},)")
        names = tuple(self.mutates) if isinstance(self.mutates, Iterable) else (self.mutates,)
        if not all(isinstance(name, str) for name in names):
            raise ArgumentError(f"fg.kernel: mutates is {self.mutates!r}", hint="give names of parameters: mutates=('x',)")
        if self.recompute not in RECOMPUTES:
            what = f"fg.kernel: recompute is {self.recompute!r}, which is no rule for what a backward pass computes again"
            raise ArgumentError(what, hint=f"give one of {', '.join(map(repr, RECOMPUTES))}")
        if self.compiler not in (None, *COMPILERS):
            what = f"fg.kernel: compiler is {self.compiler!r}, which is no way to compile"
            raise ArgumentError(what, hint=f"give one of {', '.join(map(repr, COMPILERS))}")
        if not isinstance(self.fast_math, bool):
            raise ArgumentError(f"fg.kernel: fast_math is {self.fast_math!r}", hint="give True or False")
        return self._replace(mutates=names)

    def over(self, declared: Options) -> Options:
        """Rules of a kernel that has some already: these, where they are not those by default."""
        rules = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return declared._replace(**rules | {"mutates": declared.mutates})


DEFAULTS = Options()
