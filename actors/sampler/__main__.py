"""`python -m actors.sampler SPEC.json` runs the sampler as a process."""

from actors.runtime.run import main
from actors.sampler.actor import SamplerSpec, run

main(SamplerSpec, run)
