"""NHD and HND are other bytes: moved as they are they are wrong, converted right."""

from tiny import FULL, PROMPT, make_engine

from kvplugin.integration.reference import Answer, ReferenceEngine
from kvplugin.kernels.dispatch import block_converter
from kvplugin.layout import plan_conversion
from kvplugin.worker.describe import kv_layout
from kvplugin.worker.tensors import KVTensors


def serve(engine: ReferenceEngine) -> Answer:
    return engine.generate([PROMPT[:30]])[0]


def tensors(engine: ReferenceEngine) -> KVTensors:
    return engine.ranks.runners[0].tensors


def copy_as_it_is(source: KVTensors, target: KVTensors) -> None:
    for mine, theirs in zip(source.buffers, target.buffers, strict=True):
        theirs.copy_(mine)


def convert(source: KVTensors, target: KVTensors) -> None:
    for name, mine in source.layers.items():
        theirs = target.layers[name]
        plan = plan_conversion(kv_layout(mine), kv_layout(theirs))
        places = mine.tensors[0].data_ptr(), theirs.tensors[0].data_ptr()
        blocks = range(mine.num_blocks)
        block_converter(plan, *places).convert(blocks, blocks)


producer = make_engine(FULL, FULL, layout="NHD")
expected = serve(producer)
for move in (copy_as_it_is, convert):
    consumer = make_engine(FULL, FULL, layout="HND")
    serve(consumer)  # its blocks have keys now; others' bytes come into them
    move(tensors(producer), tensors(consumer))
    answer = serve(consumer)
    right = all(answer.logits[i].allclose(expected.logits[i]) for i in answer.logits)
    print(f"{move.__name__}: hit {answer.num_cached_tokens}, right: {right}")
for engine in (producer, consumer):
    print(engine.plan.layout, tensors(engine).layers["layers.0"].tensors[0].stride())
