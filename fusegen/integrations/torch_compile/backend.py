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
from fusegen.integrations.fx.cut import CutRegion, NodeCost, NodeCosts, example_of, regions_of, value_of
from fusegen.integrations.fx.function import RegionFunction, function_name, region_function
from fusegen.ir.symbolic import literal
from fusegen.target import Target

_LOG = logging.getLogger("fusegen.integrations.torch_compile")
_FALLBACKS = ("inductor", "eager")


def fusegen(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compiles regions of a Dynamo graph to kernels, with their own backward passes; a fallback compiles the rest.

    Args:
        module, inputs: the graph and its example inputs, from Dynamo.
        options: options of torch.compile: ``{"fallback": "inductor"}``, the default, or ``"eager"``.
        mode: mode of torch.compile, passed to Inductor.

    Raises:
        ArgumentError: an option is unknown.
    """
    fallback = _fallback(options or {})
    device = _device(inputs)
    compiled = module
    if device is not None:
        try:
            compiled = fused(module, target_of(device), device)
        except Exception as error:  # for instance an old GPU, or a bug in fusegen: the unfused graph is correct
            _LOG.warning("nothing is fused: %s: %s", type(error).__name__, error)
    if fallback == "eager":
        return compiled.forward
    from torch._functorch import config as functorch_config
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = list_mode_options(mode) if mode else None
    # A graph in autograd's cache may call operators that only another process has registered.
    with functorch_config.patch(enable_autograd_cache=False):
        return cast(Callable[..., Any], compile_fx(compiled, list(inputs), config_patches=patches))


def _fallback(options: Mapping[str, Any]) -> str:
    unknown = [name for name in options if name != "fallback"]
    if unknown or options.get("fallback", _FALLBACKS[0]) not in _FALLBACKS:
        what = f"the backend fusegen does not accept the options {dict(options)!r}"
        raise ArgumentError(what, hint=f'options={{"fallback": {" or ".join(map(repr, _FALLBACKS))}}}')
    return str(options.get("fallback", _FALLBACKS[0]))


def _device(inputs: Sequence[Any]) -> torch.device | None:
    """Returns the device of all tensors, or None if there is not exactly one. Tensors without dims count only if none has dims."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    devices = {value.device for value in tensors if value.dim()} or {value.device for value in tensors}
    return devices.pop() if len(devices) == 1 else None


# Fusion of a graph: each region, within a layer, becomes a kernel.


_ALL, _LIGHT = (NodeCost.LIGHT, NodeCost.FREE, NodeCost.HEAVY), (NodeCost.LIGHT, NodeCost.FREE)
_MIN_OPERATIONS = 2  # the fewest operations of a region: fusing one alone gains nothing
_MOST_KERNELS = 1024  # regions that are cached for later graphs


class FusedRegion(nn.Module):
    """A region as a kernel. If the kernel refuses a call, torch runs the region's function from then on."""

    def __init__(self, function: RegionFunction) -> None:
        super().__init__()
        self.name = function.name
        self._function, self.kernel = _kernel(function)
        self._is_refused = False

    def forward(self, *values: Any) -> Any:
        if self._is_refused:
            return self._function(*values)
        try:
            return self.kernel(*values)
        except IndexRangeError:  # an invalid index in this call
            raise
        except FusegenError as error:
            self._is_refused = True
            _LOG.warning("%s is run by torch: %s", self.name, error.what)
            return self._function(*values)


_kernels: dict[str, tuple[Callable[..., Any], Kernel[..., Any]]] = {}


def _kernel(function: RegionFunction) -> tuple[Callable[..., Any], Kernel[..., Any]]:
    text = function.text
    if text not in _kernels:
        if len(_kernels) >= _MOST_KERNELS:
            _kernels.clear()
        python = function.function()
        _kernels[text] = (python, Kernel(python, name=function.name))
    return _kernels[text]


def fused(module: fx.GraphModule, machine: Target, device: torch.device) -> fx.GraphModule:
    """The module with kernels in place of regions, or the module itself if it has none.

    Args:
        module: a graph module whose nodes have ``meta["example_value"]``, as Dynamo makes it.
        device: the device of its tensors.
    """
    mark_writes(module.graph)
    kinds = NodeCosts(machine).of(module.graph.nodes)
    regions = list(_regions(module.graph, kinds, machine, device))
    return _FusedGraph(module, regions).module() if regions else module


def _regions(
    graph: fx.Graph, kinds: dict[fx.Node, NodeCost], machine: Target, device: torch.device
) -> Iterator[tuple[CutRegion, RegionFunction]]:
    """The regions that become kernels. If a region cannot be traced, its pieces between matmuls are tried instead."""
    for region in _cut(graph, kinds, _ALL):
        if not _is_worth_it(region, kinds):
            continue
        function = _traced(region, machine, device)
        if function is not None:
            yield region, function
            continue
        inside = {node: kind for node, kind in kinds.items() if node in set(region.nodes)}
        pieces = [piece for piece in _cut(graph, inside, _LIGHT) if _is_worth_it(piece, kinds)]
        yield from ((piece, function) for piece in pieces if (function := _traced(piece, machine, device)) is not None)


def _is_worth_it(region: CutRegion, kinds: dict[fx.Node, NodeCost]) -> bool:
    launching = [kinds[node] for node in region.nodes if kinds[node] is not NodeCost.FREE]
    return len(launching) >= _MIN_OPERATIONS and NodeCost.LIGHT in launching and bool(region.results)


def _cut(graph: fx.Graph, kinds: dict[fx.Node, NodeCost], allowed: Sequence[NodeCost]) -> list[CutRegion]:
    return regions_of(graph, kinds, allowed, lambda node: (node.meta.get(EPOCH), layer_of(module_of(node))))


def layer_of(path: str) -> str:
    """The prefix of a module's path up to its first number, which is the index in a list of layers."""
    names = path.split(".")
    last = next((index for index, name in enumerate(names) if name.isdigit()), None)
    return "" if last is None else ".".join(names[: last + 1])


def _traced(region: CutRegion, machine: Target, device: torch.device) -> RegionFunction | None:
    """The region's function; None if fusegen cannot trace it."""
    try:
        function = region_function(region.nodes, region.results, "x")
        _require_traced(function, machine, device)
    except Exception as error:  # also an error of torch: then torch runs the region
        _LOG.warning("a region of %d operations is left to torch: %s", len(region.nodes), getattr(error, "what", error))
        return None
    return function


def _require_traced(function: RegionFunction, machine: Target, device: torch.device) -> None:
    """Traces a function with its dynamic sizes as symbols.

    Raises:
        UnsupportedError: a dynamic size must be known at compile time, so each value would need another kernel.
    """
    variants = Dispatcher(function.function(), function.name).variants
    dynamic = [
        (name, dim, dim == value.dim() - 1)
        for name, value in ((name, value_of(node)) for node, name in function.parameters.items()) if isinstance(value, Tensor)
        for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)
    ]  # fmt: skip
    variants.history.run_time.update((name, dim) for name, dim, is_last in dynamic if is_last)
    request = variants.traced([example_of(node) for node in function.parameters], machine, device)[0]
    extents = {(spec.name, dim): extent for spec in request.specs for dim, extent in enumerate(spec.shape)}
    for name, dim, _ in dynamic:
        if literal(extents[name, dim]) is not None:
            raise UnsupportedError(f"dim {dim} of {name!r} is dynamic and must be known at compile time")


