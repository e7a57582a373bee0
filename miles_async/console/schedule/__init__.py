"""What a scheduling rule costs under a staleness bound: a model without overhead, and advice from a run's own lengths."""

from miles_async.console.schedule.advice import Advice, advise
from miles_async.console.schedule.model import Rule, Sample, Setup, simulate

__all__ = ("Advice", "Rule", "Sample", "Setup", "advise", "simulate")
