"""What exists is documented, and what is documented exists."""

import re
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.metrics import METRICS as NIXL_METRICS
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.connectors.offload.metrics import METRICS as OFFLOAD_METRICS
from kvplugin.hashing import make_key
from kvplugin.hooks import (
    BlockPoolContext,
    EvictionPolicyContext,
    Hooks,
    HookSpecs,
    registered_commands,
)
from kvplugin.integration.vllm.policy_config import PolicyConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SECTION = re.MULTILINE | re.DOTALL


def headings(page: str) -> set[str]:
    """Names in backticks that open a third-level heading."""
    text = (DOCS / page).read_text()
    return set(re.findall(r"^### `([\w ]+?)(?: [A-Z:=. ]+)?`$", text, re.MULTILINE))


def environment_variables() -> set[str]:
    """Names of ours that the code reads."""
    sources = [
        path
        for folder in ("kvplugin", "kernels", "connectors", "integration")
        for path in (ROOT / folder).rglob("*.py")
    ]
    return {
        name
        for path in sources
        for name in re.findall(r'"(KVPLUGIN_[A-Z_]+)"', path.read_text())
    }


def test_every_key_and_variable_is_documented():
    keys = {
        field.name
        for kind in (OffloadConfig, NixlConfig, PolicyConfig)
        for field in msgspec.structs.fields(kind)
    }
    assert headings("configuration.md") == keys | environment_variables()


def test_every_hook_is_documented():
    specs = {name for name in vars(HookSpecs) if name.startswith("kvp_")}
    assert headings("hooks.md") == specs


@pytest.fixture(scope="module")
def hook_examples():
    """The example of each hook, as a plugin."""
    text = (DOCS / "hooks.md").read_text()
    plugins = {}
    for name, body in re.findall(r"^### `(kvp_\w+)`\n(.*?)(?=^### |\Z)", text, SECTION):
        (source,) = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
        plugins[name] = ModuleType(f"example of {name}")
        exec(source, vars(plugins[name]))  # noqa: S102
    return plugins


def test_every_hook_has_an_example_that_registers(hook_examples):
    for name, plugin in hook_examples.items():
        example = Hooks.of(plugin).plugins[-1]
        assert (example.name, example.hooks) == (plugin.__name__, (name,))
    assert hook_examples.keys() == headings("hooks.md")


def test_the_examples_of_policy_and_pool_work_together(hook_examples):
    hooks = Hooks.of(
        hook_examples["kvp_make_eviction_policy"], hook_examples["kvp_make_block_pool"]
    )
    policy = hooks.make_eviction_policy(
        EvictionPolicyContext(name="newest", num_blocks=4)
    )
    pool = hooks.make_block_pool(BlockPoolContext(num_blocks=4, policy=policy))
    for name in (b"a", b"b", b"c"):
        (block,) = pool.get_new_blocks(1)
        pool.insert([block], [make_key(name * 32, 0)])
        pool.free_blocks([block])
    assert pool.get_new_blocks(2) == [3, 2]
    pool.check()
    assert pool.allocations == 4


def test_every_command_is_documented():
    names = set()
    for command in registered_commands():
        children = getattr(command, "commands", {})
        names |= {f"kvplugin {command.name} {child}" for child in children}
        names |= set() if children else {f"kvplugin {command.name}"}
    assert headings("commands.md") == names


@pytest.mark.parametrize(
    ("prefix", "metrics"),
    [
        ("vllm:kvplugin_offload_", OFFLOAD_METRICS),
        ("vllm:kvplugin_nixl_", NIXL_METRICS),
    ],
)
def test_every_metric_is_documented_with_its_kind_and_meaning(prefix, metrics):
    text = (DOCS / "metrics.md").read_text()
    (section,) = re.findall(rf"^## `{prefix}`\n(.*?)(?=^## |\Z)", text, SECTION)
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", section, re.MULTILINE)
    assert rows == [(metric.name, metric.kind, metric.help) for metric in metrics]


PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@each_page
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@each_page
def test_no_placeholder_is_left(page):
    assert re.findall(r"@[A-Z]+@|TODO|XXX", page.read_text()) == []


def test_examples_in_python_compile():
    for page in DOCS.glob("*.md"):
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            compile(code, page.name, "exec")
