"""The environment that ships: a number is guessed. Its answers follow from task and actions alone, so it can be rebuilt."""

from __future__ import annotations

from typing import Any


class Guess:
    """`label` of the task is the number, from 0 to 9."""

    def reset(self, task: dict[str, Any]) -> str:
        """Begin anew with the task's number, and say what the policy sees first."""
        self._secret, self._left = int(task["label"] or 7) % 10, 4
        return "guess a digit"

    def step(self, action: Any) -> tuple[str, float, bool]:
        """(observation, reward, whether it is over) of a guess."""
        self._left -= 1
        said = int(action)
        if said == self._secret:
            return "right", 1.0, True
        return ("higher" if said < self._secret else "lower"), 0.0, self._left == 0
