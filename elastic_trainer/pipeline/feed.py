"""Where a stage gets the fields of its microbatches from: inputs, labels, per-layer fields."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from elastic_trainer.errors import DataError, TransportError
from elastic_trainer.pipeline.link import Link
from elastic_trainer.schedule.segment import SegmentKind
from elastic_trainer.transport.channel import Tag
from elastic_trainer.types import WorkerId

_TAG_KIND: Mapping[SegmentKind, str] = {"train": "D", "eval": "E"}


class Feed(ABC):
    """Hands out microbatches by number; called by the compute thread, once for each."""

    @abstractmethod
    def fetch(
        self, update: int, microbatch: int, kind: SegmentKind, timeout_s: float
    ) -> Mapping[str, Tensor]:
        """The fields that this stage needs of a microbatch (`microbatch` counts in its batch).

        Raises:
            StallError: they did not come within `timeout_s`.
        """


class ChannelFeed(Feed):
    """Microbatches that the loader sends, prepared ahead of need."""

    def __init__(self, link: Link, loader: WorkerId, generation: int) -> None:
        self._link = link
        self._loader = loader
        self._generation = generation

    def fetch(
        self, update: int, microbatch: int, kind: SegmentKind, timeout_s: float
    ) -> Mapping[str, Tensor]:
        tag = Tag(self._generation, _TAG_KIND[kind], update, microbatch)
        message = self._link.recv(self._loader, tag, timeout_s)
        names = message.meta.get("fields")
        if not isinstance(names, list) or len(names) != len(message.tensors):
            raise TransportError(f"{self._loader} sent {tag} with fields {names!r}")
        return dict(zip(names, message.tensors, strict=True))


class MemoryFeed(Feed):
    """Microbatches held in memory, for tests and benchmarks: batches by update, then by index."""

    def __init__(
        self,
        train: Mapping[int, Sequence[Mapping[str, Tensor]]],
        evaluation: Mapping[int, Sequence[Mapping[str, Tensor]]] | None = None,
    ) -> None:
        self._batches = {"train": train, "eval": evaluation or {}}

    def fetch(
        self, update: int, microbatch: int, kind: SegmentKind, timeout_s: float
    ) -> Mapping[str, Tensor]:
        try:
            return self._batches[kind][update][microbatch]
        except (KeyError, IndexError):
            raise DataError(
                f"there is no {kind} microbatch {microbatch} of update {update}"
            ) from None
