"""Synthetic data, for demos and tests: a bilingual grammar, shapes with captions, ListOps."""
