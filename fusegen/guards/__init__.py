"""Python state that a function reads: what is seen of it while the function is traced, and whether it is still so in a later call.

A `Recorder` watches one run of a function and notes every read of a variable, an attribute or a container as a `Read`. The
`State` that it leaves behind is one generated function, which a call asks whether all of them would read the same again.
"""

from fusegen.guards.changes import ChangeError, refusing_changes
from fusegen.guards.check import State
from fusegen.guards.conditions import Conditions
from fusegen.guards.places import Kind, Read, Slot
from fusegen.guards.recorder import Recorder
from fusegen.guards.values import cell_contents, contents, exact, has_identity, is_plain, matcher, same

__all__ = [
    "ChangeError",
    "Conditions",
    "Kind",
    "Read",
    "Recorder",
    "Slot",
    "State",
    "cell_contents",
    "contents",
    "exact",
    "has_identity",
    "is_plain",
    "matcher",
    "refusing_changes",
    "same",
]
