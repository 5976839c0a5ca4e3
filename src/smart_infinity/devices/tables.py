"""Tables of a device's plan, made once: what kernels read, and where to look things up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.kernels.frame import PIECE_COLUMNS
from smart_infinity.layout import DevicePlan, Layout


def piece_tables(layout: Layout, plan: DevicePlan) -> list[npt.NDArray[np.int64]]:
    """By record, the rows that the kernels read; see ``kernels.frame``."""
    tables = []
    for record in plan.records:
        rows = np.empty((len(record.pieces), PIECE_COLUMNS), np.int64)
        for index, piece in enumerate(record.pieces):
            run = plan.runs[piece.run]
            within = piece.start - run.start
            rows[index] = (
                piece.parameter,
                piece.run,
                piece.length,
                piece.record_offset,
                2 * run.device_offset + within,
                run.device_offset + within,
                FORMAT_OF_DTYPE[layout.parameters[piece.parameter].dtype],
            )
        tables.append(rows)
    return tables


def records_of_runs(plan: DevicePlan) -> list[list[int]]:
    """By run, the indices of the records that hold it."""
    found: list[list[int]] = [[] for _ in plan.runs]
    for record in plan.records:
        for piece in record.pieces:
            found[piece.run].append(record.index)
    return found
