"""``torch.compile(model, backend="fusegen")``."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.overrides import resolve_name

from fusegen.api import Kernel
from fusegen.compiler.backends import target_of
from fusegen.compiler.dispatch import Dispatcher
from fusegen.errors import ArgumentError, FusegenError, IndexRangeError, UnsupportedError
from fusegen.integrations.fx.capture import EPOCH, WRITES, module_of
from fusegen.integrations.fx.cut import CutRegion, Kinds, NodeCost, example_of, regions_of, value_of
from fusegen.integrations.fx.function import RegionFunction, function_name, region_function
from fusegen.ir.symbolic import literal
from fusegen.target import Target

_LOG = logging.getLogger("fusegen.integrations.torch_compile")
_FALLBACKS = ("inductor", "eager")


def fusegen(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compiles a graph of Dynamo's: its regions become kernels, which derive their own gradients, and the rest goes to a fallback.

    Args:
        module, inputs: as Dynamo gives them.
        options: of torch.compile: ``{"fallback": "inductor"}``, the default, or ``"eager"``.
        mode: of torch.compile, as Inductor takes it.

    Raises:
        ArgumentError: an option that does not exist.
    """
    fallback = _fallback(options or {})
    device = _device(inputs)
    found = module
    if device is not None:
        try:
            found = fused(module, target_of(device), device)
        except Exception as error:  # of a GPU that is too old, say, or a defect of ours: the graph is right without us
            _LOG.warning("nothing is fused: %s: %s", type(error).__name__, error)
    if fallback == "eager":
        return found.forward
    from torch._functorch import config as functorch_config
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = list_mode_options(mode) if mode else None
    # A graph from autograd's cache is not traced again, and knows no operator that another process made.
    with functorch_config.patch(enable_autograd_cache=False):
        return cast(Callable[..., Any], compile_fx(found, list(inputs), config_patches=patches))


def _fallback(options: Mapping[str, Any]) -> str:
    unknown = [name for name in options if name != "fallback"]
    if unknown or options.get("fallback", _FALLBACKS[0]) not in _FALLBACKS:
        what = f"the backend fusegen is given {dict(options)!r}"
        raise ArgumentError(what, hint=f'options={{"fallback": {" or ".join(map(repr, _FALLBACKS))}}}')
    return str(options.get("fallback", _FALLBACKS[0]))


