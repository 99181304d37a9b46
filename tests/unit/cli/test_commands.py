"""The commands: what they pass on, what they print, one line and an exit code when they fail."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic_trainer.cli.commands import app
from elastic_trainer.cli.complete import complete_config, complete_override, complete_run
from elastic_trainer.cli.main import run
from elastic_trainer.config import load_config
from elastic_trainer.errors import ClusterError, ConfigError, ScheduleError
from elastic_trainer.observability.changes import Change
from elastic_trainer.observability.progress import format_bytes
from elastic_trainer.observability.record import RunRecord
from elastic_trainer.types import CheckpointInfo, Plan, Prediction, StagePlan

COMMANDS = (
    "train plan make-dataset data status runs stop scale drain checkpoints export generate evaluate"
).split()
PLAN = Plan(
    generation=1,
    schedule="1f1b",
    num_microbatches=8,
    layers=("embed", "blocks.0", "head"),
    stages=(
        StagePlan(stage=0, first=0, stop=2, worker="stage-0"),
        StagePlan(stage=1, first=2, stop=3, worker="stage-1"),
    ),
    predicted=Prediction(
        step_s=0.25, bubble_ratio=0.11, stage_busy_s=(0.2, 0.25), stage_memory_bytes=(2**21, 500)
    ),
    reasons=("cut after blocks.0: largest stage 0.25 s; after embed it were 0.3 s",),
)


class FakeRun(ModuleType):
    """Stands in for elastic_trainer.run, which needs Ray; records calls and answers."""

    def __init__(self) -> None:
        super().__init__("elastic_trainer.run")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            answer = self.answers.get(name)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    module = FakeRun()
    monkeypatch.setitem(sys.modules, "elastic_trainer.run", module)
    return module


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with one ended run in `runs/`."""
    monkeypatch.chdir(tmp_path)
    with RunRecord(tmp_path / "runs" / "first", clock=lambda: 1000.0) as record:
        record.append_update({"update": 1, "loss": 2.0})
        record.write_plan(PLAN)
        record.log_event("end", "completed: all updates done")
        record.write_status(
            {"state": "completed", "update": 1, "total_updates": 1, "loss": 2.0}
            | {"started_at": 935.0, "perplexity": 7.5}
        )
    return tmp_path / "runs"


def failure(capsys: pytest.CaptureFixture[str], args: Sequence[str], code: int) -> str:
    """The one line on standard error of a command that must fail."""
    assert run(args) == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("elastic-trainer: ")
    return captured.err


def output(capsys: pytest.CaptureFixture[str], args: Sequence[str]) -> str:
    assert run(args) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_help_names_every_command_and_option() -> None:
    runner = CliRunner()
    text = runner.invoke(app, ["--help"]).output
    for command in COMMANDS:
        assert command in text
        result = runner.invoke(app, [command, "--help"])
        assert result.exit_code == 0 and "Usage" in result.output
    text = runner.invoke(app, ["train", "--help"], terminal_width=120).output
    for (
        option
    ) in "--workers --address --run-dir --resume --detach --dry-run --fast-dev-run".split():
        assert option in text


