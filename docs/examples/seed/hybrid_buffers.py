"""10 full and 20 window layers: three groups, ten buffers, one pool of block ids."""

from tiny import FULL, PROMPT, make_engine, rows, window

from kvplugin.integration.reference import SamplingParams

engine = make_engine(*[FULL, window(5), window(5)] * 10)
(runner,) = engine.ranks.runners
for number, group in enumerate(runner.config.kv_cache_groups):
    first, *_, last = group.layer_names
    kind = type(group.kv_cache_spec).__name__
    print(f"group {number}: {len(group.layer_names)} x {kind}, {first} to {last}")
buffers = runner.config.kv_cache_tensors
print(len(buffers), "buffers; the first is shared by", *buffers[0].shared_by)

request = engine.add_request(PROMPT[:26], SamplingParams(max_tokens=4))
for _ in range(3):
    engine.step()
for number, row in enumerate(rows(engine, request)):
    print(f"group {number}:", row)

caches = [runner.tensors.layers[name] for name in buffers[0].shared_by]
print("one address:", len({cache.tensors[0].data_ptr() for cache in caches}) == 1)
ids = [{*row} - {0} for row in rows(engine, request)]
print("an id is in one row only:", not (ids[0] & ids[1] or (ids[0] | ids[1]) & ids[2]))
