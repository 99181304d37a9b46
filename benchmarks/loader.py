"""Our loader against Hugging Face `datasets` and Ray Data: samples/s out of the captions Parquet.

The same work for all three, on the same rows: the picture decoded to an RGB array of the size that
the model wants and cut into patches, the sound decoded to samples of one channel at one rate and
made log-mel frames, the caption tokenised. All call the same functions, in as many threads or
processes as there are cores, so what differs is how a loader reads, spreads the work and hands over
what was made. Ours is the `BatchStream` of the trainer with the loader's work ahead, decoding in
processes of its own; it also predicts costs, packs and joins samples to microbatches, which is not
asked of the others. The dataset has several rows of each picture (captions in several languages):
ours decodes it once and keeps it, within `data.media_cache_mb`, but not from one epoch to the next.
`uncached` is ours without that.

Peers go the ways that their manuals offer, and the one that is fastest in a first epoch counts:

- `datasets`: `load_dataset` of the Parquet files with `Image` and `Audio` as bytes (its own
  decoding of sound wants FFmpeg), decoded in a transform, in the processes of a PyTorch
  `DataLoader` or in threads.
- Ray Data: `read_parquet` and `map_batches` in tasks, read by `iter_batches`, not shuffled.

Every sample is one epoch over a scratch copy, from the request to the last row, after one epoch of
each way, by which that of each peer is chosen and which warms processes up.
"""

import logging
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from common import figure, log, parser, show

from elastic_trainer.config import Config, load_config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.media.audio import decode_audio, log_mel
from elastic_trainer.data.media.decoders import shared
from elastic_trainer.data.media.images import decode_image, patchify
from elastic_trainer.data.media.reader import limits_of
from elastic_trainer.data.prefetch import Prefetcher
from elastic_trainer.data.tokenizer import load_tokenizer

BATCH_SIZE = 32
ROWS_PER_GROUP = 150
WAIT_S = 60.0
COLUMNS = ["image", "audio", "text"]
Epoch = Callable[[], int]  # reads all rows once; how many


class Work:
    """What the peers make of a batch of rows."""

    def __init__(self, config: Config) -> None:
        self.image, self.audio = limits_of(config.data)
        self.tokenizer = load_tokenizer(config.data.path)

    def __call__(self, rows: Any) -> dict[str, Any]:
        pictures = [decode_image(file["bytes"], self.image) for file in rows["image"]]
        sounds = [decode_audio(file["bytes"], self.audio) for file in rows["audio"]]
        return {
            "patches": [patchify(picture, self.image.patch_size)[0] for picture in pictures],
            "frames": [log_mel(sound, self.audio) for sound in sounds],
            "tokens": [self.tokenizer.encode(text) for text in rows["text"]],
        }


