"""`python -m actors.recorder SPEC.json` runs the recorder as a process."""

from actors.recorder.actor import RecorderSpec, run
from actors.runtime.run import main

main(RecorderSpec, run)
