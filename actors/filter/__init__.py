"""The filter room: judges complete groups."""
