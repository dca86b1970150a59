"""Fusion: which nodes become which kernel."""

from fusegen.passes.fuse.driver import fuse
from fusegen.passes.fuse.groups import Domain, Group, GroupKind
from fusegen.passes.fuse.rows import apart

__all__ = ["Domain", "Group", "GroupKind", "apart", "fuse"]
