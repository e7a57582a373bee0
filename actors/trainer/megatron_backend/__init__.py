"""Training on megatron-core. `layout`, `mapping`, `architecture`, `families` and `flags` are pure: no torch, no megatron-core."""

import warnings

# megatron-core warns of what it does without (Apex, Transformer Engine) and of itself, a dozen lines while it is imported.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", message="Please use DTensor instead")  # of its checkpoints
