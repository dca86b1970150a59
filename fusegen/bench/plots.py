"""Whether charts can be drawn: the library for them comes with an extra, and is imported when a chart is asked for."""

from __future__ import annotations

from importlib.util import find_spec

from fusegen.errors import ArgumentError


def require_plots() -> None:
    """Refuses what needs charts where the library for them is not installed.

    Raises:
        ArgumentError: saying what to install.
    """
    if find_spec("matplotlib") is None:
        raise ArgumentError("a report has charts, and matplotlib is not installed", mend="pip install 'fusegen[bench]'")
