"""What stands between a session and those who speak of messages and tools: tool calls in text, dialogues, the OpenAI endpoint."""
