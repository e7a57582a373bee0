"""`python -m actors.environments SPEC.json` runs the environments as a process."""

from actors.environments.actor import EnvironmentsSpec, run
from actors.runtime.run import main

main(EnvironmentsSpec, run)
