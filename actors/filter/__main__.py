"""`python -m actors.filter SPEC.json` runs the filter as a process."""

from actors.filter.actor import FilterSpec, run
from actors.runtime.run import main

main(FilterSpec, run)
