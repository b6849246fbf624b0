"""What a model takes in memory in each format of its weights: the weights themselves, and the process while and after loading.

    python -m benchmarks.weights_memory [--model default]

Every format is loaded in a process of its own, by compiled kernels. "more" is how much the process has grown since it had
imported everything, at its largest and at the end (Linux's VmHWM and VmRSS).
"""

import argparse
import json
import subprocess
import sys

from nanokv.kernels.matrix import FORMATS

MEASURE = """
import json, sys
import numpy as np
import nanokv, nanokv.kernels.compiled
from nanokv.kernels.choice import start
start(None)

def kilobytes(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))

form = None if sys.argv[2] == "stored" else sys.argv[2]
before = kilobytes("VmRSS")
model = nanokv.load(sys.argv[1], kernels="compiled", weights=form)
params, seen = model.params, {}
parts = [*vars(params).values(), *(each for block in params.blocks for each in vars(block).values())]
for each in parts:
    for plane in getattr(each, "planes", [each] if isinstance(each, np.ndarray) else []):
        seen[id(plane)] = plane.nbytes
print(json.dumps([sum(seen.values()), model.weight_bytes, kilobytes("VmHWM") - before, kilobytes("VmRSS") - before]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="What a model takes in memory in each format of its weights.")
    parser.add_argument("--model", default="default")
    model = parser.parse_args().model
    print("| weights | in memory, MB | read for a token, MB | process, at most, MB more | after loading, MB more |")
    print("|---|---|---|---|---|")
    for form in ("stored", *FORMATS):
        run = subprocess.run([sys.executable, "-c", MEASURE, model, form], check=True, capture_output=True, text=True)
        held, read, peak, after = json.loads(run.stdout)
        name = "as stored" if form == "stored" else form
        print(f"| {name} | {held / 1e6:.1f} | {read / 1e6:.1f} | {peak / 976.6:.0f} | {after / 976.6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
