"""Rules over a whole configuration."""

import pytest

from elastic_trainer.config import load_config, parse_workers
from elastic_trainer.config.tree import leaf_types
from elastic_trainer.config.validate import CHOICES, LIMITS
from elastic_trainer.errors import ConfigError

ASYNC = "pipeline.schedule=async_1f1b"
NO_LOSS = ["elastic.max_failures=0", "elastic.max_preemptions=0"]


def test_rules_name_settings_that_exist() -> None:
    assert set(CHOICES) | set(LIMITS) <= set(leaf_types())


@pytest.mark.parametrize("path", CHOICES)
def test_choices_are_listed_when_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=f"`{path}` is 'nonsense'. It must be one of") as caught:
        load_config(None, [f"{path}=nonsense"])
    assert all(choice in str(caught.value) for choice in CHOICES[path])


@pytest.mark.parametrize("path", LIMITS)
def test_limits(path: str) -> None:
    low, high = LIMITS[path]
    with pytest.raises(ConfigError, match=f"`{path}` is .* It must be"):
        load_config(None, [f"{path}={low - 1}"])
    if high is not None:
        with pytest.raises(ConfigError, match=f"`{path}` is .* It must be between"):
            load_config(None, [f"{path}={int(high) + 1}"])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.global_batch_size=30"], "train.global_batch_size=28 or 32"),
        (["train.global_batch_size=30"], "pipeline.microbatch_size=3 or 5"),
        (["train.global_batch_size=2"], "train.global_batch_size=4,"),
        (["pipeline.num_stages=3"], "`pipeline.num_stages` is 3 but `cluster.num_workers` is 2"),
        (["pipeline.cuts=[1,2]"], "has 2 cuts for 2 stages"),
        (["pipeline.cuts=[0]"], "above 0 and ascend"),
        (["cluster.num_workers=3", "pipeline.cuts=[4,4]"], "above 0 and ascend"),
        ([ASYNC, "train.precision=fp16"], "fp16 needs a synchronous schedule"),
        (["data.format=columns"], "`data.input_columns` is empty"),
        (["data.input_columns=[x]"], "are not used by format text"),
        (["train.eval_steps=5", "train.eval_batches=0"], "`train.eval_batches` is 0"),
        (["loss.reduction=mean"], "`loss.target` is null"),
        (["optim.beta2=1"], "`optim.beta2` is 1"),
        (["cluster.address=somewhere"], "local, auto or HOST:PORT"),
        (["cluster.address=ray://head:10001"], "HOST:PORT of the cluster's GCS"),
        (["cluster.resources_per_worker.GPU=-1"], "below 0"),
        (["elastic.min_workers=3"], "`elastic.min_workers` is 3 but `cluster.num_workers`"),
        (["elastic.min_workers=1", "pipeline.cuts=[2]"], "`pipeline` asks for 2 stages"),
        (["elastic.num_spares=1", *NO_LOSS], "Raise one of them, or set elastic.num_spares=0"),
        (["elastic.snapshot_every=4", *NO_LOSS], "or set elastic.snapshot_every=0"),
        (["elastic.lease_limit_s=9", "elastic.stall_limit_s=5"], "above `elastic.stall_limit_s` 5"),
    ],
)
def test_contradictions_are_refused_with_the_way_out(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert says in str(caught.value)


def test_what_the_suggestions_say_works() -> None:
    for batch in (28, 32):
        load_config(None, [f"train.global_batch_size={batch}"])
    for micro in (3, 5):
        load_config(None, ["train.global_batch_size=30", f"pipeline.microbatch_size={micro}"])


def test_an_asynchronous_run_has_no_batch_to_divide() -> None:
    load_config(None, [ASYNC, "train.global_batch_size=30", "pipeline.commit_every=64"])


def test_addresses_that_are_right() -> None:
    for address in ("local", "auto", "10.0.0.1:6379"):
        assert load_config(None, [f"cluster.address={address}"]).cluster.address == address


def test_a_run_that_survives_nothing_is_no_contradiction() -> None:
    assert load_config(None, NO_LOSS).elastic.max_failures == 0
    load_config(None, ["elastic.num_spares=1", "elastic.max_failures=0"])


def test_the_shipped_lease_bends_to_a_short_stall_limit() -> None:
    assert load_config(None, ["elastic.stall_limit_s=2"]).elastic.stall_limit_s == 2


@pytest.mark.parametrize(
    ("text", "limits"), [("4", (4, 4)), (4, (4, 4)), ("2:8", (2, 8)), (" 3:3 ", (3, 3))]
)
def test_numbers_of_workers(text: str | int, limits: tuple[int, int]) -> None:
    assert parse_workers(text) == limits


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "at least one worker"),
        ("0:4", "at least one worker"),
        ("8:2", "The fewest come first: 2:8"),
        ("two", "MIN:MAX such as 2:8"),
        ("2:", "MIN:MAX"),
        (":2", "MIN:MAX"),
        ("1:2:3", "MIN:MAX"),
        ("-1", "MIN:MAX"),
        ("2.5", "MIN:MAX"),
        ("", "MIN:MAX"),
        ("٣", "MIN:MAX"),
    ],
)
def test_what_is_no_number_of_workers(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="`--workers` is") as caught:
        parse_workers(text)
    assert says in str(caught.value)
