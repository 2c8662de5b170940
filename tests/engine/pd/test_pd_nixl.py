"""Two engines that read each other over NIXL itself, as from another machine, and the
turns of a conversation between them."""

import pytest

from tests.engine import asking
from tests.engine.asking import assert_close
from tests.engine.host import EngineHost
from tests.engine.pd import faults, handing
from tests.engine.pd.hosts import Engines, counted, ours
from tests.engine.prompts import tokens

NOISE = 0.02


@pytest.fixture(scope="module")
def pair(tiny_engines: Engines) -> list[EngineHost]:
    return tiny_engines.start_all(
        *(
            {
                "config": ours(
                    "both",
                    same_host="off",
                    bidirectional_kv_xfer=True,
                    kv_lease_duration=120.0,
                ),
                "block_size": size,
                "prepare": faults.reads_can_be_watched,
            }
            for size in (64, 128)
        )
    )


@pytest.mark.parametrize("back", [False, True], ids=["64 to 128", "128 to 64"])
def test_the_text_is_that_of_one_engine(pair, back):
    producer, consumer = reversed(pair) if back else pair
    prompts = [tokens(f"nixl {back} {n}", n) for n in (130, 640, 1023, 1500)]
    expected = consumer.run(asking.ask, prompts)
    assert consumer.run(asking.reset_within_a_second)
    before = counted(consumer, "reads")
    params = producer.run(handing.prefill, prompts)
    answers = consumer.run(handing.decode, prompts, params)
    for answer, other in zip(answers, expected, strict=True):
        assert_close(other, answer, NOISE)
    assert counted(consumer, "reads") == before + len(prompts)
    assert "rank 0: NIXL (same_host is off)" in consumer.log.read_text()
    assert "process to process" not in consumer.log.read_text()
    _end(*pair)


def test_wrong_bytes_would_have_been_noticed(pair):
    producer, consumer = pair
    prompt = tokens("nixl zero", 640)
    expected = consumer.run(asking.ask_one, prompt)
    assert consumer.run(asking.reset_within_a_second)
    params = producer.run(handing.prefill, [prompt])
    consumer.run(faults.zero_group, 0)
    (answer,) = consumer.run(handing.decode, [prompt], params)
    consumer.run(faults.zero_group, None)
    with pytest.raises(AssertionError):
        assert_close(expected, answer, NOISE)
    _end(*pair)
    assert consumer.run(asking.reset_within_a_second)


@pytest.mark.parametrize("back", [False, True], ids=["64 to 128", "128 to 64"])
def test_the_next_turn_is_read_back_from_who_answered_the_last(pair, back):
    """The prefill engine has forgotten the first turn; the second one's prefill reads
    what the decode engine has of prompt and answer, and hands over again."""
    prefill, decode = reversed(pair) if back else pair
    prompt = tokens(f"turns {back}", 700)
    (params,) = prefill.run(handing.prefill, [prompt])
    ((answer, told),) = decode.run(handing.ask_with, [prompt], [params], 80)
    assert told is not None
    assert told["do_remote_decode"]
    _end(prefill)
    assert prefill.run(asking.reset_within_a_second)

    longer = [*prompt, *answer.tokens, *tokens(f"turns more {back}", 60)]
    before = counted(prefill, "read_tokens")
    ((_, handed),) = prefill.run(handing.ask_with, [longer], [told], 1)
    assert counted(prefill, "read_tokens") - before == 700 + 80 - 1
    assert handed is not None
    reads = counted(decode, "reads")
    (again,) = decode.run(handing.decode, [longer], [handed])
    assert counted(decode, "reads") == reads + 1

    _end(*pair)
    for host in pair:
        assert host.run(asking.reset_within_a_second)
    assert_close(decode.run(asking.ask_one, longer), again, NOISE)
    assert decode.run(asking.reset_within_a_second)


def _end(*hosts: EngineHost) -> None:
    """Leases that nobody reads any more end; nothing else is held."""
    for host in hosts:
        host.run(handing.end_leases)
    for host in hosts:
        assert not any(host.run(handing.settle).values())
