"""LR schedulers: noticed when they step, otherwise untouched; and what a step foresees of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torchs

from smart_infinity.schedulers import StepPattern, is_scheduler, observe_steps

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: torchs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: torchs.MultiplicativeLR(o, lambda epoch: 0.95),
    "StepLR": lambda o: torchs.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: torchs.ConstantLR(o, 0.3, 2),
    "LinearLR": lambda o: torchs.LinearLR(o, 0.3, 1.0, 4),
    "ExponentialLR": lambda o: torchs.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, 1.0, 2), torchs.ExponentialLR(o, 0.9)], [2]
    ),
    "CosineAnnealingLR": lambda o: torchs.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: torchs.ChainedScheduler(
        [torchs.ConstantLR(o, 0.5, 2), torchs.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: torchs.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: torchs.CyclicLR(o, 0.01, 0.1, 2),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, 0.1, 20),
    "PolynomialLR": lambda o: torchs.PolynomialLR(o, 4),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 3),
}
STEPS = 5
# torch's, which wants an optimizer's step before each scheduler's; a copied one always lacks it.
pytestmark = pytest.mark.filterwarnings("ignore:.*optimizer.step:UserWarning")


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)


def step(name: str, scheduler: Any, number: int) -> None:
    scheduler.step(1.0 + number) if name == "ReduceLROnPlateau" else scheduler.step()


def state_of(scheduler: Any) -> dict[str, Any]:
    return copy.deepcopy(scheduler.state_dict())


def test_all_of_torchs_schedulers_are_here() -> None:
    assert set(torchs.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


def test_what_a_scheduler_is() -> None:
    for make in SCHEDULERS.values():
        assert is_scheduler(make(optimizer()))

    class Wrapper:
        def __init__(self, scheduler: Any) -> None:
            self.scheduler = scheduler

        def step(self) -> None:
            self.scheduler.step()

        def get_last_lr(self) -> list[float]:
            return self.scheduler.get_last_lr()

    assert is_scheduler(Wrapper(None))
    for other in (optimizer(), torch.nn.Linear(1, 1), 3, None, torch.amp.GradScaler("cpu")):
        assert not is_scheduler(other)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_observing_changes_nothing_but_that_it_is_noticed(name: str) -> None:
    """Against a twin that is not observed: state, rates, kind, loading, and being undone."""
    ours, theirs = optimizer(), optimizer()
    observed, twin = SCHEDULERS[name](ours), SCHEDULERS[name](theirs)
    kind = type(observed)
    calls: list[bool] = []
    undo = observe_steps(observed, calls.append)
    assert isinstance(observed, kind)
    assert isinstance(observed, type(twin))
    assert (type(observed).__name__, type(observed).__module__) == (kind.__name__, kind.__module__)
    for number in range(STEPS):
        step(name, observed, number)
        step(name, twin, number)
        assert calls == [name == "ReduceLROnPlateau"] * (number + 1)
        assert set(observed.state_dict()) == set(twin.state_dict())
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
        assert observed.get_last_lr() == twin.get_last_lr()
    saved = state_of(observed)
    fresh = SCHEDULERS[name](optimizer())
    fresh.load_state_dict(saved)
    observed.load_state_dict(state_of(twin))
    assert len(calls) == STEPS
    undo()
    assert type(observed) is kind
    assert set(observed.__dict__) == set(twin.__dict__)
    step(name, observed, STEPS)
    assert len(calls) == STEPS


@pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - {"LambdaLR", "MultiplicativeLR"}))
def test_the_state_of_an_observed_scheduler_is_that_of_its_twin(name: str) -> None:
    observed, twin = SCHEDULERS[name](optimizer()), SCHEDULERS[name](optimizer())
    observe_steps(observed, lambda _: None)
    for number in range(STEPS):
        step(name, observed, number)
        step(name, twin, number)
        assert plain(observed.state_dict()) == plain(twin.state_dict())


def plain(value: Any) -> Any:
    """State without the functions in it, which differ from object to object."""
    if isinstance(value, dict):
        return {key: plain(own) for key, own in value.items() if not callable(own)}
    if isinstance(value, list | tuple):
        return [plain(own) for own in value if not isinstance(own, torchs.LRScheduler)]
    return value


@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_observed_scheduler_can_be_copied(name: str) -> None:
    observed = SCHEDULERS[name](optimizer())
    undo = observe_steps(observed, lambda _: None)
    twin = copy.deepcopy(observed)
    assert isinstance(twin, type(SCHEDULERS[name](optimizer())))
    assert plain(twin.state_dict()) == plain(observed.state_dict())
    before = plain(state_of(observed))
    step(name, twin, 0)
    assert plain(observed.state_dict()) == before
    undo()
    step(name, twin, 1)


def test_a_copy_of_an_observed_scheduler_is_not_observed() -> None:
    """It is another scheduler: its steps are none of the registered one's."""
    observed = SCHEDULERS["StepLR"](optimizer())
    calls: list[bool] = []
    observe_steps(observed, calls.append)
    for twin in (copy.deepcopy(observed), copy.copy(observed)):
        twin.step()
    assert calls == []
    observed.step()
    assert calls == [False]


