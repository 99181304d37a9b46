"""What follows from where the run stands: the steps that the elastic core takes by itself."""

from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.generations import Generations
from elastic_trainer.elastic.goal import Goal
from elastic_trainer.elastic.phase import WORKING, Phase
from elastic_trainer.elastic.staff import Staff
from elastic_trainer.elastic.wishes import must_pause, pause_is_due, wish
from elastic_trainer.elastic.work import Work
from elastic_trainer.types import Plan, WorkerId


class Course:
    """Phase, reason, work, staff and generations of one run, and how they move each other."""

    def __init__(self, goal: Goal, work: Work, generations: Generations) -> None:
        self.goal = goal
        self.phase = Phase.STARTING
        self.reason = "waiting for workers"
        self._work = work
        self._staff = Staff(goal)
        self._members = self._staff.members
        self._gens = generations
        self._lack = ""  # why it waits, without the number of workers

    @property
    def done(self) -> bool:
        return self.phase in (Phase.FINISHED, Phase.FAILED)

    @property
    def generation(self) -> int:
        """The generation that is entered; facts of others count for nothing."""
        return self._gens.current

    @property
    def plan(self) -> Plan | None:
        """The newest plan that workers were configured with."""
        return self._gens.plan

    @property
    def workers(self) -> list[WorkerId]:
        """All that live, in the order in which they came."""
        return list(self._members.nodes)

    @property
    def committed(self) -> int:
        return self._work.committed

    # Recovery.

    def _recover(self, why: str, now: float) -> list[do.Instruction]:
        """The generation is over: go back to the newest state that is left."""
        out: list[do.Instruction] = [do.Abort(generation=self.generation, reason=why)]
        self._work.drop(now)
        self._gens.drop()
        if not self._staff.enough:
            return out + self._wait(why, now)
        return out + self._regroup(why, max(len(self._gens.holders), self._staff.floor))

    def _regroup(self, why: str, most: int) -> list[do.Instruction]:
        self.phase, self.reason = Phase.RECOVERING, why
        workers = self._members.lineup(self.plan, min(most, self._staff.most))
        length = self._work.segment_updates
        return self._gens.regroup(workers, self._members.nodes, why, length)

    def _wait(self, why: str, now: float) -> list[do.Instruction]:
        """Keep what there is until more workers join."""
        self.phase, self._lack = Phase.WAITING, why
        if self._work.end_status != "completed":  # it was to end anyway
            return self._end_run(self._work.end_status, self._work.end_reason, now)
        self._gens.refused.clear()
        self._staff.hope()
        return self._say_who_is_missing()

    def _say_who_is_missing(self) -> list[do.Instruction]:
        there, floor = len(self._members.usable), self._staff.floor
        reason = f"{there} of {floor} workers: waiting for room" if there < floor else "waiting"
        reason += f" ({self._lack})" if self._lack else ""
        if reason == self.reason:
            return []
        self.reason = reason
        return [do.Wait(reason=reason)]

    def _configure(self) -> list[do.Instruction]:
        """Configure, once the plan is there and everybody who lives has said what it holds."""
        work = self._work
        made = self._gens.configuration(self._members, saved=work.saved, newest=work.committed)
        return [] if made is None else self._restore(made)

    def _restore(self, made: do.Configure) -> list[do.Instruction]:
        self.phase, self.reason = Phase.RESTORING, made.reason
        self._work.rewind(made.update)
        return [made]

    # The next step.

    def _advance(self, now: float) -> list[do.Instruction]:
        """Do what can be done now."""
        if self.phase in (Phase.STARTING, Phase.WAITING):
            return self._begin(now)
        out: list[do.Instruction] = []
        if self.phase is Phase.RUNNING:
            out.extend(self._consider(now))
        if self.phase is Phase.DRAINING:
            out.extend(self._drain(now))
        if self.phase in (Phase.RUNNING, Phase.FINISHING):
            out.extend(self._go_on(now))
        return out

    def _begin(self, now: float) -> list[do.Instruction]:
        """Begin, or go on, once enough workers are there and no more are about to come."""
        staff, line = self._staff, self._members.lineup(self.plan, self._staff.most)
        if not staff.enough:
            return self._say_who_is_missing() if line else []
        if not staff.settled(now) or line in self._gens.refused:
            return []
        if self.phase is Phase.STARTING:
            return self._plan_first()
        return self._regroup(f"{len(line)} workers are there", staff.most)

    def _plan_first(self) -> list[do.Instruction]:
        workers = self._members.lineup(None, self._staff.most)
        all_there = len(workers) >= self._staff.most
        self.reason = "all workers are there" if all_there else f"{len(workers)} workers are there"
        self.phase = Phase.PLANNING
        return [self._gens.propose(workers, self.reason)]

    def _consider(self, now: float) -> list[do.Instruction]:
        """Prepare the change that should be made, while training goes on."""
        gens, staff = self._gens, self._staff
        assert self.plan is not None
        if self._work.all_issued:
            gens.drop()
            return []
        if must_pause(self.plan, staff, gens.refused):
            gens.drop()
            if pause_is_due(self.plan, staff, now):
                self.phase, self.reason = Phase.DRAINING, "too few workers will be left"
            return []
        wanted = wish(self.plan, staff, gens.refused, now)
        if wanted is None:
            gens.drop()
        elif gens.change is None or gens.change.workers != wanted.workers:
            return [gens.propose(wanted.workers, wanted.reason, wanted.compulsory)]
        else:
            gens.change.compulsory = wanted.compulsory
        return []

    def _drain(self, now: float) -> list[do.Instruction]:
        """Reach a commit point; enter the next generation there, or pause."""
        gens, work, change = self._gens, self._work, self._gens.change
        assert self.plan is not None
        if gens.entered:
            return []  # waiting for the stock
        if change is not None:
            still_right = self._staff.can_employ(change.workers)
        else:
            still_right = must_pause(self.plan, self._staff, gens.refused)
        if work.all_issued or not still_right:
            gens.drop()
            self.phase, self.reason = Phase.RUNNING, ""
            return []
        if not work.idle:
            return []
        if change is not None:
            work.leave(now)
            return [gens.enter()]
        if work.committed > work.saved:
            return work.save_now(now, "training is about to pause")
        return self._wait(self.reason, now)

    def _go_on(self, now: float) -> list[do.Instruction]:
        """Hand out as much as may be in flight, and finish when everything is done."""
        work = self._work
        out = work.issue()
        if work.at_end and self.phase is Phase.RUNNING:
            self.phase = Phase.FINISHING
            self._gens.drop()
            work.last_state()
        out.extend(work.retry_save(now))
        if self.phase is Phase.FINISHING:
            orders, done = work.finish()
            out.extend(orders)
            if done:
                out.extend(self._finish(work.end_status, work.committed, work.end_reason))
        return out

    def _keep_house(self) -> list[do.Instruction]:
        """Dismiss who is not needed any more, and ask for who is missing."""
        if self.done or self.phase is Phase.FINISHING or self._work.end_status != "completed":
            return []
        out: list[do.Instruction] = []
        if self.phase in (Phase.STARTING, Phase.RUNNING, Phase.DRAINING, Phase.WAITING):
            out = self._staff.dismiss(self._in_use())
        return out + self._staff.ask("workers have come or gone")

    def _in_use(self) -> set[WorkerId]:
        """Workers that hold something that is needed, or are about to."""
        work, change = self._work, self._gens.change
        if self.phase is Phase.WAITING:
            return set(self.workers if work.saved < work.committed else ())
        used = set(self._gens.holders)
        if change is not None:
            used |= {*change.workers, *change.asked}
        if work.saving is not None:
            used |= set(work.saving.workers)
        return used

    # The end.

    def _end_run(self, status: str, reason: str, now: float) -> list[do.Instruction]:
        """End at the next commit point, or at once where none will come."""
        work = self._work
        if self.phase in WORKING:
            if work.end_at(work.issued, status, reason):
                self.reason = reason
            return self._advance(now)
        if work.saved >= work.reached:
            return self._finish(status, work.saved, reason)
        if self._staff.enough and self.phase is not Phase.WAITING:
            work.end_at(work.reached, status, reason)  # regain what was committed, and save it
            return []
        reason += (
            f"; too few workers were left to save the {work.reached - work.saved} updates after "
            f"{work.saved}: they will be trained again"
        )
        return self._finish(status, work.saved, reason)

    def _finish(self, status: str, update: int, reason: str) -> list[do.Instruction]:
        self.phase = Phase.FAILED if status == "failed" else Phase.FINISHED
        self.reason = reason
        return [do.Finish(status=status, update=update, reason=reason)]

    def _fail(self, reason: str) -> list[do.Instruction]:
        abort = do.Abort(generation=self.generation, reason=reason)
        return [abort, *self._finish("failed", self.committed, reason)]
