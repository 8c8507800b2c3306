"""Every planted fault: each must be caught by the suite. Run by ``run.py``; the table is in
docs/reliability.md."""

from __future__ import annotations

import directory_faults
import identity_faults
import planner_faults
import worker_faults
from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *identity_faults.FRAMING,
    *identity_faults.KEYS,
    *identity_faults.LAYOUT,
    *identity_faults.STORES,
    *directory_faults.JOINT_RULE,
    *directory_faults.SPACE,
    *directory_faults.START,
    *planner_faults.LOADS,
    *planner_faults.DEADLINES,
    *planner_faults.REPORTS,
    *planner_faults.SAVES,
    *planner_faults.SNAPSHOTS,
    *planner_faults.ORDER,
    *worker_faults.COPIES,
    *worker_faults.WRITES,
    *worker_faults.BOUNDS,
    *worker_faults.SHARED,
)
