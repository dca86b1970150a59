"""What ships was verified: no record is of other kernels than are emitted today, and one list names all that has no record.

``fusegen verify`` on a machine with a GPU writes both; ``pytest tests/unit/test_verify_shipped.py --accept`` the list alone.
"""

from __future__ import annotations

import pytest

from fusegen.specs import SPECS
from fusegen.target import target
from fusegen.verify.record import COMMAND, FILE, LIST, TARGETS, own_folder, unverified_text, write_unverified
from fusegen.verify.status import problems


@pytest.mark.parametrize("architecture", TARGETS)
@pytest.mark.parametrize("name", SPECS)
def test_no_record_is_stale(name: str, architecture: str) -> None:
    found = problems(SPECS[name], target(architecture), own_folder())
    stale = [line for line in found if not line.endswith(": no record")]
    assert not stale, f"on a machine with a GPU: {COMMAND} {name}\n" + "\n".join(stale)


def test_the_list_names_what_has_no_record(accept: bool) -> None:
    if accept:
        write_unverified(own_folder())
    stored = (own_folder() / LIST).read_text(encoding="utf-8")
    assert stored == unverified_text(own_folder()), f"{COMMAND}, or this test with --accept"


def test_no_record_is_of_something_else() -> None:
    stored = {path.relative_to(own_folder()).as_posix() for path in own_folder().rglob(FILE)}
    assert stored <= {f"{architecture}/{name}/{FILE}" for architecture in TARGETS for name in SPECS}
