"""The build's one hook: templates lie beside the package in a checkout, and inside of it in a wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_TEMPLATES = Path("templates")


class BuildWithTemplates(build_py):
    """Copies ``templates/`` to ``fusegen/templates/`` of what is built; an editable install reads the checkout's instead."""

    def run(self) -> None:
        """Builds modules and templates; what an earlier build left in the folder does not reach the wheel."""
        if not self.editable_mode:
            shutil.rmtree(self._package, ignore_errors=True)
        super().run()
        for path in self._templates():
            target = self._package / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """All files of the build."""
        return [*super().get_outputs(include_bytecode), *(str(self._package / path) for path in self._templates())]

    @property
    def _package(self) -> Path:
        return Path(self.build_lib, "fusegen")

    def _templates(self) -> list[Path]:
        return [] if self.editable_mode else sorted(path for path in _TEMPLATES.rglob("*") if path.is_file())


setup(cmdclass={"build_py": BuildWithTemplates})
