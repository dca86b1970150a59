"""Finds what is worth fusing: in a model with a batch, in an FX graph, in a profile."""

from fusegen.findings.finding import Finding, Findings, Observation
from fusegen.findings.sources import find

__all__ = ["Finding", "Findings", "Observation", "find"]
