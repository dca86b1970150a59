"""Guards on the Python state that a function reads: recorded while it is traced, checked before each later call.

`StateRecorder` watches one run of a function and records each read of a variable, an attribute or a container as a `StateRead`.
`StateGuard` compiles the reads to one function that tells whether a later call would read the same values.
"""

from fusegen.guards.changes import ChangeError, refusing_changes
from fusegen.guards.check import StateGuard
from fusegen.guards.places import Conditions, PlaceKind, StatePlace, StateRead
from fusegen.guards.recorder import StateRecorder
from fusegen.guards.values import cell_contents, contents, exact, has_identity, is_plain, matcher, same

__all__ = [
    "ChangeError",
    "Conditions",
    "PlaceKind",
    "StateRead",
    "StateRecorder",
    "StatePlace",
    "StateGuard",
    "cell_contents",
    "contents",
    "exact",
    "has_identity",
    "is_plain",
    "matcher",
    "refusing_changes",
    "same",
]
