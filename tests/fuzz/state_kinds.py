"""Kinds of Python state that a function reads: how it is made, read and changed, as text. A kind is a line or two here.

In the texts ``$v`` is the variable that holds the state, ``$n`` a number and ``$t`` a tensor of 4 elements, another one each time.
A kernel notices every change of what is GUARDED. What is REFUSABLE it notices, or it refuses to read it; it is never stale.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """State of a kind.

    Attributes:
        setup: statements that make it.
        read: an expression over the state, and the parameter ``x``, that ``x`` is multiplied by.
        changes: statements, each of which changes it.
        refused: an expression that says when a refusal is right.
        function: the definition of ``f``, where ``x * (read)`` would not do.
        calls: ways to call ``$k``.
    """

    setup: str
    read: str
    changes: tuple[str, ...]
    refused: str = "False"
    function: str = ""
    calls: tuple[str, ...] = ("$k(x)",)


def kind(setup: str, read: str, *changes: str, calls: tuple[str, ...] = ("$k(x)",), refused: str = "False") -> Kind:
    return Kind(setup, read, changes, refused, calls=calls)


def holder(members: str, read: str, *changes: str, arguments: str = "") -> Kind:
    """An object of a class with some members."""
    body = "\n    ".join(members.split("\n"))
    return Kind(f"class ${{v}}_class:\n    {body}\n$v = ${{v}}_class({arguments})", read, changes)


def module(made: str, *changes: str, read: str = "$v(x)", refused: str = "False") -> Kind:
    """A torch module, whose parameters want no gradients."""
    return Kind(f"$v = {made}.requires_grad_(False)", read, changes, refused)


def called(function: str, setup: str, *calls: str, changes: tuple[str, ...] = (), refused: str = "False") -> Kind:
    """What an argument is, or what is in it."""
    return Kind(setup, "", changes, refused, function, calls)


_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {}
    def forward(self, x):
        return {}
$v = Net()"""


def net(member: str, result: str, *changes: str, refused: str = "False") -> Kind:
    """A module of a class of the user's."""
    return Kind(_NET.format(member.replace("\n", "\n        "), result), "$v(x)", changes, refused)


_FACTORY = "def scaled(w):\n    return lambda x: x * w\n"

VARIABLES = {
    "number": kind("$v = $n", "$v", "$v = $n", "$v += 1"),
    "type of a number": kind("$v = 1", "{int: 2, float: 3, bool: 5}[type($v)]", "$v = 1.0", "$v = True", "$v = 1"),
    "zero of either sign": kind("$v = 0.0", "torch.full_like(x, $v).reciprocal()", "$v = -0.0", "$v = 0.0"),
    "number that is no number": kind("$v = $n", "$v", "$v = float('nan')", "$v = float('inf')"),
    "none or a number": kind("$v = None", "(7 if $v is None else $v)", "$v = $n", "$v = None"),
    "large integer": kind("$v = 2**70", "float($v)", "$v = 2**71"),
    "string": kind("$v = 'relu'", "getattr(torch, $v)(x)", "$v = 'tanh'", "$v = 'relu'"),
    "bytes": kind("$v = b'ab'", "$v[0]", "$v = b'bc'", "$v = bytearray(b'cd')", "$v[0] = 9"),
    "dtype": kind("$v = torch.float32", "x.to($v)", "$v = torch.float64", "$v = torch.int32"),
    "size": kind("$v = torch.Size((4,))", "torch.full($v, 2.0).sum()", "$v = torch.Size((1,))"),
    "range": kind("$v = range(3)", "sum($v)", "$v = range(5)"),
    "slice": kind("$v = slice(1, None)", "x[..., $v].sum()", "$v = slice(2, None)"),
    "numpy scalar": kind("$v = np.float32($n)", "float($v)", "$v = np.float32($n)", "$v = np.float64($n)"),
    "numpy scalar as it is": kind("$v = np.float64($n)", "$v", "$v = np.float64($n)", "$v = np.int64(7)"),
    "fraction": kind("$v = fractions.Fraction(1, 2)", "float($v)", "$v = fractions.Fraction(1, 3)"),
    "enum member": kind("class ${v}_enum(enum.Enum):\n    A = $n\n    B = $n\n$v = ${v}_enum.A", "$v.value", "$v = ${v}_enum.B"),
    "enum identity": kind(
        "class ${v}_enum(enum.Enum):\n    A = 1\n    B = 2\n$v = ${v}_enum.A", "(2 if $v is ${v}_enum.A else 3)",
        "$v = ${v}_enum.B",
    ),
    "enum class": kind("class $v(enum.IntEnum):\n    A = 5", "$v.A", "class $v(enum.IntEnum):\n    A = 6"),
}  # fmt: skip

