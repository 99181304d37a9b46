"""Sound of any rate and number of channels becomes log-mel frames; what cannot be read is named."""

import io

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from elastic_trainer.data.media.audio import (
    AudioLimits,
    audio_size,
    decode_audio,
    log_mel,
    num_frames,
)
from elastic_trainer.errors import DataError

LIMITS = AudioLimits()


def tone(rate: int, seconds: float = 0.5, channels: int = 1, hertz: float = 440) -> bytes:
    wave = 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)
    return wav(np.repeat(wave[:, None], channels, axis=1), rate)


def wav(samples: NDArray[np.float64], rate: int, kind: str = "WAV", subtype: str = "") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype or None)
    return file.getvalue()


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize("channels", [1, 2])
def test_any_rate_becomes_the_wanted_one(rate: int, channels: int) -> None:
    samples = decode_audio(tone(rate, channels=channels), LIMITS)
    assert samples.dtype == np.float32 and abs(len(samples) - 8000) <= 1
    want = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(samples)) / 16000)
    assert np.abs(samples - want)[100:-100].max() < 0.01


def test_channels_are_averaged() -> None:
    left_only = np.stack([np.full(1600, 0.5), np.zeros(1600)], axis=1)
    assert np.allclose(decode_audio(wav(left_only, 16000), LIMITS), 0.25, atol=1e-4)


@pytest.mark.parametrize("kind, subtype", [("OGG", "VORBIS"), ("FLAC", ""), ("WAV", "ULAW")])
def test_kinds_of_files(kind: str, subtype: str) -> None:
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(4000) / 8000)
    assert len(decode_audio(wav(wave, 8000, kind, subtype), LIMITS)) == 8000


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000])
@pytest.mark.parametrize("num_samples", [1, 399, 400, 401, 5000, 70000])
def test_frames_are_known_before_decoding(rate: int, num_samples: int) -> None:
    limits = AudioLimits(max_seconds=1.0)
    data = wav(np.zeros(num_samples), rate)
    assert audio_size(data) == (num_samples, rate)
    frames = log_mel(decode_audio(data, limits), limits)
    assert frames.shape == (num_frames(num_samples, rate, limits), 40)
    assert len(frames) <= 98, "a second at the most"
    assert np.isfinite(frames).all()


def test_what_the_head_of_an_mp3_file_tells_is_not_believed() -> None:
    whole = wav(np.sin(np.arange(40_000) / 5) / 2, 8000, "MP3")
    data = whole[: len(whole) // 2]
    with soundfile.SoundFile(io.BytesIO(data)) as sound:
        told = sound.frames
    num_samples, rate = audio_size(data)
    assert 0 < num_samples < told == 40_000
    assert len(log_mel(decode_audio(data, LIMITS), LIMITS)) == num_frames(num_samples, rate, LIMITS)


def test_higher_tones_lie_in_higher_bands() -> None:
    bands = [
        int(log_mel(decode_audio(tone(16000, hertz=hertz), LIMITS), LIMITS).mean(axis=0).argmax())
        for hertz in (200, 500, 1000, 3000, 7000)
    ]
    assert bands == sorted(bands) and len(set(bands)) == 5


def test_louder_is_larger_and_silence_is_finite() -> None:
    quiet = np.sin(np.arange(4000) / 10).astype(np.float32) * 0.01
    assert log_mel(quiet * 10, LIMITS).max() > log_mel(quiet, LIMITS).max()
    assert np.isfinite(log_mel(np.zeros(4000, np.float32), LIMITS)).all()


@pytest.mark.parametrize(
    "data, told",
    [
        (b"", "0 bytes"),
        (b"this is no sound", "damaged or of no known format"),
        (wav(np.zeros(0), 8000), "no samples"),
        (wav(np.zeros((0, 2)), 48000), "no samples"),
        (wav(np.array([0.0, np.nan]), 16000, subtype="FLOAT"), "no numbers"),
        (tone(16000)[:30], "damaged"),
        (wav(np.zeros(9), 2**31 - 1), "2147483647 samples per second"),
    ],
    # Not by their bytes, which hold the time of day.
    ids=["empty", "text", "mono", "stereo", "nan", "cut", "rate"],
)
def test_what_is_no_sound_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(DataError, match=told):
        decode_audio(data, LIMITS)
