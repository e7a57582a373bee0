"""Rollouts are programs: `async def rollout(task, session) -> list[Trajectory]`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.generation.rollouts.session import Program, Segment, Session, Task, Trajectory, env

__all__ = ["Program", "Segment", "Session", "Task", "Trajectory", "env"]


def __getattr__(name: str) -> Any:
    """Loaded when it is asked for: a process that runs a rollout function does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from actors.generation.rollouts import session

    return getattr(session, name)
