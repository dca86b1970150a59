"""What ships was verified: one list names all that has no record. `fusegen verify --check` compares the records themselves.

``fusegen verify`` on a machine with a GPU writes both; ``pytest tests/unit/test_verify_shipped.py --accept`` the list alone.
"""

from __future__ import annotations

from fusegen.specs import SPECS
from fusegen.verify.record import COMMAND, FILE, LIST, TARGETS, own_folder, unverified_text, write_unverified


def test_the_list_names_what_has_no_record(accept: bool) -> None:
    if accept:
        write_unverified(own_folder())
    stored = (own_folder() / LIST).read_text(encoding="utf-8")
    assert stored == unverified_text(own_folder()), f"{COMMAND}, or this test with --accept"


def test_no_record_is_of_something_else() -> None:
    stored = {path.relative_to(own_folder()).as_posix() for path in own_folder().rglob(FILE)}
    assert stored <= {f"{architecture}/{name}/{FILE}" for architecture in TARGETS for name in SPECS}
