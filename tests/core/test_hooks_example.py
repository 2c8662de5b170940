"""The plugins in docs/examples are packages that install, work and pass their own
tests."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
COMMAND = "from kvplugin.cli.main import main; main()"


class Installed(NamedTuple):
    """The example, copied and installed into a folder of its own."""

    tree: Path
    target: Path

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *args],
            cwd=self.tree,
            env=os.environ | {"PYTHONPATH": str(self.target)},
            capture_output=True,
            text=True,
        )


def install(name: str, base: Path) -> Installed:
    """Without network: what it needs is here."""
    tree, target = base / "tree", base / "target"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(EXAMPLES / name, tree, ignore=ignored)
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = ["pip", "install", *offline, "--target", str(target), str(tree)]
    subprocess.run([sys.executable, "-m", *command], check=True)
    shutil.rmtree(tree / "src")
    return Installed(tree, target)


@pytest.fixture(scope="module")
def eviction(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install("eviction_policy", tmp_path_factory.mktemp("eviction"))


@pytest.fixture(scope="module")
def scheduling(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install("scheduling_policy", tmp_path_factory.mktemp("scheduling"))


@pytest.mark.parametrize("name", ["eviction", "scheduling"])
def test_its_own_tests_pass_where_it_is_installed(
    name: str, request: pytest.FixtureRequest
) -> None:
    example: Installed = request.getfixturevalue(name)
    result = example.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert result.returncode == 0, result.stdout


def listed(example: Installed) -> dict[str, Any]:
    """Plugins by name."""
    result = example.run("-c", COMMAND, "plugins", "--json")
    return {row["name"]: row for row in json.loads(result.stdout)}


def test_the_eviction_policy_is_listed_with_its_name(eviction: Installed) -> None:
    rows = listed(eviction)
    assert rows["clock"]["distribution"] == "kvplugin-clock"
    assert rows["clock"]["version"] == "1.0.0"
    assert rows["clock"]["policies"].keys() == {"clock"}


def test_the_scheduling_policy_is_listed_with_its_hooks(scheduling: Installed) -> None:
    row = listed(scheduling)["fair"]
    assert (row["distribution"], row["version"]) == ("kvplugin-fair", "1.0.0")
    decisions = ("admission", "victim", "waiting_order")
    assert row["hooks"] == [f"kvp_choose_{decision}" for decision in decisions]


@pytest.mark.parametrize(
    ("options", "message"),
    [("{}", ""), ('{"chances": 2}', ""), ('{"chance": 2}', "takes chances, not")],
)
def test_offload_can_be_configured_with_it(
    eviction: Installed, options: str, message: str
) -> None:
    result = eviction.run(
        "-c",
        COMMAND,
        "config",
        "offload",
        "cpu_bytes_to_use=1GiB",
        "eviction_policy=clock",
        f"eviction_policy_options={options}",
    )
    assert message in result.stderr
    assert (result.returncode == 0) == (not message)
    if not message:
        assert '"eviction_policy": "clock"' in result.stdout
