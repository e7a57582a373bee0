"""What every training library shares: the step over its verbs, the files of checkpoints, the commands of its ranks."""