CONTAINERS = {
    "list": kind("$v = [$n, $n]", "$v[0]", "$v[0] = $n", "$v.reverse()", "$v.insert(0, $n)", "$v = [$n]"),
    "length of a list": kind("$v = [1]", "len($v)", "$v.append(1)", "$v.append('a')", "$v.clear()"),
    "dict": kind("$v = {'e': $n}", "$v['e']", "$v['e'] = $n", "$v.update(e=$n)", "$v = {'e': $n}"),
    "keys of a dict": kind("$v = {'a': 1}", "(2 if 'b' in $v else 3)", "$v['b'] = 1", "del $v['b']"),
    "values of a dict": kind("$v = {'a': $n}", "sum($v.values())", "$v['b'] = $n"),
    "type of an element": kind("$v = [1]", "{int: 2, float: 3}[type($v[0])]", "$v[0] = 1.0"),
    "order of a dict": kind("$v = {2.0: 1, 3.0: 1}", "next(iter($v))", "$v[2.0] = $v.pop(2.0)"),
    "nested containers": kind("$v = {'a': [{'e': $n}]}", "$v['a'][0]['e']", "$v['a'][0]['e'] = $n", "$v['a'][0] = {'e': $n}"),
    "tuple of lists": kind("$v = ([$n], 1)", "$v[0][0]", "$v[0][0] = $n", "$v = ([$n],)"),
    "set": kind("$v = {$n}", "sum($v)", "$v.add(7)", "$v.discard(7)", "$v = frozenset({$n})"),
    "deque": kind("$v = collections.deque([$n])", "$v[0]", "$v[0] = $n", "$v.appendleft($n)"),
    "default dict": kind("$v = collections.defaultdict(lambda: 7)", "$v['e']", "$v['e'] = $n", "$v.clear()"),
    "ordered dict": kind("$v = collections.OrderedDict(e=$n)", "$v['e']", "$v['e'] = $n"),
    "chain map": kind("${v}_in = {'e': $n}\n$v = collections.ChainMap(${v}_in)", "$v['e']", "${v}_in['e'] = $n"),
    "mapping proxy": kind("${v}_in = {'e': $n}\n$v = types.MappingProxyType(${v}_in)", "$v['e']", "${v}_in['e'] = $n"),
    "array": kind("$v = array.array('d', [$n])", "$v[0]", "$v[0] = $n"),
    "numpy array": kind("$v = np.array([$n])", "float($v[0])", "$v[0] = $n", "$v = np.array([$n])"),
    "large list": kind("$v = [$n] * 300_000", "$v[5]", "$v[5] = $n"),
    "dict that holds itself": kind("$v = {'e': $n}\n$v['self'] = $v", "$v['self']['e']", "$v['e'] = $n"),
    "list that holds itself": kind("$v = [$n]\n$v.append($v)", "$v[1][0]", "$v[0] = $n"),
    "dict of functions": kind("$v = {'e': lambda x: x + $n}", "$v['e'](x)", "$v['e'] = lambda x: x + $n", "$v['e'] = torch.neg"),
    "objects in a list": kind("$v = [S(e=$n)]", "$v[0].e", "$v[0].e = $n", "$v[0] = S(e=$n)"),
    "objects in a dict": kind("$v = {'o': S(e=$n)}", "$v['o'].e", "$v['o'].e = $n"),
    "objects in a tuple": kind("$v = (S(e=$n),)", "$v[0].e", "$v[0].e = $n"),
    "objects in a deque": kind("$v = collections.deque([S(e=$n)])", "$v[0].e", "$v[0].e = $n"),
    "loop over objects": kind("$v = [S(e=$n)] * 2", "sum(o.e for o in $v)", "$v[1].e = $n", "$v.append($v[0])"),
}  # fmt: skip


def behind(made: str, reached: str, read: str, *changes: str) -> Kind:
    """An object that is read by something made of it alone: a bound method, a view, a partial."""
    return kind(f"${{v}}_in = {made}\n$v = {reached}", read, *changes)


