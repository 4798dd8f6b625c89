"""Load generator: replays a workload against an OpenAI-compatible server, open loop, and measures what users see."""
