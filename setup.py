"""The build's one hook: templates and verification records lie beside the package in a checkout, and inside of it in a wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_TEMPLATES, _GENERATED = Path("templates"), Path("generated")


class BuildWithData(build_py):
    """Copies ``templates/`` to ``fusegen/templates/`` of what is built, and each ``generated/…/verified.json`` to
    ``fusegen/records/…/verified.json``; an editable install reads the checkout's instead."""

    def run(self) -> None:
        """Builds modules and data; what an earlier build left in the folder does not reach the wheel."""
        if not self.editable_mode:
            shutil.rmtree(self._package, ignore_errors=True)
        super().run()
        for source, target in self._data().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """All files of the build."""
        return [*super().get_outputs(include_bytecode), *map(str, self._data().values())]

    @property
    def _package(self) -> Path:
        return Path(self.build_lib, "fusegen")

    def _data(self) -> dict[Path, Path]:
        """What is copied, and where to."""
        if self.editable_mode:
            return {}
        templates = sorted(path for path in _TEMPLATES.rglob("*") if path.is_file())
        records = sorted(_GENERATED.glob("*/*/verified.json"))
        copied = {path: self._package / path for path in templates}
        return copied | {path: self._package / "records" / path.relative_to(_GENERATED) for path in records}


setup(cmdclass={"build_py": BuildWithData})
