"""The worker's side of the KV cache: what block ids mean in memory (torch)."""
