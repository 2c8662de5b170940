"""Prefill/decode disaggregation beside vLLM's own NixlConnector.

Both pairs of engines are there at the same time in processes of their own and are asked
in turn, the other one stopped, so that a slow spell of the machine hits both alike.
Ratios are ours over theirs, taken within a turn.
"""

import json
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from benchmarks import _pd_work as work
from benchmarks._pd_engines import Model, Pair, find_model, pairs
from benchmarks._ratios import LEAST_PAIRS, Interval, paired_ratios
from tests.engine.prompts import tokens

PROMPTS: Final = 2
"""Different ones, in turn."""
OTHERS: Final = 4
"""Requests that decode while others' KV arrives."""
MODELS: Final = ("llama", "smollm2")
SECTIONS: Final = ("contiguous", "fragmented", "decoding")
BLOCKED_MS: Final = 2.0
RESAMPLES: Final = 2000


class Bar(NamedTuple):
    """What a ratio should be: its median, and an end of its interval."""

    median: float
    end: float
    more_is_better: bool = False

    def met_by(self, ratio: Interval) -> bool:
        if self.more_is_better:
            return ratio.median >= self.median and ratio.low >= self.end
        return ratio.median <= self.median and ratio.high <= self.end


BARS: Final = {
    "contiguous": {
        "first token": Bar(1.05, 1.15),
        "GB/s": Bar(0.95, 0.85, more_is_better=True),
    },
    "fragmented": {"GB/s": Bar(1.5, 1.5, more_is_better=True)},
    "decoding": {"p99 gap": Bar(1.2, float("inf"))},
}


@click.command("pd")
@click.option(
    "--pairs",
    "turns",
    default=31,
    show_default=True,
    type=click.IntRange(LEAST_PAIRS),
    help="Interleaved pairs of transfers in each section.",
)
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--sections", default=",".join(SECTIONS), show_default=True)
@click.option(
    "--tokens", "count", default=4096, show_default=True, type=click.IntRange(64)
)
@click.option(
    "--block-size",
    default=32,
    show_default=True,
    help="Pages of 64 KiB (llama) and 24 KiB (smollm2) with 32.",
)
@click.option(
    "--huge-pages",
    is_flag=True,
    help="Also for vLLM's connector, which does not ask for them.",
)
@click.option(
    "--same-host",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "off"]),
    help="Ours: off reads over NIXL, as from another machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON at the end.")
@click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for what the engines print.  [default: a temporary one]",
)
def main(
    turns: int,
    models: str,
    sections: str,
    count: int,
    block_size: int,
    huge_pages: bool,
    same_host: str,
    as_json: bool,
    logs: Path | None,
) -> None:
    """KV from one engine to another: time to the first token, GB/s, gaps."""
    wanted = _parse("--sections", sections, SECTIONS)
    # Nobody else would wake the engines that are stopped, for them to end.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in _parse("--models", models, MODELS):
            model = find_model(name)
            at = (logs or Path(folder)) / name
            at.mkdir(parents=True, exist_ok=True)
            with pairs(
                model,
                tokens=count,
                prompts=PROMPTS,
                block_size=block_size,
                huge_pages=huge_pages,
                settings={"same_host": same_host},
                logs=at,
            ) as both:
                pages = "all" if huge_pages else "ours"
                click.echo(f"\n{name}: huge pages for {pages}, same_host {same_host}")
                bench = Bench(name, model, both, turns, count, block_size)
                report[name] = {section: bench.run(section) for section in wanted}
    if as_json:
        click.echo(json.dumps(report, indent=2))


def _parse(option: str, text: str, known: Sequence[str]) -> list[str]:
    wanted = text.split(",")
    if unknown := [name for name in wanted if name not in known]:
        raise click.BadParameter(
            f"{', '.join(unknown)}: there are {', '.join(known)}", param_hint=option
        )
    # Fragmentation stays: what wants blocks in order comes before it.
    return [name for name in known if name in wanted]


class Turn(NamedTuple):
    """One transfer."""

    first_token_s: float
    """From the end of the prefill to the first token of the consumer."""
    received: work.Received

    @property
    def gigabytes_per_second(self) -> float:
        return self.received.nbytes / self.received.seconds / 1e9


