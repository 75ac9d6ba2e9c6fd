"""Sections that fail in every way, instead of those of `benchmarks.card.sections`."""

import json
import subprocess
import sys
import time

# A training that takes a while to save, when it is told to end.
SAVING = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(0.5)
    (pathlib.Path(sys.argv[1]) / "saved").touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
time.sleep(600)
"""


def main() -> None:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    row = {"row": name, "device": "NVIDIA H100 80GB HBM3", "has_accelerator": True, "size": options["size"]}
    print(json.dumps(row), flush=True)
    if name == "correctness":
        sys.exit("ValueError: something is wrong")
    if name == "runs" and options["size"] == "saves":
        subprocess.Popen([sys.executable, "-c", SAVING, options["output"]], stdout=subprocess.DEVNULL)
        time.sleep(600)
    if name == "prediction":
        time.sleep(600)
    print(json.dumps({"row": "second", "seconds": options["ends"] - time.time(), "told": options["device"]}))


if __name__ == "__main__":
    main()
