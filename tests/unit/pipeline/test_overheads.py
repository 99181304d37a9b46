"""What stages need beside their layers is measured, not guessed."""

import time

import pytest
import torch

from elastic_trainer.config import Config
from elastic_trainer.pipeline import overheads
from elastic_trainer.pipeline.overheads import measure_messages, measure_stage, with_messages
from elastic_trainer.pipeline.stage import Stage
from elastic_trainer.transport.channel import Channel, Tag
from elastic_trainer.transport.in_process import InProcessNetwork
from elastic_trainer.types import Overheads, Profile

LATE_S = 0.02


@pytest.fixture(autouse=True)
def _few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overheads, "REPEATS", 3)


def test_work_beside_the_layers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = measure_stage(Config(), torch.zeros(8))
    enter = Stage._enter

    def slow(self: Stage, *args: object) -> object:
        time.sleep(LATE_S)
        return enter(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Stage, "_enter", slow)
    after = measure_stage(Config(), torch.zeros(8))
    assert 0 < before.forward_s < LATE_S <= after.forward_s
    assert after.backward_s < LATE_S
    assert 0 < after.forward_cpu_s < LATE_S, "who sleeps needs no core"
    assert 0 <= after.backward_cpu_s <= after.backward_s


def test_slow_sends_and_slow_links_are_told_apart() -> None:
    network = InProcessNetwork()

    def open_channel(name: str) -> Channel:
        channel = network.channel(name)
        send = channel.send

        def slow(*args: object) -> None:
            time.sleep(LATE_S)
            send(*args)  # type: ignore[arg-type]

        channel.send = slow  # type: ignore[method-assign, assignment]
        return channel

    found = measure_messages(open_channel)
    assert found.send_s >= LATE_S > found.link_s
    assert 0 < found.send_cpu_s < LATE_S
    profile = Profile(
        device_class="cpu",
        microbatch_size=1,
        layers=(),
        overheads=Overheads(forward_s=7.0, forward_cpu_s=3.0),
    )
    both = with_messages(profile, open_channel).overheads
    assert (
        both.send_s >= LATE_S > both.link_s and both.forward_s == 7.0 and both.forward_cpu_s == 3.0
    )


def test_channels_are_closed_afterwards() -> None:
    network = InProcessNetwork()
    opened: list[Channel] = []

    def open_channel(name: str) -> Channel:
        opened.append(network.channel(name))
        return opened[-1]

    measure_messages(open_channel)
    for channel in opened:
        with pytest.raises(Exception, match="closed"):
            channel.recv("nobody", Tag(0, "F", 0, 0), 0.1)
