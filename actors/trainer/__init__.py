"""Trainer room: takes kept groups, makes optimizer steps, announces policy versions."""
