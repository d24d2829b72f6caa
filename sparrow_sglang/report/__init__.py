"""`sparrow report`: a page about a run or a calibration, or several runs compared."""
