"""A window is hit by the blocks at its end; what lies before them may be gone."""

from tiny import FULL, PROMPT, make_engine, rows, window

for name, layer in (("full", FULL), ("window of 8", window(8))):
    engine = make_engine(layer)
    first = engine.add_request(PROMPT[:24])
    engine.step()
    (row,) = rows(engine, first)
    engine.run()
    engine.manager.evict_blocks(row[:3])

    second = engine.add_request([*PROMPT[:24], 1, 2])
    engine.step()
    print(f"{name}: row {row}, then {row[:3]} are evicted")
    print(f"  hit {engine.answers[second].num_cached_tokens},", *rows(engine, second))
    engine.run()