class _FusedGraph:
    """A graph under construction, with calls in place of regions.

    Nodes keep their order, except that a region is called before the first reader of its results, after its inputs. No node moves
    across a node that may write.
    """

    def __init__(self, module: fx.GraphModule, regions: Sequence[tuple[CutRegion, RegionFunction]]) -> None:
        self._old = module
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._region = {node: (region, function) for region, function in regions for node in region.nodes}
        self._last = {region.nodes[-1]: region for region, _ in regions}
        self._fused: dict[str, nn.Module] = {}

    def module(self) -> fx.GraphModule:
        for node in self._old.graph.nodes:
            if node not in self._region:
                self._emit(node)
            elif node in self._last:  # the latest position: later nodes may change modes, or write
                for result in self._values_read_outside(self._last[node]):
                    self._emit(result)
        names = [str(node.target) for node in self._old.graph.nodes if node.op == "get_attr"]
        attributes = {name: operator.attrgetter(name)(self._old) for name in names}
        fused_module = fx.GraphModule({**dict(self._old.named_modules()), **attributes, **self._fused}, self._graph)
        fused_module.meta = dict(self._old.meta)
        return fused_module

    def _values_read_outside(self, region: CutRegion) -> list[fx.Node]:
        """The region's results, and its views that other nodes read."""
        inside = set(region.nodes)
        views = [node for node in region.nodes if any(user not in inside for user in node.users)]
        return list(dict.fromkeys([*region.results, *views]))

    def _emit(self, node: fx.Node) -> None:
        stack = [node]
        while stack:
            current = stack[-1]
            if current in self._new:
                stack.pop()
                continue
            owner = self._region.get(current)
            inputs = list(owner[1].parameters) if owner and current in owner[0].results else current.all_input_nodes
            missing = [operand for operand in inputs if operand not in self._new]
            if missing:
                stack += reversed(missing)
                continue
            if owner and current in owner[0].results:
                self._call(*owner)
            else:
                self._new[current] = self._graph.node_copy(current, self._new.__getitem__)
            stack.pop()

    def _call(self, region: CutRegion, function: RegionFunction) -> None:
        name = f"fused_{len(self._fused)}_{function.name}"
        self._fused[name] = FusedRegion(function)
        call = self._graph.call_module(name, tuple(self._new[node] for node in function.parameters))
        for index, node in enumerate(region.results):
            result = call if len(region.results) == 1 else self._graph.call_function(_item, (call, index))
            result.meta = dict(node.meta)
            self._new[node] = result


