"""When actors are asked whether they are there, and when their silence counts as loss."""

from elastic_trainer.actors.pulse import Pulse


def test_asked_four_times_per_limit() -> None:
    pulse = Pulse(8.0)
    assert pulse.due(100.0) == [], "who has never answered is still starting"
    pulse.answered("a", 0.0)
    pulse.answered("b", 1.0)
    assert pulse.due(1.9) == []
    assert pulse.due(2.0) == ["a"]
    assert pulse.due(3.0) == ["a", "b"]
    pulse.ask("a", 3.0)
    assert pulse.due(4.0) == ["b"], "one question at a time"
    pulse.answered("a", 4.0)
    assert pulse.due(6.0) == ["a", "b"]


def test_silence() -> None:
    pulse = Pulse(8.0)
    pulse.ask("a", 1.0)
    pulse.ask("b", 2.0, limit_s=20.0)
    assert pulse.silent(9.0) == {}
    assert pulse.silent(9.5) == {"a": 8.5}
    assert pulse.silent(23.0) == {"a": 22.0, "b": 21.0}
    pulse.answered("a", 23.0)
    assert pulse.silent(23.0) == {"b": 21.0}
