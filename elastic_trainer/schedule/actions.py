"""One action of one stage; a schedule is a list of them per stage.

An action prints and parses: `2F0` is stage 2's forward of microbatch 0, `3SEND_G7@0` sends stage
3's gradients of tied parameters, complete after microbatch 7, to stage 0.

| kind | meaning |
|---|---|
| F j | forward of microbatch j on the newest weights |
| B j | backward of microbatch j on the weights of its forward |
| SEND_F j, RECV_F j | activations to the next stage, from the previous one |
| SEND_B j, RECV_B j | gradient of the stage's input to the previous stage, from the next one |
| REDUCE j | collective of all stages before OPT j: gradient norms, overflow flags |
| OPT j | optimizer step of the update whose last microbatch is j |
| SEND_G j, RECV_G j | gradients of tied parameters, follower to owner, before the owner's OPT j |
| SEND_W j, RECV_W j | tied weights after OPT j, owner to follower |
| TIE j | the follower installs the owner's weights of OPT j |

What B j computes for its own stage alone may be left for later: for when the stage would wait, at
the latest for before SEND_G, REDUCE and OPT.
RECV posts and never blocks: the F, B, OPT or TIE that needs the message waits for it. `peer` is set
for G and W (the other stage) and for TIE (the owner); F and B only ever meet their neighbour.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic_trainer.errors import ScheduleError


class Kind(StrEnum):
    """What an action does."""

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    SEND_G = "SEND_G"
    RECV_G = "RECV_G"
    SEND_W = "SEND_W"
    RECV_W = "RECV_W"
    TIE = "TIE"
    REDUCE = "REDUCE"
    OPT = "OPT"


COUNTERPART = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.SEND_G: Kind.RECV_G,
    Kind.SEND_W: Kind.RECV_W,
    Kind.RECV_F: Kind.SEND_F,
    Kind.RECV_B: Kind.SEND_B,
    Kind.RECV_G: Kind.SEND_G,
    Kind.RECV_W: Kind.SEND_W,
}
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B, Kind.SEND_G, Kind.SEND_W})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B, Kind.RECV_G, Kind.RECV_W})
_NEIGHBOUR = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
_PATTERN = re.compile(
    rf"(\d+)({'|'.join(sorted(Kind, key=lambda k: -len(k)))})(\d+)(?:@(\d+))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one stage does with one microbatch."""

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        at = "" if self.peer is None else f"@{self.peer}"
        return f"{self.stage}{self.kind.value}{self.microbatch}{at}"

    @staticmethod
    def parse(text: str) -> "Action":
        """The inverse of `str`."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action",
                "Write stage, kind and microbatch, such as 2F0, 0SEND_F3 or 3SEND_G7@0",
            )
        stage, kind, microbatch, peer = match.groups()
        return Action(Kind(kind), int(stage), int(microbatch), None if peer is None else int(peer))

    @property
    def other(self) -> int:
        """The stage at the other end of a SEND or RECV."""
        if self.peer is not None:
            return self.peer
        return self.stage + _NEIGHBOUR[self.kind]

    def counterpart(self) -> "Action":
        """The action at the other end of a SEND or RECV that matches it."""
        peer = None if self.kind in _NEIGHBOUR else self.stage
        return Action(COUNTERPART[self.kind], self.other, self.microbatch, peer)


ActionLists = Sequence[tuple[Action, ...]]
"""The actions of each stage, in the order in which it performs them."""
