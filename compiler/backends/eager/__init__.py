"""The reference backend, which runs an exported graph operator by operator."""

from .backend import EagerBackend

__all__ = ["EagerBackend"]
