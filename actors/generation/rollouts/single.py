"""The shipped program: one turn in answer to the prompt."""

from actors.generation.rollouts import Session, Task, Trajectory


async def rollout(task: Task, session: Session) -> list[Trajectory]:
    """The model's answer to the task's prompt."""
    answer = await session.generate(task.prompt)
    return [Trajectory(task.prompt, [answer])]
