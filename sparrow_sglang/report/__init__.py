"""`sparrow report`: calibrations, benchmarks and training runs as one self-contained page."""
