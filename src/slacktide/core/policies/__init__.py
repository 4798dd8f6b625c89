"""One file per policy; the file's name is the policy's name with underscores."""
