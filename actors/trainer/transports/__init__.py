"""Weights on their way to engines, in buckets as a backend exports them: files, CUDA IPC on one host, NCCL broadcast over a group.

Each sender prepares outside of the engines' pause and makes a plan; workers act on the plan. Importable without a GPU.
"""
