"""What operators run: benchmarks now; planning, warm-up and deployment build on the same base."""
