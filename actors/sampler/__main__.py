"""`python -m actors.sampler SPEC.json` runs the sampler as a process."""

from actors.sampler.actor import SamplerSpec, run
from actors.runtime.run import main

main(SamplerSpec, run)
