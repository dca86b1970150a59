"""Fusion: which nodes become which kernel. Families of kernels are handed in; fusion knows none."""

from fusegen.fusion.driver import fuse
from fusegen.fusion.groups import Domain, Group, GroupKind

__all__ = ["Domain", "Group", "GroupKind", "fuse"]
