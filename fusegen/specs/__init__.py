"""The prebuilt fusions, as declarations; a family a file."""

from fusegen.specs.registry import FAMILIES, SPECS, find
from fusegen.specs.spec import Spec, materialize, meta

__all__ = ["FAMILIES", "SPECS", "Spec", "find", "materialize", "meta"]
