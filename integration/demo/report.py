"""The comparison as JSON."""

import json
from statistics import median
from typing import Any

from kvplugin.integration.demo.results import Answer, Case, Comparison, EngineRun


def to_json(comparison: Comparison) -> str:
    """The figures of the table and every answer; times in seconds, sizes in bytes."""
    return json.dumps(
        {
            "title": comparison.title,
            "succeeded": comparison.succeeded,
            "steady": comparison.steady,
            "recomputed_over_loaded": comparison.speedup,
            "answers": len(comparison.pairs),
            "answers_differing": len(comparison.differing),
            "largest_logprob_gap": comparison.largest_logprob_gap,
            "without": _engine(comparison.without),
            "with": _engine(comparison.with_kvplugin),
        },
        indent=2,
    )


def _engine(run: EngineRun) -> dict[str, Any]:
    times = {case: run.ttft_s(case) for case in Case}
    return {
        "start_s": run.start_s,
        "ttft_median_s": {case: median(of) for case, of in times.items() if of},
        "ttft_total_s": run.waiting_s,
        "prompt_tokens": run.prompt_tokens,
        "computed_tokens": run.computed_tokens,
        "local_tokens": run.local_tokens,
        "loaded_tokens": run.loaded_tokens,
        "hit_rate": run.hit_rate,
        "totals": run.totals,
        "answers": [_answer(answer) for answer in run.answers],
    }


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "document": answer.document,
        "visit": answer.visit,
        "question": answer.question,
        "answer": answer.text,
        "case": answer.case,
        "ttft_s": answer.ttft_s,
    }
