"""What every room needs to be a process: context, consuming, deadlines, seeds, vitals, shutdown."""
