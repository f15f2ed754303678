"""Torch's Inductor, which is the default compiler, and a variant with large matrix products in float8."""

from .artifacts import AotiPackage, Artifact, OtherProcessor
from .backend import OLDEST_TORCH, InductorBackend, find_cpp_compiler
from .float8 import Float8Backend

__all__ = [
    "OLDEST_TORCH",
    "AotiPackage",
    "Artifact",
    "Float8Backend",
    "InductorBackend",
    "OtherProcessor",
    "find_cpp_compiler",
]
