"""Rollouts are programs: `async def rollout(task, session) -> list[Trajectory]`."""

from actors.generation.rollouts.session import Program, Segment, Session, Task, Trajectory, env

__all__ = ["Program", "Segment", "Session", "Task", "Trajectory", "env"]
