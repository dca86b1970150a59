"""Where a kernel's function reads state: in itself, in helpers, methods, other modules, closures; as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A way to write a function that reads state.

    Attributes:
        function: statements that define ``f``; ``$read`` is an expression over the variables ``$variables`` and over ``x``.
        once: statements before the first kernel, which further kernels share.
        declare: a statement that makes the kernel ``$k`` of ``f``.
        elsewhere: whether the state lies in the module ``other``, where ``once`` runs too.
        refused: whether the declaration or the call may be refused.
    """

    function: str
    once: str = ""
    declare: str = "$k = kernel(f)"
    elsewhere: bool = False
    refused: bool = False


_READS = "return x * ($read)"


def _deep(depth: int) -> Place:
    """Helpers that call each other; the last one reads."""
    calls = [f"def h{level}(x):\n    return h{level + 1}(x)" for level in range(1, depth)]
    return Place("def f(x):\n    return h1(x)", "\n".join([*calls, f"def h{depth}(x):\n    {_READS}"]))


_HOST = f"class Host:\n    def f(self, x):\n        {_READS}\nhost = Host()"
_NET = f"class Host(nn.Module):\n    def forward(self, x):\n        {_READS}\nhost = Host()"

PLACES: dict[str, Place] = {
    "function": Place(f"def f(x):\n    {_READS}"),
    "lambda": Place("f = lambda x: x * ($read)"),
    "closure": Place("f = make($variables)", f"def make($variables):\n    def f(x):\n        {_READS}\n    return f"),
    "closure of a closure": Place(
        "f = make($variables)()",
        f"def make($variables):\n    def inner():\n        def f(x):\n            {_READS}\n        return f\n    return inner",
    ),
    **{f"{depth} deep": _deep(depth) for depth in (1, 2, 4, 6)},
    "helper that gives the value": Place("def f(x):\n    return x * value(x)", "def value(x):\n    return $read"),
    "other module": Place("def f(x):\n    return other.h(x)", f"def h(x):\n    {_READS}", elsewhere=True),
    "other module, 3 deep": Place(
        "h = other.h\ndef g(x):\n    return h(x)\ndef f(x):\n    return g(x)",
        f"def i(x):\n    {_READS}\ndef h(x):\n    return i(x)",
        elsewhere=True,
    ),
    "one branch": Place(f"def f(x):\n    if x.shape[0] == 2:\n        return x + 1\n    {_READS}"),
    "inner function": Place("def f(x):\n    def inner():\n        return $read\n    return x * inner()"),
    "comprehension": Place("def f(x):\n    return sum([x * ($read) for _ in range(2)])"),
    "generator": Place("def f(x):\n    return next(x * ($read) for _ in range(2))"),
    "default that reads": Place("def g(x, get=lambda x: $read):\n    return x * get(x)\ndef f(x):\n    return g(x)"),
    "wrapped": Place(
        f"@wrapped\ndef f(x):\n    {_READS}",
        "def wrapped(g):\n    @functools.wraps(g)\n    def f(x):\n        return g(x)\n    return f",
    ),
    "inlined kernel": Place("def f(x):\n    return h(x)", f"@kernel\ndef h(x):\n    {_READS}"),
    "method of an object": Place("def f(x):\n    return host.f(x)", _HOST),
    "method": Place("f = Host().f", _HOST),
    "class method": Place("f = Host.f", f"class Host:\n    @classmethod\n    def f(cls, x):\n        {_READS}"),
    "static method": Place("f = Host.f", f"class Host:\n    @staticmethod\n    def f(x):\n        {_READS}"),
    "forward": Place("f = Host().forward", _NET),
    "declared method": Place("", _HOST.replace("    def", "    @kernel\n    def", 1), "$k = host.f"),
    "declared forward": Place("", _NET.replace("    def", "    @kernel\n    def", 1), "$k = host"),
    "partial": Place("f = functools.partial(h, 1.0)", "def h(s, x):\n    return s * x * ($read)", refused=True),
    "object that is called": Place("f = Host()", f"class Host:\n    def __call__(self, x):\n        {_READS}", refused=True),
    "module that is called": Place("f = host", _NET, refused=True),
    "reader of the own attribute": Place("def f(x):\n    return x * f.read(x)\nf.read = lambda x: $read"),
}
