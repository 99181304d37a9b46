"""A loader: tokenises, packs and decodes ahead of need, and sends batches to the stages.

A plain class; `handles.py` makes it an actor. Its only state is the position in the data, which the
coordinator commits; what it sends is a pure function of that position and, where packing follows
the stages, of the rates that it is told. Several loaders read the same batches, and each makes and
sends only what the stages that it feeds need of them. Its process loads no torch: fields are arrays
until they are at a stage.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from elastic_trainer.actors.fence import Fence
from elastic_trainer.actors.links import Edges, addresses, open_channels, own_ip
from elastic_trainer.actors.priority import yield_to_compute
from elastic_trainer.actors.watch import Mark
from elastic_trainer.config import Config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.info import describe
from elastic_trainer.data.media import decoders
from elastic_trainer.data.prefetch import Prefetcher
from elastic_trainer.data.rates import RateTable, effective_from
from elastic_trainer.data.window import Batch, Fields, Window
from elastic_trainer.errors import DataError
from elastic_trainer.planner.sample_costs import Rates
from elastic_trainer.schedule.build import is_asynchronous
from elastic_trainer.transport.channel import Arrays, Tag
from elastic_trainer.types import BatchInfo, Cursor, WorkerId


def update_batch_size(config: Config) -> int:
    """Samples of one update: the global batch, or one microbatch when asynchronous."""
    if is_asynchronous(config.pipeline.schedule):
        return config.pipeline.microbatch_size
    return config.train.global_batch_size


class Loader:
    """Serves one run's training and held-out batches."""

    def __init__(self, worker: WorkerId, config: Config, private_dir: str) -> None:
        yield_to_compute()
        self.worker = worker
        self.config = config
        self._channels = open_channels(worker, config, private_dir, None)
        self._edges = Edges(self._channels, "loader")
        self._fence = Fence(worker)
        self._routes: Mapping[str, Sequence[WorkerId]] = {}
        self._fields: frozenset[str] = frozenset()  # that are made ahead
        self._ahead: Prefetcher[Batch] | None = None
        self._window: Window | None = None
        self._rates: RateTable | None = None
        self._eval_cache: list[Batch] | None = None
        self._mark = Mark((0, 0), "its start")
        decoders.hold(self)

    def describe(self) -> Mapping[str, Any]:
        """Where the loader is, and the address of its channel."""
        return {
            "role": "loader",
            "addresses": addresses(self._channels),
            "device": "loader",
            "node_ip": own_ip(),
            "pid": os.getpid(),
        }

    def ping(self) -> Mark:
        """How far the main thread is; answers whenever the process can, whatever it does."""
        return self._mark

    def sample(self) -> Fields:
        """The first microbatch of the data, to profile with: field name to array."""
        self._at("the first microbatch")
        for _, microbatches in self._open(Cursor(), None):
            return microbatches[0]
        raise DataError(f"{self.config.data.path} holds no training batch", "Check data.path.")

    def configure(
        self,
        generation: int,
        peers: Mapping[WorkerId, Any],
        routes: Mapping[str, Sequence[WorkerId]],
        cursor: Cursor,
        first_update: int,
        rates: Rates | None = None,
    ) -> None:
        """Serve these peers from `cursor` on, where the batch of `first_update` begins.

        Args:
            routes: which field goes to whom. Without any the loader is idle.
            rates: of the stages, if packing follows them.
        """
        self._at("configuring")
        self._fence.enter(generation, lambda: self._begin(generation))
        self._edges.connect(peers)
        self._routes = routes
        before, self._fields = self._fields, frozenset(routes)
        ahead = self._ahead
        # What was packed by other rates is no use: all loaders of a generation begin alike.
        keeps = self.config.data.cost == "frozen" and self._fields == before
        if keeps and ahead is not None and not ahead.failed and self._window is not None:
            if self._window.seek(cursor):
                return
        if ahead is not None:
            ahead.close(wait_s=0)  # the storage may hang: nobody waits for it here
        if self._fields != before:
            self._eval_cache = None
        self._ahead = self._window = None
        self._rates = None if rates is None else RateTable(rates)
        if not routes:
            return
        self._ahead = Prefetcher(
            self._open(cursor, self._fields, first_update, self._rates),
            self.config.data.prefetch_updates,
            self.config.elastic.stall_limit_s,
        )
        self._window = Window(self._ahead, cursor)

    def abort(self, generation: int, reason: str) -> None:
        """End what goes on for `generation` or an older one at once."""
        self._fence.end(generation, reason, self._interrupt)

    def prepare(
        self, generation: int, first_update: int, num_updates: int, rates: Rates | None = None
    ) -> list[BatchInfo]:
        """Send the next batches to the stages; fewer than asked when the last epoch ends.

        Args:
            rates: new ones, which count from the first update on whose batch is yet to be made by
                every loader, however far ahead it is.
        """
        assert self._window is not None, "configure comes first"
        self._fence.check(generation)
        if rates is not None:
            assert self._rates is not None, "packing follows the stages from the beginning"
            ahead = self.config.data.prefetch_updates
            self._rates.announce(effective_from(first_update, ahead), rates)
        infos: list[BatchInfo] = []
        for update in range(first_update, first_update + num_updates):
            self._fence.check(generation)
            self._at(f"the batch of update {update}")
            batch = next(self._window, None)
            if batch is None:
                break
            info = _numbered(batch[0], update)
            self._send(Tag(generation, "D", update, 0), batch[1])
            infos.append(info)
        return infos

    def prepare_eval(self, generation: int, first_key: int) -> list[BatchInfo]:
        """Send the held-out batches, under keys from `first_key` on; empty without such data."""
        if self._eval_cache is None:
            self._eval_cache = list(self._eval_batches(generation))
        infos = []
        for key, (info, microbatches) in enumerate(self._eval_cache, start=first_key):
            self._send(Tag(generation, "E", key, 0), microbatches)
            infos.append(_numbered(info, key))
        return infos

    def close(self) -> None:
        """Close the sockets, and end what decodes."""
        if self._ahead is not None:
            self._ahead.close()
        decoders.release(self)
        for channel in self._channels.values():
            channel.close()

    def _begin(self, generation: int) -> None:
        self._edges.exchange.advance(generation)
        if self._ahead is not None:
            self._ahead.resume()

    def _interrupt(self, error: Exception) -> None:
        self._edges.exchange.interrupt(error)
        if (ahead := self._ahead) is not None:
            ahead.interrupt(error)

    def _at(self, place: str) -> None:
        self._mark = Mark((self._mark.at[0] + 1, 0), place)

    def _open(
        self,
        cursor: Cursor,
        fields: Collection[str] | None,
        first_update: int = 1,
        rates: RateTable | None = None,
    ) -> Iterator[Batch]:
        return BatchStream(
            self.config,
            "train",
            update_batch_size(self.config),
            cursor,
            first_update=first_update,
            num_epochs=self.config.train.num_epochs,
            fields=fields,
            rates=rates,
        )

    def _eval_batches(self, generation: int) -> Iterator[Batch]:
        self._at("the held-out data")
        if describe(self.config).num_eval_rows is None:
            return
        size = self.config.train.global_batch_size
        fields = self._fields
        # Once through is enough.
        stream = BatchStream(self.config, "eval", size, num_epochs=1, fields=fields)
        for number, batch in enumerate(islice(stream, self.config.train.eval_batches), start=1):
            self._fence.check(generation)
            yield batch
            self._at(f"held-out batch {number + 1}")

    def _send(self, first: Tag, microbatches: Sequence[Fields]) -> None:
        """Send a batch to those who need of it; `first` is the tag of its first microbatch."""
        for index, fields in enumerate(microbatches):
            tag = replace(first, microbatch=index)
            for peer in dict.fromkeys(p for peers in self._routes.values() for p in peers):
                names = [name for name, peers in self._routes.items() if peer in peers]
                arrays = [_field(fields, name) for name in names]
                self._edges.exchange.send(peer, tag, Arrays(arrays, {"fields": names}))


def _field(fields: Fields, name: str) -> Any:
    if name not in fields:
        raise DataError(
            f"the model asks for field {name!r}, which the data does not have",
            "Set data.format and data.input_columns, or correct the model's fields (an emulated "
            "layer's cost_field)",
        )
    return np.asarray(fields[name])


def _numbered(info: BatchInfo, update: int) -> BatchInfo:
    return replace(info, update=update)