def _device(inputs: Sequence[Any]) -> torch.device | None:
    """The device of all tensors, numbers on the CPU left out; None where there are several, or none."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    devices = {value.device for value in tensors if value.dim()} or {value.device for value in tensors}
    return devices.pop() if len(devices) == 1 else None


# A graph with its regions as kernels: all that fusegen traces, layer by layer.


_ALL, _LIGHT = (NodeCost.LIGHT, NodeCost.FREE, NodeCost.HEAVY), (NodeCost.LIGHT, NodeCost.FREE)
_LEAST = 2  # operations of a region: one alone gains nothing
_MOST_KERNELS = 1024  # that are kept for later graphs


class FusedRegion(nn.Module):
    """A region as a kernel; as torch runs its function where the kernel refuses a call.

    Args:
        function: of the region.

    Attributes:
        name: of the function.
        kernel: that computes it.
    """

    def __init__(self, function: RegionFunction) -> None:
        super().__init__()
        self.name = function.name
        self._function, self.kernel = _kernel(function)
        self._is_refused = False

    def forward(self, *values: Any) -> Any:
        """Computes the region."""
        if self._is_refused:
            return self._function(*values)
        try:
            return self.kernel(*values)
        except IndexRangeError:  # the caller's mistake in this call
            raise
        except FusegenError as error:
            self._is_refused = True
            _LOG.warning("%s runs as torch runs it: %s", self.name, error.what)
            return self._function(*values)


_kernels: dict[str, tuple[Callable[..., Any], Kernel[..., Any]]] = {}


def _kernel(function: RegionFunction) -> tuple[Callable[..., Any], Kernel[..., Any]]:
    """A function and its kernel: equal layers share them."""
    text = function.text
    if text not in _kernels:
        if len(_kernels) >= _MOST_KERNELS:
            _kernels.clear()
        python = function.function()
        _kernels[text] = (python, Kernel(python, name=function.name))
    return _kernels[text]


def fused(module: fx.GraphModule, machine: Target, device: torch.device) -> fx.GraphModule:
    """The module with a kernel for each region; the module itself where there is none.

    Args:
        module: as Dynamo makes it, with ``meta["example_value"]``.
        machine: what it runs on.
        device: its tensors are there.
    """
    note_writes(module.graph)
    kinds = Kinds(machine).of(module.graph.nodes)
    chosen = list(_chosen(module.graph, kinds, machine, device))
    return _Rebuilt(module, chosen).module() if chosen else module


def _chosen(
    graph: fx.Graph, kinds: dict[fx.Node, NodeCost], machine: Target, device: torch.device
) -> Iterator[tuple[CutRegion, RegionFunction]]:
    """The regions that become kernels: whole ones, or where one cannot be traced, its parts between matmuls."""
    for region in _regions(graph, kinds, _ALL):
        if not _is_worth_it(region, kinds):
            continue
        function = _traced(region, machine, device)
        if function is not None:
            yield region, function
            continue
        inside = {node: kind for node, kind in kinds.items() if node in set(region.nodes)}
        parts = [part for part in _regions(graph, inside, _LIGHT) if _is_worth_it(part, kinds)]
        yield from ((part, function) for part in parts if (function := _traced(part, machine, device)) is not None)


def _is_worth_it(region: CutRegion, kinds: dict[fx.Node, NodeCost]) -> bool:
    """True if a region has several operations, and not matmuls alone."""
    launching = [kinds[node] for node in region.nodes if kinds[node] is not NodeCost.FREE]
    return len(launching) >= _LEAST and NodeCost.LIGHT in launching and bool(region.results)


def _regions(graph: fx.Graph, kinds: dict[fx.Node, NodeCost], taken: Sequence[NodeCost]) -> list[CutRegion]:
    return regions_of(graph, kinds, taken, lambda node: (node.meta.get(EPOCH), layer_of(module_of(node))))


def layer_of(path: str) -> str:
    """The part of a module's path that ends with the first number, as the elements of a list of layers have it."""
    parts = path.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _traced(region: CutRegion, machine: Target, device: torch.device) -> RegionFunction | None:
    """The function of a region; None where fusegen does not trace it."""
    try:
        function = region_function(region.nodes, region.results, "x")
        _require_traced(function, machine, device)
    except Exception as error:  # of torch itself, too: then it runs as it is
        _LOG.warning("a region of %d operations is left to torch: %s", len(region.nodes), getattr(error, "what", error))
        return None
    return function


def _require_traced(function: RegionFunction, machine: Target, device: torch.device) -> None:
    """Traces a function, with sizes that change as symbols.

    Raises:
        UnsupportedError: one of these must be known: then each size would be another kernel.
    """
    variants = Dispatcher(function.function(), function.name).variants
    changing = [
        (name, dim, dim == value.dim() - 1)
        for name, value in ((name, value_of(node)) for node, name in function.parameters.items()) if isinstance(value, Tensor)
        for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)
    ]  # fmt: skip
    variants.history.run_time.update((name, dim) for name, dim, is_last in changing if is_last)
    request = variants.traced([example_of(node) for node in function.parameters], machine, device)[0]
    extents = {(spec.name, dim): extent for spec in request.specs for dim, extent in enumerate(spec.shape)}
    for name, dim, _ in changing:
        if literal(extents[name, dim]) is not None:
            raise UnsupportedError(f"dim {dim} of {name!r} must be known, and changes")


