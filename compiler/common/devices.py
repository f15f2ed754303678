"""Devices and their numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def with_number(device: torch.device) -> torch.device:
    """Return a device with its number: "cuda" is the current GPU, and tensors on it say "cuda:0"."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def is_another(device: torch.device, own: torch.device) -> bool:
    """Whether two devices are of one type and have different numbers. One without a number is the current one."""
    return device.type == own.type and None not in (device.index, own.index) and device.index != own.index