def _item(values: Any, index: int) -> Any:
    return values[index]


# Epochs number the nodes of a Dynamo graph, so that no node moves across an in-place write or a call with unknown effects.


_IN_PLACE = {"setitem", "delitem", *(name for name in dir(operator) if name.startswith("i") and hasattr(operator, name[1:]))}
"""In-place operators of Python, such as ``iadd``."""


def mark_writes(graph: fx.Graph) -> None:
    """Marks nodes that write or may write in ``meta``, and numbers each node by the count of writes before it (its epoch)."""
    epoch = 0
    for node in graph.nodes:
        node.meta[WRITES] = node.op.startswith("call") and _may_write(node)
        epoch += node.meta[WRITES]
        node.meta[EPOCH] = epoch
        epoch += node.meta[WRITES]


def _may_write(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op == "call_method":
        return _is_write_name(target)
    if node.op == "call_module" or node.kwargs.get("out") is not None:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if getattr(operator, name_of(target), None) is target:
        return name_of(target) in _IN_PLACE
    if resolve_name(target) is None:
        return not isinstance(value_of(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)) and not _is_factory(node)
    return _is_write_name(name_of(target)) or _is_in_place(node)


def name_of(target: Any) -> str:
    return str(getattr(target, "__name__", ""))


def _is_write_name(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in (
        "__setitem__",
        *(f"__{op}__" for op in _IN_PLACE),
    )


def _is_in_place(node: fx.Node) -> bool:
    """True if ``inplace`` is set, by name or position, as in ``F.relu(x, inplace=True)``."""
    if node.kwargs.get("inplace"):
        return True
    if not inspect.isfunction(node.target):
        return False
    names = list(inspect.signature(node.target).parameters)
    return "inplace" in names and len(node.args) > names.index("inplace") and bool(node.args[names.index("inplace")])


def _is_factory(node: fx.Node) -> bool:
    """True if a function of numbers returns a tensor, as ``torch.arange`` does."""
    return isinstance(value_of(node), Tensor) and getattr(torch, function_name(node), None) is node.target
