"""The prebuilt fusions, as declarations; a family a file."""

from fusegen.specs.registry import SPECS, find
from fusegen.specs.spec import Spec, materialize, meta

__all__ = ["SPECS", "Spec", "find", "materialize", "meta"]
