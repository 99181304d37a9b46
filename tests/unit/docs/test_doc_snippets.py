"""What the documentation shows works: snippets run, settings exist, commands parse, links lead on.

A page is read from top to bottom in an empty folder. A block whose first line is `# NAME.py` or
`# NAME.yaml` is a file; other Python blocks run, with `fit` checking its arguments instead of
training. The pages' own models are then trained, split and unsplit.
"""

import ast
import importlib
import importlib.util
import inspect
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

import elastic_trainer
from elastic_trainer.cli.commands import app, split_config
from elastic_trainer.config import Config, load_config, to_mapping
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.elastic import state
from elastic_trainer.models.registry import load_model
from elastic_trainer.observability.series import CATALOG
from elastic_trainer.run import fit
from elastic_trainer.testing.in_process import Batches, InProcessPipeline, even_plan
from elastic_trainer.types import RunResult

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
OPERATIONS = ROOT / "docs" / "operations.md"
OWN = ROOT / "docs" / "your-own-model-and-data.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = set(to_mapping(Config()))
VOCAB_SIZE, LENGTH = 50, 8


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block, in order."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def file_name(text: str) -> str | None:
    """The file that a block says it is."""
    match = re.match(r"# ([\w.-]+\.(?:py|yaml))\n", text)
    return match[1] if match else None


def shell_lines(text: str) -> Iterator[list[str]]:
    """The words of each command; comments are gone, continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def checked_fit(config: Any = None, *overrides: str, **options: Any) -> RunResult:
    """Takes what `fit` takes, reads the configuration, trains nothing."""
    inspect.signature(fit).bind(config, *overrides, **options)
    load_config(config, overrides)
    return RunResult(name="run", status="completed", reason="", run_dir="runs/run", update=1)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder on the module path; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(elastic_trainer, "fit", checked_fit, raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def read_page(page: Path) -> None:
    """Do what a reader would who copies everything, up to training."""
    for language, text in blocks(page):
        name = file_name(text)
        if name:
            Path(name).write_text(text, encoding="utf-8")
            importlib.invalidate_caches()
        if language == "python" and name:
            importlib.import_module(name.removesuffix(".py"))
        elif language == "python":
            exec(compile(text, f"{page.name} snippet", "exec"), {"__name__": "snippet"})
        elif language == "yaml":
            tree = yaml.safe_load(text)
            if set(tree) <= SECTIONS:
                load_config(name or tree)
        elif language == "sh":
            for words in shell_lines(text):
                check_command(words)


def check_command(words: list[str]) -> None:
    """A command of ours exists and takes these arguments."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if "--" in words and words[0] == "ray":
        words = words[words.index("--") + 1 :]
    match words:
        case ["elastic-trainer" | ".venv/bin/elastic-trainer", *arguments]:
            check_elastic_trainer(arguments)
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text()
            for target in targets:
                is_target = re.search(rf"^{target}:", makefile, re.MULTILINE)
                assert "=" in target or is_target, f"make {target}"
        case ["python" | ".venv/bin/python", "-m", module, *_]:
            assert importlib.util.find_spec(module) is not None, module
        case ["python" | ".venv/bin/python", script, *_] if not script.startswith("-"):
            assert (ROOT / script).is_file(), script


