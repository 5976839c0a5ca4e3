"""What one run of ``train`` was asked to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class OptimizerName(StrEnum):
    """What ``--optimizer`` offers."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"
    ADAGRAD = "adagrad"


class DtypeName(StrEnum):
    """What ``--dtype`` offers."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class Durability(StrEnum):
    """What ``--durability`` offers."""

    STEP = "step"
    NONE = "none"


class Verify(StrEnum):
    """What ``--verify`` offers."""

    RESUME = "resume"
    READ = "read"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The options of ``train``, validated one by one; ``cli.train`` says what each means."""

    model: str
    texts: Sequence[Path]
    """Empty for the default book."""
    devices: Sequence[Path]
    steps: int
    batch_size: int
    seq_len: int
    accumulate: int
    optimizer: OptimizerName
    lr: float | None
    """None: that of a resumed state, or the default."""
    weight_decay: float
    max_grad_norm: float
    dtype: DtypeName
    device_memory: str | None
    output: Path | None
    trace: Path | None
    seed: int
    durability: Durability
    verify: Verify
    resume: bool | None
    """True continues the state in the devices, False discards it, None refuses it."""

    @property
    def num_tokens(self) -> int:
        """Tokens that all steps together use."""
        return self.steps * self.accumulate * self.batch_size * self.seq_len
