"""What is installed is what is in the tree, under `kvplugin` and nowhere else."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DIRS = {
    "kvplugin": "kvplugin",
    "kvplugin.connectors": "connectors",
    "kvplugin.kernels": "kernels",
    "kvplugin.integration": "integration",
}
"""Packages of the layers and their folders in the repository."""

IMPORTS = {
    "kvplugin": "kvplugin/__init__.py",
    "kvplugin.cli.main": "kvplugin/cli/main.py",
    "kvplugin.connectors.offload.scheduler": "connectors/offload/scheduler.py",
    "kvplugin.kernels.host": "kernels/host.py",
    "kvplugin.integration.vllm": "integration/vllm/__init__.py",
}
"""A module of each layer and its file in the repository."""


class Installed(NamedTuple):
    """A wheel, the tree it was built from and a folder it is installed in."""

    tree: Path
    wheel: Path
    target: Path

    @property
    def files(self) -> set[str]:
        return set(zipfile.ZipFile(self.wheel).namelist())

    def run(self, *args: str | Path) -> str:
        """Output of Python in an empty folder, with the installed package first."""
        elsewhere = self.target.parent / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, *args],
            cwd=elsewhere,
            env=os.environ | {"PYTHONPATH": str(self.target)},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    def ask(self, program: str) -> Any:
        """What a program prints as JSON."""
        return json.loads(self.run("-c", program))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built from a copy, because a build leaves files in its tree and takes into the
    wheel what earlier builds left there."""
    base = tmp_path_factory.mktemp("wheel")
    tree, target = base / "tree", base / "target"
    for folder in PACKAGE_DIRS.values():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    for pattern in ("pyproject.toml", "README*", "LICENSE*"):
        for file in ROOT.glob(pattern):
            shutil.copy(file, tree)
    build = ["build", "--wheel", "--no-isolation", "--outdir", str(base), str(tree)]
    subprocess.run([sys.executable, "-m", *build], check=True)
    (wheel,) = base.glob("*.whl")
    install = ["pip", "install", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run(
        [sys.executable, "-m", *install, "--target", str(target), str(wheel)],
        check=True,
    )
    return Installed(tree, wheel, target)


def modules(tree: Path) -> dict[str, Path]:
    """Path below `kvplugin/` of every Python file of the layers, and the file."""
    return {
        f"{package.replace('.', '/')}/{file.relative_to(tree / folder)}": file
        for package, folder in PACKAGE_DIRS.items()
        for file in (tree / folder).rglob("*.py")
    }


# -- the list in pyproject.toml ----------------------------------------------------


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    folders = {str(Path(path).parent) for path in modules(ROOT)}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert {package.replace(".", "/") for package in listed} == folders
    assert PROJECT["tool"]["setuptools"]["package-dir"] == PACKAGE_DIRS


def test_every_listed_package_has_an_init_file() -> None:
    found = modules(ROOT)
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        assert f"{package.replace('.', '/')}/__init__.py" in found


# -- the wheel ---------------------------------------------------------------------


def test_wheel_holds_every_module_of_the_tree_and_no_other(
    installed: Installed,
) -> None:
    in_wheel = {name for name in installed.files if name.endswith(".py")}
    assert in_wheel == set(modules(installed.tree))


def test_wheel_installs_one_top_level_name(installed: Installed) -> None:
    # `kernels` is the name of a library that transformers imports.
    version = PROJECT["project"]["version"]
    tops = {name.partition("/")[0] for name in installed.files}
    assert tops == {"kvplugin", f"kvplugin-{version}.dist-info"}


def test_wheel_says_that_it_is_typed_and_under_which_licence(
    installed: Installed,
) -> None:
    assert "kvplugin/py.typed" in installed.files
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in installed.files)


@pytest.mark.parametrize("module", IMPORTS)
def test_module_is_imported_from_the_wheel(installed: Installed, module: str) -> None:
    program = f"import json, {module} as m; print(json.dumps(m.__file__))"
    assert Path(installed.ask(program)).is_relative_to(installed.target)


def test_entry_points_resolve(installed: Installed) -> None:
    program = """
import json
from importlib.metadata import distribution

points = distribution("kvplugin").entry_points
for point in points:
    point.load()
print(json.dumps([(point.group, point.name, point.value) for point in points]))
"""
    points = {(group, name): value for group, name, value in installed.ask(program)}
    assert points == {
        ("console_scripts", "kvplugin"): "kvplugin.cli.main:main",
        ("kvplugin", "vllm"): "kvplugin.integration.vllm.plugin",
        ("pytest11", "kvplugin"): "kvplugin.testing.pytest_plugin",
        ("vllm.general_plugins", "kvplugin"): "kvplugin.integration.vllm:register",
    }


def test_command_runs_and_knows_its_version(installed: Installed) -> None:
    output = installed.run(installed.target / "bin" / "kvplugin", "--version")
    assert output.split()[-1] == PROJECT["project"]["version"]


def test_metadata_names_the_extras(installed: Installed) -> None:
    program = """
import json
from importlib.metadata import metadata

print(json.dumps(metadata("kvplugin").get_all("Provides-Extra")))
"""
    extras = {"cli", "hash", "metrics", "nixl", "plot", "worker", "vllm", "dev"}
    assert extras <= set(installed.ask(program))


# -- the editable install that runs these tests ------------------------------------


@pytest.mark.parametrize("module", IMPORTS)
def test_module_under_test_is_the_one_in_the_tree(module: str) -> None:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == (ROOT / IMPORTS[module]).resolve()
