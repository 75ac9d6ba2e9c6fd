"""What a run reports: progress, TensorBoard, profiles, attention plots, and the report."""
