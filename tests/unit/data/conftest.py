"""Small datasets for the tests of the data package."""

import io
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from PIL import Image

from elastic_trainer.config import Config, DataConfig, ModelConfig, PipelineConfig, TrainConfig
from elastic_trainer.data.media import decoders
from elastic_trainer.data.media.decoding import File, Files
from elastic_trainer.data.tokenizer import Tokenizer, train_bpe

TEXTS = [
    "The pipeline drains, then the next segment begins.\n" * repeats + f"row {repeats}"
    for repeats in (1, 7, 0, 3, 2, 5, 1, 4)
]


def write_parquet(path: Path, columns: Mapping[str, Any], group_rows: int = 3) -> Path:
    """Write a file of several row groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), str(path), row_group_size=group_rows)
    return path


@pytest.fixture(scope="session")
def write() -> Callable[..., Path]:
    return write_parquet


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_bpe(TEXTS, 300)


@pytest.fixture
def text_dataset(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A folder as make-dataset lays it out: two training shards, one held-out shard."""
    folder = tmp_path / "texts"
    write_parquet(folder / "data" / "train-00000-of-00002.parquet", {"text": TEXTS[:5]})
    write_parquet(folder / "data" / "train-00001-of-00002.parquet", {"text": TEXTS[5:]})
    write_parquet(folder / "data" / "eval-00000-of-00001.parquet", {"text": TEXTS[:4]})
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    return folder


def make_config(
    path: Path | str,
    *,
    microbatch_size: int = 2,
    seed: int = 0,
    args: Mapping[str, Any] | None = None,
    **data: Any,
) -> Config:
    """A configuration that reads `path`."""
    data.setdefault("sequence_length", 8)
    return Config(
        data=DataConfig(path=str(path), **data),
        model=ModelConfig(args=dict(args or {})),
        pipeline=PipelineConfig(microbatch_size=microbatch_size),
        train=TrainConfig(seed=seed),
    )


@pytest.fixture(scope="session")
def config() -> Callable[..., Config]:
    return make_config


@pytest.fixture(scope="session")
def texts() -> Sequence[str]:
    return TEXTS


def make_picture(width: int = 20, height: int = 10, shade: int = 0, kind: str = "PNG") -> bytes:
    """The bytes of a picture file."""
    buffer = io.BytesIO()
    Image.new("L", (width, height), shade).save(buffer, kind)
    return buffer.getvalue()


def make_sound(num_samples: int = 800, rate: int = 8000, kind: str = "WAV") -> bytes:
    """The bytes of a sound file."""
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(num_samples) / 5) / 2, rate, format=kind)
    return buffer.getvalue()


def write_tar(path: Path | None, members: Mapping[str, bytes], mode: str = "w") -> bytes:
    """A tar archive with these files, in order."""
    buffer = io.BytesIO()
    opened: Any = tarfile.open(fileobj=buffer, mode=mode)  # type: ignore[call-overload]
    with opened as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    if path is not None:
        path.write_bytes(buffer.getvalue())
    return buffer.getvalue()


def write_deb(path: Path, members: Mapping[str, bytes]) -> Path:
    """A Debian package that holds these files."""
    control = {"./control": f"Package: {path.name.split('_')[0]}\nVersion: 1\n".encode()}
    archive = b"!<arch>\n"
    for name, data in (
        ("debian-binary", b"2.0\n"),
        ("control.tar.gz", write_tar(None, control, "w:gz")),
        ("data.tar.gz", write_tar(None, {f"./{n}": m for n, m in members.items()}, "w:gz")),
    ):
        archive += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode()
        archive += data + b"\n" * (len(data) % 2)
    path.write_bytes(archive)
    return path


@pytest.fixture(scope="session")
def picture() -> Callable[..., bytes]:
    return make_picture


@pytest.fixture(scope="session")
def sound() -> Callable[..., bytes]:
    return make_sound


@pytest.fixture(scope="session")
def tar() -> Callable[..., bytes]:
    return write_tar


@pytest.fixture(scope="session")
def deb() -> Callable[[Path, Mapping[str, bytes]], Path]:
    return write_deb


# A decoder for which some pictures are deadly, as a mistake in a codec may be. One that spares it
# becomes PICTURE.
DEADLY_DECODER = """
import os, signal, sys, threading
from elastic_trainer.data.media import decoder_process, decoding
make = decoding.make
def deadly(files, limits):
    for file in files.get("image", ()):
        word, _, place = (file.data or b"").partition(b" ")
        if word == b"segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if word == b"exit":
            os._exit(3)
        if word == b"hang":
            place and open(place, "w").close()
            threading.Event().wait()
        if word == b"slow":
            threading.Event().wait(float(place))
        if word == b"mistake":
            raise ZeroDivisionError("a mistake of ours")
        if word == b"once" and not os.path.exists(place):
            open(place, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    harmless = b"once", b"slow"
    spared = decoding.File(PICTURE)
    pictures = [
        spared if (file.data or b"").startswith(harmless) else file
        for file in files.get("image", ())
    ]
    return make({**files, "image": pictures}, limits)
decoding.make = deadly
decoder_process.main(*map(int, sys.argv[1:]))
"""


@pytest.fixture
def deadly_decoder(tmp_path: Path) -> Path:
    """What to run as a decoder for which some pictures are deadly."""
    path = tmp_path / "deadly_decoder.py"
    path.write_text(f"PICTURE = {make_picture()!r}\n{DEADLY_DECODER}")
    return path


@pytest.fixture
def deadly(deadly_decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders are such ones."""
    monkeypatch.setattr(decoders, "COMMAND", (sys.executable, str(deadly_decoder)))


@pytest.fixture
def files(picture: Callable[..., bytes], sound: Callable[..., bytes]) -> Callable[[int], Files]:
    """The files of sample `n`: a picture and up to two clips."""
    return lambda n: {
        "image": [File(picture(100 + 10 * n, 80, 9 * n % 256))],
        "audio": [File(sound(3000 + 100 * n))] * (n % 3),
    }
