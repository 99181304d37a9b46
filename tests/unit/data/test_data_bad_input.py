"""Each kind of bad input gives one clear DataError, which names the place and what to do."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_trainer.config import Config
from elastic_trainer.data import location
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.info import describe
from elastic_trainer.data.location import Location
from elastic_trainer.data.sources import ParquetSource
from elastic_trainer.data.tokenizer import Tokenizer, load_tokenizer
from elastic_trainer.errors import DataError
from elastic_trainer.types import Cursor

MakeConfig = Callable[..., Config]
Write = Callable[..., Path]


def read_epoch(settings: Config, split: str = "train") -> int:
    return sum(1 for _ in BatchStream(settings, split, 4, num_epochs=1))


def fails(settings: Config, *parts: str, cursor: Cursor | None = None) -> DataError:
    """Reading raises a DataError whose text holds all parts, on one line."""
    with pytest.raises(DataError) as caught:
        describe(settings)
        for _ in BatchStream(settings, "train", 4, cursor, num_epochs=1):
            pass
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.hint
    return caught.value


def test_missing(tmp_path: Path, config: MakeConfig) -> None:
    fails(config(tmp_path / "nothing"), "there is no dataset at", "nothing", "make-dataset")


def test_folder_without_parquet(tmp_path: Path, config: MakeConfig) -> None:
    (tmp_path / "notes.txt").write_text("x")
    fails(config(tmp_path), "no .parquet file", str(tmp_path), "make-dataset")


def test_empty(text_dataset: Path, write: Write, config: MakeConfig) -> None:
    for file in (text_dataset / "data").glob("train-*"):
        file.unlink()
    write(text_dataset / "data" / "train-0.parquet", {"text": pa.array([], pa.string())})
    fails(config(text_dataset), "is empty", "1 file(s), no row")


def test_held_out_files_only(text_dataset: Path, config: MakeConfig) -> None:
    for file in (text_dataset / "data").glob("train-*"):
        file.unlink()
    fails(config(text_dataset), "held-out files only", "train-")


def test_no_held_out_split(tmp_path: Path, write: Write, config: MakeConfig) -> None:
    path = write(tmp_path / "all.parquet", {"tokens": [[1, 2]]})
    settings = config(path, format="tokens")
    assert describe(settings).num_eval_rows is None
    with pytest.raises(DataError, match="no held-out split.*data.eval_path"):
        read_epoch(settings, "eval")
    with pytest.raises(DataError, match="no split 'test'"):
        BatchStream(settings, "test", 4)


@pytest.mark.parametrize("keep", [0, 3, 0.5, -1])
def test_cut_short(text_dataset: Path, config: MakeConfig, keep: float) -> None:
    file = text_dataset / "data" / "train-00001-of-00002.parquet"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep) if keep == 0.5 else int(keep)])
    fails(config(text_dataset), file.name, "cut short", "build it again")


def test_damaged_inside(text_dataset: Path, config: MakeConfig) -> None:
    file = text_dataset / "data" / "train-00001-of-00002.parquet"
    content = bytearray(file.read_bytes())
    content[4:60] = bytes(56)
    file.write_bytes(content)
    assert describe(config(text_dataset)).num_rows == 8, "footers are whole"
    fails(config(text_dataset), file.name, "damaged in row group 0")


@pytest.mark.parametrize(
    ("columns", "guess"),
    [
        ({"texts": ["a"], "id": [1]}, "Did you mean texts?"),
        ({"id": [1], "body": ["a"]}, "Did you mean body?"),
        ({"id": [1]}, "Set data.text_column"),
    ],
)
def test_no_text_column(
    text_dataset: Path, write: Write, config: MakeConfig, columns: dict[str, Any], guess: str
) -> None:
    write(text_dataset / "data" / "train-00001-of-00002.parquet", columns)
    fails(config(text_dataset), "no column 'text'", "id (int64)", guess, "00001-of-00002")


def test_text_column_of_numbers(text_dataset: Path, write: Write, config: MakeConfig) -> None:
    for number in (0, 1):
        write(text_dataset / "data" / f"train-0000{number}-of-00002.parquet", {"text": [1, 2]})
    fails(config(text_dataset), "column text", "int64, not text", "data.text_column")


def test_shards_that_disagree(text_dataset: Path, write: Write, config: MakeConfig) -> None:
    write(text_dataset / "data" / "train-00001-of-00002.parquet", {"text": [1, 2]})
    fails(config(text_dataset), "int64", "string", "00001-of-00002", "same columns")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_not_utf8(tmp_path: Path, tokenizer: Tokenizer, config: MakeConfig, kind: Any) -> None:
    rows = pa.array([b"fine", b"also fine", b"caf\xe9 au lait", b"x"], pa.binary()).cast(
        pa.large_binary() if kind == pa.large_string() else pa.binary()
    )
    rows = pa.Array.from_buffers(kind, len(rows), rows.buffers())  # casting would check the bytes
    file = tmp_path / "latin1.parquet"
    pq.write_table(pa.table({"text": rows}), str(file), row_group_size=2)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    fails(config(file), "not UTF-8", f"row 2 of {file}", "0xe9 at 3")


def test_null_rows(text_dataset: Path, write: Write, config: MakeConfig) -> None:
    file = text_dataset / "data" / "train-00001-of-00002.parquet"
    write(file, {"text": ["a", "b", "c", "d", None]})
    fails(config(text_dataset), "column text is null", f"row 4 of {file}")


def test_null_token(tmp_path: Path, write: Write, config: MakeConfig) -> None:
    file = write(tmp_path / "x.parquet", {"tokens": [[1], [2, None]]})
    fails(config(file, format="tokens"), "has a null", f"row 1 of {file}")


@pytest.mark.parametrize("wrong", [-1, 10, 2**40])
def test_token_out_of_range(tmp_path: Path, write: Write, config: MakeConfig, wrong: int) -> None:
    file = write(tmp_path / "x.parquet", {"tokens": [[1, 9], [0], [2, 3, wrong, 4]]})
    settings = config(file, format="tokens", args={"vocab_size": 10})
    fails(settings, f"token id {wrong} at 2 of row 2 of {file}", "vocabulary of 10")


def test_tokens_of_another_type(tmp_path: Path, write: Write, config: MakeConfig) -> None:
    file = write(tmp_path / "x.parquet", {"tokens": ["text"]})
    fails(config(file, format="tokens"), "string, not lists of token ids", "data.format")
    fails(config(file, format="tokens", tokens_column="token"), "Did you mean tokens?")


def test_only_empty_rows(tmp_path: Path, write: Write, config: MakeConfig) -> None:
    file = write(tmp_path / "x.parquet", {"tokens": pa.array([[], []], pa.list_(pa.int32()))})
    fails(config(file, format="tokens"), "no row of the dataset", "holds a token")


def test_tokenizer_missing(text_dataset: Path, config: MakeConfig) -> None:
    elsewhere = config(text_dataset, tokenizer=str(text_dataset / "lost.json"))
    fails(elsewhere, "no tokenizer at", "lost.json", "data.tokenizer")
    (text_dataset / "tokenizer.json").unlink()
    fails(config(text_dataset), "no tokenizer.json beside", "make-dataset")


def test_tokenizer_damaged(text_dataset: Path, config: MakeConfig) -> None:
    (text_dataset / "tokenizer.json").write_text("{}")
    fails(config(text_dataset), "is not a tokenizer.json")


def test_tokenizer_larger_than_the_model(text_dataset: Path, config: MakeConfig) -> None:
    size = load_tokenizer(str(text_dataset)).vocab_size
    settings = config(text_dataset, args={"vocab_size": 100})
    fails(settings, f"has {size} ids", "vocab_size is 100", f"to {size} or more")
    describe(config(text_dataset, args={"vocab_size": size}))


@pytest.mark.parametrize("length", [0, -3])
def test_wrong_sequence_length(text_dataset: Path, config: MakeConfig, length: int) -> None:
    fails(config(text_dataset, sequence_length=length), f"sequence_length is {length}")


def test_sequence_longer_than_the_model(text_dataset: Path, config: MakeConfig) -> None:
    fails(config(text_dataset, args={"max_positions": 7}), "is 8, but the model has 7 positions")
    describe(config(text_dataset, args={"max_positions": 8}))


def test_wrong_settings(text_dataset: Path, config: MakeConfig) -> None:
    fails(config(text_dataset, format="csv"), "'csv'", "text, tokens, columns")
    fails(config(text_dataset, format="columns"), "data.input_columns is empty")
    for batch_size, microbatch_size in ((0, 2), (2, 0)):
        settings = config(text_dataset, microbatch_size=microbatch_size)
        with pytest.raises(DataError, match="holds nothing"):
            BatchStream(settings, "train", batch_size)


def test_columns_that_do_not_stack(tmp_path: Path, write: Write, config: MakeConfig) -> None:
    file = write(tmp_path / "x.parquet", {"x": [[1.0], [1.0, 2.0]], "t": ["a", "b"]})
    settings = config(file, format="columns", input_columns=["x"], shuffle=False)
    fails(settings, "column x has shape [1] in row 0 but [2] in row 1")
    alone = config(file, format="columns", input_columns=["x"], shuffle=False, microbatch_size=1)
    assert read_epoch(alone) == 1
    fails(config(file, format="columns", input_columns=["t"]), "holds string")
    fails(config(file, format="columns", input_columns=["xs"]), "no column 'xs'", "mean x?")


def test_ragged_and_null_inside_a_column(tmp_path: Path, write: Write, config: MakeConfig) -> None:
    ragged = write(tmp_path / "r.parquet", {"x": [[[1.0], [1.0, 2.0]]]})
    settings = config(ragged, format="columns", input_columns=["x"])
    fails(settings, "unequal lengths", f"row 0 of {ragged}")
    holes = write(tmp_path / "h.parquet", {"x": [[1.0, None]]})
    fails(config(holes, format="columns", input_columns=["x"]), "null inside row 0")


@pytest.mark.parametrize(
    "cursor",
    [Cursor(row=8), Cursor(row=-1), Cursor(row=1, offset=10**6), Cursor(sample=10**6)],
)
def test_position_of_another_dataset(
    text_dataset: Path, config: MakeConfig, cursor: Cursor
) -> None:
    fails(config(text_dataset), f"row {cursor.row}, offset", "has changed", cursor=cursor)


def test_dataset_json_damaged(tmp_path: Path, write: Write, config: MakeConfig) -> None:
    file = write(tmp_path / "x.parquet", {"tokens": [[1]]})
    (tmp_path / "dataset.json").write_text("{")
    fails(config(file, format="tokens"), "dataset.json is not JSON")


def test_unreadable(text_dataset: Path) -> None:
    class Locked:
        def open_input_file(self, name: str) -> None:
            raise PermissionError(13, f"Permission denied: {name}")

    place = Location(str(text_dataset))
    files = place.list_parquet()
    place.filesystem = Locked()
    with pytest.raises(DataError, match="cannot read .*Permission denied.*its permissions"):
        ParquetSource(place, files, ["text"], setting="data.text_column")


def test_row_groups_stay_in_memory_within_the_limit(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path / "x.parquet", {"x": list(range(12))}, group_rows=3)
    place = Location(str(path))
    opened: list[int] = []

    class Counting(ParquetSource):
        def _load(self, number: int) -> Any:
            opened.append(number)
            return super()._load(number)

    source = Counting(place, [str(path)], ["x"], setting="", cache_bytes=0)
    assert [source.value(row, "x").as_py() for row in (0, 2, 11, 3, 4, 0)] == [0, 2, 11, 3, 4, 0]
    assert opened == [0, 3, 1, 0], "one group is kept, however large"
    assert source.where(11) == f"row 11 of {path}"


def test_unknown_scheme(config: MakeConfig) -> None:
    fails(config("gopher://hole/x"), "gopher://hole/x", "Known schemes")
    fails(config("s3://"), "names no file or folder")


@pytest.fixture
def silent_server() -> Iterator[int]:
    """Port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")


@pytest.mark.usefixtures("credentials")
def test_remote_refuses(config: MakeConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    uri = f"s3://bucket/x?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
    fails(config(uri), "cannot look at s3://bucket/x", "Check the address")


@pytest.mark.usefixtures("credentials")
def test_remote_never_answers(silent_server: int) -> None:
    uri = f"s3://b/x?endpoint_override=127.0.0.1:{silent_server}&scheme=http&region=us-east-1"
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"no answer within 0.5 s\. Check the address"):
        Location(uri, timeout_s=0.5).list_parquet()
    assert time.monotonic() - begin < 5


def test_a_remote_failure_crosses_the_thread() -> None:
    remote = Location.__new__(Location)
    remote.given, remote.is_remote, remote._timeout_s = "s3://b/x", True, 5.0

    def broken() -> None:
        assert threading.current_thread().daemon
        raise OSError("first line\nsecond line")

    with pytest.raises(DataError, match="cannot list s3://b/x: first line. Check"):
        remote.call(broken, "list")
    assert location.first_line(OSError()) == "OSError"
