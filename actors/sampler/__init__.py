"""The sampler room: decides which prompt starts when."""
