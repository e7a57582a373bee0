"""The embedded engine: a small torch server that speaks the subset of SGLang's HTTP interface a rollout needs.

Run it as `python -m actors.generation.engines.embedded --model-path DIR`. Files, from the outside in: `__main__` (flags,
process), `server` (HTTP), `wire` (bodies), `scheduler` (continuous batching, pause, weight updates), `request` (one
request's state), `sampling`, `model` (lean forward of the Llama and Qwen families), `cache` (keys and values),
`weights`, `config`.
"""
