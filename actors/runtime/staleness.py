"""What the staleness bound means where it is applied (pure): the rule in force, and the bound in steps.

A bound of N policy versions admits tokens of the N versions before the one being trained. Where a version is published only
every `interval` steps, the newest tokens of a version are already interval - 1 steps old when the next one comes.
"""

from __future__ import annotations

from typing import Literal

Rule = Literal["split", "whole", "member", "wait", "drop"]


def rule_of(policy: str, bound: int) -> Rule:
    """The rule behind the setting `staleness_policy`: `auto` splits groups on their last turn where there are turns."""
    match policy:
        case "split" | "member" | "wait" | "drop":
            return policy
        case "auto" if bound > 0:
            return "split"
    return "whole"


def bound_in_steps(bound: int, interval: int) -> int:
    """Most steps between the weights that made a token and those being trained, for a bound in policy versions."""
    return (bound + 1) * interval - 1
