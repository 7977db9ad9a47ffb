"""A run in a process of its own, which takes no time from the server that it measures: `python -m jattn.load.child`."""

import dataclasses
import json
import subprocess
import sys

from jattn.load.figures import Row
from jattn.load.run import measured
from jattn.load.workload import Level, Workload


def measured_apart(url: str, workload: Workload, level: Level) -> Row:
    """As `run.measured`, from another process.

    Raises:
        ValueError: As there.
        RuntimeError: The process has died.
    """
    job = {"url": url, "workload": dataclasses.asdict(workload), "level": dataclasses.asdict(level)}
    command = [sys.executable, "-m", "jattn.load.child"]
    done = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"The client's process ended with code {done.returncode}.")
    row = json.loads(done.stdout)
    if "error" in row:
        raise ValueError(row["error"])
    return row


def main() -> None:
    """Reads a job from standard input, and writes its figures to standard output."""
    job = json.load(sys.stdin)
    try:
        row = measured(job["url"], Workload(**job["workload"]), Level(**job["level"]))
    except ValueError as error:
        row = {"error": str(error)}
    json.dump(row, sys.stdout)


if __name__ == "__main__":
    main()
