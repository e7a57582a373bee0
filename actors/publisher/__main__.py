"""`python -m actors.publisher SPEC.json` runs the publisher as a process."""

from actors.publisher.actor import PublisherSpec, run
from actors.runtime.run import main

main(PublisherSpec, run)
