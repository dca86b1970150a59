"""Finds what is worth fusing: in a model with a batch, in an FX graph, in a profile."""

from fusegen.integrations.find.finding import Finding, Findings, Observation
from fusegen.integrations.find.sources import find

__all__ = ["Finding", "Findings", "Observation", "find"]
