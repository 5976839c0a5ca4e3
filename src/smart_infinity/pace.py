"""When devices may work: in the step, beside the forward that follows it, during backward."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smart_infinity.errors import UnsupportedError


@dataclass(frozen=True)
class Pace:
    """What the training loop has said about itself; see `offload` for the meaning of each."""

    overlap: bool
    accumulation_steps: int | None
    max_grad_norm: float | None

    def __post_init__(self) -> None:
        if not isinstance(self.overlap, bool):
            raise UnsupportedError(f"overlap is {self.overlap!r}. Expected True or False")
        steps = self.accumulation_steps
        if steps is not None and (type(steps) is not int or steps < 1):
            raise UnsupportedError(
                f"accumulation_steps is {steps!r}. Expected None, or the number of backwards that "
                "make a step: 1 or more"
            )
        norm = self.max_grad_norm
        if norm is not None and (
            not isinstance(norm, int | float) or not norm > 0 or math.isinf(norm)
        ):
            raise UnsupportedError(f"max_grad_norm is {norm!r}. Expected None or a positive number")

    @property
    def works_ahead(self) -> bool:
        """Whether devices begin with a step during backward."""
        return self.overlap or self.accumulation_steps is not None

    @property
    def updates_early(self) -> bool:
        """Whether they update then, or only read."""
        return self.accumulation_steps is not None and self.max_grad_norm is None
