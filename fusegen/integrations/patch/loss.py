"""The loss of a model of ``transformers``, which is a function that the model holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from torch import nn

from fusegen.api import Kernel
from fusegen.errors import ArgumentError
from fusegen.integrations.patch.fused_call import FusedCall, Prepared
from fusegen.runtime.callables import name_of, python_function

_ATTRIBUTE = "_loss_function"


def has_loss(model: nn.Module) -> bool:
    """True if a model computes its loss by a Python function that it holds: not by a module, which is patched as all others."""
    is_held = isinstance(getattr(type(model), "loss_function", None), property) and _ATTRIBUTE not in model._modules
    if not is_held or "labels" not in signature(type(model).forward).parameters:
        return False
    try:
        python_function(model.loss_function)  # type: ignore[arg-type]
    except ArgumentError:
        return False
    return True


class FusedLoss(FusedCall):
    """The loss function of a model, as one kernel where it can be one.

    Args:
        model: of transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self._given = vars(model).get(_ATTRIBUTE)
        self._function: Callable[..., Any] = model.loss_function  # type: ignore[assignment]
        self._kernel = _kernel(self._function)

    def put(self) -> None:
        """Takes the place of the model's loss function."""
        setattr(self.module, _ATTRIBUTE, self)

    def remove(self) -> None:
        """Puts back what was there."""
        if vars(self.module).get(_ATTRIBUTE) is self:
            if self._given is None:
                delattr(self.module, _ATTRIBUTE)
            else:
                setattr(self.module, _ATTRIBUTE, self._given)

    @property
    def name(self) -> str:
        """The name of the model's own function."""
        return name_of(self._function)

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own function."""
        return self._function

    def prepared(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
        """A call as a kernel."""
        return Prepared(self._kernel, tuple(args), kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """The state that a file or a copy holds: what was compiled is made anew."""
        return {"module": self.module, "_given": self._given, "_function": self._function}

    def __setstate__(self, state: dict[str, Any]) -> None:
        FusedCall.__init__(self)
        self.__dict__.update(state)
        self._kernel = _kernel(self._function)


def _kernel(function: Callable[..., Any]) -> Kernel[..., Any]:
    """The kernel of a loss, which may be an object of the user's, or a partial."""
    return Kernel(python_function(function), name="loss")