BEHIND = {
    "method of a dict": behind("{'e': $n}", "${v}_in.get", "$v('e')", "${v}_in['e'] = $n"),
    "subscription of a dict": behind("{'e': $n}", "${v}_in.__getitem__", "$v('e')", "${v}_in['e'] = $n"),
    "subscription of a list": behind("[$n]", "${v}_in.__getitem__", "$v(0)", "${v}_in[0] = $n"),
    "count of a list": behind("[1, 2]", "${v}_in.count", "$v(1)", "${v}_in.append(1)"),
    "length of a list by its method": behind("[1]", "${v}_in.__len__", "$v()", "${v}_in.append(1)"),
    "membership of a set": behind("{1}", "${v}_in.__contains__", "(2 if $v(5) else 3)", "${v}_in.add(5)"),
    "method of a deque": behind("collections.deque([$n])", "${v}_in.__getitem__", "$v(0)", "${v}_in[0] = $n"),
    "method of an array": behind("array.array('d', [$n])", "${v}_in.__getitem__", "$v(0)", "${v}_in[0] = $n"),
    "method of a numpy array": behind("np.array([$n])", "${v}_in.item", "$v(0)", "${v}_in[0] = $n"),
    "values of a dict by a view": behind("{'e': $n}", "${v}_in.values()", "sum($v)", "${v}_in['e'] = $n", "${v}_in['f'] = 5.0"),
    "keys of a dict by a view": behind("{'e': 1}", "${v}_in.keys()", "len($v)", "${v}_in['f'] = 1"),
    "items of a dict by a view": behind("{'e': $n}", "${v}_in.items()", "dict($v)['e']", "${v}_in['e'] = $n"),
    "partial of a method": behind("{'e': $n}", "functools.partial(${v}_in.get, 'e')", "$v()", "${v}_in['e'] = $n"),
    "map of a method": behind("{'e': $n}", "${v}_in.get", "sum(map($v, ['e']))", "${v}_in['e'] = $n"),
    "method of an object's dict": behind("S(e=[$n])", "S(get=${v}_in.e.__getitem__)", "$v.get(0)", "${v}_in.e[0] = $n"),
    "method of a user's dict": kind(
        "class D(dict): ...\n${v}_in = D(e=$n)\n$v = ${v}_in.get", "$v('e')", "${v}_in['e'] = $n",
    ),
    "method of an object in a list": behind("[S(e=$n)]", "${v}_in.__getitem__", "$v(0).e", "${v}_in[0].e = $n"),
    "method in a dict": behind("{'e': $n}", "{'get': ${v}_in.get}", "$v['get']('e')", "${v}_in['e'] = $n"),
    "method in a module": net(
        "self.e = {'e': $n}\nself.get = self.e.get", "x * self.get('e')", "$v.e['e'] = $n",
    ),
    "view in a module": net("self.e = {'e': $n}\nself.all = self.e.values()", "x * sum(self.all)", "$v.e['e'] = $n"),
}  # fmt: skip

ABSENT = {
    "global that is missing": called(
        "def f(x):\n    try:\n        return x * late_$v\n    except NameError:\n        return x * 1", "$v = 1", "$k(x)",
        changes=("late_$v = $n", "del late_$v"),
    ),
    "missing key of the globals": kind("$v = 1", "globals().get('late_$v', 7)", "late_$v = $n", "del late_$v"),
    "name in the globals": kind("$v = 1", "(2 if 'late_$v' in globals() else 3)", "late_$v = $n", "del late_$v"),
    "name that is put among the built-in ones": kind(
        "import builtins\nbuiltins.built_$v = $n", "built_$v", "builtins.built_$v = $n", "built_$v = $n", "del built_$v",
    ),
    "built-in name that is taken": called(
        "def f(x):\n    return x * max(2, 3)", "$v = 1", "$k(x)", changes=("max = min", "del max"),
    ),
    "missing attribute of a class": kind(
        "class $v: ...", "getattr($v, 'e', 7)", "$v.e = $n", "del $v.e",
    ),
    "missing attribute of a base": kind(
        "class ${v}_base: ...\nclass $v(${v}_base): ...", "(2 if hasattr($v, 'e') else 3)", "${v}_base.e = $n", "del ${v}_base.e",
    ),
    "class attribute by an exception": called(
        "def f(x):\n    try:\n        return x * $v.e\n    except AttributeError:\n        return x * 3", "class $v: ...", "$k(x)",
        changes=("$v.e = $n", "del $v.e"),
    ),
    "missing attribute of the own class": holder(
        "def get(self):\n    return getattr(type(self), 'e', 7)", "$v.get()", "${v}_class.e = $n", "del ${v}_class.e",
    ),
    "missing attribute of an object's class": holder("n = 1", "getattr($v, 'e', 7)", "${v}_class.e = $n", "$v.e = $n"),
    "missing attribute of a tensor": kind("$v = $t", "$v * getattr($v, 'e', 7)", "$v.e = $n", "del $v.e"),
    "missing attribute of a function": kind("def $v(): ...", "getattr($v, 'e', 7)", "$v.e = $n", "del $v.e"),
    "missing attribute of a module": kind("$v = types.ModuleType('a')", "getattr($v, 'e', 7)", "$v.e = $n", "del $v.e"),
    "method that comes in between": kind(
        "class A:\n    def __call__(self):\n        return $n\nclass B(A): ...\n$v = B()", "$v()", "B.__call__ = lambda self: $n",
    ),
    "super that comes in between": kind(
        "class A:\n    def get(self):\n        return $n\nclass B(A): ...\nclass C(B):\n    def get(self):\n"
        "        return super().get()\n"
        "$v = C()", "$v.get()", "B.get = lambda self: $n",
    ),
}  # fmt: skip

