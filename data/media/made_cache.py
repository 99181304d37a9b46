"""What files have become, kept for other rows that have the same ones.

Datasets repeat media: five captions of a picture, several questions about it. A file is known by
what is in it, so two rows share one wherever each of them has it from.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.data.media.audio import AudioLimits
from elastic_trainer.data.media.decoding import File, Files, Limits, Made, Picture
from elastic_trainer.data.media.images import ImageLimits
from elastic_trainer.errors import DataError

KINDS = ("image", "audio")  # in the order of `Limits` and of `Made`
ENTRY_BYTES = 512  # what holding one takes beside its numbers: objects of arrays, its key
Key = tuple[str, ImageLimits | AudioLimits, Hashable]
One = Picture | NDArray[np.float32]  # a picture or a clip


class MadeCache:
    """Pictures and clips that were decoded; those not wanted for longest go first.

    Threads may share it. What it holds cannot be written to, since others have it too.

    Args:
        max_bytes: that it takes. 0: it keeps nothing, and looks at no file.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Key, One] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What it takes now."""
        return self._num_bytes

    def get(self, key: Key) -> One | None:
        """What is held under the key, from now on the last to go."""
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key]

    def put(self, key: Key, made: One) -> None:
        """Hold this, unless it alone is too large; what was not wanted for longest makes room."""
        num_bytes = _bytes_of(made)
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            if key in self._held:  # another thread was as quick
                self._held.move_to_end(key)
                return
            self._held[key] = made
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, oldest = self._held.popitem(last=False)
                self._num_bytes -= _bytes_of(oldest)

    def clear(self) -> None:
        """Hold nothing."""
        with self._lock:
            self._held.clear()
            self._num_bytes = 0

    def through(
        self,
        samples: Sequence[Files],
        limits: Limits,
        decode: Callable[[Sequence[Files]], Sequence[Made | DataError]],
    ) -> list[Made | DataError]:
        """What becomes of each sample, decoding only what is not known.

        Args:
            samples: their files.
            limits: of sizes.
            decode: gives what becomes of samples that have some of these files, in their order.
        """
        if not self._max_bytes:
            return list(decode(samples))
        keyed = [list(_keyed(files, limits)) for files in samples]
        made = self._known(keyed)  # held here, too, since the cache may lose it meanwhile
        results: dict[int, Made | DataError] = {}
        while len(results) < len(samples):
            asked: dict[int, dict[Key, File]] = {}
            coming: set[Key] = set()
            for place, files in enumerate(keyed):
                if place in results:
                    continue
                unknown = {key: file for key, file in files if key not in made}
                if not unknown:
                    results[place] = _whole([key for key, _ in files], made)
                elif coming.isdisjoint(unknown):
                    asked[place] = unknown
                    coming.update(unknown)
                # Else another sample has asked for one of its files. It waits for all of them: if
                # that one is damaged, what is told must be the first error of this sample, too.
            if asked:
                answers = decode([_by_kind(unknown) for unknown in asked.values()])
                for (place, unknown), answer in zip(asked.items(), answers, strict=True):
                    if isinstance(answer, DataError):  # not kept, since it is told each time
                        results[place] = answer
                    else:
                        self._note(unknown, answer, made)
        return [results[place] for place in range(len(samples))]

    def _known(self, keyed: Sequence[Sequence[tuple[Key, File]]]) -> dict[Key, One]:
        found = {key: self.get(key) for files in keyed for key, _ in files}
        return {key: one for key, one in found.items() if one is not None}

    def _note(self, keys: Mapping[Key, File], answer: Made, made: dict[Key, One]) -> None:
        ones: list[One] = [*answer[0], *answer[1]]
        for key, one in zip(keys, ones, strict=True):
            for array in _arrays(one):
                array.flags.writeable = False
            made[key] = one
            self.put(key, one)


def _keyed(files: Files, limits: Limits) -> Iterator[tuple[Key, File]]:
    """The files of a sample, each with its key, pictures first."""
    each: tuple[ImageLimits | AudioLimits, ...] = limits
    for kind, limit in zip(KINDS, each, strict=True):
        for file in files.get(kind, ()):
            # Without bytes it is its own key. Nothing is made of it, so nothing is kept.
            content: Hashable = file if file.data is None else _digest(file.data)
            yield (kind, limit, content), file


def _digest(data: bytes) -> bytes:
    # Nobody can make it collide, and processors have instructions for it.
    return hashlib.sha256(data).digest()


def _by_kind(files: Mapping[Key, File]) -> dict[str, list[File]]:
    return {kind: [file for key, file in files.items() if key[0] == kind] for kind in KINDS}


def _whole(keys: Sequence[Key], made: Mapping[Key, One]) -> Made:
    """A sample, from its files in order."""
    pictures: list[Picture] = []
    clips: list[NDArray[np.float32]] = []
    for key in keys:
        one = made[key]
        if isinstance(one, tuple):
            pictures.append(one)
        else:
            clips.append(one)
    return pictures, clips


def _arrays(one: One) -> tuple[NDArray[np.generic], ...]:
    return one if isinstance(one, tuple) else (one,)


def _bytes_of(one: One) -> int:
    return ENTRY_BYTES + sum(array.nbytes for array in _arrays(one))
