"""Who holds up the rest when the stages of a segment stand still.

A stage that waits for a message which nobody has sent yet is held up by others. The culprit is the
one whose action at hand has all its inputs, and which does not act. Sends are buffered and RECV
never waits, so only F, B, REDUCE, OPT and TIE have inputs from other stages.

How far each stage is tells nearly all. Where it does not, the stages must say themselves whether
they wait, and for whom: inside REDUCE, which all stages enter, and for batches of their loader.
"""

from collections.abc import Mapping, Sequence

from elastic_trainer.schedule.actions import RECEIVES, Action, ActionLists, Kind

LOADER = -1  # in place of a stage that is waited for: batches come from a loader
_ROOT = 0  # the stage that collects the norms of a REDUCE and answers all others


def find_culprits(
    actions: ActionLists, progress: Sequence[int], waiting: Mapping[int, int] | None = None
) -> list[int]:
    """Stages that hold up the rest, earliest in dependency order first.

    In place of a stage stands `fed(s)` where it is the loader of stage s.

    Empty if all have finished, and never otherwise. Stages that could act come before those that
    are to blame only because a message of theirs was sent and did not arrive.

    Args:
        actions: the complete lists of one segment.
        progress: index of each stage's action at hand; the number of its actions: finished.
        waiting: for whose message a stage says that it waits, another stage's or LOADER's; who is
            not in it does not wait, as far as is known.
    """
    search = _Search(actions, progress, waiting or {})
    idle, lost = search.run()
    senders = _senders_of(lost)
    ordered = [*search.sort(idle), *search.sort(senders)]
    return list(dict.fromkeys(ordered))


def fed(culprit: int) -> int:
    """In place of a stage, the loader that feeds it; and the stage that such a one feeds."""
    return LOADER - culprit


class _Search:
    def __init__(
        self, actions: ActionLists, progress: Sequence[int], waiting: Mapping[int, int]
    ) -> None:
        self.actions = actions
        self.progress = [_skip(row, done) for row, done in zip(actions, progress, strict=True)]
        self.waiting = waiting
        self.gradients = _tied_gradients(actions)
        self.at_hand = {
            stage: row[done]
            for stage, (row, done) in enumerate(zip(actions, self.progress, strict=True))
            if done < len(row)
        }
        self.done = {a for row, done in zip(actions, progress, strict=True) for a in row[:done]}

    def run(self) -> tuple[dict[int, int], dict[tuple[int, int], int]]:
        """Culprits, and messages (from, to) that are lost, each with the stage that it holds up."""
        idle: dict[int, int] = {}
        lost: dict[tuple[int, int], int] = {}
        for stage, action in self.at_hand.items():
            if not self._is_ready(action):
                continue
            sender = self.waiting.get(stage)
            if sender is None:
                idle[stage] = stage
            elif sender == LOADER:
                idle[fed(stage)] = stage
            else:
                lost[sender, stage] = stage
        return idle, lost

    def sort(self, culprits: Mapping[int, int]) -> list[int]:
        """The keys in dependency order of what the stages in the values have at hand."""
        if len(culprits) < 2:
            return list(culprits)
        rounds = self._play()

        def rank(culprit: int) -> tuple[int, int]:
            stage = culprits[culprit]
            return rounds[stage][self.progress[stage]], stage

        return sorted(culprits, key=rank)

    def _is_ready(self, action: Action) -> bool:
        """Whether the others have done all that the action needs of them."""
        if not self.done.issuperset(self._inputs(action)):
            return False
        stage, j = action.stage, action.microbatch
        if action.kind is not Kind.REDUCE:
            return True
        if stage == _ROOT:
            return all(self._has_given(other, j) for other in range(1, len(self.actions)))
        return not self._has_given(stage, j) or Action(Kind.REDUCE, _ROOT, j) in self.done

    def _has_given(self, stage: int, microbatch: int) -> bool:
        """Whether a stage has sent its part of a REDUCE: then it waits for the root, or is past."""
        reduce = Action(Kind.REDUCE, stage, microbatch)
        if self.at_hand.get(stage) == reduce:
            return self.waiting.get(stage) == _ROOT
        return reduce in self.done

    def _inputs(self, action: Action) -> list[Action]:
        """The SENDs of other stages that an action needs."""
        stage, j = action.stage, action.microbatch
        match action.kind:
            case Kind.F if stage > 0:
                return [Action(Kind.SEND_F, stage - 1, j)]
            case Kind.B if stage < len(self.actions) - 1:
                return [Action(Kind.SEND_B, stage + 1, j)]
            case Kind.TIE if action.peer is not None:
                return [Action(Kind.SEND_W, action.peer, j, stage)]
            case Kind.OPT | Kind.REDUCE:
                return self.gradients.get((stage, j), [])
        return []

    def _play(self) -> list[list[int]]:
        """The round in which each action is done, one per stage and round, undisturbed."""
        rounds: list[list[int]] = [[] for _ in self.actions]
        done: set[Action] = set()
        number = 0
        while heads := [
            row[len(played)]
            for row, played in zip(self.actions, rounds, strict=True)
            if len(played) < len(row)
        ]:
            able = [head for head in heads if done.issuperset(self._inputs(head))]
            if sum(head.kind is Kind.REDUCE for head in able) < len(self.actions):
                able = [head for head in able if head.kind is not Kind.REDUCE]
            assert able, "a validated schedule never gets stuck"
            for action in able:
                rounds[action.stage].append(number)
            done.update(able)
            number += 1
        return rounds


def _skip(row: Sequence[Action], index: int) -> int:
    """The action at hand, or the next one that is no RECV: a stage is never held up by those."""
    while index < len(row) and row[index].kind in RECEIVES:
        index += 1
    return index


def _tied_gradients(actions: ActionLists) -> dict[tuple[int, int], list[Action]]:
    """The SENDs of tied gradients that a stage needs for the update that ends at a microbatch."""
    gradients: dict[tuple[int, int], list[Action]] = {}
    for stage, row in enumerate(actions):
        for action in row:
            if action.kind is Kind.RECV_G:
                gradients.setdefault((stage, action.microbatch), []).append(action.counterpart())
    return gradients


def _senders_of(lost: Mapping[tuple[int, int], int]) -> dict[int, int]:
    """Whom to blame for lost messages: a stage at the end of most of them, else the sender.

    A stage that is cut off neither sends nor receives: it is at one end of every lost message.
    """
    ends = [stage for pair in lost for stage in pair]
    blamed: dict[int, int] = {}
    for (sender, receiver), held_up in lost.items():
        worse = receiver if ends.count(receiver) > ends.count(sender) else sender
        blamed.setdefault(worse, held_up)
    return blamed
