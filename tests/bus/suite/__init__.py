"""What tests of the bus, and of what stands on it, share: the conformance suite, a clock, a lossy proxy, messages.

Nothing here imports a test framework, so that any of them may use it.
"""
