"""What the pages about P/D say is so."""

import json
import re
import shlex
from itertools import chain
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvplugin.cli.main import cli
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.metrics import METRICS
from kvplugin.connectors.offload.config import OffloadConfig
from kvplugin.plan import CacheOptions, layers_of, load_model
from kvplugin.settings import read_settings

ROOT = Path(__file__).parents[2]
PD = (ROOT / "docs" / "pd.md").read_text()
DEPLOYMENT = (ROOT / "docs" / "pd-deployment.md").read_text()
README = (ROOT / "README.md").read_text()
PREFIX = "vllm:kvplugin_nixl_"


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table under a heading, its own first two lines left out."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_every_metric_has_its_place_in_what_to_look_at() -> None:
    table = " ".join(chain(*rows(DEPLOYMENT, "When it is slow")))
    named = set(re.findall(r"`([a-z_]+)`", table))
    ours = {metric.name for metric in METRICS}
    assert ours - named <= {"read_tokens", "read_bytes"}  # in "How much network"
    keys = set(NixlConfig.__struct_fields__)
    assert named <= ours | keys | {"kv_role"}


@pytest.mark.parametrize(
    ("model", "name"), [("qwen3-8b", "Qwen3-8B"), ("llama-3.1-70b", "Llama-3.1-70B")]
)
def test_bytes_of_a_token_are_those_of_the_plan(model: str, name: str) -> None:
    layers = layers_of(load_model(model), CacheOptions())
    token = sum(spec.page_size_bytes / spec.block_size for spec in layers.values())
    (row,) = (
        row for row in rows(DEPLOYMENT, "How much network") if row[0].startswith(name)
    )
    assert row[1] == f"{token / 1024:.0f} KiB"
    shown, unit = row[2].split()
    scale = {"MB": 1e6, "GB": 1e9}[unit]
    assert float(shown) * scale == pytest.approx(4096 * token, rel=0.01)
    assert float(row[3].split()[0]) == pytest.approx(5 * 4096 * token / 1e9, rel=0.02)


def test_ports_are_those_of_the_files() -> None:
    table = rows(DEPLOYMENT, "Ports and who may reach them")
    listed = re.findall(r"\d{4,5}", " ".join(row[0] for row in table))
    deploy = ROOT / "integration" / "deploy"
    for file in ("compose.yaml", "kubernetes.yaml"):
        text = (deploy / file).read_text()
        used = set(re.findall(r"(?:[pP]ort\"?[=:] ?|--port=)(\d{4,5})", text))
        used |= set(re.findall(r"\d{5}-\d{5}", text)[0].split("-"))
        assert used <= set(listed), file


def test_the_offload_example_is_a_configuration_of_both() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PD, re.S)
    config = json.loads(example)
    kinds = {
        "KVPluginNixlConnector": NixlConfig,
        "KVPluginOffloadConnector": OffloadConfig,
    }
    for one in config["kv_connector_extra_config"]["connectors"]:
        settings = one["kv_connector_extra_config"]
        read_settings(kinds[one["kv_connector"]], settings, "the example")


@pytest.mark.parametrize("text", [PD, README], ids=["pd.md", "README.md"])
def test_the_commands_render_a_configuration(text: str) -> None:
    commands = re.findall(r"\$\(kvplugin (config nixl [^)]*)\)", text)
    roles = set()
    for command in commands:
        done = CliRunner().invoke(cli, shlex.split(command))
        assert done.exit_code == 0, done.output
        roles.add(json.loads(done.output)["kv_role"])
    assert roles == {"kv_producer", "kv_consumer"}


def test_engines_of_one_machine_get_side_channels_of_their_own() -> None:
    for text in (PD, README):
        (block,) = (
            block
            for block in re.findall(r"```console\n(.*?)```", text, re.S)
            if "config nixl" in block
        )
        engines = [part for part in block.split("$ ") if "vllm serve" in part]
        named = [re.findall(r"side_channel_port=(\d+)|_PORT=(\d+)", e) for e in engines]
        ports = ["".join(one[0]) if one else "5600" for one in named]
        assert len(set(ports)) == 2


def test_make_pd_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^pd: .*\n\t.*demo pd \$\(ARGS\)$", makefile, re.M)
    assert "make pd " in makefile
    compose = yaml.safe_load((ROOT / "integration/deploy/compose.yaml").read_text())
    assert set(compose["services"]) == {"prefill", "decode", "router"}
