"""80 tokens and three more, in blocks of 16: from the first block to eviction."""

from tiny import FULL, PROMPT, make_engine, rows

from kvplugin.integration.reference import SamplingParams

engine = make_engine(FULL, FULL, block_size=16, num_blocks=10, max_model_len=144)
pool = engine.manager.block_pool
request = engine.add_request(PROMPT[:80], SamplingParams(max_tokens=3))
for _ in range(2):
    engine.step()
    slots = engine.ranks.metadata.groups[0].slots.tolist()
    print(f"computed {len(slots)}, last slot {slots[-1]}:", *rows(engine, request))
engine.step()
slot = engine.ranks.metadata.groups[0].slots.tolist()[-1]
print(f"computed 1, slot {slot} = block {slot // 16}, offset {slot % 16}")

engine.run()
answer = engine.answers[request]
print(f"ended ({answer.finish_reason}) after {len(answer.token_ids)} tokens,", end=" ")
print(f"{pool.get_num_free_blocks()} of {pool.num_usable_blocks} blocks free")


def hit(prompt: list[int]) -> int:
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=1))
    return answer.num_cached_tokens


print("the same prompt hits", hit(PROMPT[:80]), "- its last token gives the logits")
print("with one token more,", hit([*PROMPT[:80], 1]))
print("a prompt that needs every block hits", hit(PROMPT[1:144]))
print("and the first one again", hit(PROMPT[:80]))
