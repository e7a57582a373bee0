"""`python -m actors.partial SPEC.json` runs the partial as a process."""

from actors.partial.actor import PartialSpec, run
from actors.runtime.run import main

main(PartialSpec, run)
