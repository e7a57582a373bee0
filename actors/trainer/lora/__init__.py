"""LoRA (arXiv 2106.09685): beside a frozen matrix W the product of two narrow ones is trained, W + alpha / rank * B A.

Read in this order: peft (which matrices, and the files of Hugging Face's peft; no torch), adapters (the policy that the torch
backend trains), merge (whole weights of base and adapter). The rest of the trainer sees a policy whose weights are the adapters.
"""