FUNCTIONS = {
    "rebound function": kind("def $v(x):\n    return x + $n", "$v(x)", "def $v(x):\n    return x + $n", "$v = torch.neg"),
    "code of a function": kind("def $v(x):\n    return x + $n", "$v(x)", "$v.__code__ = (lambda x: x + $n).__code__"),
    "default of a function": kind("def $v(e=$n):\n    return e", "$v()", "$v.__defaults__ = ($n,)"),
    "keyword default": kind("def $v(*, e=$n):\n    return e", "$v()", "$v.__kwdefaults__['e'] = $n"),
    "mutable default": kind("def $v(cfg={'e': $n}):\n    return cfg['e']", "$v()", "$v.__defaults__[0]['e'] = $n"),
    "attribute of a function": kind("def $v(): ...\n$v.e = $n", "$v.e", "$v.e = $n"),
    "variable that two functions share": kind(
        "def make():\n    e = $n\n    def get():\n        return e\n    def put(n):\n        nonlocal e\n"
        "        e = n\n    return get, put\n$v, ${v}_put = make()", "$v()", "${v}_put($n)",
    ),
    "function that a function gives": kind("def $v(n):\n    return lambda x: x + n\n${v}_n = $n", "$v(${v}_n)(x)", "${v}_n = $n"),
    "module": kind("$v = types.ModuleType('config')\n$v.e = $n", "$v.e", "$v.e = $n", "$v = types.ModuleType('b')\n$v.e = $n"),
    "module in a module": kind("$v = types.ModuleType('a')\n$v.b = types.ModuleType('b')\n$v.b.e = $n", "$v.b.e", "$v.b.e = $n"),
    "function of a module": kind("$v = types.ModuleType('a')\n$v.e = lambda x: x + $n", "$v.e(x)", "$v.e = lambda x: x + $n"),
    "module's computed name": kind("$v = types.ModuleType('a')\n$v.e = $n", "getattr($v, ''.join(['e']))", "$v.e = $n"),
    "library that is rebound": kind("$v = torch", "$v.tanh(x)", "$v = S(tanh=torch.neg)"),
    "import in the function": called(
        "def f(x):\n    from module_of_a_user import e\n    return x * e",
        "import sys\n$v = sys.modules.setdefault('module_of_a_user', types.ModuleType('module_of_a_user'))\n$v.e = $n",
        "$k(x)", changes=("$v.e = $n",),
    ),
    "kernel of a method": kind(
        "class C:\n    def scaled(self, x):\n        return x * self.e\n$v = C()\n$v.e = $n\n${v}_k = kernel($v.scaled)",
        "${v}_k(x)", "$v.e = $n",
    ),
}  # fmt: skip

