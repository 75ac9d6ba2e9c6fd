"""Outputs of a run: progress, TensorBoard, profiles, attention plots and the report."""
