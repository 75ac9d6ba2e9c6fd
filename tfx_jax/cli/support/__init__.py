"""What the verbs of `tfx-jax` share: options, overrides, input lines and progress."""
