"""The reward room: scores rollouts."""
