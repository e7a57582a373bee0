"""Weights on their way to engines without files: CUDA IPC on one host, NCCL broadcast over a group.

Each sender prepares outside of the engines' pause and writes a plan; workers act on the plan. Importable without a GPU.
"""

from actors.trainer.transports.buckets import plan_buckets
from actors.trainer.transports.ipc import IpcSender
from actors.trainer.transports.nccl import NcclSender

__all__ = ("IpcSender", "NcclSender", "plan_buckets")
