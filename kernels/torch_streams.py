"""The streams of `torch.cuda`, as `streams.py` wants them."""

from collections.abc import Callable

import torch

from kvplugin.kernels.streams import Event, Stream


class TorchStreams:
    """`StreamApi` of `torch.cuda`, which is also ROCm's.

    Args:
        device: index of the GPU.
    """

    def __init__(self, device: int) -> None:
        self._device = device

    def new_stream(self) -> Stream:
        """A stream of torch's pool, at the lowest priority."""
        return torch.cuda.Stream(self._device)

    def compute_stream(self) -> Stream:
        """torch's current stream of this thread."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: Stream) -> Event:
        """An event without timing, which is the cheap kind."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """On the device alone."""
        stream.wait_event(event)

    def done(self, event: Event) -> bool:
        """Raises RuntimeError for any error of work before the event."""
        return event.query()

    def run(self, stream: Stream, launch: Callable[[], int]) -> int:
        """With the stream as torch's current one, which Triton uses too."""
        with torch.cuda.stream(stream):
            return launch()
