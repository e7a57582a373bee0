"""Training on megatron-core. `layout`, `mapping`, `architecture`, `families` and `flags` are pure: no torch, no megatron-core."""
