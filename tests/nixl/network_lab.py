"""A prefill and a decode engine in network namespaces of their own, and a link between
them that a test takes down.

Needs root and `ip netns`. Bytes go by NIXL over TCP, as between two machines.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvplugin.connectors.nixl.config import NixlConfig, Role
from kvplugin.integration.reference import ReferenceEngine, SamplingParams
from kvplugin.integration.reference.connector import nixl
from kvplugin.integration.reference.orders import News
from kvplugin.integration.reference.process import EngineProcess
from tests.reference.bench import tokens
from tests.reference.models import settings
from tests.reference.pd import HANDS_OVER, PATIENCE
from tests.reference.test_pd_processes import alone, model_of

TIMES = {
    "handshake_timeout_s": 2.0,
    "transfer_timeout_s": 3.0,
    "kv_lease_duration": 4.0,
    "dead_peer_ttl_s": 1.0,
}
LENGTH = 90
"""Of prompts."""
_BLOCKS = {"block_size": 8}
_PORT = 5600
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_REC, _MS_SLAVE = 0x4000, 1 << 19
_MNT_DETACH = 2


def ip(*words: str, namespace: str = "") -> None:
    """Run `ip`, in a namespace if one is named."""
    command = ["ip", *(["-n", namespace] if namespace else []), *words]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


class Net:
    """Two namespaces, and a pair of devices between them, each of its namespace's name.

    Raises:
        OSError: this cannot be had here; says why.
    """

    def __init__(self) -> None:
        tag = f"kv{os.getpid() % 10**8}"
        self.ends = {f"{tag}p": "10.213.7.1", f"{tag}d": "10.213.7.2"}
        self.p, self.d = self.ends
        if os.geteuid():
            raise OSError("network namespaces need root")
        if shutil.which("ip") is None:
            raise OSError("there is no `ip`: install iproute2")
        try:
            self._set_up()
        except subprocess.SubprocessError as error:
            self.close()
            said = getattr(error, "stderr", "") or str(error)
            raise OSError(f"`ip netns` does not work: {said.strip()}") from None

    def _set_up(self) -> None:
        for end in self.ends:
            ip("netns", "add", end)
        self._connect()
        for end, address in self.ends.items():
            ip("link", "set", "lo", "up", namespace=end)
            self.address("add", end, address)
            self.link("up", end)

    def _connect(self) -> None:
        """A cable, its ends in the namespaces."""
        pair = ("type", "veth", "peer", "name", self.d, "netns", self.d)
        ip("link", "add", self.p, "netns", self.p, *pair)

    def link(self, state: str, end: str = "") -> None:
        """Plug a cable in ("up"), or out."""
        end = end or self.p
        ip("link", "set", end, state, namespace=end)

    def mtu(self, size: int, end: str) -> None:
        ip("link", "set", end, "mtu", str(size), namespace=end)

    def address(self, what: str, end: str, address: str) -> None:
        ip("addr", what, f"{address}/24", "dev", end, namespace=end)

    def close(self) -> None:
        """Both are gone, and the devices with them."""
        for end in self.ends:
            command = ["ip", "netns", "del", end]
            subprocess.run(command, check=False, capture_output=True, timeout=30)


def enter(namespace: str) -> None:
    """Put this thread, and those that it starts, into a namespace.

    As `ip netns exec`: UCX finds network devices in /sys, which shows those of the
    namespace that it was mounted in.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    with open(f"/run/netns/{namespace}") as there:
        checked(libc.setns(there.fileno(), _CLONE_NEWNET))
    checked(libc.unshare(_CLONE_NEWNS))
    flags = ctypes.c_ulong(_MS_REC | _MS_SLAVE)
    checked(libc.mount(b"", b"/", b"none", flags, None))
    libc.umount2(b"/sys", _MNT_DETACH)
    checked(libc.mount(b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None))


def make(namespace: str, address: str, role: str, gates: str) -> ReferenceEngine:
    """In the process: the namespace first, before any socket."""
    enter(namespace)
    os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES=namespace)
    _gate_posts(Path(gates))
    config = NixlConfig(
        side_channel_host=address,
        side_channel_port=_PORT,
        secret="s" * 32,
        same_host="off",
        **TIMES,  # type: ignore[arg-type]
    )
    return ReferenceEngine(
        model_of("full"),
        settings(engine_id=role, max_model_len=128, **_BLOCKS),
        nixl(config, Role(role)),
    )


def _gate_posts(gates: Path) -> None:
    """While there is a file `hold`, reads stand before their first byte until there is
    `go`, and say that they do."""
    from kvplugin.connectors.nixl.nixl_reader import NixlReader

    post = NixlReader.post

    def gated(self: NixlReader, *args: Any) -> Any:
        if not (gates / "hold").exists():
            return post(self, *args)
        (gates / "about").touch()
        late = time.monotonic() + PATIENCE
        while not (gates / "go").exists() and time.monotonic() < late:
            time.sleep(0.01)
        found = post(self, *args)
        (gates / "posted").touch()
        return found

    NixlReader.post = gated  # type: ignore[method-assign]


