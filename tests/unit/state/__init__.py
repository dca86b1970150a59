"""Kinds of Python state that kernels read, one case a kind; each file adds its own to the table."""

from tests.unit.state import modules, objects, tensors, variables
from tests.unit.state.cases import CASES, Derived, Settings, frozen

__all__ = ["CASES", "Derived", "Settings", "frozen", "modules", "objects", "tensors", "variables"]
