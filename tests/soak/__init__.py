"""A long random run of stock vLLM with offload: `make soak`."""
