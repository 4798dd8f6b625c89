"""The command line: `main.py` dispatches, one module per verb, shared options in `options.py`."""
