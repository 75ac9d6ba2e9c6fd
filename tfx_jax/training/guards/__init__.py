"""Guards of a run: signals, locks, memory checks and the watchdog."""
