"""The one place that knows NIXL's Python interface (written against 1.5.1).

What was seen there, with UCX on one machine, and what follows from it:

- *Posting copies.* On one machine `transfer()` does the copy itself and returns with
  ``DONE`` (4,000 x 64 KiB: 66 ms), without the GIL; over TCP it returns at once. So
  only threads of our own post.
- *Threads.* With `NIXL_THREAD_SYNC_RW` several threads post on one agent at once; the
  default, `NONE`, promises nothing.
- *An idle agent takes a core.* The thread that serves other agents polls without
  a pause, as the Python interface sets its `pthrDelay` to 0 and offers no other. With
  1 us or more it sleeps until there is something to do.
- *An active handle must not be released.* `release()` answers as if it had cancelled,
  and the bytes arrive all the same (seen with a stopped peer that went on). So must
  a remote agent not be removed below an active handle: its state can then never be
  learnt (`NIXL_ERR_NOT_FOUND`).
- *A stopped peer* is read as if nothing were, where UCX copies by the kernel; over TCP
  the state stays ``PROC`` until it goes on.
- *A dead peer* raises `nixlRemoteDisconnectError`, at the post or at a look at the
  state, some 20 ms after its death over TCP; after that for ever, also if the network
  alone was broken: removing and adding the agent again connects anew.
- *Names.* Adding metadata of another process under a known name is refused
  (`NIXL_ERR_NOT_ALLOWED`) until the old one is removed, hence an incarnation in them.
"""

import importlib
import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kvplugin.errors import ConfigError, TransferError, unknown_name

logger = logging.getLogger("vllm.kvplugin.nixl")

HOST: Final = "cpu"
_PAUSE_MICROSECONDS: Final = 1000
"""After so long at most NIXL's thread looks by itself; it is woken before."""


def agent_name(rank: int, incarnation: int) -> str:
    """Of a rank's agent, in one of its lives."""
    return f"kvplugin-{incarnation:x}-{rank}"


class Area(NamedTuple):
    """Memory to register."""

    address: int
    nbytes: int
    device: str
    """As torch names it."""


