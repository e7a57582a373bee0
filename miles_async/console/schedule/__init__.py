"""What a scheduling rule costs under a staleness bound: a model without overhead, and advice from a run's own lengths."""

from miles_async.console.schedule.model import Outcome, Rule, Sample, Setup, simulate

__all__ = ("Outcome", "Rule", "Sample", "Setup", "simulate")
