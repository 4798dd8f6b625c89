"""What a run was worth: outcome of a run, definitions of every metric, summaries. See docs/metrics.md."""
