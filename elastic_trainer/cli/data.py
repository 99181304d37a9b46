"""Commands for datasets: making one, looking into one."""

import glob
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_trainer.cli import render
from elastic_trainer.cli.complete import complete_dataset
from elastic_trainer.errors import ConfigError

OWN_FILES = "from"

data_app = typer.Typer(help="Look into datasets.", no_args_is_help=True)


def make_dataset(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="stdlib-text, gcide: text. captions: pictures and speech. speech: sound. digits: "
            "pictures. from: your own FILES.",
            autocompletion=complete_dataset,
        ),
    ],
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE]... [KEY=VALUE]...",
            help="Of kind from: folders, .tar archives (WebDataset) and .jsonl lists. Of all: "
            "arguments of that kind (a wrong one lists them), such as on_error=skip.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder to make; default: datasets/KIND, or after the first FILE."
        ),
    ] = None,
    from_dir: Annotated[
        str | None,
        typer.Option(
            "--from-dir",
            metavar="PATH",
            help="Offline: the downloaded package, or a folder with it or with its files.",
            show_default=False,
        ),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=257, help="Entries of the tokenizer.")] = 4096,
    eval_fraction: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of documents or pictures held out.")
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another dataset in the folder.")
    ] = False,
) -> None:
    """Make a dataset of a package's content or your own files: Parquet files with a tokenizer."""
    from elastic_trainer.data.make_dataset import make_dataset as build

    files, arguments = split_files(kind, source or [])
    if from_dir is not None:
        arguments["from_dir"] = from_dir
    info = build(
        kind,
        out or Path("datasets") / (_name_of(files[0]) if files else kind),
        vocab_size=vocab_size,
        eval_fraction=eval_fraction,
        seed=seed,
        overwrite=overwrite,
        **arguments,
    )
    render.dataset(info)


@data_app.command()
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A dataset's folder, file or URI.")],
    columns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OURS=THEIRS]...",
            help="Columns that are called otherwise, such as image=img.",
            show_default=False,
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the histograms there.", show_default=False),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples of a batch, to predict its balance.")
    ] = 64,
    microbatches: Annotated[
        int, typer.Option(min=1, help="Microbatches of a batch, to predict its balance.")
    ] = 8,
    stages: Annotated[
        int, typer.Option(min=1, help="Stages of the pipeline, to predict its balance.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the order of rows.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables and pictures.")
    ] = False,
) -> None:
    """Show rows, modalities and sizes of a dataset, and how evenly it fills microbatches."""
    from elastic_trainer.cli import sizes
    from elastic_trainer.config import DataConfig
    from elastic_trainer.data.media.balance import predict_balance
    from elastic_trainer.data.media.inspect import inspect_dataset
    from elastic_trainer.planner.sample_costs import analytic_cost

    data = DataConfig(columns=split_pairs(columns or []))
    found = inspect_dataset(path, data)
    cost = analytic_cost(
        patch_size=data.patch_size, mel_bins=data.mel_bins, vocab_size=found.vocab_size or 0
    )
    balance = predict_balance(
        found.items,
        cost,
        num_stages=stages,
        batch_size=batch_size,
        num_microbatches=microbatches,
        seed=seed,
    )
    sizes.show(found, balance, as_json)
    if png is not None:
        from elastic_trainer.cli.drawing import draw

        draw(found, balance, png)
        typer.echo(f"Drew {png}", err=True)


def _name_of(file: str) -> str:
    """What a dataset made of this file is called: its name up to the first dot."""
    name = Path(file).expanduser().resolve().name.lstrip(".").partition(".")[0]
    if not name or glob.has_magic(name):
        raise ConfigError(f"`{file}` gives the dataset no name", "Name its folder by --out.")
    return name


def split_files(kind: str, texts: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Names of files, which only the kind `from` has, and `key=value` texts as a dict."""
    if kind != OWN_FILES:
        return [], split_pairs(texts)
    files = [t for t in texts if Path(t).exists() or not t.partition("=")[0].isidentifier()]
    files += [t for t in texts if t not in files and "=" not in t]
    return files, {"files": files, **split_pairs([t for t in texts if t not in files])}


def split_pairs(texts: list[str]) -> dict[str, Any]:
    """`key=value` texts as a dict of texts."""
    pairs = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier():
            raise ConfigError(f"`{text}` is not an argument", "Write key=value without spaces.")
        pairs[key] = value
    return pairs
