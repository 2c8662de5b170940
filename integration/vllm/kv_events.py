"""Our KV events as vLLM's own: versions of vLLM encode them differently."""

from typing import Any

from vllm.distributed import kv_events

from kvplugin.events import KVCacheEvent


def as_vllms(event: KVCacheEvent) -> Any:
    """vLLM's event of the same name, with the fields that this version has."""
    theirs = getattr(kv_events, type(event).__name__)
    known = set(theirs.__struct_fields__) & set(event.__struct_fields__)
    return theirs(**{name: getattr(event, name) for name in known})
