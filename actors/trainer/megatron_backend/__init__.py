"""Training on megatron-core. `layout`, `architecture`, `families` and `flags` are pure: they load without torch or megatron-core."""
