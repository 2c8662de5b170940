"""`python -m tests.oracles VERSION REPLAY < request > answer`, started by `ask`."""

import importlib
import os
import pickle
import sys


def main(version: str, replay: str) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # vLLM prints while it is imported; the answer needs a clean stream.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import vllm

    if vllm.__version__.split("+")[0] != version:
        raise SystemExit(f"vLLM {version} wanted, {vllm.__version__} found")
    answer = importlib.import_module(f"tests.oracles.{replay}").answer
    answers.write(pickle.dumps(answer(pickle.load(sys.stdin.buffer))))
    answers.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
