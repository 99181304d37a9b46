"""Profiles of layers are kept between runs, and measured anew when what they depend on changes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic_trainer.actors.planning import (
    cache_folder,
    load_profile,
    profile_facts,
    profile_key,
    store_profile,
)
from elastic_trainer.config import Config, load_config
from elastic_trainer.types import LayerProfile, Profile


def config(*overrides: str) -> Config:
    return load_config({"data": {"format": "synthetic"}, "train": {"max_steps": 4}}, overrides)


def key_of(
    *overrides: str,
    device_class: str = "cpu",
    layers: Sequence[str] = ("a",),
    length: int = 8,
    dtype: type = np.float32,
    **facts: str,
) -> str:
    description = {
        "device_class": device_class,
        "layers": layers,
        "profile_facts": {"code": "x", "cpu": "y", "torch": "2"} | facts,
    }
    return profile_key(config(*overrides), description, {"x": np.zeros((4, length), dtype)})


def test_profiles_are_cached_by_what_times_depend_on() -> None:
    others = {
        key_of("numerics.threads_per_stage=2"),
        key_of("pipeline.microbatch_size=2"),
        key_of(device_class="gpu"),
        key_of(layers=["b"]),
        key_of(length=9),
        key_of(dtype=np.int64),
        key_of(code="z"),
        key_of(cpu="z"),
        key_of(torch="3"),
    }
    assert len(others | {key_of()}) == 10
    assert key_of("optim.learning_rate=0.5") == key_of()


def test_what_was_stored_is_found_unless_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layer = LayerProfile(
        name="a", forward_s=1.0, backward_s=2.0, activation_bytes=3, saved_bytes=4,
        parameter_bytes=5,
    )  # fmt: skip
    profile = Profile(device_class="cpu", microbatch_size=4, layers=(layer,))
    key = key_of()
    assert load_profile(key) is None
    store_profile(key, profile)
    assert load_profile(key) == profile
    (cache_folder() / f"{key}.json").write_text("{cut")
    assert load_profile(key) is None


def test_profiles_do_not_outlive_the_code_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "profiled_nets"
    package.mkdir()
    for name in ("__init__", "nets", "blocks"):
        (package / f"{name}.py").write_text("width = 4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = config("model.target=profiled_nets.nets:make")
    before = profile_facts(own)
    assert before["cpu"] and before["torch"] == torch.__version__
    assert profile_facts(own) == before != profile_facts(config())
    seen = {before["code"]}
    for changed in ("nets", "blocks"):
        (package / f"{changed}.py").write_text("width = 4096\n")
        seen.add(profile_facts(own)["code"])
    for text in ("{}", '{"n_embd": 8}'):
        (tmp_path / "config.json").write_text(text)
        folder = config("model.name=hf", f"model.args.path={tmp_path}")
        seen.add(profile_facts(folder)["code"])
    assert len(seen) == 5


def test_a_target_that_cannot_be_found_is_refused_elsewhere() -> None:
    assert profile_facts(config("model.target=nowhere_at_all.x:f"))["code"]
