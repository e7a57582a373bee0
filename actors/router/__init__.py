"""The router room: keeps one sglang-router running in front of all engines."""
