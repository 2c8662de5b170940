"""vLLM's own NixlConnector at the other end: recognised, refused, never harmed.

Its client (REQ) sends MessagePack of ``[b"get_meta_msg", pp_rank, tp_rank]`` (vLLM
0.32) or ``[b"get_meta_msg", tp_rank]`` (0.19.1), and expects a map with a hash that
must equal its own, and in 0.32 a second frame with the server's clock. It shows the
hash that it got in the error which ends its handshake, so ours is a sentence.

Its server (ROUTER) unpacks exactly that many fields, and its thread ends at the first
message that has another number. No message suits both, so ours has as many as suit the
vLLM that is installed here: engines that exchange KV run one version. That listener
survives it, logs our name and answers. The other one ends, and is named by us all the
same, for it has not said that it is one of ours (`zmtp`).
"""

import time
from typing import Any, Final

import msgpack

from kvplugin.connectors.nixl.version import VERSION, VLLM_VERSION
from kvplugin.errors import IntegrityError
from kvplugin.wire import unpack

OURS: Final = f"KVPluginNixlConnector (kvplugin {VERSION})"
FIELDS: Final = 2 if VLLM_VERSION.startswith("0.19.") else 3
"""Of a message that the listener of the vLLM beside us survives."""
_ASKS: Final = b"get_meta_msg"
_HASH: Final = "compatibility_hash"
_AGENT: Final = "agent_metadata_bytes"
_MAX_BYTES: Final = 16 << 20
_NEW: Final = "0.32"
_OLD: Final = "0.19"


def asks(fields: Any) -> str:
    """The vLLM whose NixlConnector asks with these fields; empty: none does."""
    if not isinstance(fields, list) or not fields or fields[0] != _ASKS:
        return ""
    if not all(type(rank) is int for rank in fields[1:]):
        return ""
    return {3: _NEW, 2: _OLD}.get(len(fields), "")


def refusal(vllm: str) -> list[bytes]:
    """The frames, after the empty one, that such a client understands."""
    sentence = (
        f"none: this is {OURS}, which does not exchange KV with vLLM's NixlConnector; "
        "use the same connector on both sides"
    )
    payload: bytes = msgpack.packb({_HASH: sentence, _AGENT: b""})
    if vllm == _OLD:
        return [payload]  # it reads one frame, and a second would break its socket
    clock: bytes = msgpack.packb(time.perf_counter())
    return [payload, clock]


def answers(message: bytes) -> bool:
    """Whether it is the answer of such a server."""
    try:
        payload = unpack(message, _MAX_BYTES)
    except IntegrityError:
        return False
    return (
        isinstance(payload, dict)
        and payload.keys() == {_HASH, _AGENT}
        and isinstance(payload[_HASH], str)
        and isinstance(payload[_AGENT], bytes)
    )


def version_of_answer(frames: list[bytes]) -> str:
    """Which vLLM answers with so many frames."""
    return _NEW if len(frames) == 3 else _OLD


def asked_us(vllm: str, peer: str) -> str:
    """What the log says when such a client has asked."""
    return (
        f"vLLM's own NixlConnector (as of vLLM {vllm}) at {peer} asked for this "
        f"engine's metadata and was refused: this engine runs {OURS}. Use the same "
        "connector on both sides"
    )


def silent(address: str) -> str:
    """Why nobody is asked who does not answer, and has not said that he is of ours."""
    return (
        f"{address} is no {OURS}: perhaps vLLM's own NixlConnector as of another vLLM, "
        "or something else. Use the same connector on both sides"
    )


def answered_us(vllm: str, address: str) -> str:
    """Why no question is answered there."""
    return (
        f"vLLM's own NixlConnector (as of vLLM {vllm}) answers at {address}, and this "
        f"engine runs {OURS}: use the same connector on both sides"
    )
