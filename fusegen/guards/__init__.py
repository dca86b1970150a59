"""Guards on the Python state that a function reads: recorded while it is traced, checked before each later call.

`StateRecorder` watches one run of a function and records each read of a variable, an attribute or a container as a `StateRead`.
`StateGuard` compiles the reads to one function that tells whether a later call would read the same values.
"""

from fusegen.guards.changes import ChangeError, rejecting_side_effects
from fusegen.guards.check import StateGuard
from fusegen.guards.locations import AccessKind, Conditions, StateLocation, StateRead
from fusegen.guards.recorder import StateRecorder
from fusegen.guards.values import cell_contents, contents, equality_test, exact_key, has_identity, is_plain, same

__all__ = [
    "ChangeError",
    "Conditions",
    "AccessKind",
    "StateRead",
    "StateRecorder",
    "StateLocation",
    "StateGuard",
    "cell_contents",
    "contents",
    "exact_key",
    "has_identity",
    "is_plain",
    "equality_test",
    "rejecting_side_effects",
    "same",
]
