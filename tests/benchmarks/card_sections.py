"""Sections that fail in every way, instead of those of `benchmarks.card.sections`."""

import json
import sys
import time


def main() -> None:
    name, options = sys.argv[1], json.loads(sys.argv[2])
    row = {"row": name, "device": "NVIDIA H100 80GB HBM3", "has_accelerator": True, "size": options["size"]}
    print(json.dumps(row), flush=True)
    if name == "correctness":
        sys.exit("ValueError: something is wrong")
    if name == "prediction":
        time.sleep(600)
    print(json.dumps({"row": "second", "seconds": options["seconds"], "told": options["device"]}))


if __name__ == "__main__":
    main()
