"""A position leads to an index of the row, the row to a block, and only then to KV."""

from tiny import FULL, PROMPT, make_engine, rows

from kvplugin.integration.reference import SamplingParams

engine = make_engine(FULL)
params = SamplingParams(max_tokens=8)
other = engine.add_request(PROMPT[50:57], params)
mine = engine.add_request(PROMPT[:5], params)
for _ in range(6):
    engine.step()
(row,), (of_other,) = rows(engine, mine), rows(engine, other)
print(f"my row: {row}, the other request's: {of_other}")

metadata = engine.ranks.metadata
position = metadata.batch.positions.tolist()[1]
index, offset = divmod(position, 4)
print(f"position {position}: index {index}, block {row[index]}, offset {offset}")
slot = metadata.groups[0].slots.tolist()[1]
print(f"slot {row[index] * 4 + offset}, and the worker says {slot}")
print(f"block {index}, as the index would have it, is mine: {index in row}")
