"""Packaged traces; see README.md here for sources and licences."""
