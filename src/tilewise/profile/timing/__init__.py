"""Building blocks of the Timer: clock, time limits, child processes, statistics and reliability checks."""
