"""`python -m tfx_jax VERB`, the same as `tfx-jax VERB`."""

from tfx_jax.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
