"""A trained model answers: the checkpoint that is meant, an engine for it, and OpenAI's interface in front."""
