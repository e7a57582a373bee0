"""The recorder: keeps the run's story on disk, whatever happens to launchers and consoles."""
