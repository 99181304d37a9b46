"""Layers to files and back: every dtype and shape, odd names, damage, many writers."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from elastic_trainer.checkpoint.layers import read_layer, snapshot, write_layer
from elastic_trainer.checkpoint.store import CheckpointStore, LayerFile
from elastic_trainer.checkpoint.tensor_file import decode, encode
from elastic_trainer.errors import CheckpointError
from elastic_trainer.types import CheckpointInfo, Cursor

Save = Callable[..., CheckpointInfo]
State = Callable[[int, str], dict[str, Tensor]]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert actual[name].shape == tensor.shape
        assert bits(actual[name]) == bits(tensor)


def unusual_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2, (3, 5), generator=generator)
    tensors = {f"param/{dtype}": values.to(dtype) for dtype in DTYPES}
    return tensors | {
        "optim/weight/step": torch.tensor(17.0),
        "buffer/flag": torch.tensor(True),
        "buffer/empty": torch.empty(0, 4),
        "param/transposed": torch.randn(6, 2, generator=generator).t(),
        "param/every_second": torch.arange(10)[::2],
        "param/expanded": torch.tensor([1.5]).expand(4),
        "param/nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        'param/ü/"quoted"\n': torch.ones(1),
    }


def test_every_dtype_and_shape_survives(store: CheckpointStore) -> None:
    tensors = unusual_tensors()
    file = write_layer(store, 1, 0, "only", tensors)
    store.commit(1, [file], cursor=Cursor())
    read = read_layer(store, store.manifest(1), "only")
    assert_same(read, tensors)
    read["param/nan"].zero_()  # what is loaded must be writable


def test_the_file_is_what_the_safetensors_library_reads_and_writes(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in unusual_tensors().items()}
    ours = b"".join(encode(tensors, {"format": "pt"}))
    (tmp_path / "ours").write_bytes(ours)
    assert_same(safetensors.torch.load_file(tmp_path / "ours"), tensors)
    assert_same(decode(safetensors.torch.save(tensors, {"format": "pt"})), tensors)
    # Each tensor starts at a multiple of its element's size, as memory-mapping readers expect.
    assert int.from_bytes(ours[:8], "little") % 8 == 0
    assert len(ours) == len(safetensors.torch.save(tensors, {"format": "pt"}))


def test_encoding_copies_no_contiguous_tensor() -> None:
    weight = torch.zeros(4)
    chunks = encode({"w": weight}, {})
    weight.fill_(1.0)
    assert bytes(chunks[-1]) == bits(torch.ones(4))


def test_a_snapshot_does_not_follow_training() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    copy = snapshot({"param/w": weight, "param/t": weight.t()})
    with torch.no_grad():
        weight.fill_(1.0)
    assert copy["param/w"].sum() == 0 and copy["param/t"].sum() == 0
    assert not copy["param/w"].requires_grad
    assert copy["param/t"].is_contiguous()


ODD_NAMES = ["", ".", "..", "../../up", "a/b", "a\\b", "ü 層", "x" * 300, "a:b*?<>|", "a.b", "A.B"]


def test_layer_names_may_hold_any_character(store: CheckpointStore) -> None:
    # The same content throughout: names alone must keep the files apart.
    files = [
        write_layer(store, 1, index, name, {"param/w": torch.tensor(float(index))})
        for index, name in enumerate(ODD_NAMES)
    ]
    store.commit(1, files, cursor=Cursor())
    manifest = store.manifest(1)
    for index, name in enumerate(ODD_NAMES):
        assert read_layer(store, manifest, name)["param/w"].item() == index
    assert {p.name for p in Path(store.root).iterdir()} == {"step-00000001"}
    assert len(list(Path(store.root).rglob("*.safetensors"))) == len(ODD_NAMES)


def test_an_unknown_layer_is_named(store: CheckpointStore, save: Save) -> None:
    save(store, 1)
    with pytest.raises(CheckpointError, match=r"no layer 'tail'.*holds: embed, blocks\.0, head"):
        read_layer(store, store.manifest(1), "tail")


def file_of(store: CheckpointStore, update: int, name: str) -> Path:
    file = store.manifest(update).layer(name).file
    return Path(store.root) / f"step-{update:08d}" / file


def test_each_flipped_byte_is_found(store: CheckpointStore, save: Save) -> None:
    save(store, 1)
    manifest = store.manifest(1)
    path = file_of(store, 1, "blocks.0")
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError) as caught:
            read_layer(store, manifest, "blocks.0")
        message = str(caught.value)
        assert "layer 'blocks.0'" in message and path.name in message
        assert "does not match its digest" in message
    path.write_bytes(content)
    assert len(read_layer(store, manifest, "blocks.0")) == 3


@pytest.mark.parametrize("keep", [0, 1, -1])
def test_a_truncated_file_is_found(store: CheckpointStore, save: Save, keep: int) -> None:
    save(store, 1)
    path = file_of(store, 1, "head")
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    expected = f"it holds {len(content[:keep])} bytes instead of {len(content)}"
    with pytest.raises(CheckpointError, match=expected) as caught:
        read_layer(store, store.manifest(1), "head")
    assert "layer 'head'" in str(caught.value) and path.name in str(caught.value)


def test_a_missing_file_is_named(store: CheckpointStore, save: Save) -> None:
    save(store, 1)
    path = file_of(store, 1, "head")
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"layer 'head' in .*{path.name}: it does not exist"):
        read_layer(store, store.manifest(1), "head")


def test_a_file_that_is_no_safetensors_is_refused(store: CheckpointStore) -> None:
    file = store.write_layer_file(1, 0, "only", [b"\x80\x04 a pickle, say"])
    store.commit(1, [file], cursor=Cursor())
    with pytest.raises(CheckpointError, match="layer 'only' of update 1 is not a safetensors file"):
        read_layer(store, store.manifest(1), "only")


def test_many_writers_of_different_layers(store: CheckpointStore, state: State) -> None:
    names = [f"blocks.{i}" for i in range(16)]
    start = threading.Barrier(len(names))
    files: list[LayerFile] = []

    def write(index: int, name: str) -> None:
        own = CheckpointStore(store.root)
        start.wait(timeout=30)
        files.append(write_layer(own, 3, index, name, state(index, name)))

    threads = [threading.Thread(target=write, args=item) for item in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    store.commit(3, files, cursor=Cursor())
    manifest = store.manifest(3)
    for index, name in enumerate(names):
        assert_same(read_layer(store, manifest, name), state(index, name))


def test_two_writers_of_the_same_layer_do_not_disturb_each_other(
    store: CheckpointStore, state: State
) -> None:
    tensors = {"param/w": torch.arange(200_000.0)}
    start = threading.Barrier(4)
    files: list[LayerFile] = []

    def write() -> None:
        start.wait(timeout=30)
        for _ in range(10):
            files.append(write_layer(store, 1, 0, "only", tensors))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(set(files)) == 1 and len(files) == 40
    store.commit(1, [files[0]], cursor=Cursor())
    assert_same(read_layer(store, store.manifest(1), "only"), tensors)
    assert len(list(Path(store.root).rglob("*.*"))) == 2


@pytest.mark.parametrize("num_saving", range(1, 7))
@pytest.mark.parametrize("num_loading", range(1, 7))
def test_saved_by_p_writers_and_loaded_by_q_readers(
    store: CheckpointStore, state: State, num_saving: int, num_loading: int
) -> None:
    names = [f"l{i}" for i in range(7)]

    def parts(num: int) -> list[range]:
        return [range(7 * s // num, 7 * (s + 1) // num) for s in range(num)]

    files = [
        write_layer(CheckpointStore(store.root), 2, i, names[i], state(i, names[i]))
        for part in reversed(parts(num_saving))
        for i in part
    ]
    store.commit(2, files, cursor=Cursor(epoch=3, row=5, offset=2), extra={"lr": 1e-3})
    for part in parts(num_loading):
        reader = CheckpointStore(store.root)
        manifest = reader.manifest(2)
        assert manifest.cursor == Cursor(epoch=3, row=5, offset=2)
        assert manifest.extra == {"lr": 1e-3}
        for i in part:
            assert_same(read_layer(reader, manifest, names[i]), state(i, names[i]))
