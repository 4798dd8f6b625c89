"""The vLLM plug-in: policies of slacktide.core schedule a real engine."""
