"""What a rollout program asks of the environment of its episode, and what that answers.

A question carries all actions since the start. So it can be asked again, of an environment that lives or of one that is built anew,
and means the same.
"""

from __future__ import annotations

from bus.messages.base import Header, Message


class EnvironmentCall(Message, frozen=True, kw_only=True, tag="environment.call"):
    """Bring the environment of an episode to behind these actions, and say what the last one gave. generation -> environments."""

    asked: str  # names the question; its answer has it too
    sample_id: str
    task: bytes  # msgpack: what the environment is begun with
    actions: tuple[bytes, ...] = ()  # msgpack each; none = what its begin gave
    told: bytes = b""  # digest of what the begin and all actions but the last gave, when they were asked first
    over: bool = False  # the episode has ended: nothing is asked, the environment may go

    def header(self) -> Header:
        return Header(id=self.sample_id, note="over" if self.over else f"action {len(self.actions)}")


class EnvironmentAnswer(Message, frozen=True, kw_only=True, tag="environment.answer"):
    """What it gave. environments -> the worker that asked."""

    asked: str
    sample_id: str
    answer: bytes = b""  # msgpack
    error: str = ""  # why there is none; empty = there is
    differs: bool = False  # built anew, it did not give what it gave before: the episode can only begin again

    def header(self) -> Header:
        return Header(id=self.sample_id, note=self.error[:80])