OBJECTS = {
    "attribute": holder("def __init__(self):\n    self.e = $n", "$v.e", "$v.e = $n", "$v.__dict__['e'] = $n", "$v = ${v}_class()"),
    "tensor as an attribute": kind("$v = S(e=$t)", "$v.e", "$v.e = $t", "$v.e.mul_(2)", "$v = S(e=$t)"),
    "attribute of a copy": kind("class C: ...\n$v = C()\n$v.e = $n", "copy.copy($v).e + copy.deepcopy($v).e", "$v.e = $n"),
    "attribute of an attribute": kind(
        "$v = S(a=S(b=S(c=S(d=S(e=$n)))))", "$v.a.b.c.d.e", "$v.a.b.c.d.e = $n", "$v.a.b = S(c=S(d=S(e=$n)))",
    ),
    "attribute with a list": kind("$v = S(a=[S(b={'c': $n})])", "$v.a[0].b['c']", "$v.a[0].b['c'] = $n", "$v.a[0].b = {'c': $n}"),
    "attribute that holds its object": kind("$v = S(e=$n)\n$v.self = $v", "$v.self.e", "$v.e = $n"),
    "data class": kind("@dataclasses.dataclass\nclass C:\n    e: float\n$v = C($n)", "$v.e", "$v.e = $n", "$v = C($n)"),
    "frozen data class": kind(
        "@dataclasses.dataclass(frozen=True)\nclass C:\n    e: float\n$v = C($n)", "$v.e", "$v = C($n)",
        "object.__setattr__($v, 'e', $n)",
    ),
    "data class that compares nothing": kind(
        "@dataclasses.dataclass(frozen=True)\nclass C:\n    e: float = dataclasses.field(compare=False)\n$v = C($n)", "$v.e",
        "$v = C($n)",
    ),
    "named tuple": kind("C = collections.namedtuple('C', 'e')\n$v = C([$n])", "$v.e[0]", "$v.e[0] = $n", "$v = C([$n])"),
    "simple namespace": kind("$v = S(e=$n)", "$v.e", "$v.e = $n"),
    "slots": holder("__slots__ = ('e',)\ndef __init__(self):\n    self.e = $n", "$v.e", "$v.e = $n", "$v = ${v}_class()"),
    "class attribute": holder("e = $n", "$v.e", "${v}_class.e = $n", "$v.e = $n", "del $v.e"),
    "attribute of a class": holder("e = $n", "${v}_class.e", "${v}_class.e = $n"),
    "attribute of a base": kind("class A:\n    e = $n\nclass B(A): ...\n$v = B()", "$v.e", "A.e = $n", "B.e = $n", "$v.e = $n"),
    "attribute of the own type": holder("e = $n\ndef get(self):\n    return type(self).e", "$v.get()", "${v}_class.e = $n"),
    "method that reads itself": holder(
        "e = $n\ndef get(self):\n    return self.e", "$v.get()", "$v.e = $n", "${v}_class.e = $n", "del $v.e",
    ),
    "class method": holder("e = $n\n@classmethod\ndef get(cls):\n    return cls.e", "$v.get()", "${v}_class.e = $n"),
    "static method": holder("@staticmethod\ndef get():\n    return $n", "$v.get()", "${v}_class.get = staticmethod(lambda: $n)"),
    "super": kind(
        "class A:\n    def get(self):\n        return self.e\nclass B(A):\n    def get(self):\n        return super().get()\n"
        "$v = B()\n$v.e = $n", "$v.get()", "$v.e = $n", "A.get = lambda self: $n", "def other(self):\n    return $n\nA.get = other",
    ),
    "method that is replaced": holder(
        "def get(self):\n    return $n", "$v.get()", "$v.get = lambda: $n", "${v}_class.get = lambda self: $n", "del $v.get",
    ),
    "property": holder(
        "n = $n\n@property\ndef e(self):\n    return self.n", "$v.e", "$v.n = $n", "${v}_class.e = property(lambda self: $n)",
    ),
    "cached property": holder(
        "n = $n\n@functools.cached_property\ndef e(self):\n    return self.n", "$v.e", "$v.n = $n", "del $v.e", "$v.e = $n",
    ),
    "property that makes an object": holder("n = $n\n@property\ndef made(self):\n    return S(e=self.n)", "$v.made.e", "$v.n = $n"),
    "property that reads a variable": kind(
        "${v}_n = $n\nclass C:\n    @property\n    def e(self):\n        return ${v}_n\n$v = C()", "$v.e", "${v}_n = $n",
    ),
    "getattr with a constant": holder("e = $n", "getattr($v, 'e')", "$v.e = $n", "${v}_class.e = $n"),
    "getattr with a default": kind("$v = S()", "getattr($v, 'e', 7)", "$v.e = $n", "del $v.e"),
    "hasattr": kind("$v = S()", "(2 if hasattr($v, 'e') else 3)", "$v.e = $n", "del $v.e"),
    "attribute that comes": holder("other = 1", "($v.e if hasattr($v, 'e') else 3)", "$v.e = $n", "del $v.e"),
    "isinstance": holder("def __init__(self): ...", "(2 if isinstance($v, ${v}_class) else 3)", "$v = S()", "$v = ${v}_class()"),
    "identity": kind("$v = S()\n${v}_b = $v", "(2 if $v is ${v}_b else 3)", "${v}_b = S()", "${v}_b = $v"),
}  # fmt: skip

