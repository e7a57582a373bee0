"""Every task of this package by the name that `builtin:` gives its model."""

from __future__ import annotations

from collections.abc import Mapping

from miles_async.quickstart.arithmetic import ARITHMETIC
from miles_async.quickstart.columns import COLUMNS
from miles_async.quickstart.steps import STEPS
from miles_async.quickstart.task import Task

TASKS: Mapping[str, Task] = {task.name: task for task in (ARITHMETIC, COLUMNS, STEPS)}
