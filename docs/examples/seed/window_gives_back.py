"""A window gives back what it has left behind; positions in the row stay."""

from tiny import PROMPT, make_engine, make_model, rows, window

from kvplugin.integration.reference import SamplingParams, dense_generate

engine = make_engine(window(4), block_size=2)
(of_window,) = engine.manager.coordinator.single_type_managers
request = engine.add_request(PROMPT[:7], SamplingParams(max_tokens=6))
engine.step()
print("7 tokens computed:", *rows(engine, request))

skipped = of_window.get_num_skipped_tokens(7)
print(f"token 7 sees {skipped}..7, nobody needs 0..{skipped - 1} again")
free = engine.manager.block_pool.get_num_free_blocks()
engine.step()
back = engine.manager.block_pool.get_num_free_blocks() - free
print("8 tokens computed:", *rows(engine, request), "blocks given back:", back)
print("as the worker sees it:", engine.ranks.runners[0].tables.tables[0].row(0)[:4])

engine.run()
expected = dense_generate(make_model(window(4)), PROMPT[:7], 6)
print("right answer:", engine.answers[request].token_ids == expected)