class Bench:
    """All sections on one model."""

    def __init__(
        self,
        name: str,
        model: Model,
        both: Mapping[str, Pair],
        turns: int,
        count: int,
        block_size: int,
    ) -> None:
        self._name = name
        self._pairs = both
        self._turns = turns
        self._page = block_size * model.layer_bytes
        self._prompts = [tokens(f"pd {name} {i}", count) for i in range(PROMPTS)]
        for pair in both.values():
            with pair.awake():
                pair.prefill.run(work.watch)
                pair.decode.run(work.watch)

    def run(self, section: str) -> dict[str, Any]:
        """Measure and print one section; its figures."""
        if section == "fragmented":
            self._fragment()
        taken: dict[str, list[Turn]] = {name: [] for name in self._pairs}
        others = OTHERS if section == "decoding" else 0

        def measure(name: str) -> Callable[[int], Mapping[str, float]]:
            def one(turn: int) -> Mapping[str, float]:
                result = self._transfer(name, turn, section, others)
                if turn:  # the first one meets the peer, and is not counted
                    taken[name].append(result)
                return {
                    "first token": result.first_token_s,
                    "GB/s": result.gigabytes_per_second,
                }

            return one

        ratios = paired_ratios(
            measure("theirs"),
            measure("ours"),
            least=self._turns,
            most=self._turns,
            narrow=0.0,
        )
        if others:
            gaps = [[one.received.gaps for one in taken[n]] for n in ("ours", "theirs")]
            ratios["p99 gap"] = percentile_ratio(*gaps, 99)
        return self._tell(section, taken, ratios)

    def _fragment(self) -> None:
        for seed, pair in enumerate(self._pairs.values()):
            with pair.awake():
                pair.prefill.run(work.fragment, seed)
                pair.decode.run(work.fragment, seed)
        self._prompts = [prompt[::-1] for prompt in self._prompts]  # not cached

    def _transfer(self, name: str, turn: int, section: str, others: int) -> Turn:
        pair = self._pairs[name]
        prompt = self._prompts[turn % PROMPTS]
        with pair.awake():
            if section == "contiguous":
                pair.decode.run(work.in_order)
            prepared = pair.decode.run(work.prepare, others)
            prefilled = pair.prefill.run(work.prefill, prompt)
            received = pair.decode.run(
                work.receive, name, prompt, prefilled.params, prepared
            )
            pair.prefill.run(work.drain)
        return Turn(received.first_token - prefilled.ended, received)

    def _tell(
        self,
        section: str,
        taken: Mapping[str, Sequence[Turn]],
        ratios: Mapping[str, Interval],
    ) -> dict[str, Any]:
        found = {name: figures(of) for name, of in taken.items()}
        page = self._page / 1024
        click.echo(f"\n{self._name}, {section}, pages of {page:.0f} KiB, medians")
        for key in found["ours"]:
            values = ", ".join(f"{name} {found[name][key]:.3g}" for name in found)
            click.echo(f"  {key}: {values}")
        for what, ratio in ratios.items():
            click.echo(f"  {sentence(what, ratio, BARS[section].get(what))}")
        blocked = found["ours"]["posting p99 ms"]
        met = "met" if blocked <= BLOCKED_MS else "missed"
        click.echo(f"  posting p99 {blocked:.2f} ms, bar {BLOCKED_MS} ms {met}")
        return {
            "engines": found,
            "ratios": {what: ratio._asdict() for what, ratio in ratios.items()},
        }


def figures(turns: Sequence[Turn]) -> dict[str, float]:
    """What the transfers of one connector were like."""
    received = [turn.received for turn in turns]
    posting = [one.longest["posting"] * 1e3 for one in received]
    polling = [one.longest["polling"] * 1e3 for one in received]
    gaps = [gap * 1e3 for one in received for gap in one.gaps]
    found = {
        "first token ms": statistics.median(turn.first_token_s for turn in turns) * 1e3,
        "GB/s": statistics.median(turn.gigabytes_per_second for turn in turns),
        "MB": statistics.median(one.nbytes for one in received) / 1e6,
        "runs of blocks": statistics.median(one.runs for one in received),
        "posting p99 ms": percentile(posting, 99),
        "polling p99 ms": percentile(polling, 99),
    }
    if gaps:
        found |= {"gap ms": statistics.median(gaps), "gap p99 ms": percentile(gaps, 99)}
    return found


def sentence(what: str, ratio: Interval, bar: Bar | None) -> str:
    """A line about a ratio of ours to theirs."""
    line = (
        f"{what}, ours / theirs: {ratio.median:.3f} "
        f"(95 %: {ratio.low:.3f} to {ratio.high:.3f}, {ratio.pairs} pairs)"
    )
    if bar is None:
        return line
    word = "at least" if bar.more_is_better else "at most"
    return f"{line}, bar {word} {bar.median} {'met' if bar.met_by(ratio) else 'missed'}"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(percent * 100) // 10_000) - 1)]


def percentile_ratio(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], percent: float
) -> Interval:
    """Ratio of percentiles of all values, with the 95 % interval of a bootstrap.

    Drawn are whole transfers: values of one transfer have much in common.

    Args:
        ours: values by transfer.
        theirs: as many.
        percent: which percentile.
    """
    rng = random.Random(0)

    def ratio(picked: Sequence[int]) -> float:
        tops = [
            percentile([value for i in picked for value in side[i]], percent)
            for side in (ours, theirs)
        ]
        return tops[0] / tops[1]

    everything = range(len(ours))
    drawn = sorted(
        ratio(rng.choices(everything, k=len(ours))) for _ in range(RESAMPLES)
    )
    return Interval(
        drawn[RESAMPLES // 40],
        ratio(everything),
        drawn[-1 - RESAMPLES // 40],
        len(ours),
    )
