"""What every training library shares. Read in this order: verbs (what a library must do), step (a training step over them), ranked
(the backend that the room calls, and its followers), ranks and wire (how rank 0 tells them), export, saving, files and state
(weights and checkpoints on their way out), old_actors, offload and clockwork."""

from actors.trainer.backend import TrainBackend


def open_backend(name: str) -> TrainBackend:
    """`none`, or a training library as `core_of` finds it, imported only when asked for. Refused when there is no such."""
    if name == "none":
        return TrainBackend()
    from actors.trainer.training.ranked import RankedBackend

    return RankedBackend(name)
