"""Cached kernels are those of the present sources, whichever of their files has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import smart_infinity

UPDATE = """
import numpy as np
from smart_infinity.kernels import OPTIMIZERS
from smart_infinity.kernels.formats import BF16
from smart_infinity.kernels.frame import TABLE_COLUMNS, T_ACTIVE
state, words16 = np.ones(4, np.float32), np.zeros(4, np.uint16)
table = np.zeros((1, TABLE_COLUMNS), np.float32)
table[0, T_ACTIVE] = 1
pieces = np.array([[0, 0, 4, 0, 0, 0, BF16]], np.int64)
OPTIMIZERS["sgd"].update(
    state, 4, np.zeros(4, np.uint16), np.zeros(4, np.float32), np.array([BF16]), pieces, table,
    words16, np.zeros(4, np.float32),
)
print(words16.tolist())
"""


def test_a_kernel_is_not_run_with_older_code_of_another_file(tmp_path: Path) -> None:
    package = tmp_path / "smart_infinity"
    shutil.copytree(
        Path(smart_infinity.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", UPDATE],
            env=environment | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    first = run()
    cached = sorted(package.rglob("*.nbi"))
    assert cached, "nothing was cached, so nothing is tested"
    assert run() == first
    assert sorted(package.rglob("*.nbi")) == cached

    frame = package / "kernels" / "frame.py"
    source = frame.read_text()
    changed = source.replace("target16[i] = f32_to_bf16(source[i])", "target16[i] = 7")
    assert changed != source
    frame.write_text(changed)
    assert run() == "[7, 7, 7, 7]" != first
