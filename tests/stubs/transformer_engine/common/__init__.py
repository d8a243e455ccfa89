"""The part of TransformerEngine that does not depend on a framework: recipes."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
