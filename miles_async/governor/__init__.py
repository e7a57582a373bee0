"""The governor: a run that moves its own knobs inside the user's envelope. look.py reads the record, decide.py decides, both
pure; govern.py acts. It stands on this floor because its patches go the way of `miles-async tune`: by the rules of settings,
which rooms do not know."""