def scratch_copy(dataset: Path, folder: Path, num_rows: int | None) -> Path:
    """A dataset of evenly spaced rows of this one's training data, with the same metadata."""
    table = pa.concat_tables(pq.read_table(f) for f in sorted((dataset / "data").glob("train-*")))
    if num_rows is not None:
        step = max(1, table.num_rows // num_rows)
        table = table.take(pa.array(range(0, table.num_rows, step)[:num_rows]))
    (folder / "data").mkdir()
    pq.write_table(
        table,
        folder / "data" / "train-00000-of-00001.parquet",
        row_group_size=ROWS_PER_GROUP,
        compression="none",
    )
    (folder / "tokenizer.json").write_bytes((dataset / "tokenizer.json").read_bytes())
    return folder


def ours(config: Config) -> Epoch:
    """The trainer's stream of batches, as the loader actor reads it."""

    def epoch() -> int:
        # As in a first epoch: only what this one has decoded is known.
        shared(config.data.media_workers, config.data.media_cache_mb << 20).cache.clear()
        stream = BatchStream(config, "train", BATCH_SIZE, num_epochs=1)
        ahead = Prefetcher(stream, config.data.prefetch_updates, WAIT_S)
        count = sum(info.num_samples for info, _ in ahead)
        ahead.close()
        return count

    return epoch


def datasets_ways(file: Path, work: Work, cache: Path) -> dict[str, Epoch]:
    """Hugging Face `datasets`, in processes and in threads."""
    import datasets
    from torch.utils.data import DataLoader

    datasets.disable_progress_bars()
    rows = datasets.load_dataset(
        "parquet", data_files={"train": str(file)}, split="train", cache_dir=str(cache)
    ).select_columns(COLUMNS)
    rows = rows.cast_column("image", datasets.Image(decode=False))
    rows = rows.cast_column("audio", datasets.Audio(decode=False))
    loader = DataLoader(
        rows.with_transform(work),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=os.cpu_count() or 1,
        persistent_workers=True,
        prefetch_factor=4,
        collate_fn=list,
    )
    pool = ThreadPoolExecutor(os.cpu_count())

    def threads() -> Iterator[dict[str, Any]]:
        waiting: deque[Future[dict[str, Any]]] = deque()
        for batch in rows.shuffle().iter(BATCH_SIZE):
            waiting.append(pool.submit(work, batch))
            if len(waiting) > 2 * (os.cpu_count() or 1):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    return {
        "processes": lambda: sum(len(batch) for batch in loader),
        "threads": lambda: sum(len(batch["tokens"]) for batch in threads()),
    }


def ray_ways(file: Path, work: Work) -> dict[str, Epoch]:
    """Ray Data in tasks; it runs on a Ray of its own."""
    import ray

    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    ray.data.DataContext.get_current().enable_progress_bars = False

    function: Any = work  # Ray's types know functions only

    def read(blocks: int) -> int:
        rows = ray.data.read_parquet(str(file), override_num_blocks=blocks)
        made = rows.select_columns(COLUMNS).map_batches(function, batch_size=BATCH_SIZE)
        return sum(
            len(batch["tokens"])
            for batch in made.iter_batches(batch_size=BATCH_SIZE, prefetch_batches=4)
        )

    cores = os.cpu_count() or 1
    return {f"{n} blocks": partial(read, n) for n in (cores, 4 * cores)}


def samples_per_s(epoch: Epoch, num_rows: int) -> float:
    begin = time.perf_counter()
    count = epoch()
    elapsed = time.perf_counter() - begin
    assert count == num_rows, f"{count} of {num_rows} rows came"
    return count / elapsed


def one_thread_each() -> None:
    """Begin anew with one thread per decoder for linear algebra, as the run's actors have it."""
    wanted = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if not wanted.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def main() -> None:
    one_thread_each()
    arguments = parser(__doc__ or "")
    arguments.add_argument("--data", type=Path, default=Path("datasets/captions"))
    arguments.add_argument("--rows", type=int, help="of an epoch, evenly spaced; all by default")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="et-bench-") as folder:
        copy = scratch_copy(options.data, Path(folder), options.rows)
        config = load_config("captions", [f"data.path={copy}"])
        config = replace(config, data=replace(config.data, media_workers=os.cpu_count() or 1))
        work, file = Work(config), next(copy.glob("data/train-*"))
        num_rows = pq.read_metadata(file).num_rows
        ways = {
            "ours": {"": ours(config)},
            "uncached": {"": ours(replace(config, data=replace(config.data, media_cache_mb=0)))},
            "datasets": datasets_ways(file, work, Path(folder) / "cache"),
            "ray_data": ray_ways(file, work),
        }
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        best = {}
        for name, its in ways.items():
            found = {way: samples_per_s(epoch, num_rows) for way, epoch in its.items()}
            best[name] = its[max(found, key=lambda way: found[way])]
            log(f"{name}: {', '.join(f'{way} {s:.1f} samples/s' for way, s in found.items())}")
        for repeat in range(options.repeats):
            names = list(best) if repeat % 2 == 0 else list(reversed(best))
            for name in names:
                speeds[name].append(samples_per_s(best[name], num_rows))
            log(", ".join(f"{name} {s[-1]:.1f} samples/s" for name, s in speeds.items()))
    figures = {f"{name}_samples_per_s": figure(s, "samples/s") for name, s in speeds.items()}
    for peer in ("datasets", "ray_data"):
        for name, label in (("ours", ""), ("uncached", "_uncached")):
            ratios = [a / b for a, b in zip(speeds[name], speeds[peer], strict=True)]
            figures[f"samples_per_s{label}_over_{peer}"] = figure(ratios)
    show(figures, options.json)


if __name__ == "__main__":
    main()
