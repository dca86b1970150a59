"""Kinds of state whose reading a kernel may refuse; see `state_kinds` for how a kind is written."""

from __future__ import annotations

from tests.fuzz.state_kinds import called, holder, kind, module

_BEHIND = {
    "list of tensors": kind("$v = [$t, $t]", "$v[0] + 2 * $v[1]", "$v[1] = $t", "$v.reverse()", "$v[0].mul_(3)"),
    "dict of tensors": kind("$v = {'a': $t, 'b': $t}", "$v['a'] + 2 * $v['b']", "$v['b'] = $t", "$v['a'] = $v['b']"),
    "nested tensors": kind("$v = {'a': ([$t],)}", "$v['a'][0][0]", "$v['a'][0][0] = $t", "$v['a'] = ([$t],)"),
    "objects that hold tensors": kind("$v = [S(e=$t)]", "$v[0].e", "$v[0].e = $t", "$v[0].e.mul_(3)"),
    "tensor as a default": kind("def $v(e=$t):\n    return e", "$v()", "$v.__defaults__[0].mul_(2)", "$v.__defaults__ = ($t,)"),
    "method that reads a tensor": holder(
        "def __init__(self):\n    self.e = $t\ndef get(self):\n    return self.e", "$v.get()", "$v.e = $t", "$v.e.mul_(2)",
    ),
    "property of a tensor": holder(
        "def __init__(self):\n    self.t = $t\n@property\ndef e(self):\n    return self.t", "$v.e", "$v.t = $t", "$v.t.mul_(2)",
    ),
}  # fmt: skip

_READING = {
    "item": kind("$v = $t", "$v[1].item()", "$v[1] = $n", "$v = $t"),
    "item of a scalar": kind("$v = torch.tensor($n)", "$v.item()", "$v.fill_($n)", "$v = torch.tensor($n)"),
    "list of a tensor": kind("$v = $t", "sum($v.tolist())", "$v[1] = $n", "$v = $t"),
    "float of a tensor": kind("$v = $t", "float($v[1])", "$v[1] = $n", "$v = $t"),
    "integer of a tensor": kind("$v = torch.tensor(3)", "int($v)", "$v.add_(1)", "$v = torch.tensor(9)"),
    "truth of a tensor": kind("$v = torch.tensor(True)", "(2 if $v else 3)", "$v.fill_(False)", "$v = torch.tensor(True)"),
    "numpy of a tensor": kind("$v = $t", "float($v.numpy()[1])", "$v[1] = $n", "$v = $t"),
    "loop over a tensor": kind("$v = $t", "sum(float(e) for e in $v)", "$v[1] = $n", "$v = $t"),
    "index by a tensor": kind("$v = torch.tensor(1)", "[2.0, 3.0, 5.0][$v]", "$v.fill_(2)", "$v = torch.tensor(0)"),
    "greatest of a tensor": kind("$v = $t", "$v.max().item()", "$v[1] = 9", "$v = $t"),
    "comparison of tensors": kind("$v = $t", "(2 if torch.equal($v, $v.flip(0)) else 3)", "$v.fill_(1)", "$v = $t"),
    "what is computed of a tensor": kind("$v = $t", "$v.max()", "$v[1] = 9", "$v = $t"),
    "new tensor of state": kind("$v = [$n] * 4", "torch.tensor($v)", "$v[1] = $n"),
    "text of a tensor": kind("$v = $t", "len(str($v))", "$v = torch.ones(9)"),
    "address of a tensor": kind("$v = $t\n${v}_b = $v", "(2 if $v.data_ptr() == ${v}_b.data_ptr() else 3)", "${v}_b = $t"),
    "hash of an object": kind("$v = object()\n${v}_d = {$v: $n}", "${v}_d[$v]", "${v}_d[$v] = $n"),
}  # fmt: skip

