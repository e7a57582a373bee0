"""A second reader of a run's samples: another reward, filter or loss beside the run's own, compared sample by sample.

Why it stands in the console and is no actor: it has no part in delivery. It writes nothing to the bus, not even that it exists,
so a shadow that raises, hangs or is killed leaves nothing behind, and a bus user who may only read is enough. It may use rooms'
code (scorers, judges, the objective), which rooms may not use of each other.

How it reads: entries of `scored` are deleted by the commit that acknowledges them. A consumer group of its own would not keep them
(that commit deletes for all), or, if it did, would hold the run's memory back for a slow reader; a copy made by the commit would
cost the run an entry for each sample. So the shadow waits in a blocking read, as the filter does: Redis answers both in the moment
of the append, with the body, and a body that lies aside is fetched at once, while the filter still reads, judges and writes. What
was gone before is counted, by the verdicts: every group that the filter judges is either compared or missed with a reason. What it
costs the run is what Redis does for the reads (docs/hooks.md has the figures).

Read in this order: plan (what to do), tap (from the bus) and recorded (from files), compare (what to do with it), session (all of
it together).
"""
