"""The forward pass of a model as CUDA graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fusegen.graphs.cache_memory import with_whole_mask
from fusegen.graphs.graphed import Graphed
from fusegen.graphs.recording import Pools

_COMPILED = "get_compiled_call"


class GraphedForward(Graphed):
    """Stands in the place of a model's forward pass, for calls without gradients.

    Args:
        module: the model.
        pools: of its graphs.

    Attributes:
        given: the forward pass that the module had as an attribute, another tool's or the user's own.
        is_put: True if calls of the model come here; behind a wrapper that another tool has put there since, this object does
            nothing any more once it is False.
    """

    def __init__(self, module: nn.Module, pools: Pools) -> None:
        self.module = module
        self.given: Callable[..., Any] | None = None
        self.is_put = False
        super().__init__(module, pools, [module])

    def put(self) -> None:
        """Takes the place of the forward pass, and of its compilation in ``generate``, which looks for a static cache."""
        if self.is_put:
            return
        self.is_put = True
        found = vars(self.module).get("forward")
        if not isinstance(found, GraphedForward):  # a copied module holds the other one's
            self.given = found
        self._roots = self._outer = [self.module]
        self.__signature__ = inspect.signature(self.original)  # read by `generate`
        self.module.forward = self
        if hasattr(type(self.module), _COMPILED):
            setattr(self.module, _COMPILED, self.not_compiled)

    def not_compiled(self, _: object) -> nn.Module:
        """The model, whatever the settings of its compilation."""
        return self.module

    def remove(self) -> None:
        """Puts back what was there, and frees the graphs."""
        self.is_put = False
        held = vars(self.module)
        if getattr(held.get(_COMPILED), "__self__", None) is self:
            delattr(self.module, _COMPILED)
        if held.get("forward") is self:
            if self.given is None:
                del self.module.forward
            else:
                self.module.forward = self.given
        self.forget()

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own forward pass."""
        return self.given or partial(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a forward pass."""
        if torch.is_grad_enabled() or not self.is_put:  # layers have graphs of their own
            return self.original(*args, **kwargs)
        return super().__call__(*args, **with_whole_mask(kwargs))

    def __getstate__(self) -> dict[str, Any]:
        """The state that a file or a copy holds: graphs are recorded anew."""
        return {"module": self.module, "given": self.given, "is_put": self.is_put}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["module"], Pools())  # type: ignore[misc]
        self.given = state["given"]
        self.is_put = state["is_put"]
        self.__signature__ = inspect.signature(self.original)
