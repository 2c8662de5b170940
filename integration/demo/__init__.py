"""kvplugin on stock vLLM with a real model: `python -m kvplugin.integration.demo`."""
