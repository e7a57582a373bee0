"""`python -m actors.router SPEC.json` runs the router as a process."""

from actors.router.actor import RouterSpec, run
from actors.runtime.run import main

main(RouterSpec, run)