def test_an_observed_scheduler_can_be_pickled_if_it_could_be() -> None:
    """As ``torch.save(scheduler)`` does."""
    observed = SCHEDULERS["StepLR"](optimizer())
    pickle.loads(pickle.dumps(observed))
    observe_steps(observed, lambda _: None)
    observed.step()
    twin = pickle.loads(pickle.dumps(observed))
    assert plain(twin.state_dict()) == plain(observed.state_dict())


def test_arguments_results_and_errors_pass_through() -> None:
    class Own:
        def step(self, *args: Any, **kwargs: Any) -> Any:
            if args == (0,):
                raise ValueError("no")
            return args, kwargs

    own, calls = Own(), []
    observe_steps(own, calls.append)
    assert own.step() == ((), {})
    assert own.step(1, a=2) == ((1,), {"a": 2})
    assert own.step(a=2) == ((), {"a": 2})
    with pytest.raises(ValueError, match="no"):
        own.step(0)
    assert calls == [False, True, True]


def test_what_is_told_of_a_step_comes_after_it() -> None:
    own = optimizer()
    scheduler = torchs.StepLR(own, 1, 0.5)
    seen: list[float] = []
    observe_steps(scheduler, lambda _: seen.append(own.param_groups[0]["lr"]))
    scheduler.step()
    assert seen == [0.05]


# --- what a step foresees ------------------------------------------------------------------------


class Life:
    """A run: each commit foresees, each call may amend; and where a crash would lead."""

    def __init__(self) -> None:
        self.pattern = StepPattern()
        self.position = self.committed = self.foreseen = self.amendments = 0

    def commit(self) -> None:
        intervals, expected = self.pattern.foreseen()
        self.committed, self.foreseen = self.position, expected
        self.pattern.committed(intervals, expected)

    def call(self, with_arguments: bool = False) -> None:
        self.position += 1
        if self.pattern.called(with_arguments):
            self.committed, self.foreseen = self.position, self.pattern.outstanding
            self.pattern.expected = max(self.pattern.expected, self.pattern.calls)
            self.amendments += 1

    @property
    def resumed(self) -> int:
        """Where the scheduler is after a crash now."""
        return self.committed + self.foreseen


def test_one_call_after_each_step_is_amended_once_and_then_foreseen() -> None:
    life = Life()
    for number in range(6):
        life.commit()
        assert life.resumed == number + (number > 0)
        life.call()
        assert life.resumed == number + 1
    assert life.amendments == 1


@pytest.mark.parametrize("calls", [2, 3])
def test_several_calls_after_each_step_are_foreseen(calls: int) -> None:
    life = Life()
    for number in range(5):
        life.commit()
        for _ in range(calls):
            life.call()
        assert life.resumed == life.position == calls * (number + 1)
    assert life.amendments == calls


def test_a_call_at_the_end_of_an_epoch_is_never_foreseen() -> None:
    life = Life()
    for number in range(20):
        life.commit()
        assert life.resumed == life.position, "no call is certain"
        if number % 5 == 4:
            life.call()
            assert life.resumed == life.position
    assert life.amendments == 4


def test_calls_with_arguments_are_never_foreseen() -> None:
    life = Life()
    for _ in range(5):
        life.commit()
        assert life.resumed == life.position
        life.call(with_arguments=True)
    assert life.amendments == 5


def test_a_first_call_that_a_crash_cut_off_is_no_interval_without_a_call() -> None:
    life = Life()
    life.commit()
    life.pattern.resumed([], 0)  # the crash came before the call
    for number in range(5):
        life.commit()
        assert life.resumed == number + (number > 0)
        life.call()
        assert life.resumed == number + 1
    assert life.amendments == 1


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12))
def test_a_crash_before_the_next_step_never_loses_a_call(counts: list[int]) -> None:
    """Nor adds more than the fewer of the last two intervals had, while calls are outstanding."""
    life = Life()
    for number, calls in enumerate(counts):
        life.commit()
        likely = min(counts[max(0, number - 2) : number], default=0)
        assert life.resumed == life.position + likely
        for made in range(1, calls + 1):
            life.call()
            assert life.resumed == life.position + max(0, likely - made)
