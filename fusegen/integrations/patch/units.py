"""The modules of a model that may be one kernel: layers, the modules inside of them, and what stands beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import nn

from fusegen.errors import ArgumentError
from fusegen.integrations.patch.padded import has_odd_rows

Chosen: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""Modules: by their class, its name, or their path in the model, where ``*`` stands for any text."""

_ONE_LAUNCH = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Identity,
    nn.modules.conv._ConvNd,
    nn.modules.dropout._DropoutNd,
    torch.jit.ScriptModule,  # whose forward pass cannot be replaced
)
"""Torch's modules in which there is nothing to fuse, or nothing that is traced; but for `has_odd_rows`."""

_MOST_PARTS = 8  # listed parts of a layer: where there are more, each is compiled on its own


@dataclass(frozen=True)
class Unit:
    """A module that may be one kernel.

    Attributes:
        path: its name in the model.
        module: the module.
    """

    path: str
    module: nn.Module


def units(model: nn.Module, only: Chosen | None, exclude: Chosen) -> list[Unit]:
    """The modules that may be one kernel, outer ones before those inside of them; one with several paths by the first.

    Raises:
        ArgumentError: a name or class chooses no module.
    """
    for chosen in (only or (), exclude):
        _require_known(model, _listed(chosen))
    left_out = {id(module) for path, module in model.named_modules() if _is_chosen(_listed(exclude), path, module)}
    names = ("",) if only is None else _listed(only)
    chosen_paths = [path for path, module in model.named_modules() if _is_chosen(names, path, module)]
    first: dict[int, Unit] = {}
    for unit in _below(model, "", left_out):
        if any(_is_in(unit.path, path) for path in chosen_paths):
            first.setdefault(id(unit.module), unit)
    return list(first.values())


def _below(module: nn.Module, path: str, left_out: set[int]) -> Iterator[Unit]:
    if id(module) in left_out or (isinstance(module, _ONE_LAUNCH) and not has_odd_rows(module)):
        return
    if not _has_layers(module) and not any(id(each) in left_out for each in module.modules()) and type(module).forward is not _NONE:
        yield Unit(path, module)
    for name, child in module.named_children():
        yield from _below(child, f"{path}.{name}" if path else name, left_out)


_NONE = nn.Module.forward


def _has_layers(module: nn.Module) -> bool:
    """True if layers are listed in a module, each of which is compiled on its own: its lists repeat a class, or one holds a single
    module. The parts of one layer differ (attention, then the MLP), or are modules of torch in which there is nothing to fuse. A
    ``ModuleDict`` holds modules of one place, as adapters do."""
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList) or type(each) is nn.Sequential]
    kinds = [type(part) for each in lists for part in each if not isinstance(part, _ONE_LAUNCH)]
    is_alone = any(isinstance(each, nn.ModuleList) and len(each) == 1 and not isinstance(each[0], _ONE_LAUNCH) for each in lists)
    return is_alone or len(set(kinds)) < len(kinds) or sum(map(len, lists)) > _MOST_PARTS


def _listed(chosen: Chosen) -> tuple[str | type[nn.Module], ...]:
    return tuple(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str) else (chosen,)


def _is_chosen(names: Sequence[str | type[nn.Module]], path: str, module: nn.Module) -> bool:
    return any(_matches(name, path, module) for name in names)


def _matches(name: str | type[nn.Module], path: str, module: nn.Module) -> bool:
    if isinstance(name, str):
        return type(module).__name__ == name or fnmatchcase(path, name)
    return isinstance(module, name)


def _is_in(path: str, outer: str) -> bool:
    """True if a path is that of a module or of one inside of it."""
    return path == outer or path.startswith(f"{outer}.") or not outer


def _require_known(model: nn.Module, names: Sequence[str | type[nn.Module]]) -> None:
    for name in names:
        if not isinstance(name, str) and not (isinstance(name, type) and issubclass(name, nn.Module)):
            raise ArgumentError(f"{name!r} is neither a module's class nor its name", mend='only=["*.mlp", nn.LayerNorm]')
        if not any(_matches(name, path, module) for path, module in model.named_modules()):
            shown = repr(name) if isinstance(name, str) else name.__name__
            classes = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ArgumentError(f"no module of the model is {shown}", mend=f"the classes in it are {classes}")
