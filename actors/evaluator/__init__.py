"""The evaluator room: measures the policy on held-out prompts."""
