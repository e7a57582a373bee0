"""Settings: what a run is told before it starts. Standard library and msgspec only, so that help answers at once."""
