"""The same store on an S3 server."""

import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest
import torch
from moto.server import ThreadedMotoServer

from elastic_trainer.checkpoint.layers import BackgroundSaver, read_layer, write_layer
from elastic_trainer.checkpoint.resume import resolve_resume
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.errors import CheckpointError
from elastic_trainer.types import CheckpointInfo, Cursor

Save = Callable[..., CheckpointInfo]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"{host}:{port}"
    finally:
        server.stop()


@pytest.fixture
def uri(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    client = boto3.client("s3", endpoint_url=f"http://{endpoint}", region_name="us-east-1")
    client.create_bucket(Bucket="runs")
    folder = request.node.name.replace("[", "-").replace("]", "")
    return f"s3://runs/{folder}?endpoint_override={endpoint}&scheme=http&region=us-east-1"


def test_save_list_resume_prune(uri: str, save: Save) -> None:
    store = CheckpointStore(uri)
    assert store.newest() is None
    assert resolve_resume(store, "auto") is None
    first = save(store, 10)
    save(store, 20)
    write_layer(store, 5, 0, "embed", {"param/w": torch.ones(2)})
    assert [info.update for info in store.list()] == [10, 20]
    assert first.path == uri.replace("?", "/step-00000010?")
    for resume, update in (("auto", 20), (10, 10), (first.path, 10), (uri, 20)):
        point = resolve_resume(CheckpointStore(uri), resume)
        assert point is not None and point.manifest.update == update
        assert read_layer(point.store, point.manifest, "head")["optim/weight/step"] == update
    assert list(store.prune(1)) == [5, 10]
    assert [info.update for info in store.list()] == [20]
    assert [entry.name for entry in store.storage.entries()] == ["step-00000020"]
    assert list(store.supersede_after(10)) == [20]
    assert store.newest() is None


def test_a_large_layer_goes_in_several_parts(uri: str) -> None:
    store = CheckpointStore(uri)
    tensors = {f"param/{i}": torch.full((1_500_000,), float(i)) for i in range(4)}
    saver = BackgroundSaver(store, ["only"])
    saver.save(1, {"only": tensors})
    result = saver.wait(60)
    assert result is not None and result.ok
    store.commit(1, result.files, cursor=Cursor())
    read = read_layer(store, store.manifest(1), "only")
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_damage_and_absence_are_named_without_the_options(uri: str, save: Save) -> None:
    store = CheckpointStore(uri)
    save(store, 1)
    manifest = store.manifest(1)
    file = f"step-00000001/{manifest.layer('head').file}"
    content = bytearray(store.storage.read(file))
    content[-1] ^= 1
    store.storage.write(file, [content])
    with pytest.raises(CheckpointError, match="layer 'head' in s3://runs/.* is damaged") as caught:
        read_layer(store, manifest, "head")
    assert "endpoint_override" not in str(caught.value)
    store.storage.delete(file)
    store.storage.delete(file)
    with pytest.raises(CheckpointError, match="layer 'head' in s3://runs/.*does not exist"):
        read_layer(store, manifest, "head")
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        resolve_resume(store, "auto")


def test_a_bucket_that_is_not_there_is_reported_by_the_saver(uri: str, tmp_path: Path) -> None:
    store = CheckpointStore(uri.replace("s3://runs/", "s3://no-such-bucket/"))
    saver = BackgroundSaver(store, ["only"])
    saver.save(1, {"only": {"param/w": torch.ones(2)}})
    result = saver.wait(60)
    assert result is not None and result.error is not None
    assert "cannot write layer 'only' to s3://no-such-bucket/" in str(result.error)
    assert "endpoint_override" not in str(result.error)


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        uri = f"s3://runs/x?endpoint_override={endpoint}&scheme=http&region=us-east-1"
        store = CheckpointStore(uri, timeout_s=0.3)
        with pytest.raises(CheckpointError, match=r"cannot list s3://runs/x: no answer within 0.3"):
            store.newest()
        saver = BackgroundSaver(store, ["only"])
        saver.save(1, {"only": {"param/w": torch.ones(2)}})
        result = saver.wait(30)
    assert result is not None and "no answer within 0.3" in str(result.error)
