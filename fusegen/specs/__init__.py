"""The prebuilt fusions, as declarations; a family a file."""

from fusegen.specs.registry import FAMILIES, SPECS, find, is_prebuilt
from fusegen.specs.spec import Spec, materialize, meta

__all__ = ["FAMILIES", "SPECS", "Spec", "find", "is_prebuilt", "materialize", "meta"]
