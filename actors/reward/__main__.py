"""`python -m actors.reward SPEC.json` runs the reward as a process."""

from actors.reward.actor import run
from actors.reward.spec import RewardSpec
from actors.runtime.run import main

main(RewardSpec, run)
