"""One question to an OpenAI server, timed to its first token."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from kvplugin.errors import KVPluginError
from kvplugin.integration.demo.model import MODEL_NAME
from kvplugin.integration.demo.processes import Program

LIMIT_S: Final = 300.0
"""For each part of an answer."""


class Answered(NamedTuple):
    """What came, and when."""

    text: str
    prompt_tokens: int
    ttft_s: float
    """From the request to the first token."""


def ask(server: Program, prompt: str, max_tokens: int) -> Answered:
    """One greedy answer to one chat message.

    Raises:
        KVPluginError: the server cannot be reached, refuses, or breaks off.
    """
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(  # noqa: S310 - a server of ours
        f"{server.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    began = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:  # noqa: S310
            return _read(server, _events(reply), began)
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode(errors="replace")
        raise KVPluginError(f"{server.name} answered {error.code}: {said}") from error
    except (OSError, http.client.HTTPException) as error:
        raise KVPluginError(
            f"{server.name} on {server.url} does not answer: {error}"
        ) from error


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The messages of a stream of server-sent events, until it says that it is done.

    Raises:
        KVPluginError: the stream ends before.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise KVPluginError("the stream of an answer broke off")


def _read(server: Program, events: Iterator[dict[str, Any]], began: float) -> Answered:
    text, prompt_tokens, first = "", 0, None
    for event in events:
        if "error" in event:
            raise KVPluginError(f"{server.name} failed: {event['error']}")
        if usage := event.get("usage"):
            prompt_tokens = usage["prompt_tokens"]
        for choice in event.get("choices", ()):
            if piece := choice["delta"].get("content"):
                first = first or time.perf_counter() - began
                text += piece
    if first is None:
        raise KVPluginError(f"{server.name} answered with no token")
    return Answered(text.strip(), prompt_tokens, first)
