"""Layers of a group share the block table, not what is in the blocks."""

from tiny import FULL, PROMPT, make_engine, rows

engine = make_engine(FULL, FULL)
(runner,) = engine.ranks.runners
request = engine.add_request(PROMPT[:10])
engine.step()
print("groups:", [group.layer_names for group in runner.config.kv_cache_groups])

step = engine.ranks.metadata
tables = [step.layers[name].block_table for name in ("layers.0", "layers.1")]
print("one table:", tables[0] is tables[1], "row", *rows(engine, request))

one, other = (runner.tensors.layers[f"layers.{i}"].tensors[0] for i in (0, 1))
block = rows(engine, request)[0][0]
print("one memory:", one.data_ptr() == other.data_ptr())
print(f"equal contents of block {block}:", one[block].equal(other[block]))