MODULES = {
    "dropout": module("nn.Dropout(1.0).eval()", "$v.train()", "$v.p = 0.0", "$v.eval()", "$v.p = 1.0"),
    "mode": module("nn.Identity()", "$v.eval()", "$v.train()", "$v.training = False", read="(2 if $v.training else 3)"),
    "batch norm": module(
        "nn.BatchNorm1d(4, momentum=0.0).eval()", "$v.running_mean = $t", "$v.running_var.mul_(3)", "$v.train()", "$v.eval()",
        refused="$v.training",
    ),
    "epsilon": module("nn.LayerNorm(4)", "$v.eps = 0.5", "$v.eps = 0.25", "$v.weight.mul_(3)", "$v.weight.data = $t"),
    "layer norm without weights": module("nn.LayerNorm(4, elementwise_affine=False)", "$v.eps = 0.5", "$v.eps = 0.25"),
    "linear": module(
        "nn.Linear(4, 4)", "$v.weight.mul_(2)", "$v.weight.data = torch.eye(4)", "$v.bias = None",
        "$v.weight = nn.Parameter(-torch.eye(4), False)",
    ),
    "activation of torch": net("self.act = F.relu", "self.act(x)", "$v.act = torch.tanh", "$v.act = lambda x: x * $n"),
    "activation that is a module": net(
        "self.act = nn.ReLU()", "self.act(x)", "$v.act = nn.Tanh()", "$v.act = nn.LeakyReLU(0.5)", "$v.act.negative_slope = 0.25",
    ),
    "number in a module": net("self.e = $n", "x * self.e", "$v.e = $n", "$v = Net()\n$v.e = $n"),
    "list in a module": net("self.e = [$n]", "x * self.e[0]", "$v.e[0] = $n"),
    "buffer": net(
        "self.register_buffer('e', $t)", "x * self.e", "$v.e = $t", "$v.e.mul_(2)", "$v._buffers['e'] = $t", "$v.double()",
    ),
    "parameter": net(
        "self.e = nn.Parameter($t, False)", "x * self.e", "$v.e.data = $t", "$v.e = nn.Parameter($t, False)",
        "$v.load_state_dict({'e': $t})",
    ),
    "module in a module's module": net(
        "self.a = nn.Sequential(nn.Sequential(nn.LayerNorm(4).requires_grad_(False)))", "self.a(x)", "$v.a[0][0].eps = 0.5",
        "$v.a[0][0].weight.mul_(3)", "$v.a[0][0] = nn.ReLU()",
    ),
    "dropout in a module": net(
        "self.a = nn.Sequential(nn.Dropout(1.0), nn.ReLU())\nself.eval()", "self.a(x)", "$v.train()", "$v.eval()",
    ),
    "sequential": module("nn.Sequential(nn.ReLU(), nn.Tanh())", "$v[0] = nn.Sigmoid()", "$v.append(nn.Tanh())", "del $v[0]"),
    "module list": net(
        "self.a = nn.ModuleList([nn.ReLU()])", "sum(m(x) for m in self.a)", "$v.a.append(nn.Tanh())", "$v.a[0] = nn.Sigmoid()",
    ),
    "module dict": net("self.a = nn.ModuleDict({'e': nn.ReLU()})", "self.a['e'](x)", "$v.a['e'] = nn.Tanh()"),
    "parameter list": net(
        "self.a = nn.ParameterList([nn.Parameter($t, False)])", "x * self.a[0]", "$v.a[0].data = $t",
        "$v.a[0] = nn.Parameter($t, False)",
    ),
    "forward that is replaced": net(
        "self.e = 1", "x * self.e", "$v.forward = lambda x: x * $n", "del $v.forward", "Net.forward = lambda self, x: x * $n",
    ),
    "property of a module": net("self.e = $n", "x * self.e", "Net.e = property(lambda self: $n)", "del $v.__dict__['e']"),
}  # fmt: skip

