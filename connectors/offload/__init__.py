"""Offload of KV blocks to host memory.

The scheduler half decides, the worker half moves bytes on each rank, `messages.py` is
all they say to each other.

- `scheduler.py` implements the contract; `loads.py` and `stores.py` are its two sides.
- What is needed: `coverage.py` (kind by kind), `boundary.py` (all groups together).
- What there is: `chunks.py` (keys and places), `capacity.py` (how much), `host_tier.py`
  (which), `holding.py` (what must stay together).
- Who is served: `requests.py`, `admissions.py`.
- What is stored of a step: `leavings.py` (what it leaves), `step_parts.py` (what is
  wanted of it), `store_room.py` (what there is room for).
- `jobs.py`: transfers under way and their deadlines.
- `worker.py`: one rank (`kvplugin.connectors.load_book` is what it has said of loads);
  `retries.py` for engines that cannot be told of failures; the rest are copy engines
  and memory.
"""
