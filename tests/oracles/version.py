"""The least replay: which vLLM answers."""


def answer(request: str) -> tuple[str, str]:
    import vllm

    return request, vllm.__version__
