"""Offload policies; `kvp_make_offload_policy` is how one is chosen by its name."""

from kvplugin.policies.offload.admit_all import AdmitAll
from kvplugin.policies.offload.base import OffloadContext, OffloadPolicy

__all__ = ["AdmitAll", "OffloadContext", "OffloadPolicy"]
