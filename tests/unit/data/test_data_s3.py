"""A dataset on an S3 server reads like the same one on disk."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from elastic_trainer.config import Config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.info import describe
from elastic_trainer.data.tokenizer import load_tokenizer
from elastic_trainer.errors import DataError

MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def dataset_endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"{host}:{port}"
    finally:
        server.stop()


@pytest.fixture
def uploaded(dataset_endpoint: str, text_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of `text_dataset` in a bucket."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    client = boto3.client("s3", endpoint_url=f"http://{dataset_endpoint}", region_name="us-east-1")
    client.create_bucket(Bucket="corpora")
    for file in text_dataset.rglob("*.*"):
        client.upload_file(str(file), "corpora", f"texts/{file.relative_to(text_dataset)}")
    query = f"endpoint_override={dataset_endpoint}&scheme=http&region=us-east-1"
    return f"s3://corpora/texts?{query}"


def test_reads_like_the_local_one(uploaded: str, text_dataset: Path, config: MakeConfig) -> None:
    remote, local = describe(config(uploaded)), describe(config(text_dataset))
    assert (remote.num_rows, remote.num_eval_rows) == (local.num_rows, local.num_eval_rows)
    assert remote.fingerprint == local.fingerprint
    assert remote.tokenizer_path is not None
    assert load_tokenizer(remote.tokenizer_path).vocab_size == local.vocab_size
    for split in ("train", "eval"):
        ours = list(BatchStream(config(uploaded), split, 4, num_epochs=1))
        theirs = list(BatchStream(config(text_dataset), split, 4, num_epochs=1))
        for (info, fields), (expected_info, expected) in zip(ours, theirs, strict=True):
            assert info == expected_info
            for microbatch, other in zip(fields, expected, strict=True):
                np.testing.assert_array_equal(microbatch["labels"], other["labels"])


def test_a_single_file_and_a_missing_one(uploaded: str, config: MakeConfig) -> None:
    file = uploaded.replace("?", "/data/train-00000-of-00002.parquet?")
    assert describe(config(file)).num_rows == 5
    with pytest.raises(DataError, match="there is no dataset at s3://corpora/texts/nothing"):
        describe(config(uploaded.replace("?", "/nothing?")))
    with pytest.raises(DataError, match="there is no dataset at s3://nobucket"):
        describe(config(uploaded.replace("corpora", "nobucket")))
