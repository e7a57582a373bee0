"""`python -m actors.evaluator SPEC.json` runs the evaluator as a process."""

from actors.evaluator.actor import EvaluatorSpec, run
from actors.runtime.run import main

main(EvaluatorSpec, run)
