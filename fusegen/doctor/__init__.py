"""What this machine has of what fusegen needs. Imports nothing that may be broken: it must run where nothing else does."""

from fusegen.doctor.finding import Finding, State
from fusegen.doctor.probes import examine

__all__ = ["Finding", "State", "examine"]
