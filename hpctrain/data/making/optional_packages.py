"""The error for a Python package that preparing a dataset needs and that is not installed."""

from __future__ import annotations

from hpctrain.base.errors import UsageError


def missing_package(error: ImportError, extra: str) -> UsageError:
    """Return the exception to raise; `extra` is the extra of `hpctrain` that installs it."""
    return UsageError(
        f"preparing a dataset needs a Python package that is not installed: {error}",
        hint=f"pip install 'hpctrain[{extra}]'",
    )
