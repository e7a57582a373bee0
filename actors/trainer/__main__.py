"""`python -m actors.trainer SPEC.json` runs the trainer as a process."""

from actors.runtime.run import main
from actors.trainer.actor import TrainerSpec, run

main(TrainerSpec, run)