_DYNAMIC = {
    "getattr with a computed name": kind("$v = S(e=$n)", "getattr($v, ''.join(['e']))", "$v.e = $n"),
    "vars": kind("$v = S(e=$n)", "vars($v)['e']", "$v.e = $n"),
    "attributes as a dict": kind("$v = S(e=$n)", "$v.__dict__['e']", "$v.e = $n"),
    "attribute getter": kind("$v = S(e=$n)", "operator.attrgetter('e')($v)", "$v.e = $n"),
    "item getter": kind("$v = {'e': $n}", "operator.itemgetter('e')($v)", "$v['e'] = $n"),
    "method caller": holder("e = $n\ndef get(self):\n    return self.e", "operator.methodcaller('get')($v)", "$v.e = $n"),
    "globals": kind("$v = $n", "globals()['$v']", "$v = $n"),
    "eval": kind("$v = $n", "eval('$v')", "$v = $n"),
    "missing attributes": holder("n = $n\ndef __getattr__(self, name):\n    return self.n", "$v.e", "$v.n = $n", "$v.e = $n"),
    "all attributes": holder(
        "n = $n\ndef __getattribute__(self, name):\n    return object.__getattribute__(self, 'n')", "$v.e", "$v.n = $n",
    ),
    "descriptor": kind(
        "class D:\n    n = $n\n    def __get__(self, o, t):\n        return self.n\nclass C:\n    e = D()\n$v = C()", "$v.e",
        "D.n = $n", "C.__dict__['e'].n = $n",
    ),
    "meta class": kind("class M(type):\n    e = $n\nclass $v(metaclass=M): ...", "$v.e", "M.e = $n", "$v.e = $n"),
    "object that is called": holder("e = $n\ndef __call__(self):\n    return self.e", "$v()", "$v.e = $n"),
    "object that is indexed": holder("e = $n\ndef __getitem__(self, i):\n    return self.e", "$v[0]", "$v.e = $n"),
    "object that is a number": holder("e = $n\ndef __float__(self):\n    return float(self.e)", "float($v)", "$v.e = $n"),
    "object with a length": holder("e = 2\ndef __len__(self):\n    return self.e", "len($v)", "$v.e = 3"),
    "object that is true or not": holder("e = True\ndef __bool__(self):\n    return self.e", "(2 if $v else 3)", "$v.e = False"),
    "object that is a function": holder("e = $n\n@property\ndef get(self):\n    return lambda: self.e", "$v.get()", "$v.e = $n"),
    "object of another class": holder("e = $n", "$v.e", "class Other:\n    e = $n\n$v.__class__ = Other"),
    "object of another class that is called": holder(
        "def __call__(self):\n    return $n", "$v()",
        "class Other(${v}_class):\n    def __call__(self):\n        return $n\n$v.__class__ = Other",
    ),
    "linked list": kind(
        "$v = S(e=$n, next=S(e=$n, next=None))", "walk($v)", "$v.next.e = $n", "$v.next.next = S(e=$n, next=None)",
    ),
    "weak reference": kind("class C: ...\n${v}_o = C()\n${v}_o.e = $n\n$v = weakref.ref(${v}_o)", "$v().e", "${v}_o.e = $n"),
    "context variable": kind("$v = contextvars.ContextVar('c', default=$n)", "$v.get()", "$v.set($n)"),
    "thread's own": kind("$v = threading.local()\n$v.e = $n", "$v.e", "$v.e = $n"),
    "partial function": kind(
        "$v = functools.partial(torch.add, other=$n)", "$v(x)", "$v = functools.partial(torch.add, other=$n)",
        "$v.keywords['other'] = $n",
    ),
    "partial function of a tensor": kind(
        "$v = functools.partial(torch.add, other=$t)", "$v(x)", "$v = functools.partial(torch.add, other=$t)",
        "$v.keywords['other'].mul_(2)",
    ),
    "cached function": kind(
        "${v}_n = $n\n@functools.lru_cache\ndef $v():\n    return ${v}_n", "$v()", "${v}_n = $n", "$v.cache_clear()",
    ),
    "bound method in a dict": kind(
        "class C:\n    def get(self):\n        return self.e\n$v = C()\n$v.e = $n\n${v}_d = {'m': $v.get}", "${v}_d['m']()",
        "$v.e = $n",
    ),
    "function behind two calls": kind("${v}_n = $n\n$v = (lambda f: lambda: f())(lambda: ${v}_n)", "$v()", "${v}_n = $n"),
    "user's list": kind("class L(list): ...\n$v = L([$n])", "$v[0]", "$v[0] = $n"),
    "user's dict": kind("class D(dict): ...\n$v = D(e=$n)", "$v['e']", "$v['e'] = $n"),
    "user's number": kind("class N(float): ...\n$v = N($n)\n$v.e = $n", "$v.e", "$v.e = $n"),
    "cached function that is filled again": kind(
        "${v}_n = $n\n@functools.lru_cache\ndef $v(a):\n    return ${v}_n", "$v(1)", "${v}_n = $n\n$v.cache_clear()\n$v(1)",
    ),
    "cached function that makes a tensor": called(
        "@functools.lru_cache\ndef $v():\n    return torch.ones(4) * ${v}_n\ndef f(x):\n    return x * $v()",
        "${v}_n = $n", "$k(x)", "f(x)",
        changes=("$v.cache_clear()", "${v}_n = $n\n$v.cache_clear()\n$v()", "$v().mul_(2)"),
    ),
    "argument that is compared with a tensor": called(
        "def f(x, y):\n    return x * (2 if y is $v else 3)", "$v = $t", "$k(x, x)", "$k(x, $v)", changes=("$v = x.clone()",),
    ),
    "method of a tensor": kind("${v}_in = torch.tensor($n)\n$v = ${v}_in.item", "$v()", "${v}_in.mul_(2)"),
    "sum of a tensor by its method": kind("${v}_in = $t\n$v = ${v}_in.sum", "$v()", "${v}_in.mul_(2)"),
    "tensors that are written in a list": called(
        "def f(x):\n    torch._foreach_mul_([$v], 2.0)\n    return x * $v", "$v = $t", "$k(x)", changes=("$v = $t",),
    ),
    "tensor that is a result's place": called(
        "def f(x):\n    torch.mul($v, 2.0, out=$v)\n    return x * $v", "$v = $t", "$k(x)", changes=("$v = $t",),
    ),
    "map": kind("${v}_in = {'e': $n}\n$v = map(${v}_in.get, ['e'] * 9)", "next($v)", "${v}_in['e'] = $n"),
    "memory of a file": kind(
        "$v = mmap.mmap(-1, 8)", "$v[0] + 1", "$v[0] = 9",
    ),
    "counter": kind(
        "def make():\n    e = 1\n    def get():\n        nonlocal e\n        e += 1\n        return e\n    return get\n$v = make()",
        "$v()",
    ),
    "iterator": kind("$v = itertools.count(2)", "next($v)"),
    "generator": kind("$v = (n for n in (2, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21))", "next($v)"),
    "list that is emptied": kind("$v = [2, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23]", "$v.pop()"),
    "list that is filled": kind("$v = []", "($v.append(1), len($v))[1]", "$v.clear()"),
    "random number of Python": kind("$v = random.Random(3)", "$v.random()"),
    "forward hook": module("nn.ReLU()", "$v.register_forward_hook(lambda m, a, y: y * 2)", "$v._forward_hooks.clear()"),
    "hook before": module("nn.ReLU()", "$v.register_forward_pre_hook(lambda m, a: (a[0] * -2,))", "$v._forward_pre_hooks.clear()"),
    "parametrization": module(
        "nn.Linear(4, 4)", "$v.weight.mul_(2)", "torch.nn.utils.parametrize.register_parametrization($v, 'weight', nn.Tanh())",
        "$v.parametrizations.weight.original.mul_(3)",
    ),
    "weight norm": module(
        "torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))", "$v.parametrizations.weight.original0.mul_(2)",
    ),
}  # fmt: skip

