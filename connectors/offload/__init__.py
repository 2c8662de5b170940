"""Offload of KV blocks to host memory.

`scheduler.py` decides (what is stored, what is loaded, what is evicted), `worker.py`
moves bytes on each rank, `messages.py` is all they say to each other.
"""
