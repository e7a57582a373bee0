"""What every training library shares. Read in this order: verbs (what a library must do), step (a training step over them),
old_actors, files and state (checkpoints), wire (commands of rank 0), offload and clockwork."""
