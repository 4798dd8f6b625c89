"""The calibrated simulator: a virtual clock around the policies."""
