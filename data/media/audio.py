"""Sound: from the bytes of a file to log-mel frames."""

import io
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.errors import DataError

_HINT = "Remove it, or set data.on_error=skip"
_WINDOW_S = 0.025
_HOP_S = 0.010
_FLOOR = 1e-10
_RANGE = 8.0  # decades below the loudest that still count
_PADDING_S = 0.05  # silence around a clip while it is resampled, which wraps around


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioLimits:
    """To which rate sound is resampled, in how many bands it is cut, and how much of it counts."""

    sample_rate: int = 16000
    mel_bins: int = 40
    max_seconds: float = 20.0


def num_frames(num_samples: int, rate: int, limits: AudioLimits) -> int:
    """Log-mel frames that a clip of so many samples per channel at `rate` becomes."""
    used = min(num_samples, _most_samples(rate, limits))
    return _frames_of(_resampled_length(used, rate, limits.sample_rate), limits.sample_rate)


def audio_size(data: bytes) -> tuple[int, int]:
    """Samples per channel and sample rate that the head of the file tells."""
    with _opened(data) as sound:
        return int(sound.frames), int(sound.samplerate)


def decode_audio(data: bytes, limits: AudioLimits) -> NDArray[np.float32]:
    """A clip as samples of one channel, the mean of all, at the wanted rate.

    Raises:
        DataError: what is wrong with it; the caller says where it stands.
    """
    with _opened(data) as sound:
        rate = int(sound.samplerate)
        try:
            channels = sound.read(_most_samples(rate, limits), dtype="float32", always_2d=True)
        except Exception as error:
            raise _damaged(error) from error
    if not len(channels):
        raise DataError("the sound has no samples", _HINT)
    if not np.isfinite(channels).all():
        raise DataError("the sound holds samples that are no numbers", _HINT)
    count = channels.shape[1]
    mixed = channels @ np.full(count, 1 / count, np.float32)  # far quicker than a mean over rows
    return _resample(mixed, rate, limits.sample_rate)


def log_mel(samples: NDArray[np.float32], limits: AudioLimits) -> NDArray[np.float32]:
    """Loudness of each frequency band in each frame, (frames, bins), about 0 to 2."""
    rate = limits.sample_rate
    window, hop = round(_WINDOW_S * rate), round(_HOP_S * rate)
    count = _frames_of(len(samples), rate)
    padded = np.zeros(window + (count - 1) * hop, np.float32)
    padded[: len(samples)] = samples[: len(padded)]
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop]
    width = 1 << (window - 1).bit_length()
    power = np.abs(np.fft.rfft(frames * _hann(window), width)) ** 2
    loud = np.log10(np.maximum(power @ _filters(rate, limits.mel_bins, width), _FLOOR))
    loud = np.maximum(loud, loud.max() - _RANGE)
    scaled: NDArray[np.float32] = ((loud + 4) / 4).astype(np.float32)
    return scaled


def _opened(data: bytes) -> Any:
    import soundfile

    if not data:
        raise DataError("the sound is empty: 0 bytes", _HINT)
    try:
        return soundfile.SoundFile(io.BytesIO(data))
    except Exception as error:
        raise _damaged(error) from error


def _damaged(error: Exception) -> DataError:
    reason = str(error).rpartition(": ")[2].rstrip(".")  # without the name of a buffer
    return DataError(f"the sound is damaged or of no known format: {reason}", _HINT)


def _most_samples(rate: int, limits: AudioLimits) -> int:
    return max(1, int(limits.max_seconds * rate))


def _resampled_length(num_samples: int, rate: int, wanted: int) -> int:
    return -(-num_samples * wanted // rate)


def _frames_of(num_samples: int, rate: int) -> int:
    window, hop = round(_WINDOW_S * rate), round(_HOP_S * rate)
    return 1 + max(0, num_samples - window) // hop


def _resample(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """The same sound at another rate: its spectrum cut or continued with nothing."""
    if rate == wanted:
        return np.ascontiguousarray(samples)
    # Padded to whole periods of the ratio, so that both lengths are whole numbers, and to a number
    # of periods that transforms quickly.
    period = rate // math.gcd(rate, wanted)
    length = _smooth(-(-(len(samples) + int(_PADDING_S * rate)) // period)) * period
    new_length = length * wanted // rate
    spectrum = np.fft.rfft(samples, length)
    short = np.fft.irfft(spectrum[: new_length // 2 + 1], new_length) * (wanted / rate)
    return short[: _resampled_length(len(samples), rate, wanted)].astype(np.float32)


def _smooth(number: int) -> int:
    """The next number from `number` on without prime factors above 5."""
    while True:
        rest = number
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return number
        number += 1


@lru_cache(maxsize=4)
def _hann(width: int) -> NDArray[np.float32]:
    turn = 2 * np.pi * np.arange(width) / width
    return (0.5 - 0.5 * np.cos(turn)).astype(np.float32)


@lru_cache(maxsize=4)
def _filters(rate: int, bins: int, width: int) -> NDArray[np.float32]:
    """Triangles, evenly spaced on the mel scale, as (frequencies, bins)."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, bins + 2) / 2595) - 1)
    frequencies = np.arange(width // 2 + 1) * rate / width
    rising = (frequencies[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies[:, None]) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
