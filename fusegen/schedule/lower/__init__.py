"""Groups to kernels and steps, one file a kind."""

from fusegen.schedule.lower.context import Bodies, Pins
from fusegen.schedule.lower.driver import lower

__all__ = ["Bodies", "Pins", "lower"]
