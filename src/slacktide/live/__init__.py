"""A running server as its `/metrics` shows it: reading, figures over a window of time, one screen."""
