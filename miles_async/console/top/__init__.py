"""`miles-async top`: the cockpit in a terminal."""
