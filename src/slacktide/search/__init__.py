"""Many runs: one scenario under several policies, the highest rate that meets a target, grids of parameters."""
