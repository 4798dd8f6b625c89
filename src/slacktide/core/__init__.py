"""The scheduling core: pure functions over columns. No clock, no I/O, no engine; numpy only."""