class NixlAgent:
    """NIXL's agent of this rank; all methods may be called from several threads.

    Args:
        name: unique over all processes that meet, restarted ones too.
        backends: NIXL's, as the user names them.

    Raises:
        ConfigError: NIXL is not installed, or a backend is unknown or does not start.
    """

    def __init__(self, name: str, backends: Sequence[str]) -> None:
        api = _api()
        config = api.nixl_agent_config(
            backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        )
        self._agent = api.nixl_agent(name, config)
        _let_it_sleep(api, self._agent)
        for backend in backends:
            self._start(backend)
        self.name = name

    def _start(self, backend: str) -> None:
        known = self._agent.get_plugin_list()
        if backend not in known:
            raise unknown_name("NIXL backend", backend, known, "backends")
        try:
            self._agent.create_backend(backend)
        except Exception as error:
            raise ConfigError(
                f"NIXL backend {backend!r} in backends does not start: {_said(error)}"
            ) from error

    @property
    def metadata(self) -> bytes:
        """What others need to reach the memory that is registered by now."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def close(self) -> None:
        """Let NIXL go; nothing may be called any more."""
        self._agent = None

    # -- memory --------------------------------------------------------------------

    def register(self, areas: Sequence[Area]) -> list[Any]:
        """Make memory known to NIXL, for `deregister`.

        Raises:
            TransferError: NIXL will not have it.
        """
        handles = []
        for kind in sorted({_kind(area.device)[0] for area in areas}):
            rows = [
                (area.address, area.nbytes, _kind(area.device)[1], "")
                for area in areas
                if _kind(area.device)[0] == kind
            ]
            try:
                handles.append(self._agent.register_memory(rows, kind))
            except Exception as error:
                self.deregister(handles)
                raise TransferError(
                    f"NIXL does not register {len(rows)} areas of {kind} memory: "
                    f"{_said(error)}"
                ) from error
        return handles

    def deregister(self, handles: Sequence[Any]) -> None:
        """Undo `register`."""
        for handle in handles:
            try:
                self._agent.deregister_memory(handle)
            except Exception as error:
                logger.error("NIXL does not deregister memory: %s", _said(error))

    # -- peers ---------------------------------------------------------------------

    def add_peer(self, metadata: bytes, name: str) -> None:
        """Let reads name another agent.

        Raises:
            TransferError: the metadata is not that of an agent of this name.
        """
        try:
            found = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(f"NIXL refuses agent {name}: {_said(error)}") from error
        found = found.decode(errors="replace") if isinstance(found, bytes) else found
        if found != name:
            # Not removed: it may be the name of another peer, with reads under way.
            raise TransferError(f"NIXL agent {found!r} came in the place of {name!r}")

    def remove_peer(self, name: str) -> None:
        """Forget another agent; no read of it may be active."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            logger.warning("NIXL does not remove agent %s: %s", name, _said(error))

    # -- reads ---------------------------------------------------------------------

    def post(
        self,
        peer: str,
        remote: "np.ndarray[Any, Any]",
        local: "np.ndarray[Any, Any]",
        nbytes: "np.ndarray[Any, Any]",
        devices: tuple[str, str],
    ) -> "Posted":
        """Start reading nbytes[i] bytes from the peer's address remote[i] to
        local[i]; copies now where the bytes are on this machine.

        Args:
            peer: its agent's name.
            remote: int64 addresses.
            local: as many.
            nbytes: as many.
            devices: where they are, the peer's first.

        Raises:
            TransferError: it did not start; nothing is written from now on.
        """
        (remote_kind, remote_index), (local_kind, local_index) = map(_kind, devices)
        handle = None
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(
                    _rows(local, nbytes, local_index), local_kind
                ),
                self._agent.get_xfer_descs(
                    _rows(remote, nbytes, remote_index), remote_kind
                ),
                peer,
            )
            state = self._agent.transfer(handle)
        except Exception as error:
            if handle is not None:
                self.release(handle)
            raise TransferError(f"NIXL: {_said(error)}", retryable=True) from error
        return Posted(self, handle, state)

    def state_of(self, handle: Any) -> str:
        """``DONE``, ``PROC`` or why it failed."""
        try:
            state: str = self._agent.check_xfer_state(handle)
        except Exception as error:
            return _said(error)
        return state

    def release(self, handle: Any) -> None:
        """Of a transfer that has ended."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            logger.error("NIXL does not release a transfer: %s", _said(error))


class Posted:
    """A posted transfer; its handle is released when it has ended, never before."""

    def __init__(self, agent: NixlAgent, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state
        self._settle()

    @property
    def is_active(self) -> bool:
        """NIXL may still write."""
        return self._handle is not None

    @property
    def has_failed(self) -> bool:
        """It has ended otherwise than it should."""
        return self._state not in ("DONE", "PROC")

    def poll(self) -> bool:
        """Whether all bytes are there.

        Raises:
            TransferError: the transfer has failed; it writes nothing any more.
        """
        if self._state == "PROC":
            self._state = self._agent.state_of(self._handle)
            self._settle()
        if self.has_failed:
            raise TransferError(f"NIXL: {self._state}", retryable=True)
        return self._state == "DONE"

    def _settle(self) -> None:
        if self._state != "PROC" and self._handle is not None:
            handle, self._handle = self._handle, None
            self._agent.release(handle)


def _rows(
    addresses: "np.ndarray[Any, Any]", nbytes: "np.ndarray[Any, Any]", device: int
) -> "np.ndarray[Any, Any]":
    rows = np.empty((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device
    return rows


def _kind(device: str) -> tuple[str, int]:
    """NIXL's kind of memory, and the device's number."""
    name, _, index = device.partition(":")
    return ("DRAM", 0) if name == HOST else ("VRAM", int(index or 0))


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def _let_it_sleep(api: Any, agent: Any) -> None:
    """Give an agent that has no backend yet, and so no thread, one that sleeps."""
    try:
        config = api.nixlBind.nixlAgentConfig()
        config.useProgThread = True
        config.syncMode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW.value
        config.pthrDelay = _PAUSE_MICROSECONDS
        agent.agent = api.nixlBind.nixlAgent(agent.name, config)
    except (AttributeError, TypeError) as error:
        logger.warning(
            "this NIXL is not as expected (%s): its idle thread takes a core",
            _said(error),
        )


def _api() -> Any:
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            f"the NIXL connector needs NIXL, which can't be imported ({error}): "
            "pip install 'kvplugin[nixl]'"
        ) from error
