"""The options of a kernel declaration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

from fusegen.autodiff.saved_values import RECOMPUTES, Recompute
from fusegen.errors import ArgumentError
from fusegen.settings import COMPILERS, Compiler

Plans: TypeAlias = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""The text of a plan, several texts, or those of each kernel by its name."""


class Options(NamedTuple):  # torch.compile traces NamedTuples, but not every dataclass
    """The options of a declaration, as documented by `fusegen.kernel`."""

    mutates: tuple[str, ...] = ()
    recompute: Recompute = "auto"
    compiler: Compiler | None = None
    fast_math: bool = False
    plan: tuple[tuple[str, str], ...] | None = None  # as in `Graph.plans`; None if not given

    def checked(self) -> Options:
        """Returns the options with ``mutates`` and ``plan`` as tuples.

        Raises:
            ArgumentError: an unknown option value, or one name instead of a sequence of names.
        """
        if isinstance(self.mutates, str):
            raise ArgumentError(
                f"fg.kernel: mutates is the string {self.mutates!r}", hint=f"pass a tuple of names: mutates=({self.mutates!r},)"
            )
        names = tuple(self.mutates) if isinstance(self.mutates, Iterable) else (self.mutates,)
        if not all(isinstance(name, str) for name in names):
            raise ArgumentError(f"fg.kernel: mutates is {self.mutates!r}", hint="pass names of parameters: mutates=('x',)")
        if self.recompute not in RECOMPUTES:
            what = f"fg.kernel: recompute is {self.recompute!r}, which is not a rule of recomputation"
            raise ArgumentError(what, hint=f"give one of {', '.join(map(repr, RECOMPUTES))}")
        if self.compiler not in (None, *COMPILERS):
            what = f"fg.kernel: compiler is {self.compiler!r}, which is not a compiler"
            raise ArgumentError(what, hint=f"give one of {', '.join(map(repr, COMPILERS))}")
        if not isinstance(self.fast_math, bool):
            raise ArgumentError(f"fg.kernel: fast_math is {self.fast_math!r}", hint="pass True or False")
        return self._replace(mutates=names, plan=None if self.plan is None else tuple(_plans(cast(Plans, self.plan))))

    def applied_to(self, declared: Options) -> Options:
        """Overrides the options of a declared kernel, except ``mutates``, by the non-default options of this object."""
        rules = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return declared._replace(**rules | {"mutates": declared.mutates})


def _plans(plan: Plans, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(plan, str):
        yield name, plan
    elif isinstance(plan, Mapping) and not name and all(isinstance(key, str) and key for key in plan):
        for key, texts in plan.items():
            yield from _plans(texts, key)
    elif isinstance(plan, (list, tuple)) and all(isinstance(text, str) for text in plan):
        yield from ((name, text) for text in plan)
    else:
        what = f"fg.kernel: plan is {plan!r}"
        raise ArgumentError(what, hint="pass the text of a plan, a list of texts, or a dict of them by the name of a kernel")


DEFAULTS = Options()