TENSORS = {
    "tensor": kind(
        "$v = $t", "$v", "$v = $t", "$v.mul_(2)", "$v[1] = 7", "$v = $v[:1]", "$v = torch.tensor(2.0)", "$v = torch.ones(1, 4)",
    ),
    "dtype of a tensor": kind("$v = $t", "$v", "$v = $v.double()", "$v = $v.to(torch.int32)", "$v.data = $t.to(torch.float16)"),
    "strides of a tensor": kind("$v = $t", "$v", "$v = $t.repeat(2)[::2]", "$v = $t[:1].expand(4)", "$v = torch.ones(4, 4).T[0]"),
    "tensor that wants a gradient": kind("$v = $t", "$v", "$v.requires_grad_()", "$v = $v.detach()", refused="$v.requires_grad"),
    "data of a tensor": kind("$v = $t", "$v", "$v.data = $t", "$v.set_($t)", "$v.data = torch.ones(1)"),
    "length of a tensor": kind("$v = $t", "len($v)", "$v = torch.ones(5)", "$v.resize_(3)", "$v.data = torch.ones(6)"),
    "shape of a tensor": kind("$v = $t", "$v.shape[0] + $v.numel()", "$v = torch.ones(5)", "$v.resize_(3, 2)"),
    "rank of a tensor": kind("$v = $t", "$v.ndim + $v.dim()", "$v = torch.ones(5, 1)", "$v.resize_(3, 2, 1)"),
    "what a tensor is": kind("$v = $t", "(2 if $v.dtype is torch.float32 else 3)", "$v = $v.double()", "$v.data = $t"),
    "kind of dtype": kind("$v = $t", "(2 if $v.is_floating_point() else 3)", "$v = $v.long()", "$v = $t"),
    "whether a tensor wants a gradient": kind(
        "$v = $t", "(2 if $v.requires_grad else 3)", "$v.requires_grad_()", "$v = $v.detach()",
    ),
    "whether a tensor is contiguous": kind("$v = $t", "(2 if $v.is_contiguous() else 3)", "$v = $t.repeat(2)[::2]"),
    "stride of a tensor": kind("$v = $t", "$v.stride(0)", "$v = $t.repeat(3)[::3]", "$v = $t"),
    "two names of a tensor": kind(
        "$v = $t\n${v}_b = $v", "$v + 3 * ${v}_b", "${v}_b = $t", "$v = ${v}_b", "$v.mul_(2)", "$v = $t",
    ),
    "two views of a tensor": kind("$v = ramp(8)\n${v}_b = $v[4:]", "$v[:4] + 3 * ${v}_b", "$v.mul_(2)", "${v}_b = $v[:4]"),
    "tensor or a number": kind("$v = $t", "$v", "$v = $n", "$v = $t", "$v = np.float32(3)"),
    "tensor or nothing": kind("$v = S(e=None)", "(x if $v.e is None else $v.e)", "$v.e = $t", "$v.e = None"),
    "attribute of a tensor": kind("$v = $t\n$v.e = $n", "$v * $v.e", "$v.e = $n"),
    "tensor that is an argument too": kind("$v = $t", "$v", "$v = $t", calls=("$k($v)", "$k(x)", "$k($v.clone())")),
}  # fmt: skip

NAMES = {
    "closures of one factory": kind(
        _FACTORY + "${v}_1, ${v}_2 = scaled($t), scaled($t)", "${v}_1(x) + 3 * ${v}_2(x)", "${v}_2 = scaled($t)", "${v}_1 = ${v}_2",
    ),
    "closures of one factory, of other shapes": kind(
        _FACTORY + "${v}_1, ${v}_2 = scaled($t), scaled(ramp(1))", "${v}_2(x) + 3 * ${v}_1(x)", "${v}_1, ${v}_2 = ${v}_2, ${v}_1",
    ),
    "numbers of one factory": kind(
        _FACTORY + "${v}_1, ${v}_2 = scaled($n), scaled($n)", "${v}_1(x) + 3 * ${v}_2(x)", "${v}_2 = scaled($n)",
    ),
    "modules of one factory": kind(
        "def linear(n):\n    m = nn.Linear(4, 4).requires_grad_(False)\n    m.weight.mul_(n)\n    return lambda x: m(x)\n"
        "${v}_1, ${v}_2 = linear(1), linear(2)",
        "${v}_1(x) + 3 * ${v}_2(x)", "${v}_2 = linear(3)", "${v}_1 = ${v}_2",
    ),
    "attribute beside a variable of its name": kind(
        "$v = S(b=$t)\n${v}_b = $t", "$v.b + 3 * ${v}_b", "${v}_b = $t", "$v.b = ${v}_b", "$v.b = ramp(1)",
    ),
    "variable beside one with a line behind": kind(
        "$v = $t\n${v}_ = $t", "$v + 3 * ${v}_", "${v}_ = $t", "$v = ${v}_", "$v = ramp(1)",
    ),
    "variable and parameter of one name": called(
        "def f(x, w):\n    return h(x) * w", "w, w_ = $t, $t\ndef h(x):\n    return x * w + 3 * w_", "$k(x, x + 1)",
        changes=("w = $t", "w_ = w"),
    ),
}  # fmt: skip

