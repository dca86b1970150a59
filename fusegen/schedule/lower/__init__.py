"""Groups to kernels and steps, one file a kind."""

from fusegen.schedule.lower.context import Pins
from fusegen.schedule.lower.driver import lower

__all__ = ["Pins", "lower"]
