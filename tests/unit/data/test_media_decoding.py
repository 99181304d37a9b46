"""Format media with decoders: any number of them makes the same, and shared by all readers."""

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_trainer.config import Config, DataConfig, PipelineConfig, TrainConfig
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.media import decoders, reader
from elastic_trainer.data.media.decoding import Files
from elastic_trainer.data.tokenizer import Tokenizer
from elastic_trainer.errors import DataError

DEADLY = 4  # the row of the deadly picture


@pytest.fixture
def dataset(
    tmp_path: Path, tokenizer: Tokenizer, files: Callable[[int], Files]
) -> Callable[[bytes], Path]:
    def save(word: bytes) -> Path:
        """Rows of which one has this for a picture, which any size is recorded for."""
        rows = []
        for number in range(20):
            pictures = [file.data for file in files(number)["image"]]
            width, height = 100 + 10 * number, 80
            if number == DEADLY and word:
                pictures, width, height = [word], 20, 20
            clips = [file.data for file in files(number)["audio"]]
            sizes = {"image_width": width, "image_height": height}
            rows.append({"image": pictures, "audio": clips, "text": f"row {number}", **sizes})
        folder = tmp_path / f"rows-{len(word)}"
        folder.mkdir()
        pq.write_table(pa.Table.from_pylist(rows), folder / "train-0.parquet", row_group_size=7)
        (folder / "tokenizer.json").write_text(tokenizer.to_json())
        return folder

    return save


def stream(path: Path, **data: Any) -> BatchStream:
    config = Config(
        data=DataConfig(path=str(path), format="media", **data),
        pipeline=PipelineConfig(microbatch_size=2),
        train=TrainConfig(global_batch_size=6),
    )
    return BatchStream(config, "train", 6, num_epochs=1)


def all_bytes(batches: Iterable[Any]) -> list[Any]:
    return [
        (info, [{name: (a.dtype, a.shape, a.tobytes()) for name, a in m.items()} for m in made])
        for info, made in batches
    ]


def children(pid: int) -> list[int]:
    """Decoders that this process has started and that are not dead."""
    found = subprocess.run(
        ["ps", "-ww", "-o", "pid=,stat=,args=", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout
    lines = [line.split(None, 2) for line in found.splitlines()]
    return [
        int(child)
        for child, state, command in lines
        if "decoder_process" in command and not state.startswith("Z")
    ]


@pytest.fixture
def closed() -> Iterator[None]:
    decoders.close()
    yield
    decoders.close()


def test_any_number_of_workers_makes_the_same(
    dataset: Callable[[bytes], Path], closed: None
) -> None:
    path = dataset(b"")
    first, *others = [
        all_bytes(stream(path, media_workers=n, media_cache_mb=0)) for n in (0, 1, 2, 3)
    ]
    assert len(first) == 4 and all(other == first for other in others)


def test_readers_share_the_processes(dataset: Callable[[bytes], Path], closed: None) -> None:
    path = dataset(b"")
    streams = [stream(path), stream(path)]
    for each in streams:
        next(each)
    before = set(children(os.getpid()))
    assert 1 <= len(before) <= 2
    for each in streams:
        list(each)
    assert before <= set(children(os.getpid())) and len(children(os.getpid())) <= 2


@pytest.mark.parametrize(
    "word, told",
    [
        pytest.param(
            b"segfault", r"the decoder died of signal 11 \(SIGSEGV\) on it", id="segfault"
        ),
        pytest.param(
            b"hang",
            "the decoder did not answer within 2 s on it",
            marks=pytest.mark.soak,
            id="hang",
        ),
    ],
)
def test_a_deadly_picture_is_named_or_skipped(
    dataset: Callable[[bytes], Path],
    deadly: None,
    closed: None,
    monkeypatch: pytest.MonkeyPatch,
    word: bytes,
    told: str,
) -> None:
    monkeypatch.setattr(reader, "_LEAST_PATIENCE_S", 2.0)
    monkeypatch.setattr(reader, "_PATIENCE", 0.0)
    path = dataset(word)
    with pytest.raises(DataError, match=f"row {DEADLY} of .*train-0.parquet: {told}"):
        list(stream(path, shuffle=False))
    batches = list(stream(path, shuffle=False, on_error="skip"))
    facts = [facts for info, _ in batches for facts in info.microbatches]
    rows = sorted(int(name) for each in facts for name in each.sample_ids)
    assert rows == [n for n in range(20) if n != DEADLY]
    ((skipped, why),) = [entry for each in facts for entry in each.skipped]
    assert skipped == str(DEADLY) and re.search(told, why)


def test_a_decoder_killed_in_the_middle_loses_nothing(
    dataset: Callable[[bytes], Path], closed: None, tmp_path: Path, deadly: None
) -> None:
    mark = tmp_path / "mark"
    word = f"once {mark}".encode()
    path = dataset(word)
    killed = all_bytes(stream(path))
    assert mark.exists()
    decoders.close()  # and what they have made is forgotten
    whole = all_bytes(stream(path))
    assert killed == whole
    assert sum(facts.num_samples for info, _ in killed for facts in info.microbatches) == 20
