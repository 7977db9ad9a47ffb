"""What jattn's speed is measured with: workloads, timing, and the record of an H200."""
