"""What a run that was killed again and again has committed, and whether that is as promised."""

from __future__ import annotations

from dataclasses import dataclass, field

from smart_infinity.benchmarks.crash_child import MICRO_BATCHES, Resumed, StepDone, StepInputs


class BrokenLineageError(Exception):
    """The run said something after which its lineage cannot be followed any more."""


@dataclass
class Lineage:
    """The committed steps of one run, over all of its attempts.

    A step in flight at a kill may have been committed or not: the step at which the next attempt
    resumes says. Everything else is fixed: an acknowledged step is never lost, a step that was
    not begun is never there, and weights, scheduler and counter are those of that very step.

    One exception is stated and counted. Until a first call of the scheduler has been committed the
    engine cannot know how often it is stepped; so a kill between the commit of the first step and
    the scheduler's step that follows loses that one, and the scheduler lags by one from then on.
    """

    inputs: list[StepInputs] = field(default_factory=list)
    """Of step 1, step 2 and so on."""
    weights: dict[int, str] = field(default_factory=dict)
    """By step, a digest; 0 is before the first."""
    problems: list[str] = field(default_factory=list)
    lost_steps: int = 0
    unscheduled: list[int] = field(default_factory=list)
    """Steps whose `scheduler.step()` a kill has lost."""
    committed_in_flight: int = 0
    """Steps that were committed although the trainer died before it knew."""
    _begun: StepInputs | None = None

    @property
    def step(self) -> int:
        """The last step known to be committed."""
        return len(self.inputs)

    def resumed(self, attempt: int, event: Resumed) -> None:
        """An attempt is ready to go on from a step."""
        acknowledged, begun, self._begun = self.step, self._begun, None
        if event.step > acknowledged + (begun is not None):
            raise BrokenLineageError(
                f"attempt {attempt} resumed at step {event.step}, and step "
                f"{acknowledged + (begun is not None)} was the last one begun"
            )
        if event.step < acknowledged:
            self.lost_steps += acknowledged - event.step
            self.problems.append(
                f"attempt {attempt} resumed at step {event.step}, and step {acknowledged} had "
                "been acknowledged"
            )
            del self.inputs[event.step :]
            self.weights = {s: own for s, own in self.weights.items() if s <= event.step}
        elif event.step > acknowledged:
            assert begun is not None
            self.inputs.append(begun)
            self.committed_in_flight += 1
        known = self.weights.setdefault(event.step, event.weights)
        if known != event.weights:
            self.problems.append(f"attempt {attempt} resumed at step {event.step} of other weights")
        self.unscheduled = [step for step in self.unscheduled if step <= event.step]
        missing = event.step - len(self.unscheduled) - event.scheduler_steps
        if missing == 1:
            self.unscheduled.append(event.step)
        if missing and (missing, event.scheduler_steps) != (1, 0):
            self.problems.append(
                f"attempt {attempt} resumed at step {event.step} with a scheduler that lags by "
                f"{missing}"
            )
        if event.batches_seen != MICRO_BATCHES * event.step:
            self.problems.append(
                f"attempt {attempt} resumed at step {event.step} with a counter of "
                f"{event.batches_seen} micro-batches"
            )

    def began(self, event: StepInputs) -> None:
        """A step is about to be made."""
        if event.step != self.step + 1:
            raise BrokenLineageError(f"step {event.step} was begun after step {self.step}")
        self._begun = event

    def done(self, event: StepDone) -> None:
        """A step was acknowledged."""
        if self._begun is None or event.step != self._begun.step:
            raise BrokenLineageError(f"step {event.step} was acknowledged and not begun")
        self.inputs.append(self._begun)
        self.weights[event.step] = event.weights
        self._begun = None

    def mismatches(self, reference: Lineage) -> list[str]:
        """What of an uninterrupted run over the same inputs differs, a line for each step."""
        found = []
        if self.weights[0] != reference.weights[0]:
            found.append("step 0: other first weights")
        for ours, theirs in zip(self.inputs, reference.inputs, strict=True):
            names = ("learning_rate", "norm", "draws")
            different = [name for name in names if getattr(ours, name) != getattr(theirs, name)]
            if self.weights[ours.step] != reference.weights[ours.step]:
                different.append("weights")
            if different:
                found.append(
                    f"step {ours.step} (attempt {ours.attempt}): {', '.join(different)} "
                    "differ from the uninterrupted run's"
                )
        return found
