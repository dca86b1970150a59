"""What runs our kernels under compute-sanitizer finds out first whether its tools see anything."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from fusegen.errors import ToolNotFoundError
from fusegen.jit import nvrtc
from tests.gpu.planted_faults import FAULTS, planted
from tests.naming import case

SCRIPT = Path(__file__).parents[2] / ".ci" / "sanitize"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
RAN = "2 plans of 1 cases ran once each"
CLEAN = {tool: f"========= COMPUTE-SANITIZER\n{RAN}\n========= ERROR SUMMARY: 0 errors" for tool in TOOLS}
CLEAN["racecheck"] = f"""{RAN}
========= Warning: Race reported between Write access at mbarrier_init(unsigned long long *, unsigned int)+0x1b0
=========     and Read access at mbarrier_expect(unsigned long long *, unsigned int)+0x1f0 [128 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"""


def test_planted_faults_compile() -> None:
    for architecture in ("sm_90a", "sm_80"):
        for tool in FAULTS:
            with case((architecture, tool)):
                try:
                    ptx = nvrtc.compile_ptx(planted(tool), architecture)
                except ToolNotFoundError:
                    pytest.skip("NVRTC is not installed")
                assert f".entry fg_planted_{tool}(" in ptx and "st.global" in ptx and "ld.global" in ptx
                assert ("st.shared" in ptx, "bar" in ptx.partition(".entry")[2]) == (tool == "racecheck", tool == "synccheck")


def sanitized(folder: Path, clean: dict[str, str], *, blind: str = "", status: int = 0) -> subprocess.CompletedProcess[str]:
    """The script with a compute-sanitizer that runs nothing.

    Args:
        clean: what each tool says of our kernels.
        blind: a tool that does not see its planted fault.
        status: with which it ends when it looks at our kernels.
    """
    cases = [f"  *planted_faults*{blind}) echo '========= ERROR SUMMARY: 0 errors';;"] if blind else []
    cases += ['  *planted_faults*) echo "========= Invalid read at fg_planted_$2+0x40"; exit 1;;']
    cases += [f"  *{tool}*every_plan*) printf '%s\\n' {shlex.quote(said)}; exit {status};;" for tool, said in clean.items()]
    said = "\n".join(['[[ "$*" == *kernel_substring=fg_* ]] || exit 3', 'case "$*" in', *cases, "esac"])
    for name, text in (("compute-sanitizer", said), ("python3", "echo a plan")):
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run([SCRIPT, folder / "logs"], env=environment, capture_output=True, text=True, check=False)


def test_tools_that_see_their_faults_and_none_of_ours(tmp_path: Path) -> None:
    done = sanitized(tmp_path, CLEAN)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(" in ")[0] for line in done.stdout.splitlines()] == [f"{tool}: 16 plans" for tool in TOOLS]
    assert done.stdout.count("no errors") == len(TOOLS)


def test_a_tool_that_sees_nothing_is_not_believed(tmp_path: Path) -> None:
    for tool in TOOLS:
        with case(tool):
            done = sanitized(tmp_path, CLEAN, blind=tool)
            assert done.returncode == 1 and f"{tool} does not see the fault" in done.stdout and "SUMMARY" not in done.stdout


def test_what_a_tool_says_of_ours(tmp_path: Path) -> None:
    for tool, said, status in (
        ("memcheck", f"========= Invalid __global__ read of size 16 bytes\n{CLEAN['memcheck']}", 1),
        ("memcheck", "========= ERROR SUMMARY: 0 errors", 0),  # the program ended early
        ("racecheck", CLEAN["racecheck"].replace("mbarrier_init", "store"), 0),
        ("initcheck", "Killed", 0),
    ):
        with case((tool, said, status)):
            done = sanitized(tmp_path, CLEAN | {tool: said}, status=status)
            assert (done.returncode == 1 and f"{tool}: see" in done.stdout) or f"{tool}: it did not come to an end" in done.stdout