class _Rebuilt:
    """A graph with calls in place of regions, in the making.

    Nodes come in the order of the graph, as early as all that they read is there; none moves over one that may write.
    """

    def __init__(self, module: fx.GraphModule, chosen: Sequence[tuple[CutRegion, RegionFunction]]) -> None:
        self._old = module
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._region = {node: (region, function) for region, function in chosen for node in region.nodes}
        self._last = {region.nodes[-1]: region for region, _ in chosen}
        self._fused: dict[str, nn.Module] = {}

    def module(self) -> fx.GraphModule:
        for node in self._old.graph.nodes:
            if node not in self._region:
                self._emit(node)
            elif node in self._last:  # at the latest here: what follows may change modes, or write
                for read in self._read_outside(self._last[node]):
                    self._emit(read)
        names = [str(node.target) for node in self._old.graph.nodes if node.op == "get_attr"]
        attributes = {name: operator.attrgetter(name)(self._old) for name in names}
        found = fx.GraphModule({**dict(self._old.named_modules()), **attributes, **self._fused}, self._graph)
        found.meta = dict(self._old.meta)
        return found

    def _read_outside(self, region: CutRegion) -> list[fx.Node]:
        """The nodes of a region that others read, views among them."""
        inside = set(region.nodes)
        views = [node for node in region.nodes if any(user not in inside for user in node.users)]
        return list(dict.fromkeys([*region.results, *views]))

    def _emit(self, node: fx.Node) -> None:
        """Emits a node, after all that it reads."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._new:
                stack.pop()
                continue
            result_of = self._region.get(top)
            reads = list(result_of[1].parameters) if result_of and top in result_of[0].results else top.all_input_nodes
            missing = [each for each in reads if each not in self._new]
            if missing:
                stack += reversed(missing)
                continue
            if result_of and top in result_of[0].results:
                self._call(*result_of)
            else:
                self._new[top] = self._graph.node_copy(top, self._new.__getitem__)
            stack.pop()

    def _call(self, region: CutRegion, function: RegionFunction) -> None:
        name = f"fused_{len(self._fused)}_{function.name}"
        self._fused[name] = FusedRegion(function)
        call = self._graph.call_module(name, tuple(self._new[node] for node in function.parameters))
        for number, node in enumerate(region.results):
            part = call if len(region.results) == 1 else self._graph.call_function(_item, (call, number))
            part.meta = dict(node.meta)
            self._new[node] = part


def _item(values: Any, number: int) -> Any:
    return values[number]


# The parts of a Dynamo graph between which nothing may move: writes in place, and calls whose effects are not known.


_IN_PLACE = {"setitem", "delitem", *(name for name in dir(operator) if name.startswith("i") and hasattr(operator, name[1:]))}
"""Operators of Python that write: ``iadd`` and the like."""


def note_writes(graph: fx.Graph) -> None:
    """Notes in each node's ``meta`` if it writes or may do so, and how many such nodes come before it."""
    epoch = 0
    for node in graph.nodes:
        node.meta[WRITES] = node.op.startswith("call") and _may_write(node)
        epoch += node.meta[WRITES]
        node.meta[EPOCH] = epoch
        epoch += node.meta[WRITES]


def _may_write(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_method":
        return _names_a_write(target)
    if node.op == "call_module" or node.kwargs.get("out") is not None:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if getattr(operator, name_of(target), None) is target:
        return name_of(target) in _IN_PLACE
    if resolve_name(target) is None:
        return not isinstance(value_of(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)) and not _is_factory(node)
    return _names_a_write(name_of(target)) or _is_in_place(node)


def name_of(target: Any) -> str:
    """The name of a function with its underscores."""
    return str(getattr(target, "__name__", ""))


def _names_a_write(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", *(f"__{each}__" for each in _IN_PLACE))


def _is_in_place(node: fx.Node) -> bool:
    """True if a function is asked to write to its argument: ``F.relu(x, inplace=True)``, also by position."""
    if node.kwargs.get("inplace"):
        return True
    if not inspect.isfunction(node.target):
        return False
    names = list(inspect.signature(node.target).parameters)
    return "inplace" in names and len(node.args) > names.index("inplace") and bool(node.args[names.index("inplace")])


def _is_factory(node: fx.Node) -> bool:
    """True if a function makes a tensor of nothing but numbers, as ``torch.arange`` does."""
    return isinstance(value_of(node), Tensor) and getattr(torch, function_name(node), None) is node.target
