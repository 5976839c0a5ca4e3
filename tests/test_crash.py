"""Training runs killed with SIGKILL at random instants, and whether the check would notice."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smart_infinity.benchmarks import crash, crash_process
from smart_infinity.benchmarks.crash import CONFIGURATIONS, CrashResult, crash_campaign, split_kills
from smart_infinity.benchmarks.crash_child import Finished, Resumed, StepDone, StepInputs, Task
from smart_infinity.benchmarks.crash_lineage import BrokenLineageError, Lineage
from smart_infinity.benchmarks.crash_process import Attempt, Child, ChildError, Clock
from smart_infinity.cli import app
from smart_infinity.errors import DeviceSpecError


def assert_as_promised(result: CrashResult, kills: int) -> None:
    assert result.problems == []
    assert result.lost_steps == result.mismatched_steps == 0
    assert result.kills == result.kills_while_resuming + result.kills_in_steps == kills
    assert result.attempts == kills + sum(own.runs for own in result.configurations)
    made = {(own.optimizer, own.devices) for own in result.configurations if own.kills}
    assert made == {(optimizer, devices) for optimizer, _, devices in CONFIGURATIONS}
    # The first step of a run can be hit at most once in each of them.
    assert result.scheduler_lags <= sum(own.runs for own in result.configurations)


def test_a_run_that_is_killed_commits_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """AdamW and SGD, 1 to 3 devices, forked DataLoader workers; a quarter minute."""
    kills = 24
    result = crash_campaign(kills, tmp_path, seed=random.randrange(1 << 30))
    assert_as_promised(result, kills)
    # Half of the kills wait until the trainer is ready, so they are in steps for certain; the
    # others are uniform over the time that a start takes.
    assert result.kills_in_steps >= 12
    assert result.kills_while_resuming >= 6
    assert result.kills_with_workers >= 5
    assert result.resumed_beside_workers >= 1
    assert result.committed_steps >= 3 * len(CONFIGURATIONS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_two_hundred_kills(tmp_path: Path) -> None:
    result = crash_campaign(200, tmp_path, seed=random.randrange(1 << 30))
    print(json.dumps(result.to_json(), indent=1))
    assert_as_promised(result, 200)
    assert result.kills_in_steps >= 100
    assert result.kills_while_resuming >= 60
    assert result.kills_with_workers >= 40
    assert result.resumed_beside_workers >= 10
    assert result.committed_in_flight >= 1


@pytest.mark.parametrize("kills", [1, 5, 6, 7, 24, 120, 121, 200])
def test_kills_are_spread_evenly(kills: int) -> None:
    runs = split_kills(kills)
    assert sum(runs) == kills
    assert max(runs) - min(runs) <= 1
    assert max(runs) <= crash.MAX_KILLS_PER_RUN
    assert len(runs) == kills or len(runs) % len(CONFIGURATIONS) == 0


# --- can the check fail? -----------------------------------------------------------------------


def inputs(step: int, attempt: int = 0) -> StepInputs:
    return StepInputs(
        attempt=attempt, step=step, learning_rate="0x1p-3", norm="0x1p+0", draws=(step, 2, 3)
    )


def done(step: int) -> StepDone:
    return StepDone(step=step, weights=f"weights {step}")


def ready(step: int, lag: int = 0) -> Resumed:
    return Resumed(
        step=step,
        weights=f"weights {step}",
        scheduler_steps=step - lag,
        batches_seen=2 * step,
        workers=(),
    )


def three_steps() -> Lineage:
    """Of attempt 0, which has also begun a fourth."""
    lineage = Lineage()
    lineage.resumed(0, ready(0))
    for step in (1, 2, 3):
        lineage.began(inputs(step))
        lineage.done(done(step))
    lineage.began(inputs(4))
    return lineage


@pytest.mark.parametrize(("step", "in_flight"), [(3, 0), (4, 1)])
def test_the_step_in_flight_may_be_committed_or_not(step: int, in_flight: int) -> None:
    lineage = three_steps()
    lineage.resumed(1, ready(step))
    assert lineage.problems == []
    assert lineage.step == step
    assert (lineage.committed_in_flight, lineage.lost_steps) == (in_flight, 0)
    lineage.began(inputs(step + 1, attempt=1))
    lineage.done(done(step + 1))
    assert [own.attempt for own in lineage.inputs] == [0] * step + [1]


def test_an_acknowledged_step_that_is_gone_is_lost() -> None:
    lineage = three_steps()
    lineage.resumed(1, ready(1))
    assert lineage.lost_steps == 2
    assert lineage.problems == [
        "attempt 1 resumed at step 1, and step 3 had been acknowledged",
    ]
    assert lineage.step == 1  # and it is followed from there


def test_a_step_that_was_never_begun_cannot_be_there() -> None:
    with pytest.raises(BrokenLineageError, match="resumed at step 5, and step 4 was the last"):
        three_steps().resumed(1, ready(5))
    lineage = three_steps()
    lineage.resumed(1, ready(3))  # so step 4 of attempt 0 was not committed
    with pytest.raises(BrokenLineageError, match="resumed at step 4"):
        lineage.resumed(2, ready(4))


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_out_of_turn_is_noticed(step: int) -> None:
    lineage = Lineage()
    lineage.resumed(0, ready(0))
    with pytest.raises(BrokenLineageError, match="acknowledged"):
        lineage.done(done(1))
    lineage.began(inputs(1))
    lineage.done(done(1))
    with pytest.raises(BrokenLineageError, match="was begun after step 1"):
        lineage.began(inputs(step))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"weights": "torn"}, "attempt 1 resumed at step 3 of other weights"),
        (
            {"scheduler_steps": 2},
            "attempt 1 resumed at step 3 with a scheduler that lags by 1",
        ),
        (
            {"scheduler_steps": 4},
            "attempt 1 resumed at step 3 with a scheduler that lags by -1",
        ),
        ({"batches_seen": 5}, "attempt 1 resumed at step 3 with a counter of 5 micro-batches"),
    ],
)
def test_what_was_resumed_is_that_very_step(change: dict[str, Any], problem: str) -> None:
    lineage = three_steps()
    lineage.resumed(1, replace(ready(3), **change))
    assert lineage.problems == [problem]


def test_a_scheduler_may_lag_until_its_first_call_is_committed() -> None:
    lineage = Lineage()
    lineage.resumed(0, ready(0))
    for step in (1, 2, 3):
        lineage.began(inputs(step))
        lineage.resumed(step, ready(step, lag=step))
    assert (lineage.problems, lineage.unscheduled) == ([], [1, 2, 3])


def test_a_scheduler_may_lag_from_the_first_step_only() -> None:
    lineage = Lineage()
    lineage.resumed(0, ready(0))
    lineage.began(inputs(1))
    lineage.resumed(1, ready(1, lag=1))
    lineage.resumed(2, ready(1, lag=1))
    lineage.began(inputs(2))
    lineage.resumed(3, ready(2, lag=1))
    assert lineage.problems == []
    assert lineage.unscheduled == [1]
    lineage.began(inputs(3))
    lineage.resumed(4, ready(3, lag=2))
    assert lineage.problems == ["attempt 4 resumed at step 3 with a scheduler that lags by 1"]
    assert lineage.unscheduled == [1, 3]  # the reference does as this run did, so others show


@pytest.mark.parametrize(
    ("spoil", "mismatch"),
    [
        (lambda own: own.weights.update({2: "other"}), "step 2 (attempt 0): weights differ"),
        (lambda own: own.weights.update({0: "other"}), "step 0: other first weights"),
        (
            lambda own: own.inputs.__setitem__(2, replace(inputs(3), learning_rate="0x1p-4")),
            "step 3 (attempt 0): learning_rate differ",
        ),
        (
            lambda own: own.inputs.__setitem__(0, replace(inputs(1), draws=(0, 2, 3), norm="0")),
            "step 1 (attempt 0): norm, draws differ",
        ),
    ],
)
def test_every_step_is_compared(spoil: Callable[[Lineage], object], mismatch: str) -> None:
    reference, spoilt = three_steps(), three_steps()
    assert spoilt.mismatches(reference) == []
    spoil(spoilt)
    (found,) = spoilt.mismatches(reference)
    assert found.startswith(mismatch)


# --- real children -----------------------------------------------------------------------------


def task(tmp_path: Path, **options: Any) -> Task:
    settings = {"seed": 1, "optimizer": "adamw", "dtype": "float32", "attempts": (0,)}
    return Task(directories=(str(tmp_path),), **settings | options)


def test_other_inputs_make_another_trajectory(tmp_path: Path) -> None:
    """So equal digests mean something: attempts differ in data and rate."""
    lineages, states = [], []
    for name, attempts in (("a", (0, 0, 1)), ("b", (0, 0, 2))):
        (tmp_path / name).mkdir()
        lineage = Lineage()
        own = task(tmp_path / name, attempts=attempts, steps_each=1)
        states.append(Attempt(own, -1, lineage, Clock()).states)
        lineages.append(lineage)
    (mismatch,) = lineages[0].mismatches(lineages[1])
    assert mismatch.startswith("step 3 (attempt 1): learning_rate, norm, weights differ")
    assert states[0]["exp_avg of 0.weight"] != states[1]["exp_avg of 0.weight"]
    assert states[0]["scheduler"] != states[1]["scheduler"]


def test_a_child_that_fails_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="it raised DeviceSpecError"):
        Attempt(task(tmp_path / "missing"), 0, Lineage(), Clock())


def test_a_child_that_ends_by_itself_was_not_killed(tmp_path: Path) -> None:
    with Child(task(tmp_path, steps_each=1)) as child:
        while not isinstance(child.receive(), Finished):
            pass
        with pytest.raises(ChildError, match="ended by itself, with exit status 0"):
            child.receive()
        with pytest.raises(ChildError, match="ended by itself, with exit status 0"):
            list(child.kill())


def test_a_child_that_says_nothing_is_taken_for_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crash_process, "PATIENCE", 0.0)
    with pytest.raises(ChildError, match="said nothing"):
        Attempt(task(tmp_path), 0, Lineage(), Clock())


# --- the command -------------------------------------------------------------------------------


def run_command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "crash", *map(str, arguments)])


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "device").mkdir()
    output = tmp_path / "crash.json"
    result = run_command("--kills", 2, "--devices", tmp_path / "device", "--json", output)
    assert result.exit_code == 0, result.output
    assert "adamw bfloat16, 1 device " in result.stdout
    content = json.loads(output.read_text())
    assert content["kills"] == content["kills_while_resuming"] + content["kills_in_steps"] == 2
    assert content["attempts"] == 4
    assert content["lost_steps"] == content["mismatched_steps"] == 0
    assert content["seed"] == 0
    assert [own["kills"] for own in content["configurations"]] == [1, 1, 0, 0, 0, 0]
    assert list((tmp_path / "device").iterdir()) == []


def test_the_command_says_what_is_not_as_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mismatches(self: Lineage, reference: Lineage) -> list[str]:
        return ["step 2 (attempt 1): weights differ from the uninterrupted run's"]

    monkeypatch.setattr(Lineage, "mismatches", mismatches)
    result = run_command("--kills", 1, "--devices", tmp_path)
    assert result.exit_code == 1
    assert "error: adamw bfloat16 on 1 device(s), run 0: step 2 (attempt 1)" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceSpecError, match="missing"):
        crash_campaign(1, tmp_path / "missing")
    result = run_command("--kills", 1, "--devices", tmp_path / "missing")
    assert result.exit_code == 1
    assert "existing directory" in " ".join(result.stderr.split())
