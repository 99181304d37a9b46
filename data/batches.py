"""The endless stream of batches: a pure function of the configuration and a cursor."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from elastic_trainer.config import Config
from elastic_trainer.data.dataset import Dataset, check_split
from elastic_trainer.data.media.collate import Decoded
from elastic_trainer.data.media.reader import MediaSamples
from elastic_trainer.data.microbatches import Divider
from elastic_trainer.data.rates import RateTable
from elastic_trainer.data.samples import Fields, Sample
from elastic_trainer.errors import DataError
from elastic_trainer.types import BatchInfo, Cursor, MicrobatchInfo


class BatchStream:
    """Batches of one split from a cursor on, epoch after epoch.

    Each batch comes as its facts and, per microbatch, its fields as numpy arrays whose first
    dimension counts samples. A batch never spans two epochs: the last one of an epoch may hold
    fewer samples, so fewer microbatches and a smaller last one. Every row (packed text: every
    token) comes exactly once per epoch. A stream opened at a batch's `end` yields the batches that
    would have followed it; so does one with another batch size, cut differently. Samples that have
    sizes are packed into microbatches by what they cost (`Divider`), when the batch is made; which
    ones it holds does not depend on that.

    Held-out data comes in one fixed order, whatever the seed and the epoch.
    """

    def __init__(
        self,
        config: Config,
        split: str,
        batch_size: int,
        cursor: Cursor | None = None,
        *,
        first_update: int = 1,
        num_epochs: int | None = None,
        fields: Collection[str] | None = None,
        rates: RateTable | None = None,
    ) -> None:
        """Open the dataset.

        Args:
            config: names the dataset, the sequence length, the microbatch size and the seed.
            split: train or eval.
            batch_size: samples per batch.
            cursor: where to begin; the start of the first epoch by default.
            first_update: number of the update that the first batch is for.
            num_epochs: stop at the end of this many epochs, counted from epoch 0; None: never.
            fields: make only these, all by default; which samples a batch holds and what is said of
                it does not depend on that.
            rates: of the stages, by update, if packing is to follow them.
        """
        check_split(split)
        if batch_size < 1 or config.pipeline.microbatch_size < 1:
            raise DataError(
                f"a batch of {batch_size} samples in microbatches of "
                f"{config.pipeline.microbatch_size} holds nothing",
                "Set train.global_batch_size and pipeline.microbatch_size to 1 or more",
            )
        self._reader = Dataset(config).reader(split)
        self._batch_size = batch_size
        self._divider = Divider(config)
        self._num_epochs = num_epochs
        self._fields = fields
        self._rates = rates
        self._update = first_update
        self.cursor = self._position = cursor or Cursor()
        self._planned: deque[list[Sample]] = deque()
        self._undecoded: deque[list[Sample]] = deque()
        self._decoded: Iterator[Decoded | DataError] = iter(())
        self._failure: Exception | None = None
        if isinstance(self._reader, MediaSamples):
            self._decoded = self._reader.decode(self._upcoming(), fields)

    def __iter__(self) -> Iterator[tuple[BatchInfo, list[Fields]]]:
        return self

    def __next__(self) -> tuple[BatchInfo, list[Fields]]:
        if not self._planned and self._failure is not None:
            raise self._failure
        if not (self._planned or self._plan()):
            raise StopIteration
        samples = self._planned.popleft()
        try:
            rates = None if self._rates is None else self._rates.at(self._update)
            division = self._divider.divide(samples, rates)
            infos, fields = self._load(samples, division.microbatches)
        except Exception as error:
            self._failure = error  # nothing more is decoded
            self._planned.clear()
            raise
        end = samples[-1].end
        info = BatchInfo(
            update=self._update, microbatches=tuple(infos), end=end, costs=division.costs
        )
        self.cursor = end
        self._update += 1
        return info, fields

    def _plan(self) -> bool:
        """Take the samples of one batch more; False at the end of the data."""
        if self._num_epochs is not None and self._position.epoch >= self._num_epochs:
            return False
        samples = self._take()
        self._position = samples[-1].end
        self._planned.append(samples)
        self._undecoded.append(samples)
        return True

    def _upcoming(self) -> Iterator[Sample]:
        """Samples to decode: batches that follow are begun before one is complete, so that no
        thread waits. What is wrong with them is raised in their turn.
        """
        while True:
            try:
                if not (self._undecoded or self._plan()):
                    return
            except Exception as error:
                self._failure = error
                return
            yield from self._undecoded.popleft()

    def _load(
        self, samples: Sequence[Sample], microbatches: Sequence[Sequence[int]]
    ) -> tuple[list[MicrobatchInfo], list[Fields]]:
        """Facts and fields of the microbatches, which are places of samples."""
        if isinstance(self._reader, MediaSamples):
            return self._reader.join(samples, microbatches, self._decoded, self._fields)
        self._undecoded.clear()
        parts = [[samples[place] for place in places] for places in microbatches]
        fields = [_stack(part, self._fields) for part in parts]
        return [_describe(part) for part in parts], fields

    def _take(self) -> list[Sample]:
        first = self._position
        samples = [self._reader.next(first)]
        while len(samples) < self._batch_size and samples[-1].end.epoch == first.epoch:
            samples.append(self._reader.next(samples[-1].end))
        return samples


def _describe(samples: Sequence[Sample]) -> MicrobatchInfo:
    return MicrobatchInfo(
        num_samples=len(samples),
        num_tokens=sum(sample.num_tokens for sample in samples),
        num_valid=sum(sample.num_valid for sample in samples),
        sample_ids=tuple(sample.id for sample in samples),
    )


def _stack(samples: Sequence[Sample], wanted: Collection[str] | None) -> Fields:
    stacked: Fields = {}
    for name, first in samples[0].fields.items():
        if wanted is not None and name not in wanted:
            continue
        arrays = [sample.fields[name] for sample in samples]
        for sample, array in zip(samples, arrays, strict=True):
            if array.shape != first.shape:
                raise DataError(
                    f"column {name} has shape {list(first.shape)} in row {samples[0].id} but "
                    f"{list(array.shape)} in row {sample.id} of the same microbatch",
                    "Pad the rows to one length, or set pipeline.microbatch_size=1",
                )
        stacked[name] = np.stack(arrays)
    return stacked
