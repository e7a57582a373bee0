"""`python -m actors.generation SPEC.json` runs the generation as a process."""

from actors.generation.actor import run
from actors.generation.spec import GenerationSpec
from actors.runtime.run import main

main(GenerationSpec, run)
