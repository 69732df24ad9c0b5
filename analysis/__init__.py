"""What came of runs: loading, statistics, summaries."""