TORCH = {
    "default dtype": kind(
        "$v = 1", "torch.ones(4)", "torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)",
    ),
    "question for the default dtype": kind(
        "$v = 1", "(2 if torch.get_default_dtype() is torch.float32 else 3)", "torch.set_default_dtype(torch.float64)",
        refused="torch.get_default_dtype() is torch.float64",
    ),
    "question for gradients": kind(
        "$v = 1", "(2 if torch.is_grad_enabled() else 3)", "torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)",
    ),
    "question for gradients by another name": kind(
        "$v = S(ask=torch.is_grad_enabled)", "(2 if $v.ask() else 3)",
        "torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)",
    ),
    "question for determinism": kind(
        "$v = 1", "2 + torch.get_deterministic_debug_mode()", "torch.set_deterministic_debug_mode(1)",
        "torch.set_deterministic_debug_mode(0)",
    ),
    "environment variable of a computed name": kind(
        "import os\nos.environ['${v}_e'] = '2'\ndef $v(name):\n    return float(os.environ.get(name, 7))",
        "$v('_'.join(['$v', 'e']))",
        "os.environ['${v}_e'] = '3'", "os.environ.pop('${v}_e', None)",
    ),
    "question for autocast": kind(
        "$v = 1", "(2 if torch.is_autocast_enabled('cpu') else 3)", "torch.set_autocast_enabled('cpu', True)",
        "torch.set_autocast_enabled('cpu', False)",
    ),
}  # fmt: skip

PARAMETERS = {
    "argument that requires a gradient": called(
        "def f(x, y):\n    return x * (2 if y.requires_grad else 3)", "", "$k(x, x)", "$k(x, x.float().requires_grad_())",
    ),
    "value that requires a gradient": called(
        "def f(x, y):\n    z = y * 2\n    with torch.no_grad():\n        w = y * 2\n"
        "    return x * (2 + z.requires_grad + 3 * w.requires_grad)",
        "", "$k(x, x)", "$k(x, x.float().requires_grad_())",
    ),
    "type of an argument": called(
        "def f(x, s):\n    return x * {int: 2, float: 3, bool: 5}[type(s)]", "", "$k(x, 1)", "$k(x, 1.0)", "$k(x, True)",
    ),
    "isinstance of an argument": called(
        "def f(x, s):\n    return x * (2 if isinstance(s, float) else 3)", "", "$k(x, 1.0)", "$k(x, 1)",
    ),
    "isinstance of a tensor": called(
        "def f(x, y):\n    return x * (2 if isinstance(y, torch.Tensor) else 3)", "", "$k(x, x)", "$k(x, 1.5)",
    ),
    "question for a tensor": called("def f(x, y):\n    return x * (2 if torch.is_tensor(y) else 3)", "", "$k(x, x)", "$k(x, 1.5)"),
    "method of a dict as an argument": called(
        "def f(x, get):\n    return x * get('e')", "${v}_in = {'e': $n}\n$v = ${v}_in.get", "$k(x, $v)",
        changes=("${v}_in['e'] = $n",),
    ),
    "partial function as an argument": called(
        "def f(x, g):\n    return g(x)", "$v = functools.partial(torch.add, other=$n)", "$k(x, $v)",
        changes=("$v.keywords['other'] = $n",),
    ),
    "name of a scalar": called(
        "def f(x, result, out, lr, lr_):\n    return x * result + out * lr - lr_", "", "$k(x, 2.0, 3.0, 0.5, 0.25)",
        "$k(x, 1, 2, 3, 4)",
    ),
    "names that are not ASCII": called("def f(x, α, β):\n    return x * α + β", "", "$k(x, 2.0, 3.0)", "$k(x, 3.0, 2.0)"),
    "names with a line before them": called(
        "def f(_x, x, eps, _eps):\n    return _x * eps + x * _eps", "", "$k(x, x * 2, 2.0, 3.0)",
    ),
}  # fmt: skip

GUARDED = VARIABLES | CONTAINERS | BEHIND | ABSENT | FUNCTIONS | OBJECTS | MODULES | TENSORS | NAMES | TORCH | PARAMETERS
"""What a kernel sees change; it may not refuse it."""
