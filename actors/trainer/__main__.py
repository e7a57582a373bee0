"""`python -m actors.trainer SPEC.json` runs the trainer as a process."""

from actors.runtime.run import main
from actors.trainer.actor import run
from actors.trainer.spec import TrainerSpec

main(TrainerSpec, run)
