"""Readers and writers of trace files, one module per family of formats; all end in a `Trace`."""
