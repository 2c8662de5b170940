"""The example in docs/examples is a package that installs, works and passes its own
tests."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "eviction_policy"
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


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Without network: what it needs is here."""
    base = tmp_path_factory.mktemp("example")
    tree, target = base / "tree", base / "target"
    shutil.copytree(EXAMPLE, tree, ignore=shutil.ignore_patterns("__pycache__"))
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = ["pip", "install", *offline, "--target", str(target), str(tree)]
    subprocess.run([sys.executable, "-m", *command], check=True)
    shutil.rmtree(tree / "src")
    return Installed(tree, target)


def test_its_own_tests_pass_where_it_is_installed(example: Installed) -> None:
    result = example.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert result.returncode == 0, result.stdout


def test_it_is_listed_with_its_policy(example: Installed) -> None:
    result = example.run("-c", COMMAND, "plugins", "--json")
    rows: dict[str, Any] = {row["name"]: row for row in json.loads(result.stdout)}
    assert rows["clock"]["distribution"] == "kvplugin-clock"
    assert rows["clock"]["version"] == "1.0.0"
    assert rows["clock"]["policies"].keys() == {"clock"}


@pytest.mark.parametrize(
    ("options", "message"),
    [("{}", ""), ('{"chances": 2}', ""), ('{"chance": 2}', "takes chances, not")],
)
def test_offload_can_be_configured_with_it(
    example: Installed, options: str, message: str
) -> None:
    result = example.run(
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