class Request:
    """What the decode engine has said of one."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_done = False


class World:
    """Both engines.

    Args:
        net: that they are in.
        gates: a folder for `_gate_posts`.
    """

    def __init__(self, net: Net, gates: Path) -> None:
        self.net = net
        self.gates = gates
        self._requests: dict[str, Request] = {}
        self._counters: dict[str, float] = {}
        self._seed = 0
        self.p = self._start(net.p, "producer")
        self.d = self._start(net.d, "consumer")

    def _start(self, end: str, role: str) -> EngineProcess:
        return EngineProcess(make, end, self.net.ends[end], role, str(self.gates))

    def ready(self) -> None:
        self.p.ready()
        self.d.ready()

    # -- requests ------------------------------------------------------------------

    def prefill(self) -> tuple[list[int], Any]:
        """A prompt of its own, and what the producer tells of it."""
        self._seed += 1
        prompt = tokens(LENGTH, seed=self._seed)
        sampling = SamplingParams(max_tokens=1)
        id_ = self.p.add_request(prompt, sampling, kv_transfer_params=HANDS_OVER)
        (served,) = self.p.finish([id_])
        return prompt, served.kv_transfer_params

    def decode(self, prompt: Sequence[int], params: Any) -> str:
        sampling = SamplingParams(max_tokens=6)
        id_ = self.d.add_request(prompt, sampling, kv_transfer_params=params)
        self._requests[id_] = Request()
        return id_

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Step the consumer until something has come about."""
        late = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < late, f"still waiting for {what}"
            self._hear(self.d.step(5))
            time.sleep(0.005)

    def _hear(self, news: News) -> None:
        for heard in news.heard:
            request = self._requests[heard.req_id]
            request.token_ids += heard.new_token_ids
            request.is_done |= bool(heard.finish_reason)

    def ends_right(self, id_: str, prompt: Sequence[int]) -> None:
        """In time, with the text of an engine that does everything itself."""
        request = self._requests[id_]
        self.until(lambda: request.is_done, f"{id_}'s end")
        assert request.token_ids == alone("full", prompt, _BLOCKS).token_ids

    def is_served(self) -> None:
        """A request is read, and answered right; nothing is left of it."""
        before = self.count("reads")
        prompt, params = self.prefill()
        self.ends_right(self.decode(prompt, params), prompt)
        self.is_empty()
        assert self.count("reads") == before + 1

    def recovers(self) -> None:
        """Reads go on once the peer is asked again."""
        time.sleep(TIMES["dead_peer_ttl_s"] + 0.2)
        self.is_served()

    # -- reads that are stopped ----------------------------------------------------

    def held(self) -> tuple[str, list[int]]:
        """A request whose read is granted and stands before its first byte."""
        for gate in ("go", "about", "posted"):
            (self.gates / gate).unlink(missing_ok=True)
        (self.gates / "hold").touch()
        prompt, params = self.prefill()
        id_ = self.decode(prompt, params)
        self.until((self.gates / "about").exists, "the read's begin")
        return id_, prompt

    def let_go(self) -> None:
        """It reads, and later ones at once."""
        (self.gates / "hold").unlink()
        (self.gates / "go").touch()

    def half_read(self) -> tuple[str, list[int]]:
        """One whose read is posted and unanswered: the producer stands still, until
        `go_on`."""
        id_, prompt = self.held()
        self._signal(signal.SIGSTOP)
        self.let_go()
        self.until((self.gates / "posted").exists, "the post")
        return id_, prompt

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, what: signal.Signals) -> None:
        assert self.p.pid is not None
        os.kill(self.p.pid, what)

    # -- accounts ------------------------------------------------------------------

    def used(self, process: EngineProcess) -> int:
        """Blocks that are not free."""
        stats = process.stats()
        for name, value in stats.connector.items():
            self._counters[name] = self._counters.get(name, 0) + value
        return stats.num_usable_blocks - stats.num_free_blocks

    def count(self, name: str) -> float:
        """Of a counter, from the start on."""
        self.used(self.d)
        return self._counters.get(name, 0)

    def is_empty(self) -> None:
        """Both pools become whole. Somebody's short requests keep the consumer
        stepping: an engine does not ask to be stepped for overdue reads."""
        late = time.monotonic() + PATIENCE
        while self.used(self.p) or self.used(self.d):
            assert time.monotonic() < late, "blocks do not come back"
            self.p.step(5)
            id_ = self.decode([1, 2, 3], None)
            request = self._requests[id_]
            self.until(lambda request=request: request.is_done, "a short request")  # type: ignore[misc]

    def close(self) -> None:
        if self.p.is_alive:
            self.go_on()
        self.d.close()
        self.p.close()


@contextmanager
def world_in(net: Net, gates: Path) -> Iterator[World]:
    """Both engines, of which the one has read from the other."""
    world = World(net, gates)
    try:
        world.ready()
        world.is_served()
        yield world
    finally:
        world.close()
