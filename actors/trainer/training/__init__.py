"""What every training library shares. Read in this order: verbs (what a library must do), step (a training step over them), ranked
(the backend that the room calls, and its followers), ranks and wire (how rank 0 tells them), export, saving, files and state
(weights and checkpoints on their way out), old_actors, offload and clockwork."""
