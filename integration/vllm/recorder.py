"""Writes what a running vLLM serves, for `kvplugin replay`."""

import fcntl
import logging
from pathlib import Path
from typing import IO, Any

from kvplugin.errors import ConfigError
from kvplugin.policies.eviction import context_of
from kvplugin.replay.record import TraceWriter

logger = logging.getLogger("vllm.kvplugin.recorder")


class Recorder:
    """One line for each request that ends, aborted ones included.

    A file that cannot be written any more ends the record, not the engine; a request
    that makes no line (a client wrote nonsense) has none.

    Args:
        path: the file, which is replaced.
        block_size: tokens that a hash of a request covers.
        groups: kinds of the KV cache groups.

    Raises:
        ConfigError: the file cannot be written, or another engine writes it.
    """

    def __init__(self, path: str, block_size: int, groups: list[str]) -> None:
        self._path = path
        self._has_left_out = False
        self._live: dict[str, tuple[Any, float | None]] = {}
        """By request: vLLM 0.32's account of the prefill, which it fills in and lets
        go; and how long its blocks are worth keeping."""
        try:
            self._lock = _locked(path)
            writer = TraceWriter(path, block_size=block_size, groups=groups)
        except OSError as error:
            raise ConfigError(f"record_trace={path!r}: {error}") from error
        self._writer: TraceWriter | None = writer

    def arrives(self, request: Any, now: float) -> None:
        """A request was added, whose hints are read.

        Args:
            request: vLLM's.
            now: seconds, of the clock of `BlockContext.expires_at`.
        """
        expires_at = context_of(request).expires_at
        ttl = None if expires_at is None else expires_at - now
        self._live[request.request_id] = getattr(request, "prefill_stats", None), ttl

    def ends(self, request: Any) -> None:
        """A request has ended; its tokens are known."""
        prefill, ttl = self._live.pop(request.request_id, (None, None))
        if self._writer is None:
            return
        context = context_of(request)
        try:
            self._writer.write(
                timestamp=request.arrival_time,
                input_length=request.num_prompt_tokens,
                output_length=request.num_output_tokens,
                block_hashes=request.block_hashes,
                session=context.session,
                turn=context.turn,
                priority=context.priority,
                ttl_s=ttl,
                ends_session=context.ends_session,
                cached_tokens=_cached_tokens(request, prefill),
            )
        except OSError:
            logger.exception("%s is not written any more", self._path)
            self.close()
        except Exception as error:
            if not self._has_left_out:
                self._has_left_out = True
                logger.warning(
                    "request %s is not in %s, nor will others be with such a mistake: "
                    "%.200s",
                    request.request_id,
                    self._path,
                    error,
                )

    def close(self) -> None:
        """The record ends."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._lock.close()


def _locked(path: str) -> IO[bytes]:
    """The file, which no other engine writes as long as this is open.

    Raises:
        OSError: it cannot be written, or another engine writes it.
    """
    file = Path(path).open("ab")  # noqa: SIM115  # open as long as the record
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise OSError("another engine writes this file: name one for each") from None
    return file


def _cached_tokens(request: Any, prefill: Any) -> int | None:
    """Tokens of the prompt that were not computed; None if it never ran."""
    if prefill is not None:
        cached = prefill.num_cached_tokens if prefill.num_prompt_tokens else -1
    else:
        cached = getattr(request, "num_cached_tokens", -1)  # vLLM 0.19
    # After a preemption some of the answer may have been found again.
    return min(int(cached), request.num_prompt_tokens) if cached >= 0 else None