_ARGUMENTS = {
    "own mutable default": called(
        "def f(x, cfg={'e': $n}):\n    return x * cfg['e']", "", "$k(x)", changes=("f.__defaults__[0]['e'] = $n",),
    ),
    "object as an argument": called(
        "def f(x, o):\n    return x * o.e", "$v = S(e=$n)", "$k(x, $v)", changes=("$v.e = $n", "$v = S(e=$n)"),
    ),
    "object with a hash as an argument": called(
        "def f(x, o):\n    return x * o.e", "class C: ...\n$v = C()\n$v.e = $n", "$k(x, $v)",
        changes=("$v.e = $n", "$v = C()\n$v.e = $n", "C.e = $n"),
    ),
    "frozen data class as an argument": called(
        "def f(x, o):\n    return x * o.e",
        "@dataclasses.dataclass(frozen=True)\nclass C:\n    e: float = dataclasses.field(compare=False)\n$v = C($n)",
        "$k(x, $v)", changes=("$v = C($n)", "object.__setattr__($v, 'e', $n)"),
    ),
    "object equal to all as an argument": called(
        "def f(x, o):\n    return x * o.e",
        "class C:\n    def __eq__(self, o):\n        return True\n    def __hash__(self):\n        return 1\n$v = C()\n$v.e = $n",
        "$k(x, $v)", changes=("$v = C()\n$v.e = $n",),
    ),
    "module as an argument": called(
        "def f(x, m):\n    return m(x - 1)", "$v = nn.Dropout(0.5).eval()", "$k(x, $v)",
        changes=("$v = nn.Tanh()", "$v = nn.LeakyReLU(0.5)", "$v.negative_slope = 2"),
    ),
    "function as an argument": called(
        "def f(x, g):\n    return g(x)", "$v = torch.relu\n${v}_n = $n", "$k(x, $v)",
        changes=("$v = lambda x: x * ${v}_n", "${v}_n = $n"),
    ),
    "tuple as an argument": called("def f(x, s):\n    return x * s[0]", "", "$k(x, (2.0, 1))", "$k(x, (3.0, 1))", "$k(x, (2, 1))"),
}  # fmt: skip

REFUSABLE = _BEHIND | _READING | _DYNAMIC | _ARGUMENTS
"""What a kernel sees change, or refuses to read; a stale value is a defect here too."""
REFUSED = frozenset({
    "item", "float of a tensor", "loop over a tensor", "greatest of a tensor", "comparison of tensors", "iterator", "generator",
    "map", "memory of a file", "tensors that are written in a list", "tensor that is a result's place", "method of a tensor",
    "random number of Python", "weight norm", "argument that is compared with a tensor",
    "own mutable default", "object as an argument",
})  # fmt: skip
"""The kinds that a tour may find refused; all others work where one function alone reads them."""
