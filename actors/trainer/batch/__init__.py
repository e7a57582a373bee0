"""Which samples go into which optimizer step, rank and micro-batch (pure): plan, batching, packing, in this order."""
