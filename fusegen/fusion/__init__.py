"""Fusion: groups the nodes of a graph into kernels. Kernel families are passed in; fusion itself knows none."""

from fusegen.fusion.driver import fuse
from fusegen.fusion.groups import Domain, Group, GroupKind

__all__ = ["Domain", "Group", "GroupKind", "fuse"]