def check_elastic_trainer(arguments: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    if arguments[0].startswith("-"):
        assert arguments[0] in [o for p in group.params for o in p.opts] + [
            "--help",
            "--install-completion",
        ]
        return
    name, *rest = arguments
    assert name in group.commands, name
    command = group.commands[name]
    while hasattr(command, "commands"):
        name, *rest = rest
        command = command.commands[name]
    given = command.make_context(name, list(rest)).params
    if name in ("train", "plan"):
        config, overrides = split_config(given["config"], given["overrides"])
        is_run = config is not None and (config.startswith(("runs/", "/")) or config == "RUN")
        settings = list(overrides)
        if given["workers"]:
            settings.append(f"cluster.num_workers={given['workers']}")
        load_config(None if is_run else config, settings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_reader_can_copy_what_a_page_shows(page: Path, workplace: Path) -> None:
    read_page(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in anchors, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_are_named_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    named = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_]+)(?:=[^`]*)?`", text)
    tree = to_mapping(Config())
    for setting in named:
        section, _, name = setting.partition(".")
        is_file = name in ("json", "jsonl", "py", "yaml")
        assert is_file or name in tree[section], f"{page.name} names {setting}"


def messages(folder: Path) -> Iterator[str]:
    """Every text in the code, with … where a value is put in."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                yield "".join(map(str, parts))


def table_after(page: Path, heading: str) -> list[list[str]]:
    """The rows of the first table below the line that starts with `heading`."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(heading))
    rows = itertools.takewhile(
        lambda line: line.startswith("|"),
        itertools.dropwhile(lambda line: not line.startswith("|---"), lines),
    )
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows][1:]


def test_messages_that_are_explained_exist() -> None:
    texts = [t for f in ("elastic_trainer", "actors", "data") for t in messages(ROOT / f)]
    rows = table_after(OPERATIONS, "| message |")
    explained = [message.strip("`") for message, _ in rows]
    assert len(explained) > 20
    lost = [m for m in explained if not any(m in text for text in texts)]
    assert not lost


def test_metrics_are_listed_with_their_labels() -> None:
    rows = table_after(OPERATIONS, "| metric |")
    listed = {name.strip("`"): (kind, labels) for name, kind, labels, _ in rows}
    exported = {
        spec.full_name: (spec.kind, ", ".join(f"`{label}`" for label in spec.labels) or "–")
        for spec in CATALOG
    }
    assert listed == exported


def test_alerts_are_listed() -> None:
    alerts = yaml.safe_load((ROOT / "configs" / "prometheus" / "alerts.yml").read_text())
    names = [rule["alert"] for group in alerts["groups"] for rule in group["rules"]]
    rows = table_after(OPERATIONS, "| alert |")
    assert [name.strip("`") for name, _ in rows] == names


def test_the_grid_of_the_architecture_page_is_what_the_code_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = blocks(ARCHITECTURE)
    at = next(i for i, (language, _) in enumerate(found) if language == "python")
    exec(compile(found[at][1], "grid", "exec"), {})
    assert capsys.readouterr().out.rstrip() == found[at + 1][1].rstrip()


def test_the_state_machine_is_drawn_as_in_the_code() -> None:
    drawing = (state.__doc__ or "").partition("    STARTING")[1:]
    drawn = "".join(drawing).partition("\n\n")[0]
    assert "FAILED" in drawn and drawn in ARCHITECTURE.read_text(encoding="utf-8")
    rows = table_after(ARCHITECTURE, "| phase |")
    assert [name.strip("`").lower() for name, *_ in rows] == [str(p) for p in state.Phase]


def test_readme_shows_the_two_commands_and_a_picture_first() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:24])
    assert "make train" in first_screen and "make test" in first_screen
    assert "docs/images/progress.svg" in first_screen
    assert (ROOT / "docs" / "images" / "progress.svg").read_text().startswith("<svg")


def small_batches(config: Config) -> Batches:
    """Two updates of the configured data."""
    stream = BatchStream(config, "train", config.train.global_batch_size)
    batches = {}
    for update in (1, 2):
        _, microbatches = next(stream)
        batches[update] = [
            {name: torch.from_numpy(array) for name, array in fields.items()}
            for fields in microbatches
        ]
    return batches


def train(config: Config, num_stages: int) -> dict[str, dict[str, torch.Tensor]]:
    model = load_model(config)
    plan = even_plan(model, num_stages, config.pipeline.schedule)
    pipeline = InProcessPipeline(model, config, plan, small_batches(config))
    pipeline.train(1, 2)
    return pipeline.states()


TOKENS = [
    "data.format=synthetic",
    f"data.sequence_length={LENGTH}",
    "train.global_batch_size=8",
    "train.max_steps=2",
    f"model.args.vocab_size={VOCAB_SIZE}",
]
EXAMPLES = {
    "nn.Sequential": (None, ["model.target=my_model:words", *TOKENS]),
    "a dict between layers": (None, ["model.target=two_streams:two_streams", *TOKENS]),
    "ties and batch fields": (None, ["model.target=tied:tied", *TOKENS]),
    "own loss": (None, ["model.target=my_model:words", "loss.target=my_loss:smooth", *TOKENS]),
    "text": ("gpt", ["data.path=datasets/notes", "data.sequence_length=32", "train.max_steps=50"]),
    "tokens": ("ids.yaml", ["model.args.vocab_size=100"]),
    "columns": ("prices.yaml", []),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_train_to_the_same_bits_on_one_and_two_stages(
    example: str, workplace: Path
) -> None:
    read_page(OWN)
    source, overrides = EXAMPLES[example]
    small = ["model.args.num_layers=1", "model.args.dim=12"] if source == "gpt" else []
    config = load_config(source, [*overrides, *small])
    one, two = train(config, 1), train(config, 2)
    assert one.keys() == two.keys() and one
    for layer, tensors in one.items():
        for key, value in tensors.items():
            assert torch.equal(value, two[layer][key]), f"{layer} {key}"


def test_the_tie_of_the_page_holds(workplace: Path) -> None:
    read_page(OWN)
    states = train(load_config(None, ["model.target=tied:tied", *TOKENS]), 2)
    assert torch.equal(states["embed"]["param/weight"], states["head"]["param/weight"])
