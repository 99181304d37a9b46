"""What a sample's files become: patches of pictures, log-mel frames of clips.

The processes that decode load this module, so it loads no more than they need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.data.media.audio import AudioLimits, decode_audio, log_mel
from elastic_trainer.data.media.images import ImageLimits, decode_image, patchify
from elastic_trainer.errors import DataError

Limits = tuple[ImageLimits, AudioLimits]
Picture = tuple[NDArray[np.uint8], NDArray[np.int64]]  # patches, and row and column of each
Made = tuple[list[Picture], list[NDArray[np.float32]]]  # pictures and clips of a sample


@dataclass(frozen=True, slots=True)
class File:
    """A picture or a clip as it lies on storage."""

    data: bytes | None
    path: str | None = None

    def read(self) -> bytes:
        if self.data is None:
            raise DataError(
                f"the file {self.path} is named, but not held",
                "Write the dataset with the bytes of its files",
            )
        return self.data


Files = Mapping[str, Sequence[File]]  # of a sample, by kind: image, audio


def make(files: Files, limits: Limits) -> Made | DataError:
    """Decode the files of a sample, or say what is wrong with one."""
    image, audio = limits
    try:
        pictures = [
            patchify(decode_image(file.read(), image), image.patch_size)
            for file in files.get("image", ())
        ]
        clips = [
            log_mel(decode_audio(file.read(), audio), audio) for file in files.get("audio", ())
        ]
    except DataError as error:
        return error
    return pictures, clips