def test_help_loads_neither_ray_nor_torch() -> None:
    script = (
        "import sys\nfrom elastic_trainer.cli.main import run\nassert run(['--help']) == 0\n"
        "heavy = {'ray', 'torch', 'omegaconf', 'pyarrow', 'prometheus_client'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_train_passes_everything_on(fake: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["train_command"] = 0
    args = "train gpt train.max_steps=3 --workers 4 --address auto --run-dir d --resume auto"
    assert output(capsys, [*args.split(), "optim.name=sgd", "--fast-dev-run"]) == ""
    assert fake.calls == [
        (
            "train_command",
            ("gpt", ["train.max_steps=3", "optim.name=sgd"]),
            {
                "workers": "4",
                "address": "auto",
                "run_dir": "d",
                "resume": "auto",
                "detach": False,
                "fast_dev_run": True,
            },
        )
    ]


def test_calls_fit_the_real_functions(fake: FakeRun, storage: Path) -> None:
    """The fake takes anything; the real signatures must take the same."""
    import importlib
    import inspect

    fake.answers |= {
        "train_command": 0,
        "plan_command": (None, PLAN),
        "dry_run": (load_config(None), PLAN),
        "stop": {"name": "", "update": 0},
        "scale": {"name": "", "min_workers": 1, "max_workers": 2, "num_workers": 1},
        "drain": {"name": "", "node": "n", "workers": []},
    }
    fake.answers |= {"checkpoints": [], "export": "o", "generate": "", "evaluate": EVALUATED}
    for args in (
        ["train"],
        ["train", "--dry-run"],
        ["plan"],
        ["stop", "first"],
        ["scale", "first", "--workers", "1:2"],
        ["drain", "first", "--node", "n", "--deadline", "30"],
        ["checkpoints", "first"],
        ["export", "first", "--to", "o"],
        ["generate", "first", "--prompt", "x"],
        ["evaluate", "first"],
    ):
        assert run(args) == 0
    del sys.modules["elastic_trainer.run"]
    real = importlib.import_module("elastic_trainer.run")
    for name, positional, keywords in fake.calls:
        inspect.signature(getattr(real, name)).bind(*positional, **keywords)
    assert len(fake.calls) == 10


EVALUATED = {"run": "first", "update": 1, "loss": 2.0, "perplexity": 7.389, "tokens": 640}


@pytest.mark.parametrize(
    ("args", "config", "settings"),
    [
        ([], None, []),
        (["gpt"], "gpt", []),
        (["train.seed=1", "optim.eps=0"], None, ["train.seed=1", "optim.eps=0"]),
        (["a.yaml", "train.seed=1"], "a.yaml", ["train.seed=1"]),
    ],
)
def test_config_may_be_left_out(
    fake: FakeRun, args: list[str], config: str | None, settings: list[str]
) -> None:
    fake.answers["train_command"] = 0
    assert run(["train", *args]) == 0
    assert fake.calls[0][1] == (config, settings)


def test_the_exit_code_of_train_is_that_of_the_run(fake: FakeRun) -> None:
    fake.answers["train_command"] = 3
    assert run(["train"]) == 3


def test_errors_are_one_line_with_their_exit_code(
    fake: FakeRun, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["train_command"] = ClusterError("No room for 3 workers", "There are 2 CPUs.")
    assert failure(capsys, ["train"], 1).endswith("No room for 3 workers. There are 2 CPUs.\n")
    fake.answers["train_command"] = ConfigError("Unknown setting `x`")
    assert "Unknown setting `x`" in failure(capsys, ["train", "x=1"], 2)
    fake.answers["train_command"] = ZeroDivisionError("by zero")
    text = failure(capsys, ["train"], 1)
    assert "internal error: ZeroDivisionError: by zero (--debug shows where)" in text
    assert "No such command" in failure(capsys, ["trian"], 2)
    assert "No such option" in failure(capsys, ["train", "--wrokers", "2"], 2)
    assert "--workers" in failure(capsys, ["scale", "first"], 2)
    assert "--node" in failure(capsys, ["drain", "first"], 2)
    assert "--deadline" in failure(capsys, ["drain", "first", "--node", "n", "--deadline", "-1"], 2)
    assert "There is no run `nope`" in failure(capsys, ["scale", "nope", "--workers", "2"], 1)
    assert "There is no run `nope`" in failure(capsys, ["drain", "nope", "--node", "n"], 1)
    assert "exclude each other" in failure(capsys, ["train", "--detach", "--dry-run"], 2)
    assert "Did you mean `first`" in failure(capsys, ["status", "frist"], 1)
    assert "There is no run `nope`" in failure(capsys, ["stop", "nope"], 1)
    assert "--to" in failure(capsys, ["export", "first"], 2)
    assert "stdlib-text" in failure(capsys, ["make-dataset", "imagenet"], 1)


def test_an_interrupted_command_says_so(fake: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["train_command"] = KeyboardInterrupt()
    assert "interrupted" in failure(capsys, ["train"], 130)


def test_debug_shows_the_traceback(fake: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    fake.answers["train_command"] = ZeroDivisionError("by zero")
    assert run(["--debug", "train"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_reason_comes_after_its_picture(
    fake: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["train_command"] = ScheduleError("Deadlock at 0F1\nF0 F1 <-- HERE\nF0 B0")
    assert run(["train"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["F0 F1 <-- HERE", "F0 B0", "elastic-trainer: Deadlock at 0F1"]


def test_plan_prints_stages_memory_and_reasons(
    fake: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["plan_command"] = (None, PLAN)
    text = output(capsys, ["plan", "gpt", "train.seed=1", "--workers", "2:4"])
    assert fake.calls == [("plan_command", ("gpt", ["train.seed=1"], "2:4"), {})]
    for shown in ("250.0 ms a step", "11% idle", "embed … blocks.0 (2)", "2.0 MiB", "500 B"):
        assert shown in text
    assert PLAN.reasons[0] in text
    assert json.loads(output(capsys, ["plan", "--json"]))["stages"][1]["worker"] == "stage-1"


def test_runs_and_status(storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, ["runs"])
    assert text.splitlines()[1].split() == ["first", "completed", "1/1", "2", "7.5", "1:05"]
    assert json.loads(output(capsys, ["runs", "--json"]))[0]["state"] == "completed"
    assert "No runs in" in output(capsys, ["runs", "--storage", "elsewhere"])
    for name in ("first", "latest", str(storage / "first")):
        text = output(capsys, ["status", name])
        assert text.startswith("first: completed\n") and "all updates done" in text
        assert "stage-0: embed … blocks.0 (2)" in text and "1 of 1" in text
    story = json.loads(output(capsys, ["status", "first", "--json"]))
    assert story["updates"] == [{"update": 1, "loss": 2.0}] and story["alive"] is False


def test_status_shows_the_newest_changes_of_the_membership(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "membership" not in output(capsys, ["status", "first"])
    lost = Change(
        time=1000.0,
        cause="wedged",
        reason="no progress for 75 s",
        update=40,
        workers_before=3,
        workers_after=2,
        worker="stage-4",
        stage=1,
        node="10.0.0.7",
        outcome="committed",
        generation=2,
        restored_update=38,
        first_commit_s=1.25,
        updates_replayed=2,
    )
    file = storage / "first" / "membership.jsonl"
    for number in range(12):
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(replace(lost, generation=2 + number))) + "\n")
    text = output(capsys, ["status", "first"])
    assert "  membership: the newest 10 of 12 changes\n" in text
    assert "generation 3," not in text and "generation 13," in text
    assert "wedged stage-4 (stage 1, node 10.0.0.7), generation 4, at update 40: 3 → 2" in text
    assert "committed after 1.25 s, 2 updates trained again from update 38" in text
    story = json.loads(output(capsys, ["status", "first", "--json"]))
    assert [change["generation"] for change in story["membership"]] == list(range(2, 14))


def test_status_counts_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunRecord(tmp_path / "run") as record:
        places = {"stage-0": "10.0.0.8", "stage-1": "10.0.0.7", "stage-2": "10.0.0.7"}
        workers = {w: {"node": n, "stage": 0, "state": "running"} for w, n in places.items()}
        workers["stage-2"]["state"] = "idle"
        record.write_status({"state": "running", "min_workers": 2, "num_workers": 4})
        record.write_status({"workers": workers, "pending_workers": 1})
        text = output(capsys, ["status", str(tmp_path / "run")])
        assert "  3 of 2 to 4 workers (1 idle, 1 asked for) on 2 nodes" in text
        workers["stage-2"]["state"] = "running"
        record.write_status({"workers": workers, "pending_workers": 0, "num_workers": 2})
        text = output(capsys, ["status", str(tmp_path / "run")])
        assert "3 of 2 workers on 2 nodes" in text
    assert "nodes" not in output(capsys, ["status", str(tmp_path / "run")]), "nobody is there"


def test_stop_and_checkpoints(
    fake: FakeRun, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["stop"] = {"name": "first", "update": 7}
    assert "first stops after its next commit point (update 7" in output(capsys, ["stop", "first"])
    assert fake.calls == [("stop", (storage / "first",), {})]
    fake.answers["checkpoints"] = [
        CheckpointInfo(update=5, path="p/step-00000005", num_bytes=3 * 2**20, created_at=1e9)
    ]
    text = output(capsys, ["checkpoints", "first"])
    assert text.splitlines()[1].split()[0] == "5" and "3.0 MiB" in text and "p/step" in text
    assert json.loads(output(capsys, ["checkpoints", "first", "--json"]))[0]["update"] == 5
    fake.answers["checkpoints"] = []
    assert "No complete checkpoint" in output(capsys, ["checkpoints", "first"])


def test_scale(fake: FakeRun, storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = {"min_workers": 2, "max_workers": 8, "num_workers": 3}
    fake.answers["scale"] = {"name": "first", "update": 7} | limits
    text = output(capsys, ["scale", "first", "--workers", "2:8"])
    assert text == "first goes on with 2 to 8 workers (3 now).\n"
    assert fake.calls == [("scale", (storage / "first", "2:8"), {})]
    fake.answers["scale"] = {"name": "first"} | dict.fromkeys(limits, 1)
    assert "with 1 worker (1 now)" in output(capsys, ["scale", "latest", "-w", "1"])


def test_drain(fake: FakeRun, storage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"name": "first", "node": "10.0.0.7", "workers": ["stage-1", "stage-4"]}
    fake.answers["drain"] = answer
    text = output(capsys, ["drain", "first", "--node", "10.0.0.7", "--deadline", "30"])
    assert text == "stage-1, stage-4 leave node 10.0.0.7 at the next commit point of first.\n"
    assert fake.calls == [("drain", (storage / "first", "10.0.0.7", 30.0), {})]
    fake.answers["drain"] = answer | {"workers": ["stage-1"]}
    assert "stage-1 leaves node" in output(capsys, ["drain", "first", "--node", "10.0.0.7"])
    assert fake.calls[-1][1][-1] is None
    fake.answers["drain"] = answer | {"workers": []}
    text = output(capsys, ["drain", "first", "--node", "10.0.0.7"])
    assert text == "first has no worker on node 10.0.0.7, and will place none there.\n"


def test_export_generate_evaluate(
    fake: FakeRun, storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers |= {"export": Path("out"), "generate": "def f", "evaluate": EVALUATED}
    assert "from_pretrained('out')" in output(capsys, ["export", "first", "--to", "out"])
    args = "generate first --max-tokens 5 --temperature 0 --top-k 3 --seed 9".split()
    assert output(capsys, [*args, "--prompt", "def "]) == "def f\n"
    assert fake.calls[-1] == (
        "generate",
        (storage / "first", "def "),
        {"max_tokens": 5, "temperature": 0.0, "top_k": 3, "seed": 9, "checkpoint": "auto"},
    )
    assert "perplexity 7.39 over 640 tokens" in output(capsys, ["evaluate", "first"])
    assert json.loads(output(capsys, ["evaluate", "first", "--json"])) == EVALUATED
    fake.answers["evaluate"] = EVALUATED | {"perplexity": None}
    assert "held-out loss 2.0000 over 640 items" in output(capsys, ["evaluate", "first"])


def test_completion_offers_recipes_settings_and_runs(storage: Path) -> None:
    assert complete_config("gp")[:2] == ["gpt", "gpt-async"]
    (storage.parent / "mine.yaml").write_text("")
    assert complete_config("mi") == ["mine.yaml"]
    assert complete_override("optim.lr") == ["optim.lr_schedule="]
    assert complete_override("optim.lr_schedule=c") == [
        "optim.lr_schedule=constant",
        "optim.lr_schedule=cosine",
    ]
    assert complete_run("") == ["latest", "first"]


def test_completion_of_nodes(storage: Path) -> None:
    with RunRecord(storage / "first") as record:
        places = {"stage-0": "10.0.0.8", "stage-1": "10.0.0.7", "stage-2": "10.0.0.7"}
        record.write_status({"workers": {w: {"node": node} for w, node in places.items()}})
    env = {"_ELASTIC_TRAINER_COMPLETE": "complete_bash", "COMP_CWORD": "4"}
    for name in ("first", "latest"):
        words = {"COMP_WORDS": f"elastic-trainer drain {name} --node "}
        result = CliRunner().invoke(app, env=env | words, prog_name="elastic-trainer")
        assert result.output.split() == ["10.0.0.7", "10.0.0.8"]
    words = {"COMP_WORDS": "elastic-trainer drain nope --node "}
    result = CliRunner().invoke(app, env=env | words, prog_name="elastic-trainer")
    assert result.output.split() == []


def test_completion_through_the_shell_protocol() -> None:
    env = {"_ELASTIC_TRAINER_COMPLETE": "complete_bash", "COMP_WORDS": "elastic-trainer train gpt-"}
    result = CliRunner().invoke(app, env=env | {"COMP_CWORD": "2"}, prog_name="elastic-trainer")
    assert "gpt-async" in result.output


def test_bytes() -> None:
    assert [format_bytes(v) for v in (0, 1023, 1024, 150 * 2**20, 5 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "150 MiB",
        "5.0 GiB",
    ]
