"""Transfers in the content of a rank's memory."""

from collections.abc import Iterator, Mapping, Sequence

from kvplugin.contract import CopyJob, CopyResult, Transport
from kvplugin.integration.reference.content_memory import LayerContent
from kvplugin.testing.slots import BlockContent, ContentError


class WatchedTransport:
    """A `Transport` whose blocks may not change while it reads them, nor be read before
    it has filled them.

    Args:
        transport: moves the bytes.
        memories: of the rank's layers.
    """

    def __init__(
        self, transport: Transport, memories: Mapping[str, LayerContent]
    ) -> None:
        self._transport = transport
        self._memories = memories
        self._under_way: dict[int, tuple[CopyJob, dict[str, list[BlockContent]]]] = {}
        self._tier: dict[tuple[str, int], BlockContent] = {}
        """What (layer, tier block) holds."""

    def submit(self, job: CopyJob) -> None:
        """See `Transport.submit`.

        Raises:
            ContentError: an engine block is null or free, or a tier block was never
                stored.
        """
        self._under_way[job.id] = job, self._copies(job)
        for memory, engine_ids, _ in self._parts(job):
            if not job.store:
                memory.poison(engine_ids)
        self._transport.submit(job)

    def poll(self, wait: float) -> list[CopyResult]:
        """See `Transport.poll`.

        Raises:
            ContentError: what a job read has changed since its start.
        """
        results = self._transport.poll(wait)
        for result in results:
            if result.id in self._under_way:  # a result may come twice
                self._settle(result)
        return results

    def close(self) -> None:
        """See `Transport.close`."""
        self._transport.close()

    def _settle(self, result: CopyResult) -> None:
        job, copies = self._under_way.pop(result.id)
        if not result.error and copies != self._copies(job):
            raise ContentError(f"what {job} reads has changed under it")
        for memory, engine_ids, tier_ids in self._parts(job):
            if job.store:
                for block in tier_ids:
                    self._tier.pop((memory.layer, block), None)
            if result.error:
                continue
            moved = copies[memory.layer]
            if job.store:
                places = [(memory.layer, block) for block in tier_ids]
                self._tier.update(zip(places, moved, strict=True))
            else:
                memory.load(moved, engine_ids)

    def _copies(self, job: CopyJob) -> dict[str, list[BlockContent]]:
        """By layer what the job's source holds now."""
        found: dict[str, list[BlockContent]] = {}
        for memory, engine_ids, tier_ids in self._parts(job):
            if job.store:
                found[memory.layer] = memory.store(engine_ids)
            else:
                found[memory.layer] = [self._stored(memory, b) for b in tier_ids]
        return found

    def _stored(self, memory: LayerContent, block: int) -> BlockContent:
        try:
            return self._tier[memory.layer, block]
        except KeyError:
            raise ContentError(
                f"layer {memory.layer}: tier block {block} was never stored"
            ) from None

    def _parts(
        self, job: CopyJob
    ) -> Iterator[tuple[LayerContent, Sequence[int], Sequence[int]]]:
        """A job by layer."""
        for group, engine_ids, tier_ids in job.parts:
            for memory in self._memories.values():
                if memory.group.index == group:
                    yield memory, engine_ids, tier_ids
